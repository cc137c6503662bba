"""The client of the serving benchmark: prompts, and one pass of them at a fixed concurrency."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import numpy as np
from common import ROOT

LOW, HIGH = 100, 400  # tokens of a prompt
SMOKE_VOCABULARY = 500  # the tiny models have no tokenizer
TIMEOUT_S = 300.0

Prompt = list[int]


class Pass(NamedTuple):
    """What one pass over the prompts took, seen by the client."""

    seconds: float
    tokens: int
    body_bytes: int
    """Bytes of the answers."""
    latency_s: float
    """Median over the requests."""


class Client:
    """Asks ``url`` for one token to each prompt, with ``concurrency`` connections kept open."""

    def __init__(self, host: str, port: int, concurrency: int) -> None:
        self._where = host, port
        self._concurrency = concurrency
        self._local = local()

    def run(self, prompts: Sequence[Prompt], tag: str, *, hidden_states: bool = False) -> Pass:
        """Each request has an id and an ``extra_key`` of its own, so no cached prefix serves it."""

        def ask(i: int) -> tuple[float, int]:
            begun = time.perf_counter()
            size, answer = self.ask(prompts[i], f"{tag}-{i}", hidden_states=hidden_states)
            check(answer, prompts[i], hidden_states)
            return time.perf_counter() - begun, size

        start = time.perf_counter()
        with ThreadPoolExecutor(self._concurrency) as pool:
            answers = list(pool.map(ask, range(len(prompts))))
        seconds = time.perf_counter() - start
        latency = statistics.median(a[0] for a in answers)
        return Pass(seconds, sum(map(len, prompts)), sum(a[1] for a in answers), latency)

    def batch(
        self, prompts: Sequence[Prompt], tag: str, new_tokens: int, *, tagged: bool = True
    ) -> float:
        """All prompts as one request, so that a slow client costs nothing; seconds it took."""
        ids = [f"{tag}-{i}" for i in range(len(prompts))]
        params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        payload = {
            "input_ids": prompts,
            "rid": [f"rid-{i}" for i in ids],
            "extra_key": ids,  # two random prompts may begin with the same token
            "sampling_params": [
                {**params, "custom_params": {"hstransport_id" if tagged else "id": i}} for i in ids
            ],
        }
        body = json.dumps(payload)
        connection = http.client.HTTPConnection(*self._where, timeout=TIMEOUT_S)
        connection.connect()
        start = time.perf_counter()
        answer = answered(connection, body)
        seconds = time.perf_counter() - start
        connection.close()
        for prompt, one in zip(prompts, json.loads(answer), strict=True):
            check(one, prompt, False, new_tokens)
        return seconds

    def alone(self, prompt: Prompt, sample_id: str, **options: bool) -> Any:
        """One request on a connection of its own; its answer."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: self.ask(prompt, sample_id, **options)[1]).result()

    def ask(
        self, prompt: Prompt, sample_id: str, *, hidden_states: bool = False, tagged: bool = True
    ) -> tuple[int, Any]:
        """Bytes of the body, and the answer out of it."""
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        if tagged:
            params["custom_params"] = {"hstransport_id": sample_id}
        payload = {
            "input_ids": prompt,
            "rid": f"rid-{sample_id}",
            "extra_key": sample_id,
            "sampling_params": params,
        }
        if hidden_states:
            payload["return_hidden_states"] = True
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(*self._where, timeout=TIMEOUT_S)
            self._local.connection = connection
        body = answered(connection, json.dumps(payload))
        return len(body), json.loads(body)


def answered(connection: http.client.HTTPConnection, payload: str) -> bytes:
    """POST /generate; the body of the answer."""
    connection.request("POST", "/generate", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status}: {body[:500]!r}")
    return body


def check(answer: Any, prompt: Prompt, hidden_states: bool, new_tokens: int = 1) -> None:
    """A pass counts only if every token was computed."""
    meta = answer["meta_info"]
    if meta["prompt_tokens"] != len(prompt) or meta["cached_tokens"] != 0:
        raise SystemExit(f"{len(prompt)} tokens were asked for, the server says {meta}")
    if meta["completion_tokens"] != new_tokens:
        raise SystemExit(f"{new_tokens} new tokens were asked for, the server says {meta}")
    if hidden_states and len(meta["hidden_states"][0]) != len(prompt):
        raise SystemExit("the server returned fewer states than the prompt has tokens")


def chats(model: Path, path: Path | None, count: int) -> list[Prompt]:
    """Prompts of LOW to HIGH tokens: conversations joined, and cut at a length drawn evenly.

    ``path``: JSON lines with ``input_ids``, ``text`` or ``messages`` (default: the demo's).
    """
    lines = (path or ROOT / "demo" / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    texts = [row.get("input_ids") or row.get("text") or _chatml(row["messages"]) for row in rows]
    pieces = [t if isinstance(t, list) else _tokenize(model, t) for t in texts]
    if path is not None:
        return pieces[:count]
    rng = np.random.default_rng(7)
    prompts = []
    for i in range(count):
        length = int(rng.integers(LOW, HIGH + 1))
        joined: Prompt = []
        at = i * len(pieces) // count
        while len(joined) < length:
            joined += pieces[at % len(pieces)]
            at += 1
        prompts.append(joined[:length])
    return prompts


def random_ids(count: int, low: int, high: int) -> list[Prompt]:
    rng = np.random.default_rng(7)
    return [
        rng.integers(3, SMOKE_VOCABULARY, rng.integers(low, high)).tolist() for _ in range(count)
    ]


def _chatml(messages: Sequence[Any]) -> str:
    """SmolLM2's own chat format."""
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


_tokenizers: dict[Path, Any] = {}


def _tokenize(model: Path, text: str) -> Prompt:
    if model not in _tokenizers:
        from tokenizers import Tokenizer

        _tokenizers[model] = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: Prompt = _tokenizers[model].encode(text, add_special_tokens=False).ids
    return ids
