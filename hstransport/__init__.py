"""hstransport: hidden states of a running SGLang server, through a shared-memory ring, to disk."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hstransport")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"
