"""The few HTTP calls that are made of an SGLang server, with standard library means only."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError
from .target import Refused, Unreachable, checked

__all__ = ["ModelInfo", "Refused", "Server", "Unreachable"]

_PROBE_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 256 << 20


@dataclass(frozen=True)
class ModelInfo:
    """What the server says of its model."""

    model: str
    tokenizer: str


class Server:
    """An SGLang server by its URL. One connection a request, so threads share nothing."""

    failure: None = None
    """A server may always come back, and its consumer is somebody else's."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError as e:
            raise ConfigError(f"server {url!r}: {e}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"server {url!r} is not a URL such as http://127.0.0.1:30000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port, self._prefix = host, port, parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass  # it serves others too

    def model_info(self) -> ModelInfo:
        """Ask what is served; Unreachable when nobody answers, Refused when it is no SGLang."""
        try:
            info = self._call("GET", "/model_info", None, _PROBE_TIMEOUT_S)
        except Refused:
            info = self._call("GET", "/get_model_info", None, _PROBE_TIMEOUT_S)  # SGLang <= 0.5.5
        if not isinstance(info, dict) or not isinstance(info.get("model_path"), str):
            raise Refused(f"{self.url} answers, but not as an SGLang server does: check --server")
        model = info["model_path"]
        return ModelInfo(model, info.get("tokenizer_path") or model)

    def version(self) -> str | None:
        """The server's SGLang release, None when it does not say. Raises Unreachable."""
        for path in ("/server_info", "/get_server_info"):
            try:
                info = self._call("GET", path, None, _PROBE_TIMEOUT_S)
            except Refused:
                continue
            version = info.get("version") if isinstance(info, dict) else None
            return version if isinstance(version, str) else None
        return None

    def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """POST /generate for one prompt; raises Unreachable or Refused."""
        return self._answered(self._generate(payload))

    def generate_at_once(self, payloads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One POST /generate for several prompts, which the server may compute in one batch.

        All ``payloads`` have the same keys. Raises as :meth:`generate`.
        """
        answers = self._generate({key: [p[key] for p in payloads] for key in payloads[0]})
        if not isinstance(answers, list) or len(answers) != len(payloads):
            raise Refused(f"{self.url}/generate gave no list of {len(payloads)} answers")
        return [self._answered(answer) for answer in answers]

    def _generate(self, body: dict[str, Any]) -> Any:
        return self._call("POST", "/generate", json.dumps(body).encode(), self._timeout_s)

    def _answered(self, answer: Any) -> dict[str, Any]:
        """The answer to one prompt, if it is one."""
        if not isinstance(answer, dict):
            raise Refused(f"{self.url}/generate answered with a {type(answer).__name__}")
        return checked(answer)

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        connection = self._connection(timeout_s)
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            answer = connection.getresponse()
            data = answer.read(_MAX_ANSWER_BYTES)
        except TimeoutError:
            raise Unreachable(f"{self.url}{path}: no answer within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as e:
            raise Unreachable(f"{self.url}{path}: {_words(e)}") from None
        finally:
            connection.close()
        if answer.status >= 500 or answer.status in (408, 425, 429):
            raise Unreachable(f"{self.url}{path}: HTTP {answer.status}: {_message(data)}")
        if answer.status >= 300:
            raise Refused(f"HTTP {answer.status}: {_message(data)}")
        try:
            return json.loads(data)
        except ValueError:
            raise Refused(f"{self.url}{path}: the answer is not JSON: {data[:80]!r}") from None

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout_s, context=self._tls
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _message(data: bytes) -> str:
    """The server's own words out of an error's body."""
    try:
        body = json.loads(data)
    except ValueError:
        return data[:300].decode(errors="replace").strip()
    while isinstance(body, dict):
        for key in ("error", "message", "detail"):
            if key in body:
                body = body[key]
                break
        else:
            return json.dumps(body)[:300]
    return str(body)[:300]
