"""Where prompts go: what a server reached over HTTP and an engine of one's own have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..errors import ServerError


class Unreachable(ServerError):
    """No answer, or an answer that says to come back: worth another try."""


class Refused(ServerError):
    """The request was understood and refused: another try would be refused as well."""


class Target(AbstractContextManager[Any], Protocol):
    """Runs prompts through a model whose states are captured, from entering it to leaving it.

    Entering raises ServerError or ConfigError when it cannot be made ready.
    """

    @property
    def failure(self) -> str | None:
        """Why nothing will be answered or stored any more; None while there is hope."""

    def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Run one prompt: the body of SGLang's POST /generate, and its answer.

        Called by many threads at once. Raises Unreachable or Refused.
        """


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer itself; Unreachable when SGLang aborted the request."""
    finish = (answer.get("meta_info") or {}).get("finish_reason") or {}
    if finish.get("type") == "abort":
        raise Unreachable(f"the server aborted the request: {finish.get('message', '')}")
    return answer
