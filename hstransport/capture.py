"""The gate between array libraries and the ring: arrays become integers, once, checked.

A :class:`Plane` is a two-dimensional bf16 array as (address, rows, strides), together with the
object that owns the memory, so that the source lives as long as somebody may copy from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import CaptureError


@dataclass(frozen=True)
class Plane:
    """``rows`` states of one layer in one memory."""

    address: int
    rows: int
    row_bytes: int
    """Bytes of one state: hidden * 2."""
    stride_bytes: int
    """Distance between the beginnings of two rows."""
    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    owner: Any
    """Keeps the memory alive."""


def plane(array: Any, hidden: int) -> Plane:
    """Take a ``[rows, hidden]`` bf16 array of torch or numpy (as uint16 bits) without copying.

    Raises CaptureError when it has another dtype, shape or order than states have.
    """
    kind = "torch" if hasattr(array, "data_ptr") else "numpy"
    if kind == "torch":
        dtype, strides = str(array.dtype), tuple(s * array.element_size() for s in array.stride())
        address, device = array.data_ptr(), str(array.device)
    else:
        dtype, strides = str(array.dtype), array.strides
        address, device = array.__array_interface__["data"][0], "cpu"
    if dtype not in ("torch.bfloat16", "uint16", "bfloat16"):
        raise CaptureError(
            f"the model's states are {dtype}, hstransport carries bfloat16: start the server "
            "with --dtype bfloat16"
        )
    shape = tuple(array.shape)
    if len(shape) != 2 or shape[1] != hidden:
        raise CaptureError(f"states have shape {shape}, expected [tokens, {hidden}]")
    if strides[1] != 2 or (shape[0] > 1 and strides[0] < hidden * 2):
        raise CaptureError(f"states have strides {strides} bytes: rows must be contiguous")
    return Plane(address, shape[0], hidden * 2, strides[0], device, array)


def split_packed(array: Any, count: int, hidden: int) -> list[Any]:
    """``[tokens, count * hidden]`` -> ``count`` views ``[tokens, hidden]``."""
    if array.ndim != 2 or array.shape[1] != count * hidden:
        raise CaptureError(
            f"packed states have shape {tuple(array.shape)}, expected [tokens, {count}*{hidden}]"
        )
    return [array[:, k * hidden : (k + 1) * hidden] for k in range(count)]
