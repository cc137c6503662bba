"""Where rings lie and how the two sides find each other.

``ROOT/SESSION/RUN-RANK.ring`` is a ring, ``ROOT/SESSION/RUN-RANK.sock`` its PUB socket. ROOT and
SESSION are directories of mode 0700 that belong to the user; anything else is refused.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from .errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RING = re.compile(r"([0-9a-f]{8,32})-(\d{1,4})\.ring")
_SOCKET_PATH_LIMIT = 107  # sizeof(sockaddr_un.sun_path) - 1 on Linux


class RingPath(NamedTuple):
    """A ring found on disk."""

    session: str
    run: str
    rank: int
    path: Path

    @property
    def socket(self) -> Path:
        """The ring's PUB socket."""
        return self.path.with_suffix(".sock")

    @property
    def endpoint(self) -> str:
        """Its ZeroMQ endpoint."""
        return f"ipc://{self.socket}"


def default_root() -> Path:
    """The user's own directory in shared memory."""
    return Path(f"/dev/shm/hstransport-{os.geteuid()}")


def check_session_name(name: str) -> str:
    """Return ``name``, or raise ConfigError saying what is allowed."""
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"session name {name!r}: allowed are 1 to 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return name


def session_directory(root: Path, session: str) -> Path:
    """Create (mode 0700) or check the session's directory. Raises PermissionError."""
    directory = root / check_session_name(session)
    for d in (root, directory):
        d.mkdir(mode=0o700, parents=d is root, exist_ok=True)
        check_private(d)
    return directory


def ring_path(root: Path, session: str, run: str, rank: int) -> RingPath:
    """The place of a new ring. Raises ConfigError when its socket's path would be too long."""
    path = session_directory(root, session) / f"{run}-{rank}.ring"
    socket = path.with_suffix(".sock")
    if len(os.fsencode(socket)) > _SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"the socket path {socket} is longer than the {_SOCKET_PATH_LIMIT} bytes that the "
            "system allows: choose a shorter HSTRANSPORT_DIR or session name"
        )
    return RingPath(session, run, rank, path)


def find_sessions(root: Path) -> list[str]:
    """Names of the sessions under ``root`` that have a ring."""
    if not root.is_dir():
        return []
    check_private(root)
    return sorted(
        d.name
        for d in root.iterdir()
        if _NAME.fullmatch(d.name) and d.is_dir() and find_rings(root, d.name)
    )


def find_rings(root: Path, session: str) -> list[RingPath]:
    """The session's rings, oldest first. Raises PermissionError for a directory not ours."""
    directory = root / session
    if not directory.is_dir():
        return []
    check_private(directory)
    found: list[tuple[float, RingPath]] = []
    for path in directory.iterdir():
        match = _RING.fullmatch(path.name)
        try:
            if match and path.is_file():
                ring = RingPath(session, match[1], int(match[2]), path)
                found.append((path.stat().st_ctime, ring))
        except FileNotFoundError:
            continue  # unlinked by its owner between the two looks
    return [ring for _, ring in sorted(found)]


def check_private(directory: Path) -> None:
    """Refuse a directory that another user owns or can enter."""
    check_owner(directory)
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o077:
        raise PermissionError(
            f"{directory} has mode {mode:04o}, others can enter it: chmod 0700 {directory}"
        )


def check_owner(path: Path) -> None:
    """Refuse what another user owns. Raises PermissionError, FileNotFoundError."""
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user id {owner}, not to {os.geteuid()}: hidden states are "
            "exchanged only through directories of one's own; set HSTRANSPORT_DIR to another"
        )
