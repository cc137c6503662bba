"""Arguments with which several commands reach a running server."""

from __future__ import annotations

import argparse
import os

from ..client.http import Server
from ..errors import ConfigError
from .checks import positive_float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`connect` takes beside ``--server``."""
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=600.0,
        metavar="SECONDS",
        help="the longest to wait for an answer (default: 600)",
    )
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable with the server's API key",
    )


def connect(arguments: argparse.Namespace) -> Server:
    """The server of ``--server``; nothing is sent yet. Raises ConfigError."""
    return Server(
        arguments.server, timeout_s=arguments.timeout, api_key=_api_key(arguments.api_key_env)
    )


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"--api-key-env {name}: that environment variable is not set")
    return key
