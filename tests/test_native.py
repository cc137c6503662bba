"""The native code under sanitizers, and fuzzed, in `make stress`; CI has no time to build it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@needs_clang
@pytest.mark.parametrize("target", ["ring_fuzz", "unpack_fuzz"])
def test_nothing_bent_is_believed(target: str, tmp_path: Path, stress_minutes: float) -> None:
    """libFuzzer: no crash, no input of more than 10 s, nothing above 64 MiB taken at once."""
    build(tmp_path, "address,undefined", "clang++")
    seconds = max(10, int(stress_minutes * 60))
    limits = ["-timeout=10", "-malloc_limit_mb=64", "-rss_limit_mb=2048"]
    run(
        f"./{target}",
        f"-max_total_time={seconds}",
        *limits,
        cwd=tmp_path,
        timeout_s=seconds + 120,
    )
