"""Indexes made anew, for shards whose own cannot be read: out of their frames alone.

What the frames say is written into a new file beside the old one, and the new one gets the name
once it has been verified. The old bytes are not touched; a file of which something is lost is kept
under another name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hstransport.errors import CorruptShardError, ShardError

from . import directory
from . import format as fmt
from .carry import pack_carry
from .chain import footer_of
from .directory import PARTIAL, Entry
from .findings import VerifyReport
from .format import pread
from .recover import Unfinished, read_unfinished
from .shard import open_shard
from .verify_frames import verify_file

DAMAGED = ".damaged"
_NEW = ".repair"
_COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class Repair:
    """What became of a file."""

    file: str
    what: str
    repaired: bool = False
    lost: bool = False
    """Whether something that was stored cannot be read, before and after."""


def repair(path: str | os.PathLike[str]) -> Iterator[Repair]:
    """Give each shard of a directory, or one shard, an index that its frames agree with.

    Works on a shard when it is asked for. A ``.partial`` file without a writer is finished.
    DatasetBusyError if a consumer writes there; FileNotFoundError if there are no shards;
    FileExistsError if the name that a damaged file is to be kept under is taken; CorruptShardError
    or OSError if a new file does not verify or cannot be written: that shard is as it was.
    """
    path = Path(path)
    entries = directory.named(path)
    with closing(directory.Lock(path if path.is_dir() else path.parent, guest=True)):
        for entry in entries:
            yield _repair(entry)


def _repair(entry: Entry) -> Repair:
    path = entry.path
    report = VerifyReport()
    walked = verify_file(path, -1, entry.partial, report)
    if not entry.partial and report.ok:
        return Repair(path.name, "nothing is wrong")
    if walked is None:
        why = report.findings[0].what if report.findings else "it has no whole header"
        return Repair(path.name, f"cannot be repaired: {why}", lost=True)
    blocks = walked.damaged
    with path.open("rb", buffering=0) as file:
        fd, size = file.fileno(), os.fstat(file.fileno()).st_size
        done = read_unfinished(fd, path, check_all=False, check_last=False)
        whole = not done.why and _is_footer(fd, done.end, size, path)
        agrees = len(report.findings) == blocks
        if not entry.partial and _has_index(path) and (agrees or not whole):
            what = f"its index is sound, {len(report.findings)} findings of hstransport verify are"
            return Repair(path.name, f"{what} of blocks, which nothing brings back", lost=True)
        return _rebuild(fd, size, entry, done, blocks)


def _rebuild(fd: int, size: int, entry: Entry, done: Unfinished, blocks: int) -> Repair:
    """Write, verify and name the new file."""
    path, index = entry.path, done.index
    final = path.with_name(path.name.removesuffix(PARTIAL))
    kept = path.with_name(path.name + DAMAGED)
    cut = _is_cut(fd, size, entry, done)
    for taken in [kept] * cut + [final] * entry.partial:
        if taken.exists():
            raise FileExistsError(f"{taken} exists: move it out of the directory first")
    fresh = path.with_name(final.name + _NEW)
    tail = footer_of(index, pack_carry(index.carry), done.end)
    try:
        _write(fresh, fd, done.end, tail)
        blocks = _check(fresh, blocks)
        if cut:
            kept.hardlink_to(path)
        fresh.replace(final)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if entry.partial:
        path.unlink()
    directory.sync(path.parent)
    what = f"{final.name} has a new index: {_amounts(done)}"
    if cut:
        what += f"; {_cut_words(size, done)}; the old file is kept as {kept.name}"
    if blocks:
        what += f"; {blocks:,} blocks are damaged: hstransport verify names their samples"
    if not cut and not blocks:
        what += "; nothing is lost"
    return Repair(path.name, what, repaired=True, lost=cut or blocks > 0)


def _is_cut(fd: int, size: int, entry: Entry, done: Unfinished) -> bool:
    """Whether what follows the last whole window was more than a footer."""
    if entry.partial and not done.why:
        return False  # a window without its head was never stored: the ring has its records
    return not _is_footer(fd, done.end, size, entry.path)


def _is_footer(fd: int, at: int, size: int, path: Path) -> bool:
    """Whether a footer begins at ``at``, whole or not: it says so, or the trailer does."""
    if fmt.kind_at(fd, at, size, path) == fmt.FOOTER:
        return True
    try:
        return fmt.read_trailer(fd, size, path)[0] == at
    except ShardError:
        return False


def _has_index(path: Path) -> bool:
    try:
        open_shard(path)
    except ShardError:
        return False
    return True


def _write(fresh: Path, source: int, end: int, tail: Sequence[bytes | memoryview]) -> None:
    """The first ``end`` bytes of ``source``, then ``tail``, all on the disk."""
    with fresh.open("wb") as file:
        at = 0
        while at < end:
            part = pread(source, min(_COPY_BYTES, end - at), at, fresh)
            file.write(part)
            at += len(part)
        file.writelines(tail)
        file.flush()
        os.fsync(file.fileno())


def _check(fresh: Path, blocks: int) -> int:
    """How many blocks of the new file are damaged; ShardError if these are more than ``blocks``,
    or not all that is wrong."""
    report = VerifyReport()
    walked = verify_file(fresh, -1, False, report)
    damaged = walked.damaged if walked else -1
    if len(report.findings) != damaged or damaged > blocks:
        raise CorruptShardError(
            f"{fresh}: the repaired file does not verify ({report.findings[0].what}): nothing was "
            "changed; restore the file from a copy"
        )
    return damaged


def _amounts(done: Unfinished) -> str:
    return f"{done.index.windows:,} windows, {done.index.tables().samples:,} samples"


def _cut_words(size: int, done: Unfinished) -> str:
    under_way = sum(len(run.open) for run in done.index.carry.values())
    why = done.why.strip("()") or "the file was cut, and may have been longer"
    return (
        f"lost from byte {done.end:,} on, {size - done.end:,} bytes that are here ({why}), and "
        f"perhaps the ends of {under_way:,} samples that were under way there"
    )
