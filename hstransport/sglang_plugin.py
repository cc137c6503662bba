"""The plugin: the one file that names SGLang's internals.

``register`` is found through the entry-point group ``sglang.srt.plugins`` in every process of
SGLang (0.5.11 and later; see ``patched`` for earlier ones) and does nothing unless HSTRANSPORT=1.
Each hook stands beside a comment that says why there. Whatever goes wrong here after the server has
started is logged, ends capture and lets serving go on, except that a hook that proves dead in the
first forward pass stops the server (HSTRANSPORT_ON_DEAD_HOOK).
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import pkgutil
import secrets
import sys
import threading
import time
from typing import Any

from . import __version__
from ._core import Planes
from .channel import Publisher
from .copyout import Copier, DeviceCopier, HostCopier
from .errors import CaptureError, ConfigError, HsTransportError
from .exporter import DecodeRun, Exporter
from .follower import Follower, Noted, Pass
from .layers import CannotHandOut, enable_capture, refuse_out_of_range, require_captured
from .protocol import (
    ABORTED,
    FINISHED,
    LENGTH,
    SessionInfo,
    pack_info,
)
from .ring import RingWriter
from .session import ring_path
from .settings import Settings, from_environment
from .stale import report_older_rings
from .tap import Forward, Tap

logger = logging.getLogger(__name__)

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# Up to 0.5.12 the scheduler itself updates weights.
_WEIGHTS = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
    _SCHEDULER,
)
_SOURCES = ("disk", "distributed", "tensor", "ipc")
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
# Hooks that every first forward pass comes through.
_RUN_BATCH = f"{_SCHEDULER}.run_batch"
_FORWARD = f"{_RUNNER}.forward"
_LOGITS_FORWARD = f"{_LOGITS}.forward"
_RESULT = f"{_SCHEDULER}.process_batch_result"
_PASS_CALLS = 12  # of these hooks: more than three passes make, and a result is one pass late
_PROGRESS_EVERY_S = 5.0
_IMAGES = "the request has multimodal_inputs"
_LOOK_EVERY = 32  # results

# Modes in which rows, positions or requests would not be what they seem. What is not proven right
# is refused by name: (server argument, value at which it is harmless, what to do).
_REFUSED = (
    ("pp_size", 1, "run without pipeline parallelism"),
    ("enable_dp_attention", False, "run without --enable-dp-attention"),
    ("attn_dp_size", 1, "run without data-parallel attention"),
    ("attn_cp_size", 1, "run without context parallelism"),
    ("dcp_size", 1, "run without context parallelism"),
    ("enable_prefill_cp", False, "run without context parallelism"),
    ("enable_prefill_context_parallel", False, "run without context parallelism"),
    ("enable_lora", False, "run without LoRA adapters"),
    ("lora_paths", None, "run without LoRA adapters"),
    ("enable_torch_compile", False, "run without --enable-torch-compile"),
    ("speculative_algorithm", None, "run without speculative decoding"),
    ("disaggregation_mode", "null", "run without prefill-decode disaggregation"),
    ("enable_two_batch_overlap", False, "run without --enable-two-batch-overlap"),
    ("enable_pdmux", False, "run without --enable-pdmux"),
    ("is_embedding", False, "serve a generation model"),
    ("dllm_algorithm", None, "serve an autoregressive model"),
)


def register() -> None:
    """Entry point. Bad settings and an SGLang that lacks a hooked name stop the server at once."""
    hooks = wanted_hooks()
    if not hooks:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def wanted_hooks() -> dict[str, Any]:
    """What is to be put around SGLang's functions in this process: name -> hook; often nothing."""
    try:
        settings = from_environment(os.environ)
        if settings is None:
            return {}
        plugin = Plugin(settings)
        try:
            hooks = _hooks(plugin)
            # What stands there now is no hook of ours.
            plugin.unhooked = {target: _resolve(target) for target in hooks}
        except CaptureError as e:
            plugin.dead_hook(e)
            return {}
    except HsTransportError as e:
        # SGLang logs and forgets an Exception of a plugin: only SystemExit stops the server.
        sys.exit(f"hstransport: {e}")
    return hooks


