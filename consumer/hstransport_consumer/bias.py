"""When the table of exponent biases is estimated again.

Its quality decides the ratio and nothing else: each chunk names the table it was packed with. A
table from 1024 rows costs 0.05 % of the ratio that one from all has (SmolLM2, Gemma-3); a first
window may have far fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .codec import U8

ENOUGH_ROWS = 1024
"""A table estimated from so many rows is kept for good."""
GROWTH = 8
"""A new table is worth its bytes when it comes from so many times the rows of the old one."""


@dataclass(frozen=True)
class BiasEstimate:
    """The table in use and what later rows say: a value, so that a failed write leaves no trace."""

    table: U8 | None = None
    """uint8 ``[planes, hidden]``."""
    rows: int = 0
    """Rows that ``table`` was estimated from."""
    seen_rows: int = 0
    weighted: npt.NDArray[np.float64] | None = None
    """Sum over windows of rows * median."""

    @property
    def settled(self) -> bool:
        return self.rows >= ENOUGH_ROWS

    @staticmethod
    def resume(table: U8, rows: int) -> BiasEstimate:
        """Go on from a table out of a shard."""
        return BiasEstimate(table, rows, rows, table.astype(np.float64) * rows)

    def observe(self, medians: U8, rows: int, new_shard: bool) -> BiasEstimate:
        """Take in a window's medians; the result's ``table`` is another object if it is new.

        Exponents of one channel crowd around one value, so the mean of windows' medians serves as
        the median of all their rows without keeping them.
        """
        weighted = medians.astype(np.float64) * rows
        if self.weighted is not None:
            weighted += self.weighted
        seen = self.seen_rows + rows
        if self.table is not None and not new_shard and seen < GROWTH * self.rows:
            return BiasEstimate(self.table, self.rows, seen, weighted)
        return BiasEstimate(np.rint(weighted / seen).astype(np.uint8), seen, seen, weighted)
