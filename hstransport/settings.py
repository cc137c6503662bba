"""What a user sets on the server's side: read from the environment once, checked, frozen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from .errors import ConfigError
from .session import check_session_name, default_root
from .tags import ID_TAG, LABELS_TAG

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
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
        """Canonical ids for a model of ``num_layers`` decoder layers: ascending, no repeats.

        Raises ConfigError when the model is too small for ``eagle3``.
        """
        if self.eagle3 and num_layers < 4:
            raise ConfigError(
                f"HSTRANSPORT_LAYERS: 'eagle3' is layers 2, n//2 and n-3, and this model has n="
                f"{num_layers} layers: name layers from 1 to {num_layers - 1}, or 'final'"
            )
        extra = (2, num_layers // 2, num_layers - 3) if self.eagle3 else ()
        return tuple(sorted({*self.ids, *extra}))


@dataclass(frozen=True)
class Selection:
    """Which requests are captured. It depends on the request alone, so that asking again, on
    another thread or rank, gives the same answer."""

    kind: str = "all"
    """``all``, ``tagged``, ``rid`` (a prefix), ``label`` or ``share`` (of all)."""
    key: str = ""
    """The prefix, or the label's name."""
    value: str | None = None
    """What the label must be; None: anything."""
    share: float = 1.0

    def wants(self, rid: str, tags: Mapping[str, Any]) -> bool:
        """``rid``: SGLang's request id. ``tags``: the request's custom_params."""
        if self.kind == "all":
            return True
        if self.kind == "tagged":
            return tags.get(ID_TAG) is not None
        if self.kind == "rid":
            return rid.startswith(self.key)
        if self.kind == "share":
            return crc32(rid.encode(errors="replace")) < self.share * (1 << 32)
        labels = tags.get(LABELS_TAG)
        if not isinstance(labels, Mapping) or self.key not in labels:
            return False
        label = labels[self.key]
        return self.value is None or self.value in (str(label), json.dumps(label))

    def __str__(self) -> str:
        if self.kind == "share":
            return f"{100 * self.share:g}%"
        value = "" if self.value is None else f"={self.value}"
        return f"{self.kind}:{self.key}{value}" if self.key else self.kind


@dataclass(frozen=True)
class Settings:
    """One server's settings; see ``ENVIRONMENT`` for the variables and their meaning."""

    session: str = "default"
    root: Path = Path()
    layers: LayerChoice = LayerChoice((), eagle3=True, final=True)
    layers_by: str = "auto"
    rows: str = "prompt"
    requests: Selection = Selection()
    budget_bytes: int | None = None
    """States, uncompressed, after which no new sample is begun."""
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
    "HSTRANSPORT_LAYERS_BY": "auto: the model hands its inner layers out, or where it cannot, "
    "hooks on them take their states; hooks: in any case (default: auto)",
    "HSTRANSPORT_ROWS": "prompt: states of the prompt's tokens; all: of generated tokens too "
    "(default: prompt)",
    "HSTRANSPORT_REQUESTS": "all: every request; tagged: only those whose custom_params carry "
    "hstransport_id; rid:PREFIX: by the beginning of the request id; label:NAME or "
    "label:NAME=VALUE: by hstransport_labels; 5% or so: a share of all, drawn by request id "
    "(default: all)",
    "HSTRANSPORT_BUDGET_BYTES": "uncompressed states after which no new sample is begun, such as "
    "500GiB; those begun go on (default: no limit)",
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
        layers_by=_choice(environ, "HSTRANSPORT_LAYERS_BY", "auto", "hooks"),
        rows=_choice(environ, "HSTRANSPORT_ROWS", "prompt", "all"),
        requests=parse_selection(environ.get("HSTRANSPORT_REQUESTS", "all")),
        budget_bytes=_optional_size(environ, "HSTRANSPORT_BUDGET_BYTES"),
        ring_bytes=_ring_bytes(environ.get("HSTRANSPORT_RING_BYTES", "1GiB")),
        stage_bytes=_optional_size(environ, "HSTRANSPORT_STAGE_BYTES"),
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


def parse_selection(text: str) -> Selection:
    """Parse ``HSTRANSPORT_REQUESTS``; raises ConfigError."""
    word = text.strip()
    kind, colon, rest = word.partition(":")
    if word.lower() in ("all", "tagged"):
        return Selection(word.lower())
    if colon and kind.lower() == "rid" and rest:
        return Selection("rid", rest)
    if colon and kind.lower() == "label" and rest and not rest.startswith("="):
        name, equals, value = rest.partition("=")
        return Selection("label", name, value if equals else None)
    share = _SHARE.fullmatch(word)
    if share and 0 < float(share[1]) <= 100:
        return Selection("share", share=float(share[1]) / 100)
    raise ConfigError(
        f"HSTRANSPORT_REQUESTS={text!r}: allowed are all, tagged, rid:PREFIX, label:NAME, "
        "label:NAME=VALUE, or a share such as 5%"
    )


def parse_size(text: str) -> int:
    """``"512MiB"`` -> bytes; binary units whichever way they are spelt. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 8GiB")
    return int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


def _ring_bytes(text: str) -> int:
    return -(-_size("HSTRANSPORT_RING_BYTES", text) // 4096) * 4096


def _optional_size(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return _size(name, text) if text.strip() else None


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
