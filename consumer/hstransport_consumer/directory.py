"""A directory of shards: names, the lock, making renames last, and the writer's own notes.

Two hidden files make it safe to take finished shards away. ``.next`` is what the next shard begins
with, header and carry: the number that is due, and all that a writer must know of those before.
``.handed-over`` names the shards that were handed over.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hstransport.errors import DatasetBusyError, NotAShardError

PARTIAL = ".partial"
NEXT = ".next"
HANDED_OVER = ".handed-over"
_UNKNOWN = "?"  # a boot
_NAME = re.compile(r"shard-(\d{6,})\.zst(\.partial)?")


class Entry(NamedTuple):
    """A shard's file, by its name."""

    number: int
    path: Path
    partial: bool


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:06d}.zst"


def partial_path(directory: Path, number: int) -> Path:
    path = shard_path(directory, number)
    return path.with_name(path.name + PARTIAL)


def entry_of(path: Path) -> Entry | None:
    """What a file's name says, or None if it is no shard's name."""
    match = _NAME.fullmatch(path.name)
    return Entry(int(match[1]), path, match[2] is not None) if match else None


def list_shards(directory: Path) -> list[Entry]:
    """All shards in order of their numbers, unfinished ones too."""
    return sorted(e for e in map(entry_of, directory.iterdir()) if e)


def named(path: Path) -> list[Entry]:
    """The shards that a person means with ``path``: those of a directory, or a file.

    FileNotFoundError if there are none.
    """
    if path.is_file():
        # A name that is no shard's says nothing of the number.
        return [entry_of(path) or Entry(-1, path, path.name.endswith(PARTIAL))]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist: name a directory of shards, or a shard")
    entries = list_shards(path)
    if not entries:
        raise FileNotFoundError(
            f"{path} holds no shards (shard-NNNNNN.zst): name the --out of hstransport-consumer"
        )
    return entries


def create(directory: Path) -> None:
    """Make the directory; Python's own errors, with a word on what to do."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(
            f"{directory} is a file: shards need a directory, name another one"
        ) from None
    except PermissionError as e:
        raise PermissionError(
            f"cannot create {directory} ({e.strerror}): choose a directory that you may write to"
        ) from None


def open_file(path: Path, flags: int = os.O_RDONLY, *, follow: bool = True) -> int:
    """A descriptor of a regular file; NotAShardError for anything else, such as a pipe that would
    never say anything. ``follow``: a symbolic link to one will do; not for what is written, which
    must not land outside of the directory."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags, 0o644)
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _not_regular(path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_regular(path)
    return fd


def _not_regular(path: Path) -> NotAShardError:
    return NotAShardError(
        f"{path} is no regular file of this directory: move it out, or put the file itself here"
    )


@contextmanager
def opened(path: Path, *, follow: bool = True) -> Iterator[int]:
    """:func:`open_file` for a few reads."""
    fd = open_file(path, follow=follow)
    try:
        yield fd
    finally:
        os.close(fd)


def sync(directory: Path) -> None:
    """Make creations, renames and removals in the directory last."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def keep_next(directory: Path, head: Iterable[bytes | memoryview]) -> None:
    """Write ``.next`` anew, whole or not at all."""
    path = directory / NEXT
    fresh = path.with_name(f"{NEXT}.new")
    fresh.unlink(missing_ok=True)  # another's link would have something else overwritten
    with fresh.open("xb") as file:
        file.writelines(head)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def note_handed_over(directory: Path, name: str, uid: bytes) -> None:
    """Add a line to ``.handed-over``, on the disk when this returns."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    fd = open_file(directory / HANDED_OVER, flags, follow=False)
    try:
        # Begun with a line's end: one that a crash has torn spoils no other.
        os.write(fd, f"\n{name} {uid.hex()}\n".encode())
        os.fdatasync(fd)
    finally:
        os.close(fd)


def handed_over(directory: Path) -> set[bytes]:
    """The uids of the shards that were handed over."""
    return {uid for _, uid in _handed_over(directory)}


def handed_numbers(directory: Path) -> set[int]:
    """Their numbers."""
    entries = (entry_of(Path(name)) for name, _ in _handed_over(directory))
    return {entry.number for entry in entries if entry}


def _handed_over(directory: Path) -> list[tuple[str, bytes]]:
    """Name and uid of each."""
    try:
        with open(open_file(directory / HANDED_OVER), errors="replace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    found = (re.fullmatch(r"(\S+) ([0-9a-f]{32})", line) for line in lines)
    return [(match[1], bytes.fromhex(match[2])) for match in found if match]


class HandedOver:
    """The shards that were handed over, by name and by uid. A consumer may hand over more at any
    time, so what is not known yet is looked for again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: set[str | bytes] = set()

    def __contains__(self, name_or_uid: object) -> bool:
        if name_or_uid not in self._known:
            self._known = {key for pair in _handed_over(self._directory) for key in pair}
        return name_or_uid in self._known


def boot_id() -> str:
    """What changes when the machine restarts; "" where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Lock:
    """The right to write into a directory, held until closed or until the process dies.

    ``guest``: for one who mends what others have written; what is known of the last writer stays.
    """

    def __init__(self, directory: Path, *, guest: bool = False) -> None:
        path = directory / ".lock"
        try:
            self._fd = open_file(path, os.O_RDWR | os.O_CREAT, follow=False)
        except PermissionError as e:
            raise PermissionError(
                f"cannot write in {directory} ({e.strerror}): choose a directory that you may "
                "write to"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 100, 0).decode(errors="replace").split()
            os.close(self._fd)
            raise DatasetBusyError(
                f"process {holder[0] if holder else 'unknown'} is writing into {directory}: "
                "wait for it, stop it, or name another directory"
            ) from None
        said = os.pread(self._fd, 100, 0).decode(errors="replace").split()
        boot = said[1] if len(said) == 2 else _UNKNOWN
        self.same_boot = boot == boot_id()
        """Whether the last writer ran since the machine started: what it wrote is then there,
        however it died."""
        self._say(boot if guest else boot_id())

    def doubt(self) -> None:
        """Let the next writer look at all that was written: it may not have reached the disk."""
        self._say(_UNKNOWN)

    def _say(self, boot: str) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()} {boot}\n".encode(), 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
