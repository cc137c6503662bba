"""A stand-in for an SGLang server that misbehaves on demand: refuses, fails, hangs, hangs up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Behaviour = Callable[[int, dict[str, Any]], tuple[int, Any] | str]
"""(number of the request, its body) -> (HTTP status, JSON answer), or "hang", or "hang up"."""


def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
    """What a server in good health says."""
    tokens = len(body.get("input_ids") or body["text"].split())
    reason = {"type": "length", "length": 1}
    return 200, {"meta_info": {"prompt_tokens": tokens, "finish_reason": reason}}


class StubServer:
    """Answers on a loopback port; ``requests`` are the bodies of /generate in order of arrival."""

    def __init__(self, behaviour: Behaviour = answer, info: Any = None) -> None:
        self.behaviour = behaviour
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._info = {"model_path": "/models/stub"} if info is None else info
        self._closing = threading.Event()

    def __enter__(self) -> StubServer:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(200 if self.path == "/model_info" else 404, stub._info)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub._lock:
                    stub.headers.append(dict(self.headers))
                    stub.requests.append(body)
                    number = len(stub.requests)
                    stub.at_once += 1
                    stub.most_at_once = max(stub.most_at_once, stub.at_once)
                try:
                    said = stub.behaviour(number, body)
                    if said == "hang":
                        stub._closing.wait(20)
                finally:
                    # Before the answer: whoever has it may ask again before this thread goes on.
                    with stub._lock:
                        stub.at_once -= 1
                if said not in ("hang", "hang up"):
                    self._say(*said)

            def _say(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()


def slow(seconds: float) -> Behaviour:
    def behave(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(seconds)
        return answer(number, body)

    return behave
