"""bf16 bits to the array type a caller wants; torch and ml_dtypes are imported only here."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt


def import_torch() -> Any:
    """The module. Raises ImportError, which says what to do, without it."""
    try:
        import torch
    except ImportError:
        raise ImportError(
            "tensors need torch: pip install 'hstransport[torch]', or use the uint16 arrays"
        ) from None
    return torch


def to_torch(bits: npt.NDArray[np.uint16]) -> Any:
    """A torch.bfloat16 tensor on the same memory as ``bits``. Raises ImportError without torch."""
    torch = import_torch()
    with warnings.catch_warnings():
        # Views of the ring are read-only; torch has no such tensors and warns of each.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def to_ml_dtypes(bits: npt.NDArray[np.uint16]) -> Any:
    """An ml_dtypes.bfloat16 array on the same memory. Raises ImportError without ml_dtypes."""
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(
            "bfloat16 arrays need ml_dtypes: pip install ml_dtypes, or use the uint16 arrays"
        ) from None
    return bits.view(ml_dtypes.bfloat16)
