"""The native code under sanitizers, and fuzzed, in `make stress`; CI has no time to build it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hstransport import _core

CSRC = Path(__file__).parents[1] / "csrc"
PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not shutil.which("cmake", path=PATH), reason="no cmake: run `make setup`"),
]
needs_clang = pytest.mark.skipif(
    not shutil.which("clang++", path=PATH), reason="no clang++ (Debian: apt-get install clang)"
)


def run(*command: str, cwd: Path, timeout_s: float = 400) -> str:
    """What a command prints; AssertionError with the end of it unless it ends well."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def build(folder: Path, sanitizers: str, compiler: str) -> None:
    cmake = shutil.which("cmake", path=PATH)
    assert cmake
    options = {
        "CMAKE_CXX_COMPILER": compiler,
        "HST_BUILD_TESTS": "ON",
        "HST_CUDA": "OFF",
        "HST_SANITIZE": sanitizers,
    }
    run(cmake, "-S", str(CSRC), *(f"-D{k}={v}" for k, v in options.items()), cwd=folder)
    run(cmake, "--build", ".", "--parallel", "2", cwd=folder)


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_native_tests_are_clean(sanitizers: str, tmp_path: Path) -> None:
    build(tmp_path, sanitizers, "c++")
    assert "all well" in run("./ring_test", cwd=tmp_path)
    if sanitizers != "thread":  # one thread
        assert "all well" in run("./ring_fuzz", "3000", cwd=tmp_path)
        assert "all well" in run("./unpack_fuzz", "30000", cwd=tmp_path)


def ring_seeds() -> list[bytes]:
    return []


def unpack_seeds() -> list[bytes]:
    """Frames of exponents as csrc/tests/unpack_fuzz.cpp takes them: how much a frame holds, and
    what is behind its head, which says so too."""
    rng = np.random.default_rng(0)
    hidden, seeds = 61, []
    for rows in (1, 20, 400, 2500):
        words = (rng.geometric(0.3, (rows, hidden)) << 7).astype(np.uint16)
        out = np.empty(_core.packed_bound(1, words.size), np.uint8)
        place = np.array([[words.ctypes.data, 0, 2 * hidden, rows]], np.uint64)
        raw, coded = _core.pack_chunk(place, np.zeros((1, hidden), np.uint8), out)
        frame = out[raw : raw + coded].tobytes()
        head = 5 + (1, 2, 4, 8)[frame[4] >> 6]  # with the size
        seeds.append(words.size.to_bytes(3, "little") + frame[head:])
    return seeds


SEEDS = {"ring_fuzz": ring_seeds, "unpack_fuzz": unpack_seeds}


@needs_clang
@pytest.mark.parametrize("target", SEEDS)
def test_nothing_bent_is_believed(target: str, tmp_path: Path, stress_minutes: float) -> None:
    """libFuzzer: no crash, no input of more than 10 s, nothing above 64 MiB taken at once."""
    build(tmp_path, "address,undefined", "clang++")
    seconds = max(10, int(stress_minutes * 60))
    limits = ["-timeout=10", "-malloc_limit_mb=64", "-rss_limit_mb=2048", "-max_len=65536"]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(SEEDS[target]()):
        (corpus / str(i)).write_bytes(seed)
    said = run(
        f"./{target}",
        f"-max_total_time={seconds}",
        *limits,
        str(corpus),
        cwd=tmp_path,
        timeout_s=seconds + 120,
    )
    assert "DONE" in said, said[-6000:]
    assert len(list(corpus.iterdir())) > 10  # it found ways that the seeds do not go
