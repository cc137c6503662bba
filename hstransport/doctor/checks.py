"""What can be told from the samples alone: rows, values, batches and the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .compare import F32, ROUGHLY, SAME, agreement, cosines, floats
from .finding import FAIL, OK, SKIPPED, WARN, Finding
from .probe import Probe, Probes

if TYPE_CHECKING:
    from hstransport_consumer.sample import Sample

Bits = npt.NDArray[np.uint16]

_NON_WHOLE = {
    "dropped": "the ring was full: give it a consumer that keeps up, or more bytes "
    "(HSTRANSPORT_RING_BYTES)",
    "aborted": "capture of it was given up: the server's log says why",
    "prefix_missing": "the server reused another request's prefix though the extra_key differs: "
    "train on no sample of this server that is not whole",
    "incomplete": "rows are missing for no stated reason: do not train on this server's samples, "
    "and report it",
    "unfinished": "the server ended before the request did",
}


def check_rows(probes: Probes, samples: Mapping[str, Sample], rows: str) -> Finding:
    """Each sample is whole and has a row for each token that was sent (``rows`` of the session)."""
    tokens = 0
    for probe in probes.whole:
        sample = samples[probe.id]
        if sample.state != "whole":
            todo = _NON_WHOLE.get(sample.state, "")
            return Finding("rows", FAIL, f"{_name(probe)} is {sample.state}: {todo}")
        due = probe.prompt
        if rows == "all":
            due = np.concatenate([probe.prompt, probe.output[:-1]])
        if sample.tokens != len(due):
            return Finding(
                "rows",
                FAIL,
                f"{_name(probe)} has {sample.tokens} rows for {len(due)} tokens: the server does "
                "not compute what it is asked; do not train on its samples",
            )
        if not np.array_equal(sample.token_ids, due) or probe.prompt_tokens != len(probe.prompt):
            return Finding(
                "rows",
                FAIL,
                f"{_name(probe)} has other token ids than were sent: something between doctor and "
                "the model changes prompts",
            )
        tokens += sample.tokens
    count = len(probes.whole)
    return Finding(
        "rows", OK, f"{tokens} rows for {tokens} tokens of {count} requests, ids as sent"
    )


def check_values(layers: tuple[int | str, ...], states: Mapping[str, Bits]) -> Finding:
    """No row is zero, one value, not finite, or the same as another row of its sample.

    ``states``: bf16 bits ``[tokens, layers, hidden]`` by sample id.
    """
    odd: dict[str, list[str]] = {}
    for sample_id, bits in states.items():
        for i, layer in enumerate(layers):
            for what, wrong in _odd_rows(bits[:, i]).items():
                if wrong.any():
                    where = f"{wrong.sum()} of {len(wrong)} tokens, the first {wrong.argmax()}"
                    odd.setdefault(what, []).append(f"layer {layer} of {sample_id} ({where})")
    if not odd:
        rows = sum(len(bits) for bits in states.values())
        return Finding("values", OK, f"no zero, constant, repeated, Inf or NaN row in {rows}")
    words = "; ".join(f"{what}: {places[0]}, {len(places)} in all" for what, places in odd.items())
    return Finding(
        "values",
        FAIL,
        f"{words}. The server hands out memory that holds no states, or its model computes NaN: "
        "do not train on its samples; see whether they are right with --disable-cuda-graph",
    )


def _odd_rows(rows: Bits) -> dict[str, npt.NDArray[np.bool_]]:
    """Which rows ``[tokens, hidden]`` are odd, by what they are; each row once."""
    zero = ~(rows & 0x7FFF).any(axis=1)
    constant = (rows == rows[:, :1]).all(axis=1) & ~zero
    infinite = ((rows & 0x7F80) == 0x7F80).any(axis=1) & ~constant
    _, first, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    repeated = (counts[first.reshape(-1)] > 1) & ~zero & ~constant & ~infinite
    return {
        "only zeros": zero,
        "one value only": constant,
        "Inf or NaN": infinite,
        "the state of another token of the sample": repeated,
    }


def check_batch(
    probes: Probes,
    samples: Mapping[str, Sample],
    states: Mapping[str, Bits],
    mixture: bool | None,
) -> Finding:
    """A request in a batch has the states that it has alone, and not those of a neighbour.

    ``mixture``: whether the model is a mixture of experts, None: not known.
    """
    pairs: list[tuple[F32, F32]] = []
    equal = 0
    for i, probe in enumerate(probes.batch):
        twin = probes.twin(i)
        # Near a tie the two may generate different tokens; up to there they are the same request.
        shared = _common(samples[probe.id].token_ids, samples[twin.id].token_ids)
        together, alone = states[probe.id][:shared], states[twin.id][:shared]
        equal += np.array_equal(together, alone)
        pairs.append((floats(together), floats(alone)))
    swapped = _rows_of_another(probes, pairs)
    if swapped:
        return Finding("batch", FAIL, swapped)
    found = agreement(pairs)
    words = f"{len(pairs)} requests sent at once, held against themselves alone: {equal} equal bit "
    words += f"for bit, {found} (kernels may round differently in a batch of another shape)"
    if found.same or (mixture and found.mostly):
        return Finding("batch", OK, words)
    if found.mostly and mixture is None:
        advice = "expected of a mixture of experts (a router near a tie), wrong of another model"
        return Finding("batch", WARN, f"{words}; {advice}")
    return Finding("batch", FAIL, f"{words}: do not train on this server's samples, and report it")


def _rows_of_another(probes: Probes, pairs: list[tuple[F32, F32]]) -> str:
    """What is wrong if a request in the batch has rows that are another request's; or ""."""
    alone = {probes.twin(i).id: pairs[i][1] for i in range(len(probes.alone))}
    for i, (together, mine) in enumerate(pairs):
        off = np.flatnonzero(cosines(together, mine) < ROUGHLY)
        for other in probes.alone:
            if other is probes.twin(i) or not len(off):
                continue
            hits = (_unit(together[off]) @ _unit(alone[other.id]).T).max(axis=1) >= SAME
            if hits.any():
                return (
                    f"{hits.sum()} of {len(together)} rows of {_name(probes.batch[i])} are those "
                    f"of {_name(other)}, the first at token {off[hits.argmax()]}: rows of requests "
                    "in one batch are mixed up; do not train on this server's samples, and report "
                    "it"
                )
    return ""


