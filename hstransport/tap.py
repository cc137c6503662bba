"""The tap: follows the requests of one rank and hands their rows to the exporter.

It knows nothing of SGLang: requests come as the :class:`Request` that the plugin makes of them,
forward passes as a :class:`Pass`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .capture import Planes, planes, split_packed
from .errors import CaptureError, ProtocolError
from .exporter import DecodeRun, Exporter
from .protocol import (
    ABORTED,
    Label,
    SessionInfo,
    TokenIds,
    check_labels,
    check_loss_mask,
    fit_id,
)
from .recorder import OpenSample, RowSpan

logger = logging.getLogger(__name__)

ID_TAG, LABELS_TAG, MASK_TAG = "hstransport_id", "hstransport_labels", "hstransport_loss_mask"
"""Keys of ``sampling_params.custom_params`` by which a caller names and labels its sample."""


class Request(Protocol):
    """One request of the server, read when it is needed."""

    @property
    def rid(self) -> str: ...
    @property
    def probe(self) -> bool: ...
    @property
    def prompt(self) -> Sequence[int] | TokenIds: ...
    @property
    def output(self) -> Sequence[int] | TokenIds: ...
    @property
    def tags(self) -> dict[str, Any]: ...
    @property
    def over(self) -> bool: ...
    @property
    def retracted(self) -> bool: ...
    def unfit(self) -> str: ...
    def reason(self) -> tuple[str, str]: ...


class Pass(NamedTuple):
    """A forward pass: for each request of the batch, in the order of its rows."""

    positions: list[int] | None
    """Token position of the request's first row; None when the server keeps it on the device."""
    counts: list[int]
    """How many rows it computes."""


@dataclass(slots=True)
class _Followed:
    """A request seen in a forward pass."""

    rid: str
    request: Request
    sample: OpenSample | None
    """None for a request that is not to be captured."""
    prompt_tokens: int
    first_position: int
    """Where its first computed row lay: tokens before it came out of the radix cache."""
    next_position: int


@dataclass
class _Decode:
    """Decode steps of one batch, for as long as its requests stay the same."""

    batch: list[Any]
    positions: list[int] | None
    """Of each request's row at the first step, as the server told."""
    rows: list[tuple[_Followed, int]]
    """The wanted rows: whose, and at which position at the first step."""
    run: DecodeRun


