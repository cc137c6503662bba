"""The file of prompts: one JSON object a line, checked in full before anything is sent.

Each line has exactly one of ``messages`` (a chat), ``text`` and ``input_ids``, and may have ``id``
(a string), ``labels`` (a map of scalars) and ``loss_mask`` (0 or 1 for each token).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HsTransportError, ProtocolError
from ..protocol import MAX_META_BYTES, TokenIds
from ..tags import MAX_ID_BYTES, Label, check_labels, encode_loss_mask
from .chat import ChatTokenizer, UnusableChat

_CONTENTS = ("messages", "text", "input_ids")
_KEYS = (*_CONTENTS, "id", "labels", "loss_mask")
_MAX_TOKENS = MAX_META_BYTES // 4 - 4096
"""So that the prompt's token ids fit into the metadata of one record."""
_SHOWN = 20


@dataclass(frozen=True)
class Prompt:
    """A line that can be sent."""

    line: int
    id: str
    tokens: TokenIds | None
    text: str | None = None
    labels: dict[str, Label] = field(default_factory=dict)
    loss_mask: tuple[int, ...] | None = None
    """Alternating run lengths, zeros first."""


@dataclass(frozen=True)
class PromptFile:
    """What a file holds: prompts to send, lines that cannot be, ids that had to be changed."""

    prompts: list[Prompt]
    bad: list[tuple[int, str]]
    """(line number, what is wrong with it)"""
    renamed: list[tuple[int, str, str]]
    """(line number, id, the id it got because an earlier line has that one)"""


class BadPrompts(HsTransportError, ValueError):
    """Lines of the prompt file that cannot be sent, each by its number."""

    def __init__(self, path: Path, bad: list[tuple[int, str]], advice: str) -> None:
        lines = [f"  line {number}: {reason}" for number, reason in bad[:_SHOWN]]
        if len(bad) > _SHOWN:
            lines.append(f"  and {len(bad) - _SHOWN} more")
        super().__init__(
            f"{path}: {len(bad)} lines cannot be used, so nothing was done ({advice}):\n"
            + "\n".join(lines)
        )


class _BadLine(Exception):
    """Why one line cannot be sent."""