def check_prefix(
    probes: Probes, samples: Mapping[str, Sample], states: Mapping[str, Bits]
) -> Finding:
    """A request whose prefix the radix cache held is completed with the rows of the first one."""
    again = probes.again
    cached, tokens = again.cached_tokens, len(again.prompt)
    if not cached:
        return Finding(
            "prefix",
            SKIPPED,
            f"{tokens} tokens sent twice: the server reused none (no radix cache)",
        )
    sample = samples[again.id]
    shared = sum(part.rows for part in sample.refs)
    if (sample.state, shared) != ("whole", cached):
        return Finding(
            "prefix",
            FAIL,
            f"{cached} of {tokens} tokens came out of the radix cache, and the sample is "
            f"{sample.state} and shares {shared} rows with the first one: serve with "
            "--disable-radix-cache, and report it",
        )
    before = floats(states[probes.first.id])
    own = floats(sample.read(cached, min(sample.tokens, len(before))))
    found = agreement([(own, before[cached : cached + len(own)])])
    if not found.mostly:
        return Finding(
            "prefix",
            FAIL,
            f"{cached} tokens came out of the radix cache, and the rows after them are not those "
            f"of the first time ({found}): serve with --disable-radix-cache, and report it",
        )
    return Finding(
        "prefix",
        OK,
        f"sent twice, {cached} of {tokens} tokens came out of the radix cache: the sample shares "
        "their rows with the first one and is whole",
    )


def _common(a: Any, b: Any) -> int:
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(np.argmin(same))


def _unit(states: F32) -> F32:
    """``[tokens, layers, hidden]`` as vectors whose products are cosines, meant over the layers."""
    norms = np.linalg.norm(states, axis=-1, keepdims=True)
    unit = np.nan_to_num(states / np.where(norms == 0, 1, norms)) / np.sqrt(states.shape[1])
    vectors: F32 = unit.reshape(len(unit), -1)
    return vectors


def _name(probe: Probe) -> str:
    return f"sample {probe.id}"
