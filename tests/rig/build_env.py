"""Set up the test environment: a venv with SGLang for CPUs, hstransport in it, and the models.

Needs only Python >= 3.10 with venv, a C++ compiler and pip's usual access to packages. Each step
leaves a stamp keyed on what it depends on, so a second run takes a fraction of a second.

    export PYTHONPATH=tests
    python -m rig.build_env                       # .venv with SGLang 0.5.20
    SGLANG_VERSION=0.5.18 python -m rig.build_env # .venv-0.5.18
    python -m rig.build_env --print-venv          # only says where that venv is
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .models import MAKERS, MODELS

DEFAULT_SGLANG = "0.5.20"
TRIED = ("0.5.18", "0.5.20", "0.5.23")
TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"

ROOT = Path(__file__).resolve().parents[2]
RIG = Path(__file__).resolve().parent
REQUIREMENTS = RIG / "requirements"
STANDINS = RIG / "standins"


class SetupError(Exception):
    """A step failed; the message ends with the last lines of what it printed."""


def venv_dir(version: str) -> Path:
    """The virtual environment for that SGLang release."""
    return ROOT / (".venv" if version == DEFAULT_SGLANG else f".venv-{version}")


class Rig:
    """One virtual environment under construction; ``run()`` brings it up to date."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.venv = venv_dir(version)
        self.python = self.venv / "bin" / "python"
        self.state = self.venv / "rig"
        self.constraints = self.state / "constraints.txt"
        self.log = self.state / "setup.log"
        self.worked = False

    def run(self) -> None:
        started = time.monotonic()
        self._create()
        self._write(self.constraints, merged_constraints(self.version))
        pins = self.constraints.read_text()
        sglang = f"sglang=={self.version}"
        lists = [REQUIREMENTS / "sglang.txt", REQUIREMENTS / "tools.txt"]
        from_lists = [arg for path in lists for arg in ("-r", str(path))]

        self._pip(TORCH, [TORCH], pins)
        self._pip(sglang, ["--no-deps", sglang, TORCHVISION], pins)
        key = pins + "".join(path.read_text() for path in lists)
        self._pip("what SGLang, the build and the tests need", [TORCH, *from_lists], key)
        self._link_standins()
        missing = [name for name in MAKERS if not (MODELS / name).exists()]
        if missing:
            # Never a stamp: the folders themselves say whether they are there.
            make = [str(self.python), "-m", "rig.models"]
            self._step(f"models {', '.join(missing)}", f"{time.time()}", make)
        self._pip(
            "hstransport (builds the native module)",
            ["--no-build-isolation", "--editable", str(ROOT)],
            digest(native_sources()),
        )
        done = f"set up in {time.monotonic() - started:.0f} s" if self.worked else "up to date"
        print(f"rig: {self.venv.name} with SGLang {self.version}: {done}", flush=True)

    def _create(self) -> None:
        """Make the venv, or make it anew when its interpreter is gone."""
        if not works(self.python):
            self.worked = True
            print(f"rig: creating {self.venv.name}", flush=True)
            make = [sys.executable, "-m", "venv", "--clear", str(self.venv)]
            made = subprocess.run(make, capture_output=True, text=True)
            if made.returncode:
                raise SetupError(
                    f"no virtual environment (is Python's venv module installed?):\n"
                    f"{made.stdout}{made.stderr}"
                )
        self.state.mkdir(exist_ok=True)

    def _pip(self, name: str, args: Sequence[str], key: str) -> None:
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "install"]
        self._step(name, key, [*pip, "--constraint", str(self.constraints), *args], tries=2)

    def _step(self, name: str, key: str, command: Sequence[str], tries: int = 1) -> None:
        """Run one command, its output into the log, unless its stamp says that it was done."""
        stamp = self.state / (hashlib.sha256(name.encode()).hexdigest()[:12] + ".stamp")
        want = hashlib.sha256("\0".join([key, *command]).encode()).hexdigest()
        if stamp.exists() and stamp.read_text() == want:
            return
        self.worked = True
        stamp.unlink(missing_ok=True)
        print(f"rig: {name} ...", end="", flush=True)
        started = time.monotonic()
        for left in reversed(range(tries)):
            begin = self.log.stat().st_size if self.log.exists() else 0
            with self.log.open("a") as log:
                print(f"\n$ {' '.join(command)}", file=log, flush=True)
                rc = subprocess.run(command, stdout=log, stderr=log, cwd=RIG.parent).returncode
            if rc == 0:
                break
            if left:
                time.sleep(5)  # an index that did not answer may answer now
        print(f" {time.monotonic() - started:.0f} s" if rc == 0 else " FAILED", flush=True)
        if rc:
            with self.log.open(errors="replace") as log:
                log.seek(begin)
                tail = log.read().splitlines()[-30:]
            raise SetupError("\n".join([*tail, f"{name}: exit status {rc}; log: {self.log}"]))
        self._write(stamp, want)

    def _link_standins(self) -> None:
        """Put the stand-ins on the venv's path, where processes and entry points find them."""
        found = sorted(self.venv.glob("lib/python3*/site-packages"))
        lines = f"{STANDINS}\nimport hstransport_rig_torchvision\n"
        self._write(found[0] / "hstransport_rig.pth", lines)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def merged_constraints(version: str) -> str:
    """The common pins, with those of this release in place of theirs, and torch's."""
    pins = pins_in(REQUIREMENTS / "constraints.txt")
    own = REQUIREMENTS / f"sglang-{version}.txt"
    if own.exists():
        pins |= pins_in(own)
    return "\n".join([TORCH, TORCHVISION, *pins.values()]) + "\n"


def pins_in(path: Path) -> dict[str, str]:
    """Package name -> its line."""
    lines = [line for line in path.read_text().splitlines() if "==" in line and line[0] != "#"]
    return {line.partition("==")[0]: line for line in lines}


def native_sources() -> Iterator[Path]:
    """What a change of makes a new build of the editable install necessary."""
    yield ROOT / "pyproject.toml"
    yield from sorted(p for p in (ROOT / "csrc").rglob("*") if p.is_file())


def digest(paths: Iterable[Path]) -> str:
    sha = hashlib.sha256()
    for path in paths:
        sha.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return sha.hexdigest()


def works(python: Path) -> bool:
    return python.exists() and subprocess.run([str(python), "-c", ""]).returncode == 0


@contextmanager
def alone() -> Iterator[None]:
    """Two setups at once would write over each other's venv: the second waits."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "rig.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    version = os.environ.get("SGLANG_VERSION") or DEFAULT_SGLANG
    if "--print-venv" in sys.argv[1:]:
        print(venv_dir(version))
        return 0
    if sys.version_info < (3, 10):  # noqa: UP036 (nothing has checked it yet)
        print(f"rig: needs Python >= 3.10, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    if version not in TRIED:
        print(f"rig: SGLang {version} was never tried here (tried: {', '.join(TRIED)})", flush=True)
    try:
        with alone():
            Rig(version).run()
    except SetupError as e:
        print(f"rig: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
