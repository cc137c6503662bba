"""The server's session: its rings, as they look from outside."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, ProtocolError, RingError
from ..protocol import SessionInfo, unpack_info
from ..ring import RingInfo, inspect_ring
from ..session import RingPath, find_rings, find_sessions


class Ring(NamedTuple):
    """A ring file, and what it says of the run that made it."""

    place: RingPath
    look: RingInfo
    info: SessionInfo


class Place(NamedTuple):
    """A session with a live server."""

    root: Path
    session: str
    live: list[Ring]
    """One for each data-parallel rank."""

    @property
    def info(self) -> SessionInfo:
        """What its ranks have in common."""
        return self.live[0].info

    @property
    def consumer_attached(self) -> bool:
        return any(ring.look.consumer_attached for ring in self.live)


def find_place(root: Path, session: str | None, model: str) -> Place:
    """The session of the server of ``model``; ConfigError says what to do when there is not one."""
    names = find_sessions(root) if session is None else [session]
    places = [place for name in names if (place := _look(root, name)).live]
    if not places:
        which = f"session {session!r}" if session else "any session"
        raise ConfigError(
            f"no live server has a ring of {which} under {root}: start it with HSTRANSPORT=1, or "
            "name its HSTRANSPORT_DIR with --dir and its HSTRANSPORT_SESSION with --session; if it "
            "had one, capture has ended (its log says why: look for hstransport); doctor runs on "
            "the server's host, as its user"
        )
    if len(places) > 1:
        places = [place for place in places if place.info.model == model] or places
    if len(places) > 1:
        found = ", ".join(place.session for place in places)
        raise ConfigError(f"{root} has several live sessions ({found}): name one with --session")
    return places[0]


def _look(root: Path, session: str) -> Place:
    live = []
    for path in find_rings(root, session):
        try:
            look = inspect_ring(path.path)
            if look.producer_alive:
                live.append(Ring(path, look, unpack_info(look.info)))
        except (FileNotFoundError, RingError):
            continue  # it ended meanwhile, or is none that a consumer could use
        except ProtocolError as e:
            raise ConfigError(f"{path.path}: {e}") from None
    return Place(root, session, live)
