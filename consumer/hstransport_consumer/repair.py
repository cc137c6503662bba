"""A shard's index made anew out of its frames, for when footer or trailer cannot be read."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hstransport.errors import HsTransportError, ShardError

from . import directory, format
from .directory import PARTIAL, Entry, entry_of, list_shards
from .progress import pack_progress
from .recover import Unfinished, read_unfinished
from .shard import open_shard
from .writer import DatasetWriter, footer_of

DAMAGED = ".damaged"
"""The damaged file is kept under its name and this."""


@dataclass(frozen=True)
class Repair:
    """What one file needed, and got unless this was only a look."""

    file: str
    needed: bool
    what: str
    lost: bool = False
    """Whether something of it could not be saved."""


def repair(path: Path, *, dry_run: bool = False) -> list[Repair]:
    """Repair a directory of shards, or one shard; one outcome for each file.

    A finished shard whose index can be read is left as it is, whatever its frames are like: that is
    for verify to say. One whose index cannot be read is copied up to its last whole window, gets a
    new index, and takes the place of the damaged one, which is kept beside it (``.damaged``). An
    unfinished file is finished as the next consumer would do it. ``dry_run`` changes nothing.

    Raises DatasetBusyError while a consumer writes there, FileNotFoundError, PermissionError.
    """
    if path.is_file():
        entry = entry_of(path)
        if entry is None:
            raise ShardError(f"{path.name} is no shard's name (shard-NNNNNN.zst)")
        folder, entries = path.parent, [entry]
    elif path.is_dir():
        folder, entries = path, list_shards(path)
    else:
        raise FileNotFoundError(f"{path} does not exist: name a directory of shards, or a shard")
    if not entries:
        raise FileNotFoundError(f"{path} holds no shards (shard-NNNNNN.zst)")
    lock = directory.Lock(folder)
    try:
        done = [_repair_finished(e.path, dry_run) for e in entries if not e.partial]
    finally:
        lock.close()
    return done + [_finish(folder, e, dry_run) for e in entries if e.partial]


def _repair_finished(path: Path, dry_run: bool) -> Repair:
    try:
        open_shard(path)
        return Repair(path.name, False, "its index is whole")
    except HsTransportError as e:
        why = str(e)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = read_unfinished(fd, path, check_all=True, check_last=True)
        cut = _after(fd, found.end)
    except HsTransportError as e:
        return Repair(path.name, True, f"cannot be repaired: {e}", lost=True)
    finally:
        os.close(fd)
    if not dry_run:
        _replace(path, found)
    tables = found.index.tables()
    going_on = sum(len(run.open) for run in found.index.progress.values())
    verb = "would be" if dry_run else "was"
    words = (
        f"{why}; its index {verb} made anew from {tables.windows:,} windows: {tables.samples:,} "
        f"samples end in it, {going_on:,} go on in the next shard"
    )
    if cut:
        words += f", or ended in the {cut:,} bytes behind byte {found.end:,} that are lost"
        words += f" {found.why}" if found.why else ""
    return Repair(path.name, True, words, lost=cut > 0)


def _after(fd: int, end: int) -> int:
    """Bytes behind the last whole window; 0 when they are the footer, damaged or not."""
    start = os.pread(fd, format.HEAD_BYTES, end)
    rest = os.fstat(fd).st_size - end
    return 0 if not rest or start[8:12] == format.FOOTER else rest


def _replace(path: Path, found: Unfinished) -> None:
    """The new file is whole and on the disk before it takes the name."""
    fresh, kept = path.with_name(f"{path.name}.repair"), path.with_name(path.name + DAMAGED)
    try:
        with path.open("rb") as old, fresh.open("wb") as new:
            _copy(old.fileno(), new.fileno(), found.end)
            for part in footer_of(found.index, pack_progress(found.index.progress), found.end):
                new.write(part)
            new.flush()
            os.fsync(new.fileno())
        shutil.copymode(path, fresh)
        open_shard(fresh)
        os.link(path, kept)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    directory.sync(path.parent)


def _copy(source: int, target: int, size: int) -> None:
    done = 0
    while done < size:
        done += os.sendfile(target, source, done, min(size - done, 1 << 30))


def _finish(folder: Path, entry: Entry, dry_run: bool) -> Repair:
    """Of an unfinished shard, what is whole."""
    if dry_run:
        return Repair(entry.path.name, True, "is unfinished: what is whole in it would be finished")
    size = entry.path.stat().st_size
    with DatasetWriter(folder):
        pass  # to open it recovers, to close it finishes
    path = entry.path.with_name(entry.path.name[: -len(PARTIAL)])
    if not path.exists():
        return Repair(entry.path.name, True, f"held nothing whole ({size:,} bytes): removed")
    samples = open_shard(path).tables.samples
    return Repair(path.name, True, f"was unfinished and is finished: {samples:,} samples")
