"""The gate between array libraries and the ring: arrays become integers, once, checked.

A forward pass's arrays become :class:`Planes`: addresses and strides of two-dimensional bf16
arrays, together with the objects that own the memory, so that the sources live as long as somebody
may copy from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _core
from ._core import Planes
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


def planes(arrays: Sequence[Any], hidden: int, stream: int | None = None) -> Planes:
    """Take the arrays of one forward pass, in the order of a run's layers; see :func:`plane`.

    ``stream``: handle of the CUDA stream on which they are computed; None: the library's current
    one (torch), else what the arrays' own interface names, else the default stream.
    """
    arrays = list(arrays)
    taken = _core.look_into(arrays, hidden)  # the short way, for what models hand over
    if taken is None:
        taken = _planes([plane(a, hidden) for a in arrays])
        if taken.device is not None and stream is None:
            stream = current_stream(arrays[0], taken.device)
    if stream is not None:
        taken.stream = stream
    return taken


def _planes(taken: Sequence[Plane]) -> Planes:
    if not taken:
        raise CaptureError("no planes")
    devices = {p.device for p in taken}
    if len(devices) > 1:
        raise CaptureError(f"planes lie on several devices: {sorted(map(str, devices))}")
    return Planes(
        [(p.address, p.stride_bytes) for p in taken],
        min(p.rows for p in taken),
        taken[0].row_bytes,
        taken[0].device,
        0,
        [p.owner for p in taken],
    )


def plane(array: Any, hidden: int) -> Plane:
    """Take a ``[rows, hidden]`` bf16 array without copying or waiting.

    ``array``: a tensor of torch; or an array of numpy, of any library that has
    ``__cuda_array_interface__`` (cupy, numba) or DLPack (jax, cupy…), of type bfloat16 or, as its
    bits, uint16. Raises CaptureError when it has another dtype, shape or order than states have.
    """
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


def current_stream(array: Any, device: int) -> int:
    """Handle of the stream on which whoever made ``array`` computes."""
    if hasattr(array, "data_ptr"):
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)
    interface = getattr(array, "__cuda_array_interface__", None)
    return int((interface or {}).get("stream") or 0)


def split_packed(array: Any, count: int, hidden: int) -> list[Any]:
    """``[tokens, count * hidden]`` -> ``count`` views ``[tokens, hidden]``."""
    if array.ndim != 2 or array.shape[1] != count * hidden:
        raise CaptureError(
            f"packed states have shape {tuple(array.shape)}, expected [tokens, {count}*{hidden}]"
        )
    return [array[:, k * hidden : (k + 1) * hidden] for k in range(count)]


_Description = tuple[str, tuple[int, ...], tuple[int, ...], int, int | None, Any]


def _describe(array: Any) -> _Description:
    """(dtype, shape, strides in bytes, address, device, owner of the memory)."""
    if hasattr(array, "data_ptr"):
        item = array.element_size()
        strides = tuple([s * item for s in array.stride()])
        name = str(array.dtype).removeprefix("torch.")
        ordinal = array.get_device()
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