def _hooks(plugin: Plugin) -> dict[str, Any]:
    weights = _first_there(_WEIGHTS, f"update_weights_from_{_SOURCES[0]}")
    return {
        # The model exists, graphs are not captured and memory is not divided yet: the place to
        # switch layers on and to take memory on the GPU.
        f"{_RUNNER}.load_model": plugin.load_model,
        # All is known: the place to begin, or refuse.
        f"{_SCHEDULER}.__init__": plugin.scheduler_init,
        # Which requests the coming forward pass belongs to.
        _RUN_BATCH: plugin.run_batch,
        # The one call that has every token's final state and all captured layers together. It is
        # not called when a decode graph is replayed, but when that graph is captured.
        _LOGITS_FORWARD: plugin.logits_forward,
        # Positions are known here, and warm-up and graph capture never come through here.
        _FORWARD: plugin.model_forward,
        # Requests finish in here and, when aborted while they wait, only in abort_request.
        _RESULT: plugin.process_batch_result,
        f"{_SCHEDULER}.abort_request": plugin.abort_request,
        # From here on the states would be another model's.
        **{f"{weights}.update_weights_from_{source}": plugin.update_weights for source in _SOURCES},
    }


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
        self._ring: _RingInTheMaking | None = None  # only on the rank that writes
        self._copier: Copier = HostCopier()
        self._tap: Tap | None = None
        self._batch: Any = None  # the ScheduleBatch whose forward pass is running
        self._armed = False  # the running pass has rows that are wanted
        self._states: tuple[Any, Any] | None = None  # (final, aux) of that pass
        # What each decode graph leaves its states in, by its batch size. To hold the tensors keeps
        # the rest of the graph from using their memory for something else.
        self._graphs: dict[int, tuple[Any, Any] | Planes | None] = {}
        self._keeps_graphs = False
        self._replayed: Any = None  # the graph runner, when the last decode step was a replay
        self._replayed_size = 0  # and its graph's batch size
        self._decode_mode: Any = None  # ForwardMode.DECODE
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
        _refuse_unproven(runner.server_args)
        self._device = _cuda_device(runner)
        num_layers = int(runner.model_config.num_hidden_layers)
        self._layers = self._settings.layers.resolve(num_layers)
        info = _session_info(self._settings, runner, self._layers, self._dp_rank)
        writes = _tp_rank() == 0
        if writes:
            self._ring = _RingInTheMaking(self._settings, info)
        result = original(runner, *args, **kwargs)
        # On every rank, so that all ranks of a tensor-parallel group run the same graph.
        hooked = self._switch_on(runner, num_layers, info.hidden)
        if writes and self._layers:
            from .verify_layers import LayerCheck

            self._check = LayerCheck(runner.model, self._layers, info.hidden, hooked)
        if writes and self._device is not None:
            stage_bytes = self._settings.stage_bytes or _stage_bytes(runner.server_args, info)
            self._copier = DeviceCopier(self._device, stage_bytes)
            self._current_stream = _current_stream()
            self._keeps_graphs = self._settings.rows == "all"
        self._runner = runner
        return result

    def _switch_on(self, runner: Any, num_layers: int, hidden: int) -> Any:
        """Have the chosen layers handed out, or hook them: then what has them is returned."""
        model = runner.model
        refused: CaptureError | None = None
        if self._settings.layers_by == "auto":
            try:
                enable_capture(model, self._layers, num_layers)
                return None
            except CannotHandOut as e:
                refused = e
        elif not self._layers:
            return None
        from .layer_hooks import LayerHooks, only_decoder

        refuse_out_of_range(self._layers, type(model).__name__, num_layers)
        obstacle = _no_hooks(runner.server_args, self._device)
        if obstacle:
            why = f"{refused}. " if refused else ""
            raise CaptureError(f"{why}Hooks on its layers would be exact, but {obstacle}")
        decoder = only_decoder(model, num_layers)
        self._layer_hooks = LayerHooks(decoder, self._layers, hidden)
        logger.info("hstransport: layers are taken by hooks on %s", type(decoder.module).__name__)
        return decoder

    def scheduler_init(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        self._dp_rank = _dp_rank(original, scheduler, args, kwargs)
        original(scheduler, *args, **kwargs)
        for target, function in self.unhooked.items():
            if _resolve(target) is function:
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
        _refuse_resolved_widths()
        if self._layer_hooks is None:
            require_captured(self._runner.model, self._layers)
        if self._mismatch is not None:
            raise self._mismatch
        if self._ring is None:
            logger.info("hstransport: tensor-parallel rank %d leaves writing to rank 0", _tp_rank())
            return
        exporter = self._ring.open(self._copier)
        info = self._ring.info
        follower = Follower(
            info,
            exporter.recorder,
            _Request,
            selection=self._settings.requests,
            budget_bytes=self._settings.budget_bytes,
        )
        self._tap = Tap(info, exporter, follower)
        if self._check is not None:
            logger.info("hstransport: layers are compared in the first pass outside CUDA graphs")
        self._silent = {_RUN_BATCH, _FORWARD, _LOGITS_FORWARD, _RESULT}

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
            self._hear(_RUN_BATCH)
        self._batch = batch
        try:
            return original(scheduler, batch, *args, **kw)
        finally:
            self._batch = None

    def model_forward(
        self, original: Any, runner: Any, forward_batch: Any, *a: Any, **kw: Any
    ) -> Any:
        if self._silent:
            self._hear(_FORWARD)
        tap, batch = self._tap, self._batch
        if tap is None or batch is None or runner is not self._runner:
            return original(runner, forward_batch, *a, **kw)
        run = None
        if forward_batch.forward_mode is self._decode_mode:
            run = tap.going_on(batch.reqs, getattr(forward_batch, "seq_lens_sum", None))
        work = run or tap.guarded(self._plan, tap, batch.reqs, forward_batch)
        if not work:
            return original(runner, forward_batch, *a, **kw)
        self._states, self._armed = None, True
        try:
            output = original(runner, forward_batch, *a, **kw)
        finally:
            states, self._states, self._armed = self._states, None, False
        replayed = self._replayed
        same_graph = replayed is not None and replayed.bs == self._replayed_size
        if run and same_graph and output.can_run_graph:
            # The usual step: the graph that was replayed for the last one, over the same batch.
            tap.guarded(tap.again, run, self._current_stream(self._device))
        else:
            tap.guarded(tap.take, work, lambda: self._planes(tap, work, states, output))
        return output

    def _plan(self, tap: Tap, reqs: list[Any], forward_batch: Any) -> Forward | DecodeRun | None:
        """The rows of the coming pass, or None when none of them is wanted."""
        mode = forward_batch.forward_mode
        if mode.is_decode():
            self._decode_mode = mode
            if not tap.all_rows or not self._wanted(tap, reqs):
                return None
            if not self._same_size(tap, reqs, forward_batch, len(reqs)):
                return None
            lengths = forward_batch.seq_lens_cpu  # None where SGLang keeps them on the device
            positions = None if lengths is None else [n - 1 for n in lengths.tolist()]
            tokens = getattr(forward_batch, "seq_lens_sum", None)
            return tap.plan_decode(reqs, Pass(positions, [1] * len(reqs)), _note(reqs), tokens)
        if mode.is_idle():
            return None
        if mode.is_extend() and not mode.is_target_verify():
            if not self._wanted(tap, reqs):
                return None
            counts = list(forward_batch.extend_seq_lens_cpu)
            if not self._same_size(tap, reqs, forward_batch, len(counts)):
                return None
            step = Pass(list(forward_batch.extend_prefix_lens_cpu), counts)
            return tap.plan(reqs, step, _note(reqs))
        raise CaptureError(f"forward mode {mode} is not one whose rows are understood")

    def _wanted(self, tap: Tap, reqs: list[Any]) -> bool:
        """Whether any of these requests is to be captured; if not, nothing is even gathered."""
        if tap.follower.spent:
            return any(tap.follower.captures(req) for req in reqs)
        selection = self._settings.requests
        if selection.kind == "all":
            return True
        return any(selection.wants(req.rid, _tags(req)) for req in reqs)

    @staticmethod
    def _same_size(tap: Tap, reqs: list[Any], forward_batch: Any, counts: int) -> bool:
        if len(reqs) == forward_batch.batch_size == counts:
            return True
        why = f"a batch of {len(reqs)} requests has {forward_batch.batch_size} sequences"
        tap.post(tap.follower.give_up, list(reqs), why)
        return False

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
        self._replayed = None
        stream = None if self._device is None else self._current_stream(self._device)
        if states is not None:
            return tap.planes(states, stream)
        if stream is not None and output.can_run_graph and isinstance(work, DecodeRun):
            return self._planes_of_graph(tap, stream)
        raise CaptureError("the forward pass did not come through LogitsProcessor.forward")

    def _planes_of_graph(self, tap: Tap, stream: int) -> Planes:
        """The states that the decode graph just replayed left in its memory."""
        # Named graph_runner up to 0.5.11.
        graphs: Any = getattr(self._runner, "decode_cuda_graph_runner", None)
        graphs = graphs or getattr(self._runner, "graph_runner", None)
        size = int(graphs.bs)  # what the batch was padded to
        kept = self._graphs.get(size)
        if kept is None:
            why = "several decode graphs" if size in self._graphs else "no decode graph"
            raise CaptureError(f"{why} of batch size {size} were captured under the plugin's eyes")
        if not isinstance(kept, Planes):
            kept = self._graphs[size] = tap.planes(kept, stream)
        kept.stream = stream
        self._replayed, self._replayed_size = graphs, size
        return kept

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
            self._hear(_LOGITS_FORWARD)
        if self._armed:
            self._states = (hidden_states, captured)
        elif self._keeps_graphs and _capturing() and logits_metadata.forward_mode.is_decode():
            size = len(hidden_states)
            # Two graphs of one size could not be told apart later.
            states = None if size in self._graphs else (hidden_states, captured)
            self._graphs[size] = states
            self._replayed = None
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
            self._hear(_RESULT, passed=batch.forward_mode.is_extend())
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


class _Request:
    """What a tap needs to know of SGLang's ``Req``."""

    __slots__ = ("_req",)

    def __init__(self, req: Any) -> None:
        self._req = req

    @property
    def rid(self) -> str:
        return str(self._req.rid)

    @property
    def probe(self) -> bool:
        """One of SGLang's own health checks, which carry this prefix in their request id."""
        return self.rid.startswith("HEALTH_CHECK")

    @property
    def prompt(self) -> Any:
        return self._req.origin_input_ids[:]  # a copy: the exporter's thread packs it later

    @property
    def output(self) -> Any:
        # Tokens after a stop were sampled and thrown away.
        return self._req.output_ids[: self._req.finished_len]

    @property
    def tags(self) -> dict[str, Any]:
        return _tags(self._req)

    @property
    def copies(self) -> int:
        """How many generations of its prompt were asked for at once."""
        return int(getattr(self._req.sampling_params, "n", 1) or 1)

    @property
    def generates(self) -> bool:
        """False for the pass that SGLang makes to have the prompt of several in its cache."""
        return bool(self._req.sampling_params.max_new_tokens != 0)

    @property
    def over(self) -> bool:
        return self._req.finished_reason is not None

    @property
    def retracted(self) -> bool:
        return bool(self._req.is_retracted)

    def unfit(self) -> str:
        """Why this request's states do not follow from its token ids; empty when they do."""
        for name in ("input_embeds", "positional_embed_overrides", "lora_id"):
            if getattr(self._req, name, None) is not None:
                return f"the request has {name}"
        if getattr(self._req, "beam_group", None) is not None:
            return "the request is a beam search"
        return ""

    def reason(self) -> tuple[str, str]:
        """(END's reason, SGLang's own words on an abort)."""
        if not self.over:
            return ABORTED, "aborted while waiting"
        said = self._req.finished_reason.to_json()
        reason = {"stop": FINISHED, "length": LENGTH}.get(said.get("type"), ABORTED)
        return reason, str(said.get("message") or "") if reason == ABORTED else ""


def _tags(req: Any) -> dict[str, Any]:
    params = req.sampling_params.custom_params
    return params if isinstance(params, dict) else {}


def _note(reqs: list[Any]) -> Noted:
    over = {id(req) for req in reqs if req.finished_reason is not None}
    # SGLang lets go of them when the request ends.
    images = {id(req): _IMAGES for req in reqs if req.multimodal_inputs is not None}
    return Noted(over, images)


def _first_there(classes: tuple[str, ...], method: str) -> str:
    """The first of these classes that this SGLang has with that method."""
    for name in classes[:-1]:
        try:
            pkgutil.resolve_name(f"{name}.{method}")
            return name
        except (ImportError, AttributeError):
            continue
    return classes[-1]


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as e:
        import sglang

        raise CaptureError(
            f"SGLang {sglang.__version__} has no {target} ({e}): this release of hstransport "
            "does not know it; use one of the releases listed in its docs/releases.md"
        ) from None


def _cuda_device(runner: Any) -> int | None:
    """Ordinal of the model's CUDA device, None when it runs on the CPU."""
    device = str(runner.device)
    if device.startswith("cpu"):
        return None
    if not device.startswith("cuda"):
        raise CaptureError(
            f"the model lies on {device}: hstransport captures on CUDA devices and CPUs; unset "
            "HSTRANSPORT to serve without capture"
        )
    import torch

    if torch.version.cuda is None:
        raise CaptureError(
            "this torch computes on another vendor's GPU, hstransport captures on NVIDIA's; unset "
            "HSTRANSPORT to serve without capture"
        )
    return int(torch.cuda.current_device())


def _stage_bytes(server_args: Any, info: SessionInfo) -> int:
    """Room for the states of the largest prefill batch."""
    tokens = int(_resolved(server_args, "chunked_prefill_size") or 0)
    if tokens <= 0:
        tokens = int(_resolved(server_args, "max_prefill_tokens") or 16384)
    return min(max(tokens * info.row_bytes, 64 << 20), 1 << 30)


def _no_hooks(server_args: Any, device: int | None) -> str:
    """Why hooks on layers would not see every state whole; empty when they do."""
    ranks = _resolved(server_args, "tp_size") or 1
    if ranks != 1:
        return (
            f"of {ranks} tensor-parallel ranks a layer may be given only a part of a sum: serve "
            "with --tp-size 1"
        )
    graphs = getattr(_resolved(server_args, "cuda_graph_config"), "prefill", None)
    if device is not None and getattr(graphs, "backend", "disabled") != "disabled":
        return (
            "they do not run when a prefill is replayed from a CUDA graph: add "
            "--disable-prefill-cuda-graph"
        )
    return ""


def _current_stream() -> Any:
    import torch

    # Without the object that torch.cuda.current_stream makes: 4 us less for each pass.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def _capturing() -> bool:
    import torch

    return bool(torch.cuda.is_current_stream_capturing())


def _refuse_unproven(server_args: Any) -> None:
    for name, harmless, remedy in _REFUSED:
        # With --enable-return-aux-hidden-states (0.5.23) an algorithm is written down and not used.
        value = _resolved(server_args, name)
        if value and value != harmless:
            raise CaptureError(
                f"hstransport cannot capture exactly with {name}={value!r}: {remedy}, "
                "or unset HSTRANSPORT to serve without capture"
            )


def _resolved(server_args: Any, name: str) -> Any:
    """What SGLang has decided for an argument, None for one that it does not know.

    From 0.5.20 on the object itself keeps what was written on the command line.
    """
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:
        return getattr(server_args, name, None)
    if not hasattr(server_args, name):
        return None
    return resolution_result(server_args, name)


def _refuse_resolved_widths() -> None:
    """Where SGLang works parallel widths out of several arguments (0.5.20 on), see the result."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return
    parallel = get_parallel()
    for name in ("attn_dp_size", "attn_cp_size", "pp_size"):
        width = getattr(parallel, name, 1)
        if width != 1:
            raise CaptureError(
                f"hstransport cannot capture exactly with {name}={width}: serve with tensor or "
                "plain data parallelism only, or unset HSTRANSPORT"
            )


def _session_info(
    settings: Settings, runner: Any, layers: tuple[int, ...], rank: int
) -> SessionInfo:
    import sglang

    config = runner.model_config
    dtype = str(config.dtype)
    if dtype != "torch.bfloat16":
        raise CaptureError(
            f"the model runs in {dtype}, hstransport carries bfloat16: add --dtype bfloat16"
        )
    return SessionInfo(
        run=secrets.token_hex(6),
        session=settings.session,
        model=str(runner.server_args.model_path),
        sglang=sglang.__version__,
        layers=layers,
        final=settings.layers.final,
        hidden=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        rows=settings.rows,
        rank=rank,
        vocab_size=int(config.vocab_size),
        created=time.time(),
        producer=__version__,
    )


class _RingInTheMaking:
    """A ring that a thread makes ready while the model loads: its memory is cleared on the way."""

    def __init__(self, settings: Settings, info: SessionInfo) -> None:
        if info.planes == 0:
            raise ConfigError("HSTRANSPORT_LAYERS names no layer: give ids, 'eagle3' or 'final'")
        self.info = info
        self._settings = settings
        self._started = time.monotonic()
        self._logged = self._started
        self._failure: BaseException | None = None
        report_older_rings(settings.root, info)
        self._place = ring_path(settings.root, info.session, info.run, info.rank)
        self._thread = threading.Thread(target=self._make, name="hstransport-ring", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            self._ring = RingWriter.create(
                self._place.path, self._settings.ring_bytes, pack_info(self.info), self._progress
            )
            # An orderly exit says so in the ring; after a kill the kernel's lock tells the others.
            atexit.register(self._ring.close)
        except BaseException as e:
            self._failure = e

    def _progress(self, done: int) -> None:
        now = time.monotonic()
        if now - self._logged >= _PROGRESS_EVERY_S:
            self._logged = now
            total = self._settings.ring_bytes
            logger.info("hstransport: ring %d of %d MiB ready", done >> 20, total >> 20)

    def discard(self) -> None:
        """Wait until the ring is ready, and remove it: nothing will be written into it."""
        self._thread.join()
        if self._failure is None:
            self._ring.close()

    def open(self, copier: Copier) -> Exporter:
        """Wait until the ring is ready, pin it if a GPU is to write into it, and open it."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        settings, info, ring = self._settings, self.info, self._ring
        if isinstance(copier, DeviceCopier):
            copier.pin(ring)
        exporter = Exporter(
            ring,
            Publisher(self._place.endpoint),
            info,
            copier=copier,
            policy=settings.policy,
            block_s=settings.block_s,
        )
        atexit.register(exporter.close)  # runs before the ring's own, and gives the pages back
        logger.info(
            "hstransport: session %s captures layers %s of %s, rows=%s requests=%s, into %s "
            "(%d MiB, policy %s; ready %.1f s after the model began to load)%s",
            info.session,
            ",".join(map(str, info.layer_names)),
            info.model,
            info.rows,
            settings.requests,
            self._place.path,
            settings.ring_bytes >> 20,
            settings.policy,
            time.monotonic() - self._started,
            _way_out(copier),
        )
        return exporter


def _way_out(copier: Copier) -> str:
    if not isinstance(copier, DeviceCopier):
        return ""
    by = "the gather kernel" if copier.has_kernel else "2-D copies (built without nvcc)"
    return f"; out of cuda:{copier.device} by {by} and a stage of {copier.max_bytes >> 20} MiB"


def _tp_rank() -> int:
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _dp_rank(init: Any, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """An argument of Scheduler.__init__; from 0.5.21 on it stands in the runtime context."""
    given = inspect.signature(init).bind(scheduler, *args, **kwargs).arguments
    if "dp_rank" in given:
        return int(given["dp_rank"] or 0)
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().dp_rank or 0)
