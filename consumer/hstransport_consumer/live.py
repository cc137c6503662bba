"""A sample out of the ring: rows that are views of records, which it holds until it lets go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hstransport.errors import LeaseError
from hstransport.protocol import End, SessionInfo, Start, TokenIds
from hstransport.ring import Record
from hstransport.tags import Label, decode_loss_mask

from .states import State
from .stream import States
from .tensors import to_torch


class Lease:
    """A record that several samples may share; released when the last lets go."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.users = 0

    def take(self) -> None:
        self.users += 1

    def drop(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.record.release()


class Fragment:
    """Consecutive rows of one sample: ``[planes, rows, hidden]``, in the ring or copied out."""

    def __init__(self, position: int, states: States, lease: Lease) -> None:
        self.position = position
        self.states = states
        self.lease: Lease | None = lease
        lease.take()

    def copy_out(self) -> int:
        """Leave the ring; returns the bytes now held in memory of our own."""
        if self.lease is None:
            return 0
        self.states = self.states.copy()
        self.free()
        return self.states.nbytes

    def free(self) -> None:
        if self.lease is not None:
            lease, self.lease = self.lease, None
            lease.drop()


class LiveSample:
    """One sample as it came off the ring. Its arrays are valid until the loop turns."""

    def __init__(
        self,
        info: SessionInfo,
        start: Start,
        end: End | None,
        state: State,
        states: States,
        fragments: list[Fragment],
    ) -> None:
        self.info = info
        self.id = start.id
        self.request_id = start.rid
        self.labels: Mapping[str, Label] = start.labels
        self.state = state.value
        """``whole`` or why not, as in the shards."""
        self.reason = end.reason if end else State.UNFINISHED.value
        self.layers = info.layer_names
        """Canonical layer ids in the order of the planes, then ``"final"``."""
        output = end.output if end else np.empty(0, np.int32)
        self.tokens = states.shape[1]
        self.token_ids: TokenIds = np.concatenate([start.prompt, output])[: self.tokens]
        self.output_ids: TokenIds = output
        self.prompt_tokens = len(start.prompt)
        mask = start.loss_mask
        self.loss_mask = None if mask is None else decode_loss_mask(mask, self.tokens)
        self._states: States | None = states
        self._fragments = fragments

    @property
    def hidden_states(self) -> npt.NDArray[np.uint16]:
        """bf16 bits, ``[tokens, layers, hidden]``; a view without a copy (rows are strided)."""
        return self._valid().transpose(1, 0, 2)

    def __getitem__(self, layer: int | str) -> npt.NDArray[np.uint16]:
        """bf16 bits of one layer, ``[tokens, hidden]``, contiguous. KeyError names the layers."""
        if layer not in self.layers:
            raise KeyError(f"layer {layer!r} was not captured; there are {list(self.layers)}")
        plane: npt.NDArray[np.uint16] = self._valid()[self.layers.index(layer)]
        return plane

    def torch(self) -> Any:
        """``[tokens, layers, hidden]`` torch.bfloat16 on the same memory. Needs torch."""
        return to_torch(self.hidden_states)

    @property
    def zero_copy(self) -> bool:
        """Whether the arrays are views of the ring."""
        self._valid()
        return any(f.lease is not None for f in self._fragments)

    def copy(self) -> LiveSample:
        """The same sample in memory of its own, valid for ever."""
        twin = object.__new__(LiveSample)
        twin.__dict__.update(self.__dict__)
        twin._states = self._valid().copy()
        twin._fragments = []
        return twin

    def release(self) -> None:
        """End the lease; called when the loop turns. Arrays taken from it must not be read."""
        self._states = None
        for fragment in self._fragments:
            fragment.free()
        self._fragments = []

    def _valid(self) -> States:
        if self._states is None:
            raise LeaseError(
                f"sample {self.id!r} was given back when the loop turned: take sample.copy() of "
                "what is to be kept"
            )
        return self._states
