"""An SGLang engine of one's own, and the consumer that stores what it captures.

Both are child processes (see engine_host for why), so that serving does not wait for packing and
either's death leaves what is stored, a summary and nothing running.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import ConfigError, ServerError
from ..session import find_rings
from ..settings import from_environment
from ..stale import remove_unfinished
from .child import Child
from .target import Refused, Unreachable, checked

_BLOCK_S = "120"
"""Nobody but this extraction waits for the engine. SGLang's watchdog ends it after 300 s."""
_STOP_S = 30.0
_DISCOVERY_S = 3.0
"""A consumer looks for rings twice a second. Packing may take longer: it ends that in order."""
_ENGINE, _CONSUMER = "SGLang's engine", "hstransport-consumer"


def capture_environment(
    environ: Mapping[str, str], out: Path, *, layers: str | None, rows: str | None
) -> dict[str, str]:
    """``environ`` with the plugin on, for tagged requests of a session that belongs to ``out``.

    The session's name follows from the directory, so that the next run into it takes over what is
    left in the ring of one that was killed. Raises ConfigError.
    """
    name = hashlib.sha256(bytes(out.resolve())).hexdigest()[:16]
    env = {"HSTRANSPORT_BLOCK_S": _BLOCK_S, **environ}
    env |= {
        "HSTRANSPORT": "1",
        "HSTRANSPORT_REQUESTS": "tagged",
        "HSTRANSPORT_SESSION": f"extract-{name}",
    }
    if layers is not None:
        env["HSTRANSPORT_LAYERS"] = layers
    if rows is not None:
        env["HSTRANSPORT_ROWS"] = rows
    from_environment(env)
    return env


