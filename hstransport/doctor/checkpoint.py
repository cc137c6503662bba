"""What doctor reads of a checkpoint without loading the model: its last norm and its lm_head."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HsTransportError
from .compare import F32

_INNER = re.compile(r"(^|\.)(layers|h|blocks|visual|vision\w*|audio\w*|mtp)\.")
_NORM = re.compile(r"(^|\.)(norm|ln_f|final_layernorm|norm_f)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|tok_embeddings|embed_in)\.weight$")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_ROWS_AT_ONCE = 16384


class Unknown(HsTransportError):
    """The checkpoint does not tell; the message says why and what to do."""


class Checkpoint:
    """The safetensors of a model's folder. Needs torch and safetensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as e:
            raise Unknown(f"{folder} has no config.json that can be read ({e})") from None
        text = config.get("text_config")
        self.config: dict[str, Any] = {**config, **text} if isinstance(text, dict) else config

    @classmethod
    def find(cls, model: str) -> Checkpoint:
        """By folder, or by a hub's name if it was downloaded before. Raises Unknown."""
        if Path(model).is_dir():
            return cls(Path(model))
        try:
            from huggingface_hub import snapshot_download

            return cls(Path(snapshot_download(model, local_files_only=True)))
        except ImportError:
            raise Unknown(_need("huggingface_hub")) from None
        except Unknown:
            raise
        except Exception as e:  # many types, all of which mean that it is not here
            first = (str(e).splitlines() or [""])[0][:120]
            raise Unknown(
                f"{model} is no folder here nor a model downloaded before ({first}): give its "
                "folder with --reference"
            ) from None

    @property
    def bytes(self) -> int:
        """Of all weights, as they are stored."""
        for ending in ("safetensors", "bin"):
            if found := sum(path.stat().st_size for path in self.folder.glob(f"*.{ending}")):
                return found
        return 0

    @property
    def mixture(self) -> bool:
        """Whether it is a mixture of experts."""
        return any(self.config.get(key) for key in _EXPERTS)

    def norm(self) -> F32:
        """Weight of the RMS norm after the last layer: ``[hidden]``. Raises Unknown."""
        name = self._one(_NORM, "final norm")
        if name.removesuffix("weight") + "bias" in self._files:
            raise Unknown(f"{name} has a bias, so it is no RMS norm")
        with self._tensor(name) as tensor:
            weight: F32 = tensor[:].float().numpy()
        if not (weight.ndim == 1 and weight.all()):
            raise Unknown(f"{name} has zeros or is no vector")
        return weight

    def logits(self, states: F32) -> F32:
        """``states @ lm_head.T`` as the model scales it: ``[rows, vocabulary]``. Raises Unknown.

        lm_head is read in pieces: it is never in memory as a whole.
        """
        import torch

        tied = self.config.get("tie_word_embeddings")
        if tied is None:
            tied = not self._named(_HEAD)
        name = self._one(_EMBEDDING if tied else _HEAD, "embedding" if tied else "lm_head")
        x = torch.from_numpy(np.ascontiguousarray(states))
        parts = []
        with self._tensor(name) as tensor:
            rows, hidden = tensor.get_shape()
            if hidden != states.shape[1]:
                raise Unknown(f"{name} is {hidden} wide, the states are {states.shape[1]}")
            for start in range(0, rows, _ROWS_AT_ONCE):
                piece = tensor[start : min(start + _ROWS_AT_ONCE, rows)]
                if not piece.is_floating_point() or piece.element_size() < 2:
                    raise Unknown(f"{name} is quantised to {piece.dtype}")
                parts.append(x @ piece.float().T)
        logits = torch.cat(parts, 1) * float(self.config.get("logit_scale") or 1.0)
        logits /= float(self.config.get("logits_scaling") or 1.0)
        cap = float(self.config.get("final_logit_softcapping") or 0.0)
        if cap:
            logits = cap * torch.tanh(logits / cap)
        result: F32 = logits.numpy()
        return result

    @property
    def eps(self) -> float:
        """What the RMS norm adds to the mean square."""
        return float(self.config.get("rms_norm_eps") or 1e-6)

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor name -> file name."""
        try:
            from safetensors import safe_open
        except ImportError:
            raise Unknown(_need("safetensors")) from None
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return dict(json.loads(index.read_text())["weight_map"])
        files: dict[str, str] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "numpy") as file:
                files |= dict.fromkeys(file.keys(), path.name)
        if not files:
            raise Unknown(f"{self.folder} has no .safetensors files")
        return files

    @contextmanager
    def _tensor(self, name: str) -> Iterator[Any]:
        """A tensor of which parts can be read, as torch tensors."""
        try:
            import torch  # noqa: F401
            from safetensors import safe_open
        except ImportError as e:
            raise Unknown(_need(e.name or "torch")) from None
        path = self.folder / self._files[name]
        if not path.is_file():
            raise Unknown(f"{path} is not there: the checkpoint is not complete")
        with safe_open(path, "pt") as file:
            yield file.get_slice(name)

    def _named(self, pattern: re.Pattern[str]) -> list[str]:
        return [n for n in self._files if pattern.search(n) and not _INNER.search(n)]

    def _one(self, pattern: re.Pattern[str], what: str) -> str:
        names = self._named(pattern)
        if len(names) != 1:
            found = ", ".join(names[:3]) or "none"
            raise Unknown(f"{self.folder}: which tensor is the {what}? Found: {found}")
        return names[0]


def _need(module: str) -> str:
    return f"{module} is needed here: pip install 'hstransport[doctor]'"
