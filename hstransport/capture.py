"""The gate between array libraries and the ring: arrays become integers, once, checked.

A :class:`Plane` is a two-dimensional bf16 array as (address, rows, strides), together with the
object that owns the memory, so that the source lives as long as somebody may copy from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import _core
from .errors import CaptureError

# DLPack: device types and the type code of bfloat16.
_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_DLPACK_UINT, _DLPACK_BFLOAT = 1, 4


class Plane(NamedTuple):
    """``rows`` states of one layer in one memory."""

    address: int
    rows: int
    row_bytes: int
    """Bytes of one state: hidden * 2."""
    stride_bytes: int
    """Distance between the beginnings of two rows."""
    device: int | None
    """Ordinal of the CUDA device; None for host memory."""
    owner: Any
    """Keeps the memory alive."""


@dataclass(slots=True)
class Planes:
    """The planes of one forward pass in the order of a run's layers, all on one device."""

    planes: list[Plane]
    rows: int
    """Rows that every one of them has."""
    device: int | None
    stream: int = 0
    """Handle of the CUDA stream on which the states are computed; 0 is the default stream."""
    native: Any = field(default=None, repr=False)
    """The same for the copier, made when it first asks."""


def plane(array: Any, hidden: int) -> Plane:
    """Take a ``[rows, hidden]`` bf16 array without copying or waiting.

    ``array``: a tensor of torch; or an array of numpy, of any library that has
    ``__cuda_array_interface__`` (cupy, numba) or DLPack (jax, cupy…), of type bfloat16 or, as its
    bits, uint16. Raises CaptureError when it has another dtype, shape or order than states have.
    """
    if hasattr(array, "data_ptr"):  # what a model hands over in every pass, without detours
        shape, stride = array.shape, array.stride()
        plain = len(stride) == 2 and stride[1] == 1 and stride[0] >= hidden == shape[1]
        if plain and _TORCH_NAMES.get(array.dtype) == "bfloat16":
            ordinal = array.get_device()
            at = None if ordinal < 0 else ordinal
            return Plane(array.data_ptr(), shape[0], hidden * 2, stride[0] * 2, at, array)
    dtype, shape, strides, address, device, owner = _describe(array)
    if dtype not in ("bfloat16", "uint16"):
        raise CaptureError(
            f"the model's states are {dtype}, hstransport carries bfloat16: start the server "
            "with --dtype bfloat16"
        )
    if len(shape) != 2 or shape[1] != hidden:
        raise CaptureError(f"states have shape {tuple(shape)}, expected [tokens, {hidden}]")
    rows, width = shape[0], hidden * 2
    if strides[1] != 2 or (rows > 1 and strides[0] < width):
        raise CaptureError(f"states have strides {strides} bytes: rows must be contiguous")
    # An array of one row may have any stride: none is ever taken.
    return Plane(address, rows, width, strides[0] if rows > 1 else width, device, owner)


def planes(arrays: Sequence[Any], hidden: int, stream: int | None = None) -> Planes:
    """Take arrays of one forward pass; see :func:`plane`.

    ``stream``: the CUDA stream on which they are computed; None: torch's current stream for torch
    tensors, else what the arrays' own interface names, else the default stream.
    """
    taken = [plane(a, hidden) for a in arrays]
    if not taken:
        raise CaptureError("no planes")
    rows, device = taken[0].rows, taken[0].device
    for p in taken:
        rows = min(rows, p.rows)
        if p.device != device:
            devices = sorted({str(p.device) for p in taken})
            raise CaptureError(f"planes lie on several devices: {devices}")
    if device is not None and stream is None:
        stream = current_stream(arrays[0], device)
    return Planes(taken, rows, device, stream or 0)


def current_stream(array: Any, device: int) -> int:
    """Handle of the stream on which whoever made ``array`` computes."""
    if hasattr(array, "data_ptr"):
        return torch_stream(device)
    interface = getattr(array, "__cuda_array_interface__", None)
    return int((interface or {}).get("stream") or 0)


def torch_stream(device: int) -> int:
    """Handle of torch's current stream on a device."""
    import torch

    # Without the stream object that torch.cuda.current_stream makes: 4 us less for each pass.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(device) if raw else torch.cuda.current_stream(device).cuda_stream)


def split_packed(array: Any, count: int, hidden: int) -> list[Any]:
    """``[tokens, count * hidden]`` -> ``count`` views ``[tokens, hidden]``."""
    if array.ndim != 2 or array.shape[1] != count * hidden:
        raise CaptureError(
            f"packed states have shape {tuple(array.shape)}, expected [tokens, {count}*{hidden}]"
        )
    return [array[:, k * hidden : (k + 1) * hidden] for k in range(count)]


_TORCH_NAMES: dict[Any, str] = {}  # torch's dtypes are slow to print, and torch may not be here


def _torch_name(dtype: Any) -> str:
    return _TORCH_NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))


_Description = tuple[str, tuple[int, ...], tuple[int, ...], int, int | None, Any]


def _describe(array: Any) -> _Description:
    """(dtype, shape, strides in bytes, address, device, owner of the memory)."""
    if hasattr(array, "data_ptr"):
        item = array.element_size()
        strides = tuple([s * item for s in array.stride()])
        name = _TORCH_NAMES.get(array.dtype) or _torch_name(array.dtype)
        ordinal = array.get_device()  # a tenth of the price of array.device
        device = ordinal if ordinal >= 0 else None
        return name, array.shape, strides, array.data_ptr(), device, array
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_interface(interface, array, _core.device_of(interface["data"][0]))
    interface = getattr(array, "__array_interface__", None)
    if interface is not None:
        return _of_interface(interface, array, None)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array)
    raise CaptureError(
        f"{type(array).__name__} is no array of torch, numpy, __cuda_array_interface__ or DLPack"
    )


def _of_interface(interface: dict[str, Any], array: Any, device: int | None) -> _Description:
    shape = tuple(interface["shape"])
    typestr = interface["typestr"]
    dtype = str(getattr(array, "dtype", "uint16" if typestr == "<u2" else typestr))
    strides = interface.get("strides")
    if strides is None:
        item = int(typestr[2:])
        strides = tuple(item * _product(shape[i + 1 :]) for i in range(len(shape)))
    return dtype, shape, tuple(strides), interface["data"][0], device, array


def _of_dlpack(array: Any) -> _Description:
    kind, ordinal = array.__dlpack_device__()
    if kind not in (_DLPACK_CPU, _DLPACK_CUDA):
        raise CaptureError(
            f"states lie on a device of DLPack type {int(kind)}: neither CPU nor CUDA"
        )
    # -1: the producer must not make any stream wait; we order our copies behind its own stream.
    capsule = array.__dlpack__(stream=-1) if kind == _DLPACK_CUDA else array.__dlpack__()
    address, shape, strides, item, code, _, _ = _core.describe_dlpack(capsule)
    names = {(_DLPACK_BFLOAT, 2): "bfloat16", (_DLPACK_UINT, 2): "uint16"}
    dtype = names.get((code, item), f"of DLPack type {code}, {item} bytes")
    device = ordinal if kind == _DLPACK_CUDA else None
    return dtype, shape, strides, address, device, (array, capsule)


def _product(numbers: Sequence[int]) -> int:
    result = 1
    for n in numbers:
        result *= n
    return result
