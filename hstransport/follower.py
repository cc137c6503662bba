"""Follows the requests of one rank: whose rows a forward pass computes, and when samples end.

It knows nothing of SGLang: requests come as the :class:`Request` that the plugin makes of them.
Everything here happens on the exporter's thread, behind the server's: what a request says is read
when that thread comes to it, and only what no longer changes by then may be read. What does change
(whether it is over, where its rows lie) comes along with the pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from .errors import CaptureError, ProtocolError
from .protocol import ABORTED, SessionInfo, TokenIds
from .recorder import OpenSample, Recorder, RowSpan
from .seldom import Seldom
from .settings import Selection
from .tags import ID_TAG, LABELS_TAG, MASK_TAG, Label, check_labels, check_loss_mask, fit_id

logger = logging.getLogger(__name__)


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
    def copies(self) -> int: ...
    @property
    def generates(self) -> bool: ...
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


class Noted(NamedTuple):
    """What was true of a batch's requests when its pass began and may not be true any more."""

    over: Collection[int] = ()
    """Identities of those that were over."""
    unfit: Mapping[int, str] = MappingProxyType({})
    """Why states do not follow from a request's token ids, by its identity."""


@dataclass(slots=True)
class _Followed:
    """A request seen in a forward pass."""

    raw: Any
    """The server's own object, kept alive so that its identity stays its own."""
    request: Request
    sample: OpenSample | None
    """None for a request that is not to be captured."""
    prompt_tokens: int
    first_position: int
    """Where its first computed row lay: tokens before it came out of the radix cache."""
    next_position: int


