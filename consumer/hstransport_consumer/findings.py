"""What a verification has seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hstransport.protocol import Segment

from .shard import Shard

Run = tuple[str, int]
"""Run and rank."""
ZERO, CONSTANT, NOT_FINITE = 1, 2, 4
"""What may be odd about a row."""

Flags = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong; ``sample`` is "" when it concerns the file."""

    file: str
    sample: str
    what: str


@dataclass
class VerifyReport:
    """What was read, and what is wrong with it."""

    shards: int = 0
    unfinished: list[str] = field(default_factory=list)
    """Names of ``.partial`` files; what is whole in them was verified too."""
    samples: int = 0
    whole: int = 0
    parted: int = 0
    """Of the samples, those that have a part in a shard that need not be here; the rest of them
    was verified."""
    tokens: int = 0
    """Rows that were decoded."""
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def note(self, path: Path, what: str, sample: str = "") -> None:
        self.findings.append(Finding(path.name, sample, what))


@dataclass
class Walked:
    """A shard whose frames have been walked, as far as they go."""

    shard: Shard
    flags: list[Flags | None]
    """What is odd about each row of each chunk; None for chunks that cannot be decoded."""
    carry_in: bytes
    carry_out: bytes
    owners: list[tuple[Run, tuple[Segment, ...]]]
    """Whose rows each chunk holds."""
    starts: dict[tuple[Run, int], int]
    """Offset of the START frame of each sample, by run and sid."""
    ends: dict[tuple[Run, int], int]

    @property
    def damaged(self) -> int:
        """Chunks that cannot be decoded."""
        return sum(flags is None for flags in self.flags)
