"""Fixtures that every part of the test suite shares: shared-memory folders, models, servers.

Tests marked ``sglang`` start a real server. A test asks for one by its configuration and gets the
one that is already running when the configuration is the same, so keep tests of one configuration
together in a module: a start takes 15 to 30 seconds. Each xdist worker has one server at most.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rig.models import model_dir as make_model
from rig.server import SGLangServer

SHM = Path("/dev/shm")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has started this in the background: children would ignore their interrupts as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make stress` says how long; without it the same tests are short."""
    parser.addoption(
        "--stress", type=float, default=0, metavar="MINUTES", help="each fuzzer's time"
    )


@pytest.fixture(scope="session")
def stress_minutes(pytestconfig: pytest.Config) -> float:
    """Minutes for each fuzzer, and the long form of the kill tests; 0 outside of `make stress`."""
    return float(pytestconfig.getoption("--stress"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say why a test cannot run here. In CI the lack of SGLang is a failure of the setup."""
    if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU (no /dev/nvidiactl)")
    if item.get_closest_marker("sglang") and importlib.util.find_spec("sglang") is None:
        reason = f"SGLang is not installed for {sys.executable}: run `make setup`"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def _shm_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hstransport-test-", dir=SHM))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def ring_dir() -> Iterator[Path]:
    """A folder in shared memory for one test's rings (a session directory's parent)."""
    yield from _shm_dir()


@pytest.fixture(scope="module")
def module_ring_dir() -> Iterator[Path]:
    """Like ``ring_dir``, kept for the whole module: for servers that several tests share."""
    yield from _shm_dir()


@pytest.fixture(scope="session")
def model_dir() -> Callable[[str], Path]:
    """``model_dir("llama")``: the folder of llama, qwen3, dsv3 or smollm2, made on first use."""
    return make_model


class ServerPool:
    """Keeps the last server for the next test that wants the same configuration."""

    def __init__(self) -> None:
        self._key: Any = None
        self._server: SGLangServer | None = None

    def get(
        self,
        model: str = "llama",
        *,
        env: Mapping[str, str | None] | None = None,
        extra_args: Sequence[str] = (),
        **config: Any,
    ) -> SGLangServer:
        """Arguments as SGLangServer's, with a model's name in place of its folder."""
        env = dict(env or {})
        key = (model, sorted(env.items()), tuple(extra_args), sorted(config.items()))
        if self._server is None or key != self._key or not self._server.running():
            self.stop()
            server = SGLangServer(make_model(model), env=env, extra_args=extra_args, **config)
            server.start()
            self._key, self._server = key, server
        return self._server

    def stop(self) -> None:
        """Stop the server that is up, if any; the next ``get`` starts a fresh one."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(abrupt=True)  # its own end takes 5 s, of which no test is the wiser


@pytest.fixture(scope="module")
def servers() -> Iterator[ServerPool]:
    """``servers.get("llama", tp=2, env={...})``: a running server, stopped after the module."""
    pool = ServerPool()
    yield pool
    pool.stop()
