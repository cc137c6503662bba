"""Windows of records in, shards out.

A window is written whole or not at all, and what it did is taken into the index only once the
kernel has it: after an error the caller may pass the same window again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from hstransport.errors import ShardError
from hstransport.protocol import End, SessionInfo, pack_info

from . import codec, directory
from . import format as fmt
from .appender import Appender
from .bias import ENOUGH_ROWS, BiasEstimate
from .encode import Bias, Packer, write_window
from .format import DatasetMeta, Header, pack_frame, pack_map
from .index import RunRecord, RunState, ShardIndex, WindowRecord
from .plan import Entry, Touched, WindowPlan, plan_window
from .progress import pack_progress
from .recover import look, reopen
from .results import Ended, WindowResult
from .states import State

UNFINISHED_REASON = "unfinished"
FULL_INDEX_BYTES = fmt.MAX_INDEX_BYTES // 4
"""A shard is finished when its index has so many bytes, however small its samples are."""


def new_uid() -> bytes:
    """A shard's name for life."""
    return os.urandom(16)


class DatasetWriter:
    """The one writer of a directory of shards. Not thread-safe; encodes on ``threads`` threads.

    ``durability``: when :meth:`write_window` returns, the bytes outlive the ``process`` (they are
    the kernel's) or the ``machine`` (they are on the disk). Samples left open when it is closed
    go on when their run does; :meth:`close_run` ends them.

    Raises DatasetBusyError if another process writes here, DatasetMismatchError, ShardError, and
    PermissionError or NotADirectoryError for a directory that cannot be written.
    """

    def __init__(
        self,
        directory_path: str | os.PathLike[str],
        *,
        shard_bytes: int = 4 << 30,
        threads: int = 1,
        durability: Literal["process", "machine"] = "process",
    ) -> None:
        if durability not in ("process", "machine"):
            raise ValueError(f"durability is {durability!r}: it must be 'process' or 'machine'")
        if threads < 1 or shard_bytes < 1:
            raise ValueError(f"threads={threads}, shard_bytes={shard_bytes}: both must be positive")
        self.directory = Path(directory_path)
        self._shard_bytes = shard_bytes
        self._durable = durability == "machine"
        directory.create(self.directory)
        self._lock = directory.Lock(self.directory)
        try:
            found = look(self.directory, trust_kernel=self._lock.same_boot)
            self._file = reopen(found, durable=self._durable)
        except BaseException:
            self._lock.close()
            raise
        self._index = found.unfinished.index if found.unfinished else None
        self._next_number = found.next_number
        self._meta = found.meta
        self._progress = found.progress
        self._estimate = found.estimate
        self._packer = Packer(threads)
        self._out_of_step = False
        """Interrupted after the file had a window and before the index had all of it."""
        self.samples = self.whole = self.tokens = self.raw_bytes = self.stored_bytes = 0
        """Since this writer was opened: samples ended, those whole, tokens and bytes stored."""

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_run(self, info: SessionInfo) -> None:
        """Announce a run; any number of times. DatasetMismatchError if it does not belong here."""
        meta = DatasetMeta.of(info)
        meta.check_limits()
        if self._meta is None:
            self._meta = meta
        self._meta.check_same(meta, str(self.directory))
        self._progress.setdefault((info.run, info.rank), RunState(info))

    def next_seq(self, run: str, rank: int) -> int:
        """The first record of the run that is not stored yet."""
        state = self._progress.get((run, rank))
        return state.next_seq if state else 0

    def open_runs(self) -> list[SessionInfo]:
        """The runs that have samples without an end."""
        return [run.info for run in self._progress.values() if run.open]

    def write_window(
        self,
        run: str,
        rank: int,
        first_seq: int,
        last_seq: int,
        events: Sequence[Entry],
    ) -> WindowResult:
        """Store the records ``first_seq`` to ``last_seq`` of a run, in ring order.

        Of Rows the array is uint16 ``[planes, rows, hidden]`` with contiguous rows; it is read in
        place and not kept. It is None for rows that never arrived. Records that could not be read
        may be left out, or be ``(None, None)``; a window that repeats some stored records and has
        new ones too must not leave any out, for they are told apart by their number.

        OSError: nothing was written; the same window may be passed again.
        """
        state = self._run(run, rank)
        repeated = min(max(state.next_seq - first_seq, 0), last_seq + 1 - first_seq)
        if repeated == last_seq + 1 - first_seq:
            return WindowResult(repeated=repeated)
        if repeated:
            if len(events) != last_seq + 1 - first_seq:
                raise ValueError(
                    f"records {first_seq} to {last_seq} overlap with stored ones (next is "
                    f"{state.next_seq}): {len(events)} events given, one for each is needed"
                )
            events = events[repeated:]
        assert self._meta is not None
        known = {sid: sample.coverage for sid, sample in state.open.items()}
        plan = plan_window(known, events, self._meta.planes, self._meta.hidden)
        return self._write(state, first_seq + repeated, last_seq + 1, plan, repeated)

    def close_run(self, run: str, rank: int, reason: str) -> list[Ended]:
        """End as ``unfinished`` what is open of a run that will not go on; ``reason`` is free text.

        Returns them. Their ``tokens`` is what their rows reach to.
        """
        state = self._progress.get((run, rank))
        if state is None or not state.open:
            return []
        plan = WindowPlan()
        for sid, sample in state.open.items():
            reach = sample.coverage.ranges[-1][1] if sample.coverage.ranges else 0
            end = End(sid, UNFINISHED_REASON, reach, np.empty(0, np.int32), detail=reason[:1024])
            plan.touched[sid] = Touched(sid, sample.coverage, end=end, state=State.UNFINISHED)
        return self._write(state, state.next_seq, state.next_seq, plan, 0).ended

    def flush(self) -> None:
        """Make all that was written outlive the machine."""
        if self._file:
            self._file.sync()

    def close(self) -> None:
        """Finish the shard and give the directory free. An empty shard leaves no file.

        After an interrupt in the midst of a window the shard is left unfinished, for the next
        writer to recover.
        """
        try:
            if self._file and not self._out_of_step:
                self._finish()
        finally:
            self._packer.close()
            if self._file:
                self._file.close()
                self._file = None
            self._lock.close()

    def _run(self, run: str, rank: int) -> RunState:
        state = self._progress.get((run, rank))
        if state is None:
            raise ValueError(f"run {run} rank {rank} was not announced: call begin_run first")
        return state

    def _write(
        self, run: RunState, first_seq: int, next_seq: int, plan: WindowPlan, repeated: int
    ) -> WindowResult:
        file, index = self._shard()
        before = file.size
        estimate = self._observe(plan, index)
        bias = self._bias(plan, estimate, index)
        records: list[RunRecord | WindowRecord] = []
        number = index.run_index((run.info.run, run.info.rank))
        try:
            with file.transaction() as out:
                if number is None:
                    number = len(index.runs)
                    out.put([pack_map(fmt.RUN, {"info": pack_info(run.info)})])
                    records.append(RunRecord(before, out.end, run.info))
                records.append(
                    write_window(out, number, first_seq, next_seq, plan, bias, self._packer)
                )
            ended = list(_ended(plan, run))
            for record in records:
                index.apply(record)
        except BaseException:
            self._out_of_step = file.size != before
            raise
        self._estimate = estimate
        result = WindowResult(
            ended,
            plan.rows,
            plan.rows * run.info.row_bytes,
            file.size - before,
            repeated,
            plan.duplicate_rows,
            plan.orphan_rows,
            plan.anomalies,
        )
        self._count(result)
        return result

    def _count(self, result: WindowResult) -> None:
        self.samples += len(result.ended)
        self.whole += sum(e.state == State.WHOLE for e in result.ended)
        self.tokens += result.rows
        self.raw_bytes += result.raw_bytes
        self.stored_bytes += result.stored_bytes

    def _observe(self, plan: WindowPlan, index: ShardIndex) -> BiasEstimate:
        """The estimate with this window's rows in it; its table is the one to use."""
        estimate = self._estimate
        if not plan.chunks or estimate.settled:
            return estimate
        assert self._meta is not None
        pieces, rows = [], 0
        for chunk in plan.chunks:
            for _, piece in chunk.pieces:
                if rows < ENOUGH_ROWS:
                    pieces.append(piece._replace(rows=min(piece.rows, ENOUGH_ROWS - rows)))
                    rows += pieces[-1].rows
        medians = codec.median_exponents(pieces, self._meta.planes, self._meta.hidden)
        return estimate.observe(medians, rows, new_shard=not index.bias)

    def _bias(self, plan: WindowPlan, estimate: BiasEstimate, index: ShardIndex) -> Bias | None:
        if not plan.chunks or estimate.table is None:
            return None
        count = len(index.bias)
        new = not count or estimate.table is not self._estimate.table
        return Bias(count if new else count - 1, estimate.table, estimate.rows, new)

    def _shard(self) -> tuple[Appender, ShardIndex]:
        """The shard to write to; a full one is finished first."""
        if self._out_of_step:
            raise ShardError(
                f"{self.directory}: this writer was interrupted in the midst of a window; close "
                "it and open another, which recovers the shard"
            )
        if self._file and self._index:
            if self._file.size < self._shard_bytes and self._index.bytes < FULL_INDEX_BYTES:
                return self._file, self._index
            self._finish()
        assert self._meta is not None
        header = Header(new_uid(), self._next_number, self._meta)
        head = [
            fmt.pack_header(header),
            pack_frame(fmt.CARRY, pack_progress(self._progress)),
        ]
        path = directory.partial_path(self.directory, self._next_number)
        self._file = Appender.create(path, head, durable=self._durable)
        self._index = ShardIndex(header, self._progress)
        self._next_number += 1
        return self._file, self._index

    def _finish(self) -> None:
        file, index = self._file, self._index
        assert file and index
        if not index.windows:
            file.discard()
            self._next_number -= 1
        else:
            body = index.tables().pack(pack_progress(self._progress))
            footer = pack_frame(fmt.FOOTER, body)
            trailer = fmt.pack_trailer(file.size, len(footer), index.header.uid)
            name = directory.shard_path(self.directory, index.header.number)
            file.finish([footer, trailer], name)
        self._file = self._index = None


def _ended(plan: WindowPlan, run: RunState) -> Iterator[Ended]:
    for t in plan.touched.values():
        if t.end is not None and t.state is not None:
            sample_id = t.start.id if t.start else run.open[t.sid].id
            yield Ended(sample_id, t.state.value, t.end.tokens, t.end.reason)