class LocalEngine:
    """Starts SGLang's Engine and hstransport-consumer when entered, stops both when left.

    ``arguments`` are those of ``sglang.launch_server``, ``environ`` is the engine's environment
    (see ``capture_environment``), ``threads`` those of the consumer, ``say`` is told what happens.
    To be entered once, by a thread that lives as long: both processes end with it.

    Entering raises ConfigError for arguments that SGLang or the consumer refuses, and ServerError
    with the end of the log when the engine does not start.
    """

    def __init__(
        self,
        model: str,
        out: Path,
        *,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        threads: int,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        if find_spec("sglang") is None:
            raise ConfigError(
                "--model runs SGLang, which is not installed here: run this in the environment "
                "of SGLang, or give the --server that serves the model"
            )
        for word in arguments:
            if word.split("=")[0] in ("--model-path", "--model"):
                raise ConfigError(f"{word} after --: the model is what --model says")
        settings = from_environment(environ)
        if settings is None:
            raise ConfigError("the environment of an engine needs HSTRANSPORT=1")
        self.failure: str | None = None
        self._settings = settings
        self._model = model
        self._out = out
        self._arguments = ["--model-path", model, *arguments]
        self._environ = environ
        self._threads = threads
        self._timeout_s = timeout_s
        self._say = say
        self._consumer: Child | None = None
        self._engine: Child | None = None
        self._ready = threading.Event()
        self._stopping = False
        self._writing = threading.Lock()
        self._lock = threading.Lock()  # of these two; never held while anything is written
        self._pending: dict[str, concurrent.futures.Future[dict[str, Any]]] = {}
        self._ended = False

    def __enter__(self) -> LocalEngine:
        self._logs = Path(tempfile.mkdtemp(prefix="hstransport-extract-"))
        try:
            self._start()
        except BaseException as e:
            self._stop()
            if not isinstance(e, ServerError):
                shutil.rmtree(self._logs, ignore_errors=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if self.failure is None:
            shutil.rmtree(self._logs, ignore_errors=True)

    def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Run one prompt (see Target)."""
        rid = payload["rid"]
        future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        with self._lock:
            if self._ended:
                raise Unreachable(self.failure or f"{_ENGINE} has ended")
            self._pending[rid] = future
        try:
            self._send(payload)
            said = future.result(self._timeout_s)
        except concurrent.futures.TimeoutError:
            self._send({"abort": rid})
            raise Unreachable(f"no answer within {self._timeout_s:g} s") from None
        finally:
            with self._lock:
                self._pending.pop(rid, None)
        if "refused" in said:
            raise Refused(said["refused"])
        if "failed" in said:
            raise Unreachable(said["failed"])
        return checked(said["answer"])

    def _start(self) -> None:
        settings = self._settings
        ring = ("--session", settings.session, "--dir", str(settings.root))
        # First: whether it may write into the directory is known long before the model is loaded.
        self._consumer = consumer = Child(
            "hstransport_consumer",
            ["--out", str(self._out), *ring, "--threads", str(self._threads)],
            orphaned=signal.SIGTERM,
            log=self._logs / "consumer.log",
        )
        self._engine = engine = Child(
            "hstransport.client.engine_host",
            self._arguments,
            orphaned=signal.SIGKILL,
            log=self._logs / "engine.log",
            environ=self._environ,
            piped=True,
        )
        threading.Thread(target=self._read_answers, args=(engine,), daemon=True).start()
        threading.Thread(target=self._gone, args=(consumer,), daemon=True).start()
        self._say(f"starting SGLang's engine with {self._model} (log: {engine.log})")
        started = time.monotonic()
        while not self._ready.wait(0.1):
            if consumer.status() is not None:
                raise ConfigError(f"{_CONSUMER} ended:\n{consumer.last_words()}")
            if (status := engine.status()) == 2:
                raise ConfigError(f"SGLang refuses what follows --:\n{engine.last_words()}")
            if status is not None:
                raise ServerError(
                    f"{_ENGINE} did not start (exit status {status}; log: {engine.log}):\n"
                    + engine.last_words()
                )
        if not find_rings(settings.root, settings.session):
            raise ServerError(
                f"{_ENGINE} runs without hstransport's plugin: install hstransport into the "
                "environment of SGLang, and let SGLANG_PLUGINS, where it is set, name it"
            )
        self._say(f"{_ENGINE} is ready after {time.monotonic() - started:.0f} s")

    def _stop(self) -> None:
        """The engine first: what it leaves in the ring is the consumer's to store."""
        self._stopping = True
        if self._engine is not None:
            with contextlib.suppress(OSError):
                self._engine.stdin.close()  # asks it to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._engine.wait(_STOP_S if self._ready.is_set() else 0)
            self._engine.send(signal.SIGKILL)
            self._engine.wait()
        if self._consumer is not None:
            self._clear_session(self._consumer)
            self._consumer.send(signal.SIGTERM)
            if (status := self._consumer.wait()) and self.failure is None:
                self.failure = _ended(_CONSUMER, status, self._consumer.log)
        with contextlib.suppress(OSError):  # a ring that could not be drained is for the next run
            (self._settings.root / self._settings.session).rmdir()

    def _clear_session(self, consumer: Child) -> None:
        """The consumer removes drained rings by itself; told to stop, it would look for no more."""
        root, session = self._settings.root, self._settings.session
        deadline = time.monotonic() + _DISCOVERY_S
        while consumer.status() is None and time.monotonic() < deadline:
            if not find_rings(root, session):
                # The consumer holds the directory, so nobody else makes a ring in its session.
                remove_unfinished(root / session, older_than_s=0)
                break
            time.sleep(0.05)

    def _send(self, words: dict[str, Any]) -> None:
        assert self._engine is not None
        line = json.dumps(words).encode() + b"\n"
        try:
            with self._writing:
                self._engine.stdin.write(line)
                self._engine.stdin.flush()
        except (OSError, ValueError):  # the pipe is broken, or closed
            raise Unreachable(self.failure or f"{_ENGINE} has ended") from None

    def _read_answers(self, engine: Child) -> None:
        for line in engine.stdout:
            said = json.loads(line)
            if "ready" in said:
                self._ready.set()
                continue
            with self._lock:
                if future := self._pending.pop(said["rid"], None):
                    future.set_result(said)
        self._gone(engine)

    def _gone(self, child: Child) -> None:
        """Called when a child ends, or is about to: without the one the other is of no use."""
        status = child.wait()
        with self._lock:
            self._ended = True
            if not self._stopping and self.failure is None:
                name = _ENGINE if child is self._engine else _CONSUMER
                self.failure = _ended(name, status, child.log)
            for future in self._pending.values():
                future.set_exception(Unreachable(self.failure or f"{_ENGINE} has ended"))
            self._pending.clear()
        if self._engine is not None:
            self._engine.send(signal.SIGKILL)


def _ended(name: str, status: int, log: Path) -> str:
    return f"{name} ended (exit status {status}; log: {log})"
