"""Windows of records in, shards out.

A window is written whole or not at all, and what it did is taken into the index only once the
kernel has it: after an error the caller may pass the same window again. Windows may be begun while
earlier ones are still being packed; they are written one after another, in the order in which they
were begun.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hstransport.protocol import End, SessionInfo, pack_info

from . import codec, directory
from . import format as fmt
from .bias import ENOUGH_ROWS, BiasEstimate
from .chain import ShardChain
from .encode import Bias, ChunkPacker, write_window
from .format import DatasetMeta, pack_map
from .index import RunRecord, RunState, ShardIndex, WindowRecord
from .plan import Entry, Known, Touched, WindowPlan, plan_window
from .prefixes import Prefixes
from .recover import look
from .results import Ended, WindowResult
from .states import Coverage, State

UNFINISHED_REASON = "unfinished"


@dataclass(frozen=True)
class _Begun:
    """A window that is being packed and is not written yet."""

    run: RunState
    first_seq: int
    next_seq: int
    plan: WindowPlan
    estimate: BiasEstimate
    """The estimate with this window's rows in it; its table is what the chunks are packed with."""
    repeated: int
    check: Callable[[], None]


class DatasetWriter:
    """The one writer of a directory of shards. Not thread-safe; encodes on ``threads`` threads.

    :meth:`write_window` stores a window and returns. To keep the threads busy, call
    :meth:`begin_window` while :attr:`hungry`, and :meth:`finish_window` for each window begun: it
    writes the oldest while the next are packed. Packed and unwritten frames take at most
    ``2 * threads + 3`` times about ``planes`` * 2 MiB.

    ``durability``: when :meth:`write_window` returns, the bytes outlive the ``process`` (they are
    the kernel's) or the ``machine`` (they are on the disk). ``min_free``: bytes of the disk that
    windows leave free; where there are fewer, it is as full. Samples left open when it is closed
    go on when their run does; :meth:`close_run` ends them. ``on_shard`` is called with the path of
    each shard that has been finished, which may be taken away from then on.

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
        min_free: int = 0,
        on_shard: Callable[[Path], None] | None = None,
    ) -> None:
        if durability not in ("process", "machine"):
            raise ValueError(f"durability is {durability!r}: it must be 'process' or 'machine'")
        if threads < 1 or shard_bytes < 1:
            raise ValueError(f"threads={threads}, shard_bytes={shard_bytes}: both must be positive")
        self.directory = Path(directory_path)
        self._min_free = min_free
        directory.create(self.directory)
        self._lock = directory.Lock(self.directory)
        try:
            found = look(self.directory, trust_kernel=self._lock.same_boot)
            self._shards = ShardChain(
                self.directory,
                found,
                shard_bytes=shard_bytes,
                durable=durability == "machine",
                on_shard=on_shard,
            )
        except BaseException:
            self._lock.close()
            raise
        self._meta = found.meta
        self._carry = found.carry
        self._estimate = found.estimate
        self._packer = ChunkPacker(threads)
        self._prefixes = Prefixes(self.directory, found.carry)
        self._begun: deque[_Begun] = deque()
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
        self._carry.setdefault((info.run, info.rank), RunState(info))

    def next_seq(self, run: str, rank: int) -> int:
        """The first record of the run that is not stored yet."""
        state = self._carry.get((run, rank))
        return state.next_seq if state else 0

    def open_runs(self) -> list[SessionInfo]:
        """The runs that have samples without an end."""
        return [run.info for run in self._carry.values() if run.open]

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
        self._check_idle()
        self.begin_window(run, rank, first_seq, last_seq, events)
        return self.finish_window()

    def begin_window(
        self,
        run: str,
        rank: int,
        first_seq: int,
        last_seq: int,
        events: Sequence[Entry],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to pack a window; arguments as :meth:`write_window`.

        The arrays are read until :meth:`finish_window` has returned for it, or has raised. It calls
        ``check`` once all are read and before the window counts; what that raises, it raises.
        """
        state = self._run(run, rank)
        next_seq, known = self._ahead(state)
        repeated = min(max(next_seq - first_seq, 0), last_seq + 1 - first_seq)
        if repeated == last_seq + 1 - first_seq:
            events = []
        elif repeated:
            if len(events) != last_seq + 1 - first_seq:
                raise ValueError(
                    f"records {first_seq} to {last_seq} overlap with stored ones (next is "
                    f"{next_seq}): {len(events)} events given, one for each is needed"
                )
            events = events[repeated:]
        assert self._meta is not None
        plan = plan_window(known, events, self._meta.planes, self._meta.hidden)
        self._begin(state, first_seq + repeated, last_seq + 1, plan, repeated, check)

    def finish_window(self) -> WindowResult:
        """Write the oldest window begun.

        OSError, or any other error: none of the windows begun is written, and all are forgotten.
        They may be begun again.
        """
        try:
            result = self._write(self._begun[0])
        except BaseException:
            self._prefixes.take_back()
            self._begun.clear()
            self._packer.forget()
            raise
        self._begun.popleft()
        return result

    @property
    def begun(self) -> int:
        """Windows that were begun and are not written."""
        return len(self._begun)

    @property
    def hungry(self) -> bool:
        """Whether another window should be begun before the oldest is written.

        Chunks of later windows are to take every buffer that is free while the oldest is written.
        """
        later = itertools.islice(self._begun, 1, None)
        return sum(len(w.plan.chunks) for w in later) < self._packer.depth

    def close_run(self, run: str, rank: int, reason: str) -> list[Ended]:
        """End as ``unfinished`` what is open of a run that will not go on; ``reason`` is free text.

        Returns them. Their ``tokens`` is what their rows reach to.
        """
        self._check_idle()
        state = self._carry.get((run, rank))
        if state is None or not state.open:
            self._prefixes.end_run((run, rank))
            return []
        plan = WindowPlan()
        for sid, sample in state.open.items():
            reach = sample.coverage.ranges[-1][1] if sample.coverage.ranges else 0
            end = End(sid, UNFINISHED_REASON, reach, np.empty(0, np.int32), detail=reason[:1024])
            plan.touched[sid] = Touched(sid, sample.coverage, end=end, state=State.UNFINISHED)
        self._begin(state, state.next_seq, state.next_seq, plan, 0, lambda: None)
        ended = self.finish_window().ended
        self._prefixes.end_run((run, rank))
        return ended

    def flush(self) -> None:
        """Make all that was written outlive the machine."""
        self._shards.sync()

    def finish_shard(self) -> None:
        """Finish the shard that is being written; the next window begins another one."""
        self._shards.finish()

    def close(self) -> None:
        """Finish the shard and give the directory free. An empty shard leaves no file.

        Windows begun and not finished are not written. After an interrupt in the midst of a
        window the shard is left unfinished, for the next writer to recover.
        """
        try:
            self.finish_shard()
        finally:
            self._packer.close()
            self._shards.close()  # waits for the sync that is under way
            if self._shards.sync_error:
                self._lock.doubt()
            self._lock.close()

    def _run(self, run: str, rank: int) -> RunState:
        state = self._carry.get((run, rank))
        if state is None:
            raise ValueError(f"run {run} rank {rank} was not announced: call begin_run first")
        return state

    def _check_idle(self) -> None:
        if self._begun:
            raise ValueError(f"{len(self._begun)} windows are begun: finish them first")

    def _ahead(self, run: RunState) -> tuple[int, Known]:
        """The run's next record and its open samples, as they will be after the windows begun."""
        next_seq = run.next_seq
        touched: dict[int, Touched] = {}
        for window in self._begun:
            if window.run is run:
                next_seq = max(next_seq, window.next_seq)
                touched |= window.plan.touched

        def known(sid: int) -> Coverage | None:
            t = touched.get(sid)
            if t is not None:
                return t.coverage if t.end is None else None
            sample = run.open.get(sid)
            return sample.coverage if sample else None

        return next_seq, known

    def _begin(
        self,
        run: RunState,
        first_seq: int,
        next_seq: int,
        plan: WindowPlan,
        repeated: int,
        check: Callable[[], None],
    ) -> None:
        estimate = self._observe(plan)
        if plan.chunks:
            assert estimate.table is not None
            self._packer.begin(plan.chunks, estimate.table)
        self._begun.append(_Begun(run, first_seq, next_seq, plan, estimate, repeated, check))

    def _write(self, window: _Begun) -> WindowResult:
        run, plan = window.run, window.plan
        if window.first_seq == window.next_seq and not plan.touched:
            return WindowResult(repeated=window.repeated)
        self._check_room()
        assert self._meta is not None
        file, index = self._shards.current(self._meta)
        self._prefixes.begin_shard(index.header.uid, index.header.number)
        before = file.size
        bias = self._bias(window, index)
        self._prefixes.resolve(run, plan, index.chunks)
        records: list[RunRecord | WindowRecord] = []
        number = index.run_index((run.info.run, run.info.rank))
        try:
            with file.transaction() as out:
                if number is None:
                    number = len(index.runs)
                    out.put([pack_map(fmt.RUN, {"info": pack_info(run.info)})])
                    records.append(RunRecord(before, out.end, run.info))
                seqs = (window.first_seq, window.next_seq)
                window_record = write_window(
                    out, number, *seqs, plan, bias, self._packer, window.check
                )
                records.append(window_record)
            ended = list(_ended(plan, run))
            for record in records:
                index.apply(record)
        except BaseException:
            self._shards.out_of_step = file.size != before
            raise
        self._prefixes.written()
        self._estimate = window.estimate
        result = WindowResult(
            ended,
            plan.rows,
            plan.rows * run.info.row_bytes,
            file.size - before,
            window.repeated,
            plan.duplicate_rows,
            plan.orphan_rows,
            plan.anomalies,
            sum(p.rows for t in plan.touched.values() for p in t.refs),
        )
        self._count(result)
        return result

    def _check_room(self) -> None:
        free = shutil.disk_usage(self.directory).free if self._min_free else 0
        if free < self._min_free:
            raise OSError(
                errno.ENOSPC,
                f"{free >> 20:,} MiB are free and {self._min_free >> 20:,} are to stay so",
                str(self.directory),
            )

    def _count(self, result: WindowResult) -> None:
        self.samples += len(result.ended)
        self.whole += sum(e.state == State.WHOLE for e in result.ended)
        self.tokens += result.rows
        self.raw_bytes += result.raw_bytes
        self.stored_bytes += result.stored_bytes

    def _observe(self, plan: WindowPlan) -> BiasEstimate:
        """The estimate with this window's rows in it; its table is the one to use."""
        estimate = self._begun[-1].estimate if self._begun else self._estimate
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
        # A table has to be written anyway; windows begun behind others are not worth a guess.
        index = self._shards.index
        new_shard = not self._begun and (
            index is None or self._shards.begins_next or not index.bias
        )
        return estimate.observe(medians, rows, new_shard=new_shard)

    def _bias(self, window: _Begun, index: ShardIndex) -> Bias | None:
        estimate = window.estimate
        if not window.plan.chunks or estimate.table is None:
            return None
        count = len(index.bias)
        new = not count or estimate.table is not self._estimate.table
        return Bias(count if new else count - 1, estimate.table, estimate.rows, new)


def _ended(plan: WindowPlan, run: RunState) -> Iterator[Ended]:
    for t in plan.touched.values():
        if t.end is not None and t.state is not None:
            sample_id = t.start.id if t.start else run.open[t.sid].id
            yield Ended(sample_id, t.state.value, t.end.tokens, t.end.reason)
