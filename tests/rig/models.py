"""Make the model folders that tests and the demo serve: ``models/{llama,qwen3,dsv3,…}``.

Six have random weights and no tokenizer (6 layers, hidden 64, vocabulary 512, under 1 MB); they
are the same bytes every time. SmolLM2-135M-Instruct has real weights and a tokenizer.

    PYTHONPATH=tests python -m rig.models [NAME ...]   # default: those that are missing
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "models"


def model_dir(name: str) -> Path:
    """The folder of that model, made now if it is missing."""
    make = MAKERS[name]
    target = MODELS / name
    if not target.exists():
        MODELS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS) as scratch:
            made = Path(scratch) / name
            make(made)
            # The rename comes last, so that a folder that is there is whole.
            if not target.exists():
                made.rename(target)
    return target


def _tiny(architecture: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from . import tiny_models

        tiny_models.save(architecture, folder)

    return make


def _smollm2(folder: Path) -> None:
    from . import smollm2

    smollm2.save(folder)


MAKERS: dict[str, Callable[[Path], None]] = {
    "llama": _tiny("llama"),
    "qwen3": _tiny("qwen3"),
    "dsv3": _tiny("deepseek_v3"),
    "gemma3": _tiny("gemma3"),
    "granite": _tiny("granite"),
    "olmo2": _tiny("olmo2"),
    "smollm2": _smollm2,
}


def main() -> int:
    for name in sys.argv[1:] or MAKERS:
        if name in sys.argv[1:]:
            shutil.rmtree(MODELS / name, ignore_errors=True)
        print(
            model_dir(name), json.loads((MODELS / name / "config.json").read_text())["model_type"]
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
