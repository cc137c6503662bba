"""What a user sets on the server's side: read from the environment once, checked, frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError
from .session import check_session_name, default_root

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}

MIN_RING_BYTES = 1 << 20


@dataclass(frozen=True)
class LayerChoice:
    """Which states are kept, before the model is known."""

    ids: tuple[int, ...]
    """Canonical ids named one by one."""
    eagle3: bool
    """Also EAGLE-3's three: 2, n//2 and n-3."""
    final: bool

    def resolve(self, num_layers: int) -> tuple[int, ...]:
        """Canonical ids for a model of ``num_layers`` decoder layers: ascending, no repeats."""
        extra = (2, num_layers // 2, num_layers - 3) if self.eagle3 else ()
        return tuple(sorted({*self.ids, *extra}))


@dataclass(frozen=True)
class Settings:
    """One server's settings; see ``ENVIRONMENT`` for the variables and their meaning."""

    session: str = "default"
    root: Path = Path()
    layers: LayerChoice = LayerChoice((), eagle3=True, final=True)
    rows: str = "prompt"
    requests: str = "all"
    ring_bytes: int = 1 << 30
    stage_bytes: int | None = None
    """None: as much as the largest forward pass needs."""
    policy: str = "block"
    block_s: float = 1.0
    on_dead_hook: str = "stop"


ENVIRONMENT: dict[str, str] = {
    "HSTRANSPORT": "1 switches capture on; unset, empty or 0 leaves the server untouched",
    "HSTRANSPORT_SESSION": "name by which a consumer finds this server (default: default)",
    "HSTRANSPORT_DIR": "directory of the rings (default: /dev/shm/hstransport-UID)",
    "HSTRANSPORT_LAYERS": "comma-separated canonical layer ids, 'eagle3' (2, n//2, n-3) and "
    "'final' (default: eagle3,final)",
    "HSTRANSPORT_ROWS": "prompt: states of the prompt's tokens; all: of generated tokens too "
    "(default: prompt)",
    "HSTRANSPORT_REQUESTS": "all: every request; tagged: only those whose custom_params carry "
    "hstransport_id (default: all)",
    "HSTRANSPORT_RING_BYTES": "size of the ring, such as 512MiB or 8GiB (default: 1GiB)",
    "HSTRANSPORT_STAGE_BYTES": "GPU memory in which states wait for their copy into the ring, such "
    "as 512MiB (default: the states of one full prefill batch, 64MiB to 1GiB)",
    "HSTRANSPORT_POLICY": "when the ring is full: block (wait up to HSTRANSPORT_BLOCK_S, then "
    "drop) or drop (default: block)",
    "HSTRANSPORT_BLOCK_S": "seconds that block may wait before it drops (default: 1.0)",
    "HSTRANSPORT_ON_DEAD_HOOK": "when SGLang lacks what the plugin hooks, does not apply a hook "
    "or the first forward pass does not come through it: stop the server, or serve without capture "
    "(default: stop)",
}
"""Every variable that hstransport reads on the server's side."""


def from_environment(environ: Mapping[str, str]) -> Settings | None:
    """Settings of this process, or None when capture is not switched on.

    Raises ConfigError naming the variable and the values allowed; an unknown ``HSTRANSPORT_…``
    variable is an error too, because a misspelt one would otherwise change nothing, silently.
    """
    switch = environ.get("HSTRANSPORT", "").strip()
    if switch in ("", "0"):
        return None
    if switch != "1":
        raise ConfigError(f"HSTRANSPORT={switch!r}: allowed are 1 (on), 0 or empty (off)")
    for name in environ:
        if name.startswith("HSTRANSPORT_") and name not in ENVIRONMENT:
            known = ", ".join(sorted(ENVIRONMENT))
            raise ConfigError(f"{name} is not a setting of hstransport; known are {known}")
    directory = environ.get("HSTRANSPORT_DIR", "").strip()
    return Settings(
        session=check_session_name(environ.get("HSTRANSPORT_SESSION", "default")),
        root=Path(directory) if directory else default_root(),
        layers=parse_layers(environ.get("HSTRANSPORT_LAYERS", "eagle3,final")),
        rows=_choice(environ, "HSTRANSPORT_ROWS", "prompt", "all"),
        requests=_choice(environ, "HSTRANSPORT_REQUESTS", "all", "tagged"),
        ring_bytes=_ring_bytes(environ.get("HSTRANSPORT_RING_BYTES", "1GiB")),
        stage_bytes=_stage_bytes(environ.get("HSTRANSPORT_STAGE_BYTES", "")),
        policy=_choice(environ, "HSTRANSPORT_POLICY", "block", "drop"),
        block_s=_seconds(environ.get("HSTRANSPORT_BLOCK_S", "1.0")),
        on_dead_hook=_choice(environ, "HSTRANSPORT_ON_DEAD_HOOK", "stop", "serve"),
    )


def parse_layers(text: str) -> LayerChoice:
    """Parse ``HSTRANSPORT_LAYERS``; raises ConfigError."""
    ids: set[int] = set()
    words = [w.strip().lower() for w in text.split(",")]
    for word in words:
        if word in ("eagle3", "final"):
            continue
        if not word.isascii() or not word.isdigit():
            raise ConfigError(
                f"HSTRANSPORT_LAYERS={text!r}: {word!r} is not allowed; give comma-separated "
                "canonical layer ids (k = state after k decoder layers), 'eagle3' and 'final'"
            )
        if int(word) in ids:
            raise ConfigError(f"HSTRANSPORT_LAYERS={text!r}: layer {word} is named twice")
        ids.add(int(word))
    return LayerChoice(tuple(sorted(ids)), "eagle3" in words, "final" in words)


def parse_size(text: str) -> int:
    """``"512MiB"`` -> bytes; binary units whichever way they are spelt. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 8GiB")
    return int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


def _ring_bytes(text: str) -> int:
    return -(-_size("HSTRANSPORT_RING_BYTES", text) // 4096) * 4096


def _stage_bytes(text: str) -> int | None:
    return _size("HSTRANSPORT_STAGE_BYTES", text) if text.strip() else None


def _size(name: str, text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as e:
        raise ConfigError(f"{name}: {e}") from None
    if size < MIN_RING_BYTES:
        raise ConfigError(f"{name}={text!r}: at least 1MiB is needed")
    return size


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise ConfigError(f"HSTRANSPORT_BLOCK_S={text!r}: allowed are seconds from 0 to 3600")
    return value


def _choice(environ: Mapping[str, str], name: str, *allowed: str) -> str:
    """The variable's value; the first of ``allowed`` is the default."""
    value = environ.get(name, allowed[0]).strip().lower()
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: allowed are {' and '.join(allowed)}")
    return value
