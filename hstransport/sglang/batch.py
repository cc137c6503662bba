"""Which rows a coming forward pass computes, as SGLang's ``ForwardBatch`` says."""

from __future__ import annotations

from typing import Any

from ..errors import CaptureError
from ..exporter import DecodeRun
from ..follower import Pass
from ..settings import Selection
from ..tap import Forward, Tap
from .request import note, tags_of


def plan(
    tap: Tap, selection: Selection, reqs: list[Any], forward_batch: Any
) -> Forward | DecodeRun | None:
    """The rows of the coming pass, or None when none of them is wanted.

    ``reqs``: the batch's requests, in the order of their rows. Raises CaptureError for a kind of
    pass whose rows are not understood.
    """
    mode = forward_batch.forward_mode
    if mode.is_decode():
        if not tap.all_rows or not _wanted(tap, selection, reqs):
            return None
        if not _same_size(tap, reqs, forward_batch, len(reqs)):
            return None
        lengths = forward_batch.seq_lens_cpu  # None where SGLang keeps them on the device
        positions = None if lengths is None else [n - 1 for n in lengths.tolist()]
        tokens = getattr(forward_batch, "seq_lens_sum", None)
        return tap.plan_decode(reqs, Pass(positions, [1] * len(reqs)), note(reqs), tokens)
    if mode.is_idle():
        return None
    if mode.is_extend() and not mode.is_target_verify():
        if not _wanted(tap, selection, reqs):
            return None
        counts = list(forward_batch.extend_seq_lens_cpu)
        if not _same_size(tap, reqs, forward_batch, len(counts)):
            return None
        step = Pass(list(forward_batch.extend_prefix_lens_cpu), counts)
        return tap.plan(reqs, step, note(reqs))
    raise CaptureError(f"forward mode {mode} is not one whose rows are understood")


def _wanted(tap: Tap, selection: Selection, reqs: list[Any]) -> bool:
    """Whether any of these requests is to be captured; if not, nothing is even gathered."""
    if tap.follower.spent:
        return any(tap.follower.captures(req) for req in reqs)
    if selection.kind == "all":
        return True
    return any(selection.wants(req.rid, tags_of(req)) for req in reqs)


def _same_size(tap: Tap, reqs: list[Any], forward_batch: Any, counts: int) -> bool:
    if len(reqs) == forward_batch.batch_size == counts:
        return True
    why = f"a batch of {len(reqs)} requests has {forward_batch.batch_size} sequences"
    tap.post(tap.follower.give_up, list(reqs), why)
    return False