class Follower:
    """``adapt`` makes a :class:`Request` of the server's own request object.

    ``budget_bytes``: states, uncompressed, after which no new sample is begun.
    """

    def __init__(
        self,
        info: SessionInfo,
        recorder: Recorder,
        adapt: Callable[[Any], Request],
        *,
        selection: Selection,
        budget_bytes: int | None = None,
    ) -> None:
        self._all_rows = info.rows == "all"
        self._recorder = recorder
        self._adapt = adapt
        self._selection = selection
        self._seldom = Seldom(logger)
        self._row_bytes = info.row_bytes
        self._budget_bytes = budget_bytes
        self.spent = False
        """Whether the budget is."""
        self._copies: dict[str, int] = {}
        # By the identity of the server's own request object: two may carry the same request id.
        self._followed: dict[int, _Followed] = {}
        self._ended: dict[int, _Followed] = {}  # by end_all

    def plan(self, batch: Sequence[Any], step: Pass, noted: Noted, steps: int) -> list[RowSpan]:
        """Which rows of a pass belong to which sample; see exporter.Plan.

        ``batch``: its requests, of which ``noted`` was true when the pass began.
        """
        spans = []
        row = 0
        for i, raw in enumerate(batch):
            count = step.counts[i]
            position = None if step.positions is None else step.positions[i]
            followed = self._followed.get(id(raw)) or self._ended.get(id(raw))
            # The overlap scheduler runs one more pass for a request that just ended.
            if followed is None and id(raw) not in noted.over:
                followed = self._follow(raw, position, noted.unfit.get(id(raw), ""))
            if followed is not None and followed.sample is not None:
                at = followed.next_position if position is None else position
                followed.next_position = at + count * steps
                keep = count if self._all_rows else min(count, followed.prompt_tokens - at)
                if keep > 0:
                    spans.append(RowSpan(followed.sample, at, row, keep))
            row += count
        if self._budget_bytes is not None and not self.spent:
            self._spend(sum(span.rows for span in spans) * steps)
        return spans

    def captures(self, raw: Any) -> bool:
        """Whether rows of this request are wanted. The server's thread may ask."""
        followed = self._followed.get(id(raw))
        return followed is not None and followed.sample is not None

    def _spend(self, rows: int) -> None:
        assert self._budget_bytes is not None
        self._budget_bytes -= rows * self._row_bytes
        if self._budget_bytes <= 0:
            self.spent = True
            self._recorder.ring.count("budget_spent")
            logger.warning(
                "hstransport: HSTRANSPORT_BUDGET_BYTES is spent: no new sample is begun, the %d "
                "that are open go on",
                sum(f.sample is not None for f in self._followed.values()),
            )

    def finish(self, raws: Iterable[Any]) -> None:
        """End the samples of requests that are over, or gone without a trace."""
        for raw in raws:
            followed = self._followed.pop(id(raw), None)
            if followed is not None:
                self._end(followed, *followed.request.reason())

    # The server's thread may ask; what it is told may be late by what it has posted itself. It
    # must ask before it posts: what is true by the time of a posted action may not have been.

    @property
    def count(self) -> int:
        """Followed requests."""
        return len(self._followed)

    def over(self) -> list[Any]:
        """Followed requests that are over."""
        return [f.raw for f in list(self._followed.values()) if f.request.over]

    def retracted(self) -> list[Any]:
        """Followed requests that the server has taken back to compute again, or given up since."""
        return [f.raw for f in list(self._followed.values()) if f.request.retracted]

    def give_up(self, batch: Sequence[Any], why: str) -> None:
        """End the samples of a batch whose rows are not understood."""
        for raw in batch:
            followed = self._followed.get(id(raw))
            if followed is not None and followed.sample is not None:
                self._seldom.warning(
                    "hstransport: sample %s is given up: %s", followed.sample.id, why
                )
                self._end(followed, ABORTED, why)
                followed.sample = None

    def end_all(self, why: str) -> None:
        """Capture ends: all open samples end as aborted, for good."""
        for followed in self._followed.values():
            try:
                self._end(followed, ABORTED, why[:1000])
            except Exception:  # whatever is broken in one must not cost the others
                logger.exception("hstransport: a sample cannot be ended")
            # Passes that were posted before may still come.
            followed.sample = None
            self._ended[id(followed.raw)] = followed
        self._followed.clear()

    def _follow(self, raw: Any, position: int | None, unfit: str) -> _Followed:
        """The request's entry, made on its first pass."""
        request = self._adapt(raw)
        tags = request.tags
        if request.probe or self.spent or not self._selection.wants(request.rid, tags):
            followed = _Followed(raw, request, None, 0, 0, 0)
            self._followed[id(raw)] = followed
            return followed
        if position is None:
            raise CaptureError(
                f"the first pass of request {request.rid} is a decode at unknown position"
            )
        prompt = request.prompt
        sample = self._start(request, tags, prompt)
        followed = _Followed(raw, request, sample, len(prompt), position, position)
        self._followed[id(raw)] = followed
        unfit = unfit or request.unfit()
        if unfit:
            self.give_up([raw], f"cannot be captured exactly: {unfit}")
        return followed

    def _start(
        self, request: Request, tags: dict[str, Any], prompt: Sequence[int] | TokenIds
    ) -> OpenSample:
        sample_id = tags.get(ID_TAG)
        labels, mask = _tagged(tags, len(prompt))
        rid = fit_id(request.rid)
        named = isinstance(sample_id, str) and sample_id
        name = fit_id(self._number(str(sample_id), request)) if named else rid
        sample = self._recorder.open(name)
        self._recorder.start(sample, rid, prompt, labels, mask, time.time())
        return sample

    def _number(self, name: str, request: Request) -> str:
        """Of ``n`` generations of one prompt each has an id of its own.

        SGLang first computes the prompt alone, then the generations: that is ``name``, these are
        ``name#1`` to ``name#n``.
        """
        if request.copies <= 1:
            return name
        number = self._copies.pop(name, 0)
        if not request.generates:
            return name
        if number + 1 < request.copies:
            self._copies[name] = number + 1
        return f"{name}#{number + 1}"

    def _end(self, f: _Followed, reason: str, detail: str) -> None:
        if f.sample is None:
            return
        output = f.request.output
        # The last generated token was sampled but never an input, so it has no state.
        tokens = f.prompt_tokens + (max(len(output) - 1, 0) if self._all_rows else 0)
        self._recorder.end(f.sample, reason, tokens, output, f.first_position, detail)


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
