"""Ask a server for a sample, and compare bf16 states."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .server import SGLangServer

VOCABULARY = 500  # of the tiny models; ordinary words in SmolLM2


def prompts(count: int, seed: int, low: int = 3, high: int = 100) -> list[list[int]]:
    """Random token ids; lengths from ``low`` to ``high - 1``."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, rng.integers(low, high)).tolist() for _ in range(count)]


def named(prefix: str, count: int, seed: int, **lengths: int) -> dict[str, list[int]]:
    """Prompts by sample id."""
    return {f"{prefix}{i}": p for i, p in enumerate(prompts(count, seed, **lengths))}


def ask(server: SGLangServer, sample_id: str, input_ids: list[int], **params: Any) -> Any:
    """One tagged request; its answer holds SGLang's own ``hidden_states`` too."""
    return server.generate(
        input_ids=input_ids,
        rid=f"rid-{sample_id}",
        extra_key=sample_id,
        return_hidden_states=True,
        sampling_params={
            "temperature": 0,
            "max_new_tokens": 1,
            "ignore_eos": True,
            "custom_params": {"hstransport_id": sample_id, "hstransport_labels": {"n": sample_id}},
            **params,
        },
    )


def ask_all(
    server: SGLangServer, requests: Mapping[str, list[int]], threads: int = 16, **params: Any
) -> dict[str, Any]:
    """Many requests at once; answers by sample id."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(lambda r: ask(server, *r, **params), requests.items()))
    return dict(zip(requests, answers, strict=True))


def returned(answer: Any) -> npt.NDArray[np.uint16]:
    """bf16 bits ``[rows, width]`` of the prompt that SGLang returned.

    With chunked prefill SGLang returns the rows of the last chunk only.
    """
    wide = np.asarray(answer["meta_info"]["hidden_states"][0], np.float32).view(np.uint32)
    assert not (wide & 0xFFFF).any(), "a returned value is no bf16 number"
    return (wide >> 16).astype(np.uint16)


def floats(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bf16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cosines(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Cosine of each row of ``a`` with the same row of ``b``; other axes are one vector."""
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    result: npt.NDArray[np.float32] = (a * b).sum(1) / (
        np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    )
    return result
