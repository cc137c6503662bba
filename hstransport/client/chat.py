"""From a chat to token ids and a loss mask, with the model's own chat template.

The template is rendered here and not by the server, because only here is it known which tokens the
assistant said. transformers does it, which is no dependency of hstransport: it is imported when the
first chat is met.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..protocol import TokenIds

Message = dict[str, Any]
Mask = npt.NDArray[np.uint8]
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = "Zq7hstransport7qZ"
"""Stands for a message's text in a rendering, to see what the template puts around it."""


class UnusableChat(Exception):
    """The template refuses this chat, or it cannot be told which tokens the assistant said."""


class ChatTokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        template = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self._template: str | None = template
        self._marks_generation = bool(template and _GENERATION.search(template))

    @classmethod
    def load(cls, path: str, *, trust_remote_code: bool = False) -> ChatTokenizer:
        """Load by folder or model name. Raises ConfigError saying what is missing."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            import jinja2  # noqa: F401
            from transformers import AutoTokenizer
        except ImportError as e:
            raise ConfigError(
                f"a tokenizer is needed here and {e.name} is not installed: "
                "pip install 'hstransport[chat]'"
            ) from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as e:  # transformers raises many types for a folder without a tokenizer
            raise ConfigError(
                f"no tokenizer could be loaded from {path}: {_first_line(e)}; "
                "name its folder with --tokenizer"
            ) from None
        return cls(tokenizer, path)

    def encode_text(self, text: str) -> TokenIds:
        """Token ids of plain text, as the server makes them."""
        return np.array(self._tokenizer(text)["input_ids"], np.int32)

    def encode(self, messages: Sequence[Message]) -> tuple[TokenIds, Mask]:
        """Token ids of the whole chat, and 1 for the tokens of what the assistant said.

        A chat that ends with another role's message gets the generation prompt. Raises
        UnusableChat, and ConfigError when the model has no chat template.
        """
        if self._template is None:
            raise ConfigError(
                f"the tokenizer of {self._name} has no chat template: give text or input_ids in "
                "place of messages, or name another --tokenizer"
            )
        ask = messages[-1]["role"] != "assistant"
        if self._marks_generation:
            return self._encode_marked(messages, ask)
        text = self._render(messages, ask)
        spans = [
            self._span(messages, i, text, ask)
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return self._tokenize(text, spans)

    def _encode_marked(self, messages: Sequence[Message], ask: bool) -> tuple[TokenIds, Mask]:
        """The template itself says what is generated: ``{% generation %}``."""
        try:
            encoded = self._tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=ask,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception as e:  # whatever a template or a tokenizer raises
            raise UnusableChat(f"the chat template refuses it: {_first_line(e)}") from None
        return np.array(encoded["input_ids"], np.int32), np.array(
            encoded["assistant_masks"], np.uint8
        )

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=ask, tokenize=False
            )
        except Exception as e:  # a template's raise_exception() and any error within it
            raise UnusableChat(f"the chat template refuses it: {_first_line(e)}") from None
        return str(text)

    def _span(self, messages: Sequence[Message], i: int, text: str, ask: bool) -> Span:
        """Where message ``i`` stands in ``text``.

        The chat is rendered once more with a mark in the message's place. What the template puts
        before and after the mark must be what it put around the message, and the message must be
        all that is between (or a part of it, when the template trims). A template that looks into
        the message, to move its reasoning elsewhere, say, fails this and is refused.
        """
        mark = _MARK
        while mark in text:
            mark += "Z"
        marked = [*messages[:i], {**messages[i], "content": mark}, *messages[i + 1 :]]
        before, found, after = self._render(marked, ask).partition(mark)
        fits = text.startswith(before) and text.endswith(after)
        said = text[len(before) : len(text) - len(after)]
        if not found or mark in after or not fits or said not in messages[i]["content"]:
            raise UnusableChat(
                f"the chat template renders messages[{i}] in a way that depends on its content, so "
                "its tokens cannot be told apart: give input_ids and loss_mask for this line"
            )
        return len(before), len(text) - len(after)

    def _tokenize(self, text: str, spans: list[Span]) -> tuple[TokenIds, Mask]:
        if not getattr(self._tokenizer, "is_fast", False):
            return self._tokenize_by_prefix(text, spans)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], np.int32)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
        mask = np.zeros(len(ids), np.uint8)
        for start, stop in spans:
            # A token that begins before the message belongs to what the template wrote.
            mask[(starts >= start) & (starts < stop)] = 1
        return ids, mask

    def _tokenize_by_prefix(self, text: str, spans: list[Span]) -> tuple[TokenIds, Mask]:
        """For tokenizers that do not say where tokens stand: compare with tokens of prefixes."""
        ids = self._ids(text)
        mask = np.zeros(len(ids), np.uint8)
        for span in spans:
            edges = []
            for at in span:
                prefix = self._ids(text[:at])
                if not np.array_equal(ids[: len(prefix)], prefix):
                    raise UnusableChat(
                        "this tokenizer joins characters across a message's border, so the "
                        "message's tokens cannot be told apart: give input_ids and loss_mask"
                    )
                edges.append(len(prefix))
            mask[edges[0] : edges[1]] = 1
        return ids, mask

    def _ids(self, text: str) -> TokenIds:
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _first_line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return words[0][:300] if words else type(error).__name__
