"""Amounts as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
