"""Start and stop a real SGLang server on the CPU.

    with SGLangServer(model_dir("llama"), env={"HSTRANSPORT": "1"}) as server:
        answer = server.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 1})

What the arguments and variables are for is said where they stand. Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Nothing here is compiled: the first request would wait a minute for it.
    "TORCHDYNAMO_DISABLE": "1",
    # With more, the threads of a tiny model's small operators wait for each other: 40 times slower.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
_libc = ctypes.CDLL(None)  # before any fork

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


class ServerDied(Exception):
    """The server ended or did not answer in time; the message holds the end of its log."""


class SGLangServer:
    """A server in a process group of its own, on a free loopback port.

    ``plugin="off"`` keeps hstransport's plugin from being loaded at all, as if it were not
    installed. ``env`` is added to the environment; a value of None removes a variable. The server
    ends when the thread that started it does.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        tp: int = 1,
        chunked_prefill: int | None = None,
        max_running: int = 8,
        max_total_tokens: int = 8192,
        env: Mapping[str, str | None] | None = None,
        extra_args: Sequence[str] = (),
        plugin: str = "on",
        log: Path | str | None = None,
    ) -> None:
        if plugin not in ("on", "off"):
            raise ValueError(f"plugin={plugin!r}: 'on' or 'off'")
        self.model_dir = Path(model_dir)
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._env = environment(tp, plugin, env or {})
        self._command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model_dir), "--host", "127.0.0.1", "--port", str(self.port)),
            *arguments(
                self.model_dir,
                tp=tp,
                chunked_prefill=chunked_prefill,
                max_running=max_running,
                max_total_tokens=max_total_tokens,
            ),
            *extra_args,
        ]
        self._log = Path(log) if log else None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SGLangServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Return once the server has answered a health check with a token of its own."""
        if self._log is None:
            fd, name = tempfile.mkstemp(prefix="sglang-", suffix=".log")
            os.close(fd)
            self._log = Path(name)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        atexit.register(self.stop)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop(abrupt=True)
            raise

    def stop(self, abrupt: bool = False) -> None:
        """SIGTERM, then SIGKILL, to the whole process group; ``abrupt``: SIGKILL at once."""
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        if not abrupt:
            _signal_group(process.pid, signal.SIGTERM)
            _wait_until_gone(process)
        _signal_group(process.pid, signal.SIGKILL)
        _wait_until_gone(process)

    def generate(self, *, timeout_s: float = 120.0, **payload: Any) -> Any:
        """POST /generate; raises RuntimeError with the server's words on a refusal."""
        request = urllib.request.Request(
            f"{self.url}/generate",
            data=json.dumps(payload).encode(),
            headers={"Content-Type": "application/json"},
        )
        return _answer(request, timeout_s)

    def get(self, path: str, timeout_s: float = 60.0) -> Any:
        """GET a JSON page, such as ``/server_info``."""
        return _answer(urllib.request.Request(f"{self.url}{path}"), timeout_s)

    @property
    def arguments(self) -> list[str]:
        """What it was told beside the model's path and the address."""
        return self._command[self._command.index("--port") + 2 :]

    def pid(self) -> int:
        """The process that was started: the HTTP server and tokenizer manager."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def running(self) -> bool:
        """Whether it was started and its first process is alive."""
        return self._process is not None and self._process.poll() is None

    def scheduler_pids(self) -> list[int]:
        """The processes that run the model, one per rank."""
        return [pid for pid in _group(self.pid()) if "sglang::scheduler" in _title(pid)]

    def log_text(self) -> str:
        """All that the server has printed so far."""
        return self._log.read_text(errors="replace") if self._log else ""

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerDied(self._words(f"exit status {self._process.returncode}"))
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=20):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.25)
        raise ServerDied(self._words(f"not healthy within {START_TIMEOUT_S:.0f} s"))

    def _words(self, what: str) -> str:
        tail = "\n".join(self.log_text().splitlines()[-40:])
        return f"SGLang: {what}: {' '.join(self._command)}\n{tail}"


def _die_with_parent() -> None:
    """A test run that is killed leaves no server: SGLang's own children do the same."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def arguments(
    model_dir: Path,
    *,
    tp: int = 1,
    chunked_prefill: int | None = None,
    max_running: int = 8,
    max_total_tokens: int = 8192,
) -> list[str]:
    """What SGLang is told beside the model's path."""
    return [
        *("--device", "cpu", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--disable-cuda-graph"),
        *("--tp-size", str(tp), "--max-running-requests", str(max_running)),
        *("--max-total-tokens", str(max_total_tokens)),
        *_when(chunked_prefill is not None, "--chunked-prefill-size", str(chunked_prefill)),
        *_when(not (model_dir / "tokenizer.json").exists(), "--skip-tokenizer-init"),
    ]


def environment(tp: int, plugin: str, extra: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with what SGLang needs on a CPU, and ``extra``."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HSTRANSPORT", "SGLANG_"))}
    env |= ENVIRONMENT
    if tp > 1:
        # One core to each rank; SGLang's own choice needs NUMA nodes.
        cores = sorted(os.sched_getaffinity(0))
        bind = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = bind
    if plugin == "off":
        env["SGLANG_PLUGINS"] = "hstransport_rig_mla"
    for key, value in extra.items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = value
    return env


def _when(condition: bool, *args: str) -> tuple[str, ...]:
    return args if condition else ()


def _answer(request: urllib.request.Request, timeout_s: float) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        words = e.read().decode(errors="replace")
        raise RuntimeError(f"{request.full_url}: HTTP {e.code}: {words}") from None


def _free_port() -> int:
    """A port that nobody has, outside the range out of which the system gives any to anybody."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _signal_group(leader: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left: that is what was wanted
        os.killpg(leader, sig)


def _wait_until_gone(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < deadline and (process.poll() is None or _group(process.pid)):
        time.sleep(0.05)


def _group(leader: int) -> list[int]:
    """Live processes of that process group (zombies left out)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):
                continue  # it ended meanwhile
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return sorted(found)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
