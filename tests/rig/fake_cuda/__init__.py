"""A CUDA driver without a GPU (fake_cuda.cpp), and tests that run on it, each in its own process.

Device memory is host memory there, streams are threads, and all work is late at random: what is
not ordered goes wrong often.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
TESTS = Path(__file__).parents[2]


def build() -> Path:
    """The shared library, built once for each version of its source."""
    name = f"hst-fake-cuda-{os.geteuid()}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    library = Path(tempfile.gettempdir()) / name / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
        command = ["c++", *flags, "-Wl,-soname,libcuda.so.1", str(SOURCE), "-o", str(new)]
        subprocess.run(command, check=True)
        new.rename(library)
    return library


def on_fake_cuda(**environ: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a process whose CUDA driver is the fake one.

    Its fixtures must be paths; they are passed on. ``environ``: more of its environment.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Path) -> None:
            module = Path(inspect.getfile(test)).stem
            given = {name: str(path) for name, path in fixtures.items()}
            command = [sys.executable, "-m", "rig.fake_cuda", module, test.__name__]
            env = {**os.environ, **{k: str(v) for k, v in environ.items()}}
            env |= {"PYTHONPATH": str(TESTS), "HST_FAKE_CUDA": str(build())}
            done = subprocess.run(
                [*command, json.dumps(given)], env=env, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

        return run

    return decorate


def main(module: str, name: str, fixtures: str) -> None:
    """In that process: the test itself. A library of the driver's name is found by the name."""
    load()
    test = inspect.unwrap(getattr(importlib.import_module(module), name))
    test(**{key: Path(path) for key, path in json.loads(fixtures).items()})


@functools.cache
def load() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["HST_FAKE_CUDA"], mode=ctypes.RTLD_GLOBAL)


class FakeArray:
    """Host memory that says it lies on CUDA device 0, as cupy's arrays do."""

    def __init__(self, bits: npt.NDArray[np.uint16], stream: int = 0) -> None:
        self.bits = bits
        self._stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = self.bits.__array_interface__
        return {**interface, "version": 3, "stream": self._stream or None}


class FakeStream:
    """A stream of the fake driver, for a test's own work."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        assert load().cuStreamCreate(ctypes.byref(handle), 1) == 0
        self.handle = int(handle.value or 0)

    def write(self, target: npt.NDArray[np.uint16], source: npt.NDArray[np.uint16]) -> None:
        """Enqueue: ``target[...] = source``. Both must stay alive."""
        load().cuMemcpyDtoHAsync_v2(
            ctypes.c_void_p(target.ctypes.data),
            ctypes.c_ulonglong(source.ctypes.data),
            ctypes.c_size_t(source.nbytes),
            ctypes.c_void_p(self.handle),
        )

    def hold(self) -> ctypes.c_int:
        """The stream stands still until the value of what is returned is not 0."""
        flag = ctypes.c_int(0)
        load().fakeStreamHold(ctypes.c_void_p(self.handle), ctypes.byref(flag))
        return flag

    def wait(self) -> None:
        load().fakeStreamIdle(ctypes.c_void_p(self.handle))
