"""The whole way once: a real SGLang with SmolLM2, the consumer, `hstransport extract`, the checks.

`make demo` runs this. It works on any machine: SGLang serves on the CPU. A run that was interrupted
is continued by the next; after a run that came to its end, the next begins anew.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rig.models import model_dir
from rig.server import SGLangServer

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "demo" / "prompts.jsonl"
DATA = ROOT / "data"
OUT = DATA / "shards"
DONE = DATA / "demo-done"
BIN = Path(sys.executable).parent
SESSION = "demo"


def main() -> int:
    DATA.mkdir(exist_ok=True)
    if DONE.exists():
        shutil.rmtree(OUT, ignore_errors=True)
        DONE.unlink()
    with tempfile.TemporaryDirectory(prefix="hstransport-demo-", dir="/dev/shm") as rings:
        asked = capture(Path(rings))
    if asked:
        return asked
    say("every checksum, every row")
    verified = run("hstransport", "verify", OUT)
    say("what is in the shards")
    inspected = run("hstransport", "inspect", OUT)
    if verified or inspected:
        return verified or inspected
    DONE.touch()
    say(f"done: from hstransport_consumer import open_shards; open_shards('{shown(OUT)}')[0]")
    return 0


def capture(rings: Path) -> int:
    """Serve, consume, extract; returns extract's exit status, or the consumer's."""
    env = {
        "HSTRANSPORT": "1",
        "HSTRANSPORT_SESSION": SESSION,
        "HSTRANSPORT_DIR": str(rings),
        "HSTRANSPORT_REQUESTS": "tagged",  # not SGLang's own warm-up request
    }
    log = DATA / "sglang.log"
    log.unlink(missing_ok=True)
    with consumer(rings) as consuming:
        say(f"starting SGLang with SmolLM2-135M on the CPU (log: {shown(log)})")
        started = time.monotonic()
        with SGLangServer(model_dir("smollm2"), env=env, log=log, max_running=4) as server:
            say(f"it serves at {server.url} after {time.monotonic() - started:.0f} s; extracting")
            where = ("--server", server.url, "--prompts", PROMPTS, "--out", OUT)
            asked = run("hstransport", "extract", *where)
        say("stopped the server")
    return asked or consuming.returncode


@contextlib.contextmanager
def consumer(rings: Path) -> Iterator[subprocess.Popen[bytes]]:
    """hstransport-consumer in the background; ended by SIGTERM, as a service would be."""
    log = DATA / "consumer.log"
    say(f"starting hstransport-consumer --out {shown(OUT)} (log: {shown(log)})")
    command = [BIN / "hstransport-consumer", "--out", OUT, "--session", SESSION, "--dir", rings]
    # A session of its own: Ctrl-C is for the extraction, the consumer then ends in order.
    with log.open("wb") as output:
        process = subprocess.Popen(command, start_new_session=True, stderr=output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode:
            say(f"the consumer failed:\n{log.read_text(errors='replace')[-2000:]}")


def run(command: str, *args: str | Path) -> int:
    return subprocess.run([BIN / command, *args]).returncode


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def say(words: str) -> None:
    print(f"demo: {words}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
