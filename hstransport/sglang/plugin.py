"""The plugin's hooks on one scheduler process.

Whatever goes wrong here after the server has started is logged, ends capture and lets serving go
on, except that a hook that proves dead in the first forward pass stops the server
(HSTRANSPORT_ON_DEAD_HOOK).
"""

from __future__ import annotations

import logging
from typing import Any

from .._core import Planes
from ..copyout import Copier, DeviceCopier, HostCopier
from ..errors import CaptureError
from ..exporter import DecodeRun
from ..follower import Follower
from ..ring_making import RingInTheMaking
from ..settings import Settings
from ..tap import Forward, Tap
from .batch import plan
from .graphs import DecodeGraphs
from .layers import require_captured
from .modes import refuse_resolved_widths, refuse_unproven
from .request import SGLangRequest
from .server import (
    capturing,
    cuda_device,
    current_stream_of,
    dp_rank,
    session_info,
    stage_bytes_for,
    tp_rank,
)
from .switch_on import switch_on
from .targets import FORWARD, LOGITS_FORWARD, RESULT, RUN_BATCH, resolve

logger = logging.getLogger(__name__)

_PASS_CALLS = 12  # of these hooks: more than three passes make, and a result is one pass late
_LOOK_EVERY = 32  # results


class Plugin:
    """State of one scheduler process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._dp_rank = 0
        self._layers: tuple[int, ...] = ()
        self._layer_hooks: Any = None  # LayerHooks, where the model does not hand its layers out
        self._check: Any = None  # LayerCheck, until the captured layers are verified
        self._mismatch: CaptureError | None = None  # what it found before capture began
        self._runner: Any = None
        self._device: int | None = None  # ordinal of the CUDA device; None: the model is on the CPU
        self._ring: RingInTheMaking | None = None  # only on the rank that writes
        self._copier: Copier = HostCopier()
        self._tap: Tap | None = None
        self._batch: Any = None  # the ScheduleBatch whose forward pass is running
        self._armed = False  # the running pass has rows that are wanted
        self._states: tuple[Any, Any] | None = None  # (final, aux) of that pass
        self._graphs = DecodeGraphs()
        self._keeps_graphs = False
        self._decode_mode: Any = None  # ForwardMode.DECODE, once it was seen
        self._current_stream: Any = None  # torch's current stream of a device, as a handle
        self._results = 0
        self.unhooked: dict[str, Any] = {}  # SGLang's own functions, by the name of the hook
        # Hooks of a forward pass that were not called yet, while the first pass is awaited.
        self._silent: set[str] = set()
        self._heard = 0

    # Each hook has AROUND's signature: the original, then the original's own arguments.

    def load_model(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(runner, "is_draft_worker", False):
            return original(runner, *args, **kwargs)
        refuse_unproven(runner.server_args)
        self._device = cuda_device(runner)
        num_layers = int(runner.model_config.num_hidden_layers)
        self._layers = self._settings.layers.resolve(num_layers)
        info = session_info(self._settings, runner, self._layers, self._dp_rank)
        writes = tp_rank() == 0
        if writes:
            self._ring = RingInTheMaking(self._settings, info)
        result = original(runner, *args, **kwargs)
        # On every rank, so that all ranks of a tensor-parallel group run the same graph.
        hooked = switch_on(runner, self._layers, self._settings.layers_by, self._device)
        if hooked is not None:
            from .layer_hooks import LayerHooks

            self._layer_hooks = LayerHooks(hooked, self._layers, info.hidden)
        if writes and self._layers:
            from .verify_layers import LayerCheck

            self._check = LayerCheck(runner.model, self._layers, info.hidden, hooked)
        if writes and self._device is not None:
            stage_bytes = self._settings.stage_bytes or stage_bytes_for(runner.server_args, info)
            self._copier = DeviceCopier(self._device, stage_bytes)
            self._current_stream = current_stream_of()
            self._keeps_graphs = self._settings.rows == "all"
        self._runner = runner
        return result

    def scheduler_init(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        self._dp_rank = dp_rank(original, scheduler, args, kwargs)
        original(scheduler, *args, **kwargs)
        for target, function in self.unhooked.items():
            if resolve(target) is function:
                why = f"SGLang did not apply the plugin's hook on {target}; its log says why"
                self._give_up(CaptureError(why))
                return
        if self._runner is None:
            why = (
                "ModelRunner.load_model was never called: this SGLang builds its model in a way "
                "that the plugin does not know"
            )
            self._give_up(CaptureError(why))
            return
        refuse_resolved_widths()
        if self._layer_hooks is None:
            require_captured(self._runner.model, self._layers)
        if self._mismatch is not None:
            raise self._mismatch
        if self._ring is None:
            logger.info("hstransport: tensor-parallel rank %d leaves writing to rank 0", tp_rank())
            return
        exporter = self._ring.open(self._copier)
        info = self._ring.info
        follower = Follower(
            info,
            exporter.recorder,
            SGLangRequest,
            selection=self._settings.requests,
            budget_bytes=self._settings.budget_bytes,
        )
        self._tap = Tap(info, exporter, follower)
        if self._check is not None:
            logger.info("hstransport: layers are compared in the first pass outside CUDA graphs")
        self._silent = {RUN_BATCH, FORWARD, LOGITS_FORWARD, RESULT}

    def dead_hook(self, error: CaptureError) -> None:
        """Stop the server with that error, or say that it serves without capture."""
        if self._settings.on_dead_hook == "stop":
            raise CaptureError(
                f"{error}. HSTRANSPORT_ON_DEAD_HOOK=serve, or no HSTRANSPORT, serves without "
                "capture"
            ) from None
        logger.error("hstransport: NOTHING WILL BE CAPTURED, the server only serves: %s", error)

    def _give_up(self, error: CaptureError) -> None:
        self.dead_hook(error)
        if self._ring is not None:
            self._ring.discard()

    def _hear(self, hook: str, passed: bool = False) -> None:
        """A hook was called for the first time, or again while another was not.

        ``passed``: a whole forward pass must have come by.
        """
        self._silent.discard(hook)
        self._heard += 1
        if self._silent and (passed or self._heard > _PASS_CALLS):
            dead, self._silent = sorted(self._silent), set()
            why = f"a forward pass did not come through the plugin's hook on {' and '.join(dead)}"
            self.dead_hook(CaptureError(why))
            if self._tap is not None:
                self._tap.stop(why)

    def run_batch(self, original: Any, scheduler: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        if self._silent:
            self._hear(RUN_BATCH)
        self._batch = batch
        try:
            return original(scheduler, batch, *args, **kw)
        finally:
            self._batch = None

    def model_forward(
        self, original: Any, runner: Any, forward_batch: Any, *a: Any, **kw: Any
    ) -> Any:
        if self._silent:
            self._hear(FORWARD)
        tap, batch = self._tap, self._batch
        if tap is None or batch is None or runner is not self._runner:
            return original(runner, forward_batch, *a, **kw)
        run = None
        if forward_batch.forward_mode is self._decode_mode:
            run = tap.going_on(batch.reqs, getattr(forward_batch, "seq_lens_sum", None))
        work = run
        if not run:
            work = tap.guarded(plan, tap, self._settings.requests, batch.reqs, forward_batch)
            if isinstance(work, DecodeRun):
                self._decode_mode = forward_batch.forward_mode
        if not work:
            return original(runner, forward_batch, *a, **kw)
        self._states, self._armed = None, True
        try:
            output = original(runner, forward_batch, *a, **kw)
        finally:
            states, self._states, self._armed = self._states, None, False
        graphs = self._graphs
        replayed = graphs.replayed
        same_graph = replayed is not None and replayed.bs == graphs.replayed_size
        if run and same_graph and output.can_run_graph:
            # The usual step: the graph that was replayed for the last one, over the same batch.
            tap.guarded(tap.again, run, self._current_stream(self._device))
        else:
            tap.guarded(tap.take, work, lambda: self._planes(tap, work, states, output))
        return output

    def _planes(
        self,
        tap: Tap,
        work: Forward | DecodeRun,
        states: tuple[Any, Any] | None,
        output: Any,
    ) -> Planes:
        """The states of the pass that has just been run, or enqueued."""
        if self._mismatch is not None:
            raise self._mismatch
        self._graphs.replayed = None
        stream = None if self._device is None else self._current_stream(self._device)
        if states is not None:
            return tap.planes(states, stream)
        if stream is not None and output.can_run_graph and isinstance(work, DecodeRun):
            return self._graphs.planes(tap, self._runner, stream)
        raise CaptureError("the forward pass did not come through LogitsProcessor.forward")

    def logits_forward(
        self,
        original: Any,
        processor: Any,
        input_ids: Any,
        hidden_states: Any,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        captured = aux_hidden_states
        if self._layer_hooks is not None:
            captured = self._take_hooked()
        if self._check is not None:
            self._verify(captured)
        if self._silent:
            self._hear(LOGITS_FORWARD)
        if self._armed:
            self._states = (hidden_states, captured)
        elif self._keeps_graphs and capturing() and logits_metadata.forward_mode.is_decode():
            self._graphs.captured(len(hidden_states), (hidden_states, captured))
        return original(
            processor,
            input_ids,
            hidden_states,
            lm_head,
            logits_metadata,
            aux_hidden_states,
            *args,
            **kwargs,
        )

    def _take_hooked(self) -> Any:
        """What the hooks on the layers saw in this pass; None when that is not to be trusted."""
        try:
            return self._layer_hooks.take()
        except Exception as e:
            self._not_captured(e)
            return None

    def _verify(self, captured: Any) -> None:
        """Compare what the model captured with what its layers were given, until one pass shows."""
        try:
            if not self._check.holds(captured):
                return
            ids = ",".join(map(str, self._layers))
            logger.info("hstransport: layers %s are those that the model computes with", ids)
        except Exception as e:
            self._check.close()
            self._not_captured(e)
        self._check = None

    def _not_captured(self, error: Exception) -> None:
        """States of inner layers are not what they should be: nothing is captured any more."""
        if self._mismatch is None:
            told = error if isinstance(error, CaptureError) else CaptureError(f"layers: {error}")
            self._mismatch = told
            if self._tap is not None and not self._armed:
                self._tap.stop(str(told), error)

    def process_batch_result(
        self, original: Any, scheduler: Any, batch: Any, *a: Any, **kw: Any
    ) -> Any:
        if self._silent:
            self._hear(RESULT, passed=batch.forward_mode.is_extend())
        result = original(scheduler, batch, *a, **kw)
        if self._tap is not None:
            self._tap.guarded(self._sweep, self._tap, scheduler, batch)
        return result

    def _sweep(self, tap: Tap, scheduler: Any, batch: Any) -> None:
        over = [req for req in batch.reqs if req.finished_reason is not None]
        self._results += 1
        queue = scheduler.waiting_queue
        # Requests may have ended outside any batch. To look at all of them takes long, so it is
        # done now and then while work goes on, and always when this may be the last batch for long.
        if self._results % _LOOK_EVERY == 0 or (
            not queue and tap.follower.count != len(batch.reqs)
        ):
            # A retracted request waits to be computed again; if it does not wait, the server gave
            # it up (out of memory, queue full, timed out), which sets no finish reason.
            waiting = {id(req) for req in queue}
            over += tap.follower.over()
            over += [req for req in tap.follower.retracted() if id(req) not in waiting]
        if over:
            tap.post(tap.follower.finish, over)

    def update_weights(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._tap is not None:
            why = "the model's weights were updated; restart the server to capture it"
            self._tap.stop(why, wait_s=10.0)  # to unpin memory must not meet a new graph capture
        return original(*args, **kwargs)

    def abort_request(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        tap = self._tap
        if tap is None:
            return original(scheduler, *args, **kwargs)
        waiting = list(scheduler.waiting_queue)
        result = original(scheduler, *args, **kwargs)
        # Those that left the queue are over, though SGLang sets no finish reason in them.
        left = {id(req) for req in scheduler.waiting_queue}
        gone = [req for req in waiting if id(req) not in left]
        if gone:
            tap.guarded(tap.post, tap.follower.finish, gone)
        return result
