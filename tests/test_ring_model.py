"""The ring's protocol, every interleaving of it: csrc/ring.pml under spin, in `make stress`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
MODEL = CSRC / "ring.pml"
BREAKS = sorted(set(re.findall(r"BREAK_([A-Z]+)", MODEL.read_text())))

needs_spin = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("cc")),
    reason="no spin, or no cc (Debian: apt-get install spin gcc)",
)


def check(folder: Path, *defines: str) -> str:
    """What spin's verifier says of the model, or of a broken one."""
    commands = [
        ["spin", "-a", *defines, str(MODEL)],
        ["cc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c"],
        ["./pan", "-E", "-n", "-w25", "-m10000"],
    ]
    said = ""
    for command in commands:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
    return said


@needs_spin
@pytest.mark.exhaustive
def test_no_interleaving_breaks_the_protocol(tmp_path: Path) -> None:
    said = check(tmp_path)
    assert "errors: 0" in said, said
    assert "Search not completed" not in said, said


@needs_spin
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_protocol_is_found(name: str, tmp_path: Path) -> None:
    said = check(tmp_path, f"-DBREAK_{name}")
    assert "errors: 1" in said and "assertion violated" in said, said


def test_the_model_names_code_that_is_there() -> None:
    """Words that the code no longer has: it was changed, and the model must follow."""
    named = re.findall(r"/\* (\w+\.(?:cpp|h)): (.+?) \*/", MODEL.read_text())
    assert len(named) > 20
    for file, words in named:
        code = "".join((CSRC / file).read_text().split())
        assert "".join(words.split()) in code, f"{file} has no {words!r}"
