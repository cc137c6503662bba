"""How alike two sets of states are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

SAME = 0.999
"""Cosine from which two states of a token are the same but for bf16 sums in another order."""
ROUGHLY = 0.99
_MOST = 0.95
_MIXTURE = 0.75
"""Share of tokens that must be the same. In a mixture of experts a router near a tie may send a
token to another expert, and that token's state differs from there on."""


class Agreement(NamedTuple):
    """Cosines of states, token by token, summed up."""

    tokens: int
    share: float
    """Of the tokens, those that are the same."""
    lowest: float
    median: float

    @property
    def same(self) -> bool:
        """True of a dense model, in another engine or in a batch of another shape."""
        return self.share >= _MOST and self.lowest >= ROUGHLY

    @property
    def mostly(self) -> bool:
        """True of a mixture of experts, too."""
        return self.share >= _MIXTURE and self.median >= SAME

    def __str__(self) -> str:
        share = f"{self.share:.1%} of {self.tokens} tokens at cosine >= {SAME}"
        return f"{share}, lowest {self.lowest:.4f}"


def floats(bits: npt.NDArray[np.uint16]) -> F32:
    """bf16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cosines(a: F32, b: F32) -> F32:
    """Cosine of each token's state in ``a`` ``[tokens, hidden]`` with that in ``b``: ``[tokens]``.

    Of several layers (``[tokens, layers, hidden]``) the lowest, for layers differ in size. 0 where
    a state is zero or not finite, which is like nothing.
    """
    with np.errstate(all="ignore"):
        norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        found = np.nan_to_num((a * b).sum(-1) / norms, nan=0.0, posinf=0.0, neginf=0.0)
    lowest: F32 = found.reshape(len(found), -1).min(axis=1)
    return lowest


def agreement(pairs: list[tuple[F32, F32]]) -> Agreement:
    """Of all the rows of some samples, each with what it is held against."""
    all_cosines = np.concatenate([cosines(a, b) for a, b in pairs])
    return Agreement(
        len(all_cosines),
        float((all_cosines >= SAME).mean()),
        float(all_cosines.min()),
        float(np.median(all_cosines)),
    )
