"""The decode graphs of a server on a GPU, and where each leaves its states."""

from __future__ import annotations

from typing import Any

from .._core import Planes
from ..errors import CaptureError
from ..tap import Tap


class DecodeGraphs:
    """What each decode graph leaves its states in, by its batch size.

    To hold the tensors keeps the rest of the graph from using their memory for something else.
    """

    __slots__ = ("_states", "replayed", "replayed_size")

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Any] | Planes | None] = {}
        self.replayed: Any = None
        """SGLang's graph runner, when the last decode step was a replay."""
        self.replayed_size = 0
        """And its graph's batch size."""

    def captured(self, size: int, states: tuple[Any, Any]) -> None:
        """A graph of that batch size leaves its states, (final, captured layers), there."""
        # Two graphs of one size could not be told apart later.
        self._states[size] = None if size in self._states else states
        self.replayed = None

    def planes(self, tap: Tap, runner: Any, stream: int) -> Planes:
        """The states that the decode graph just replayed on that stream left in its memory.

        ``runner``: SGLang's ModelRunner. Raises CaptureError for a graph that is not known.
        """
        # Named graph_runner up to 0.5.11.
        graph_runner: Any = getattr(runner, "decode_cuda_graph_runner", None)
        graph_runner = graph_runner or getattr(runner, "graph_runner", None)
        size = int(graph_runner.bs)  # what the batch was padded to
        kept = self._states.get(size)
        if kept is None:
            why = "several decode graphs" if size in self._states else "no decode graph"
            raise CaptureError(f"{why} of batch size {size} were captured under the plugin's eyes")
        if not isinstance(kept, Planes):
            kept = self._states[size] = tap.planes(kept, stream)
        kept.stream = stream
        self.replayed, self.replayed_size = graph_runner, size
        return kept
