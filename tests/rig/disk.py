"""Disks of one's own: file systems that are mounted, and strace that makes writes fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CACHED, DIRECT = "pwritev,pwritev2", "pwrite64"
"""The system calls by which a consumer writes shards, through the page cache and past it."""


def mount(*arguments: str | Path) -> None:
    """Call mount, or skip the test where that is not allowed."""
    command = ["mount", *map(str, arguments)]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")


@contextmanager
def mounted(path: Path, *arguments: str | Path) -> Iterator[Path]:
    """A file system mounted at a new folder ``path``."""
    path.mkdir()
    mount(*arguments, path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def tampered(process: subprocess.Popen[bytes], *calls: str) -> Iterator[None]:
    """Have system calls of a running process fail or take long, as strace's ``-e inject=`` says:
    ``f"{CACHED}:error=EIO"``, ``"fdatasync:delay_enter=100000"`` (microseconds)."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: it is what makes the disk fail")
    names = ",".join(call.partition(":")[0] for call in calls)
    command = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={names}"]
    for call in calls:
        command += ["-e", f"inject={call}"]
    tracer = subprocess.Popen(
        [*command, "-p", str(process.pid)], stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        while not all(map(_traced, Path(f"/proc/{process.pid}/task").iterdir())):
            if tracer.poll() is not None:
                assert tracer.stderr
                pytest.skip(f"strace cannot attach: {tracer.stderr.read().decode()[:200]}")
            time.sleep(0.01)
        yield
    finally:
        tracer.terminate()  # it lets go of the process, which goes on
        tracer.wait()


def _traced(thread: Path) -> bool:
    return "TracerPid:\t0\n" not in (thread / "status").read_text()
