"""Files, records and messages that lie, by the thousand; rig/fuzz.py says what must not happen.

Short here, and for as long as `make stress` says there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

INPUTS = {"messages": 4000, "records": 60, "shards": 200}


def fuzz(target: str, directory: Path, minutes: float, *options: str) -> None:
    command = [sys.executable, "-m", "rig.fuzz", target, "--dir", str(directory), *options]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=minutes * 60 + 120,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("target", INPUTS)
def test_what_lies_is_refused_and_breaks_nothing(
    target: str, ring_dir: Path, stress_minutes: float
) -> None:
    inputs = f"--inputs={INPUTS[target]}"
    fuzz(target, ring_dir, stress_minutes, inputs, f"--minutes={stress_minutes}")


@pytest.mark.exhaustive
@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="no atheris: pip install it")
@pytest.mark.parametrize("target", INPUTS)
def test_the_same_led_by_coverage(target: str, ring_dir: Path, stress_minutes: float) -> None:
    minutes = max(stress_minutes, 0.2)
    fuzz(target, ring_dir, minutes, "--atheris", f"--minutes={minutes}")