class Tap:
    """``adapt`` makes a :class:`Request` of the server's own request object."""

    def __init__(
        self,
        info: SessionInfo,
        exporter: Exporter,
        adapt: Callable[[Any], Request],
        *,
        tagged_only: bool,
    ) -> None:
        self.all_rows = info.rows == "all"
        self._info = info
        self._exporter: Exporter | None = exporter
        self._adapt = adapt
        self._tagged_only = tagged_only
        # By the identity of the server's own request object, which the entry keeps alive: two
        # requests may carry the same request id.
        self._followed: dict[int, _Followed] = {}
        self._decode: _Decode | None = None

    def guarded(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run a step of capture; an error ends capture, never serving."""
        if self._exporter is None:
            return None
        try:
            return step(*args)
        except Exception as e:
            self.stop(str(e), e)
            return None

    def stop(self, why: str, error: Exception | None = None) -> None:
        """End capture for good; all open samples end as aborted, and serving goes on."""
        exporter, self._exporter = self._exporter, None
        if exporter is None:
            return
        logger.error("hstransport: capture stopped, serving goes on: %s", why, exc_info=error)
        if error is not None:
            exporter.abandon()
        for f in self._followed.values():
            try:
                self._end(exporter, f, ABORTED, f"capture stopped: {why}"[:1000])
            except Exception:  # whatever is broken must not reach the server's thread
                logger.exception("hstransport: sample of request %s cannot be ended", f.rid)
        self._followed.clear()
        try:
            exporter.close()
        except Exception:
            logger.exception("hstransport: the ring cannot be closed in order")

    def plan(self, batch: Sequence[Any], step: Pass) -> list[RowSpan]:
        """Which rows of the coming pass belong to which sample. ``batch``: its requests."""
        self._leave_decode()
        spans = []
        row = 0
        for i, raw in enumerate(batch):
            count = step.counts[i]
            position = None if step.positions is None else step.positions[i]
            followed = self._followed.get(id(raw)) or self._follow(raw, position)
            if followed is not None and followed.sample is not None:
                at = followed.next_position if position is None else position
                followed.next_position = at + count
                keep = count if self.all_rows else min(count, followed.prompt_tokens - at)
                if keep > 0:
                    spans.append(RowSpan(followed.sample, at, row, keep))
            row += count
        return spans

    def plan_decode(self, batch: Sequence[Any], positions: list[int] | None) -> DecodeRun:
        """The same for a decode step: one row for each request of the batch, in its order.

        ``positions``: of these rows; None when the server keeps them on the device. Costs next to
        nothing while the batch stays the same.
        """
        last = self._decode
        if last is not None and last.run.open and batch == last.batch:
            steps = last.run.steps
            if last.positions is None or positions == [p + steps for p in last.positions]:
                return last.run
        self._leave_decode()
        rows = []
        spans = []
        for i, raw in enumerate(batch):
            position = None if positions is None else positions[i]
            followed = self._followed.get(id(raw)) or self._follow(raw, position)
            if followed is not None and followed.sample is not None:
                at = followed.next_position if position is None else position
                rows.append((followed, at))
                spans.append(RowSpan(followed.sample, at, i, 1))
        run = DecodeRun(spans)
        self._decode = _Decode(list(batch), positions, rows, run)
        return run

    def _leave_decode(self) -> None:
        last, self._decode = self._decode, None
        if last is not None:
            for followed, at in last.rows:
                followed.next_position = at + last.run.steps

    def planes(self, states: tuple[Any, Any], stream: int | None = None) -> Planes:
        """Take the states of a pass: (final, captured layers).

        final: ``[tokens, hidden]``. Captured layers: a list of such arrays, or one packed
        ``[tokens, layers * hidden]``. All may be padded at their end. ``stream``: the CUDA stream
        on which they are computed.
        """
        final, captured = states
        hidden, layers = self._info.hidden, self._info.layers
        arrays: list[Any] = []
        if layers:
            if captured is None:
                raise CaptureError("the model handed no captured layers to LogitsProcessor.forward")
            packed = hasattr(captured, "ndim")
            arrays = split_packed(captured, len(layers), hidden) if packed else list(captured)
        if len(arrays) != len(layers):
            raise CaptureError(f"the model captured {len(arrays)} layers, {len(layers)} were asked")
        if self._info.final:
            arrays.append(final)
        return planes(arrays, hidden, stream)

    def take(self, work: Sequence[RowSpan] | DecodeRun, planes: Planes) -> None:
        """Copy the rows that :meth:`plan` or :meth:`plan_decode` named."""
        exporter = self._exporter
        assert exporter is not None
        spans = work.spans if isinstance(work, DecodeRun) else work
        rows = spans[-1].row + spans[-1].rows
        if planes.rows < rows:
            raise CaptureError(f"a plane has {planes.rows} rows, the batch has {rows}")
        if isinstance(work, DecodeRun):
            exporter.step(work, planes)
        else:
            exporter.rows(spans, planes)
        exporter.submit()

    def retracted(self) -> set[int]:
        """Identities of followed requests that the server has taken back to compute again."""
        return {key for key, f in self._followed.items() if f.request.retracted}

    @property
    def followed(self) -> int:
        """Requests seen in a pass and not over yet."""
        return len(self._followed)

    def sweep(self, gone: Collection[int] = ()) -> None:
        """End the samples of requests that are over; those of ``gone`` ended without a trace."""
        self.finish([key for key, f in self._followed.items() if f.request.over or key in gone])

    def finish(self, keys: Iterable[int]) -> None:
        """End the samples of requests that are over, by their identities."""
        assert self._exporter is not None
        for key in keys:
            f = self._followed.pop(key, None)
            if f is not None:
                self._end(self._exporter, f, *f.request.reason())
        self._exporter.submit()

    def give_up(self, batch: Sequence[Any], why: str) -> None:
        """End the samples of a batch whose rows are not understood."""
        assert self._exporter is not None
        for raw in batch:
            f = self._followed.get(id(raw))
            if f is not None and f.sample is not None:
                logger.warning("hstransport: sample %s is given up: %s", f.sample.id, why)
                self._end(self._exporter, f, ABORTED, why)
                f.sample = None

    def _follow(self, raw: Any, position: int | None) -> _Followed | None:
        """The request's entry, made on its first pass; None for one that is already over."""
        request = self._adapt(raw)
        if request.over:
            return None  # the overlap scheduler runs one more pass for a request that just ended
        if position is None:
            raise CaptureError(
                f"the first pass of request {request.rid} is a decode at unknown position"
            )
        prompt = request.prompt
        sample = self._start(request, prompt)
        followed = _Followed(
            request.rid, request, sample, len(prompt), position, next_position=position
        )
        self._followed[id(raw)] = followed
        unfit = request.unfit()
        if unfit and sample is not None:
            self.give_up([raw], f"cannot be captured exactly: {unfit}")
        return followed

    def _start(self, request: Request, prompt: Sequence[int] | TokenIds) -> OpenSample | None:
        assert self._exporter is not None
        tags = request.tags
        sample_id = tags.get(ID_TAG)
        if request.probe or (self._tagged_only and sample_id is None):
            return None
        labels, mask = _tagged(tags, len(prompt))
        rid = fit_id(request.rid)
        return self._exporter.start(
            fit_id(sample_id) if isinstance(sample_id, str) and sample_id else rid,
            rid,
            prompt,
            labels,
            mask,
        )

    def _end(self, exporter: Exporter, f: _Followed, reason: str, detail: str) -> None:
        if f.sample is None:
            return
        output = f.request.output
        # The last generated token was sampled but never an input, so it has no state.
        tokens = f.prompt_tokens + (max(len(output) - 1, 0) if self.all_rows else 0)
        exporter.end(f.sample, reason, tokens, output, cached=f.first_position, detail=detail)


def _tagged(tags: dict[str, Any], tokens: int) -> tuple[dict[str, Label], tuple[int, ...] | None]:
    """Labels and loss mask that the caller sent; bad ones become a label that says so."""
    if not tags:
        return {}, None
    try:
        labels = check_labels(tags.get(LABELS_TAG) or {})
        mask = tags.get(MASK_TAG)
        if mask is not None and len(mask) > 2 * tokens + 2:
            raise ProtocolError(f"a loss mask of {len(mask)} runs for {tokens} tokens")
        return labels, None if mask is None else check_loss_mask(mask)
    except (ProtocolError, TypeError) as e:
        return {"hstransport_error": str(e)[:500]}, None