def read_prompts(
    path: Path, tokenizer: Callable[[], ChatTokenizer], limit: int | None = None
) -> PromptFile:
    """Read and check the whole file, or its first ``limit`` prompts.

    ``tokenizer`` is called at the first line with ``messages``. Raises OSError for the file, and
    what ``tokenizer`` raises.
    """
    prompts: list[Prompt] = []
    bad: list[tuple[int, str]] = []
    for number, raw in _lines(path):
        if limit is not None and len(prompts) + len(bad) >= limit:
            break
        try:
            prompts.append(_prompt(number, _object(raw), tokenizer))
        except _BadLine as e:
            bad.append((number, str(e)))
    renamed = _make_ids_unique(prompts)
    return PromptFile(prompts, bad, renamed)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except UnicodeDecodeError as e:
        raise _BadLine(f"not UTF-8: {e.reason} at byte {e.start}") from None
    except RecursionError:
        raise _BadLine("not usable JSON: nested too deeply") from None
    except ValueError as e:
        raise _BadLine(f"not JSON: {e}") from None
    if not isinstance(value, dict):
        raise _BadLine(f"is a JSON {type(value).__name__}, not an object")
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        raise _BadLine(f"unknown key {unknown[0]!r}; allowed are {', '.join(_KEYS)}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _prompt(number: int, line: dict[str, Any], tokenizer: Callable[[], ChatTokenizer]) -> Prompt:
    given = [key for key in _CONTENTS if key in line]
    if len(given) != 1:
        what = " and ".join(given) if given else "none of them"
        raise _BadLine(f"needs exactly one of {', '.join(_CONTENTS)}; has {what}")
    mask: tuple[int, ...] | None = None
    text: str | None = None
    tokens: TokenIds | None = None
    if given == ["text"]:
        text = _text(line["text"])
    elif given == ["input_ids"]:
        tokens = _input_ids(line["input_ids"])
    else:
        tokens, mask = _chat(line["messages"], tokenizer())
    if "loss_mask" in line:
        mask = _loss_mask(line["loss_mask"], tokens)
    return Prompt(
        number, _id(line.get("id"), tokens, text), tokens, text, _labels(line.get("labels")), mask
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _BadLine(f"text must be a string, not {type(value).__name__}")
    if not value:
        raise _BadLine("text is empty: there is no token to capture")
    _utf8("text", value)
    return value


def _input_ids(value: Any) -> TokenIds:
    if not isinstance(value, list):
        raise _BadLine(f"input_ids must be a list of token ids, not {type(value).__name__}")
    if not value:
        raise _BadLine("input_ids is empty: there is no token to capture")
    if len(value) > _MAX_TOKENS:
        raise _BadLine(f"input_ids has {len(value)} tokens, at most {_MAX_TOKENS} can be captured")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise _BadLine(f"input_ids[{i}] is {token!r:.40}, not a token id")
    return np.array(value, np.int32)


def _chat(messages: Any, tokenizer: ChatTokenizer) -> tuple[TokenIds, tuple[int, ...]]:
    if not isinstance(messages, list) or not messages:
        raise _BadLine("messages must be a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _BadLine(f"messages[{i}] must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise _BadLine(f"messages[{i}].{key} must be a string")
            _utf8(f"messages[{i}].{key}", message[key])
    try:
        tokens, mask = tokenizer.encode(messages)
    except UnusableChat as e:
        raise _BadLine(str(e)) from None
    if not 0 < len(tokens) <= _MAX_TOKENS:
        raise _BadLine(f"messages become {len(tokens)} tokens; allowed are 1 to {_MAX_TOKENS}")
    return tokens, encode_loss_mask(mask)


def _loss_mask(value: Any, tokens: TokenIds | None) -> tuple[int, ...]:
    if tokens is None:
        raise _BadLine("loss_mask with text: only the server knows its tokens; give input_ids")
    if not isinstance(value, list) or any(type(x) is not int or x not in (0, 1) for x in value):
        raise _BadLine("loss_mask must be a list of 0 and 1")
    if len(value) != len(tokens):
        raise _BadLine(f"loss_mask has {len(value)} entries for {len(tokens)} tokens")
    return encode_loss_mask(value)


def _labels(value: Any) -> dict[str, Label]:
    if value is None:
        return {}
    try:
        return check_labels(value)
    except ProtocolError as e:
        raise _BadLine(str(e)) from None


def _id(value: Any, tokens: TokenIds | None, text: str | None) -> str:
    """The line's own id, or one that a later run finds again: a hash of what is sent."""
    if value is None:
        content = b"text" + text.encode() if text is not None else b"ids_" + _bytes(tokens)
        return hashlib.sha256(content).hexdigest()[:24]
    if not isinstance(value, str) or not value:
        raise _BadLine(f"id must be a string of at least one character, not {value!r:.40}")
    _utf8("id", value)
    # Room for the suffix of a repeated id.
    if len(value.encode()) > MAX_ID_BYTES - 12:
        raise _BadLine(f"id has {len(value.encode())} bytes, at most {MAX_ID_BYTES - 12} are kept")
    return value


def _bytes(tokens: TokenIds | None) -> bytes:
    return b"" if tokens is None else tokens.astype("<i4").tobytes()


def _utf8(name: str, value: str) -> None:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadLine(f"{name} has a lone surrogate: it is not valid Unicode") from None


def _make_ids_unique(prompts: list[Prompt]) -> list[tuple[int, str, str]]:
    """Give the second line with an id ``#2``, and so on, so that each is a sample of its own."""
    taken = {p.id for p in prompts}
    seen: set[str] = set()
    count: dict[str, int] = {}
    renamed = []
    for i, prompt in enumerate(prompts):
        if prompt.id not in seen:
            seen.add(prompt.id)
            continue
        number = count.get(prompt.id, 1) + 1
        while f"{prompt.id}#{number}" in taken:
            number += 1
        count[prompt.id] = number
        name = f"{prompt.id}#{number}"
        taken.add(name)
        seen.add(name)
        renamed.append((prompt.line, prompt.id, name))
        prompts[i] = replace(prompt, id=name)
    return renamed
