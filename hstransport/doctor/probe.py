"""The requests that doctor sends, and what the server answers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..client.ask import payload
from ..client.http import Server
from ..client.prompts import Prompt
from ..protocol import TokenIds

NEW_TOKENS = 4
"""Generated after each prompt; their states are looked at too where the server captures them."""
LABEL = "hstransport.doctor"
"""Every sample of doctor's has this label, and a loss mask of zeros."""
_LENGTHS = (48, 48, 100, 23)
"""Two that are alike: to swap their rows leaves both samples with the right number of them."""


@dataclass(frozen=True)
class Probe:
    """One request, answered."""

    id: str
    """The sample's id."""
    prompt: TokenIds
    output: TokenIds
    """Generated token ids, the most probable ones."""
    logprobs: tuple[float, ...]
    """The server's own, of each generated token; empty when it does not say."""
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Probes:
    """All requests of a check."""

    alone: list[Probe]
    """Sent one after another."""
    batch: list[Probe]
    """The same prompts, each twice, in one call: ``batch[i]`` has the tokens of ``twin(i)``."""
    first: Probe
    again: Probe
    """The same tokens as ``first``, when the prefix cache holds them."""

    def twin(self, i: int) -> Probe:
        return self.alone[i % len(self.alone)]

    def __len__(self) -> int:
        return len(self.alone) + len(self.batch) + 2

    def __iter__(self) -> Iterator[Probe]:
        return iter([*self.alone, *self.batch, self.first, self.again])

    @property
    def whole(self) -> list[Probe]:
        """Those that must be stored whole, whatever the prefix cache does."""
        return [*self.alone, *self.batch, self.first]


def new_prefix() -> str:
    """What the ids of one run of doctor begin with."""
    return f"doctor-{secrets.token_hex(4)}-"


def send(server: Server, prefix: str, vocab_size: int) -> Probes:
    """Send all requests and wait for the answers. Raises ServerError."""
    prompts = _prompts(vocab_size)
    prefix_key = f"{prefix}prefix"
    alone = [_Question(f"{prefix}alone-{i}", tokens) for i, tokens in enumerate(prompts)]
    batch = [_Question(f"{prefix}batch-{i}", tokens) for i, tokens in enumerate(prompts * 2)]
    first, again = (_Question(f"{prefix}prefix-{i}", prompts[2], prefix_key) for i in range(2))

    def ask(question: _Question) -> Probe:
        return question.answered(server.generate(question.body))

    alone_probes = [ask(question) for question in alone]
    answers = server.generate_at_once([question.body for question in batch])
    batch_probes = [q.answered(a) for q, a in zip(batch, answers, strict=True)]
    return Probes(alone_probes, batch_probes, ask(first), ask(again))


def _prompts(vocab_size: int) -> list[TokenIds]:
    """Token ids, the same each time, out of that part of the vocabulary where words are.

    Vocabularies keep their special tokens, images' and the like, at either end.
    """
    low, high = (1000, vocab_size // 2) if vocab_size >= 4000 else (3, max(vocab_size, 4))
    rng = np.random.default_rng(0)
    return [rng.integers(low, high, n).astype(np.int32) for n in _LENGTHS]


class _Question:
    """A request that is to be sent; ``key``: its prefix cache's, its own by default."""

    def __init__(self, sample_id: str, tokens: TokenIds, key: str | None = None) -> None:
        self._id = sample_id
        self._tokens = tokens
        self._rid = f"{sample_id}-rid"
        mask = (len(tokens) + NEW_TOKENS,)
        prompt = Prompt(0, sample_id, tokens, None, {LABEL: True}, mask)
        self.body = payload(prompt, self._rid, NEW_TOKENS, past_cache=True)
        """Of POST /generate."""
        self.body["sampling_params"]["ignore_eos"] = True
        self.body["return_logprob"] = True
        if key is not None:
            self.body["extra_key"] = key

    def answered(self, answer: dict[str, Any]) -> Probe:
        meta = answer.get("meta_info") or {}
        return Probe(
            self._id,
            self._tokens,
            np.array(answer.get("output_ids") or [], np.int32),
            _logprobs(meta.get("output_token_logprobs")),
            int(meta.get("prompt_tokens") or 0),
            int(meta.get("cached_tokens") or 0),
        )


def _logprobs(entries: Sequence[Sequence[object]] | None) -> tuple[float, ...]:
    return tuple(float(str(entry[0])) for entry in entries or ())
