"""The plugin: the one file that names SGLang's internals.

``register`` is found through the entry-point group ``sglang.srt.plugins`` in every process of
SGLang (0.5.11 and later) and does nothing unless HSTRANSPORT=1. Each hook stands beside a comment
that says why there. Whatever goes wrong here after the server has started is logged, ends capture
and lets serving go on.
"""

from __future__ import annotations

import atexit
import logging
import os
import pkgutil
import secrets
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import __version__
from .capture import plane, split_packed
from .channel import Publisher
from .errors import CaptureError, ConfigError, HsTransportError, ProtocolError
from .exporter import Exporter, OpenSample, RowSpan
from .layers import enable_capture
from .protocol import (
    ABORTED,
    FINISHED,
    LENGTH,
    Label,
    SessionInfo,
    check_labels,
    check_loss_mask,
    fit_id,
    pack_info,
)
from .ring import RingWriter
from .session import ring_path
from .settings import Settings, from_environment
from .stale import report_older_rings

logger = logging.getLogger(__name__)

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
_HEALTH_CHECK = "HEALTH_CHECK"  # SGLang's own probes carry this prefix in their request id

# Modes in which rows, positions or requests would not be what they seem. What is not proven right
# is refused by name: (server argument, value at which it is harmless, what to do).
_REFUSED = (
    ("pp_size", 1, "run without pipeline parallelism"),
    ("enable_dp_attention", False, "run without --enable-dp-attention"),
    ("attn_cp_size", 1, "run without context parallelism"),
    ("speculative_algorithm", None, "run without speculative decoding"),
    ("disaggregation_mode", "null", "run without prefill-decode disaggregation"),
    ("enable_two_batch_overlap", False, "run without --enable-two-batch-overlap"),
    ("enable_pdmux", False, "run without --enable-pdmux"),
    ("is_embedding", False, "serve a generation model"),
    ("dllm_algorithm", None, "serve an autoregressive model"),
)


def register() -> None:
    """Entry point. Bad settings and an SGLang that lacks a hooked name stop the server at once."""
    try:
        settings = from_environment(os.environ)
        if settings is None:
            return
        hooks = _hooks(Plugin(settings))
        for target in hooks:
            _require(target)
    except HsTransportError as e:
        # SGLang logs and forgets an Exception of a plugin: only SystemExit stops the server.
        sys.exit(f"hstransport: {e}")

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _hooks(plugin: Plugin) -> dict[str, Any]:
    return {
        # The model exists, graphs are not captured yet: the place to switch layers on.
        f"{_RUNNER}.load_model": plugin.load_model,
        # Ranks, model and settings are all known: the place to create the ring, or refuse.
        f"{_SCHEDULER}.__init__": plugin.scheduler_init,
        # Which requests the coming forward pass belongs to.
        f"{_SCHEDULER}.run_batch": plugin.run_batch,
        # The one call that has every token's final state and all captured layers together.
        f"{_LOGITS}.forward": plugin.logits_forward,
        # Positions are known here, and warm-up and graph capture never come through here.
        f"{_RUNNER}.forward": plugin.model_forward,
        # Requests finish in here and, when aborted while they wait, only in abort_request.
        f"{_SCHEDULER}.process_batch_result": plugin.process_batch_result,
        f"{_SCHEDULER}.abort_request": plugin.abort_request,
    }


class Plugin:
    """State of one scheduler process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._layers: tuple[int, ...] = ()
        self._runner: Any = None
        self._tap: Tap | None = None
        self._batch: Any = None  # the ScheduleBatch whose forward pass is running
        self._states: tuple[Any, Any] | None = None  # (final, aux) of that pass

    # Each hook has AROUND's signature: the original, then the original's own arguments.

    def load_model(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        if not getattr(runner, "is_draft_worker", False):
            _refuse_unproven(runner.server_args)
            num_layers = int(runner.model_config.num_hidden_layers)
            self._layers = self._settings.layers.resolve(num_layers)
            # On every rank, so that all ranks of a tensor-parallel group run the same graph.
            enable_capture(runner.model, self._layers, num_layers)
            self._runner = runner
        return result

    def scheduler_init(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        if self._runner is None:
            raise CaptureError(
                "hstransport saw no ModelRunner.load_model: this SGLang builds its model in a way "
                "that the plugin does not know; unset HSTRANSPORT to serve without capture"
            )
        if _tp_rank() != 0:
            logger.info("hstransport: tensor-parallel rank %d leaves writing to rank 0", _tp_rank())
            return
        info = _session_info(self._settings, self._runner, self._layers, _dp_rank(scheduler))
        self._tap = Tap(self._settings, info, _open_exporter(self._settings, info))

    def run_batch(self, original: Any, scheduler: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        self._batch = batch
        try:
            return original(scheduler, batch, *args, **kw)
        finally:
            self._batch = None

    def model_forward(self, original: Any, runner: Any, forward_batch: Any, *a: Any, **kw: Any) -> Any:
        tap, batch = self._tap, self._batch
        if tap is None or batch is None or runner is not self._runner:
            return original(runner, forward_batch, *a, **kw)
        spans, rows = tap.guarded(tap.plan, batch.reqs, forward_batch) or ((), 0)
        if not spans:
            return original(runner, forward_batch, *a, **kw)
        self._states = None
        output = original(runner, forward_batch, *a, **kw)
        states, self._states = self._states, None
        tap.guarded(tap.take, spans, rows, states)
        return output

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
        if self._batch is not None:
            self._states = (hidden_states, aux_hidden_states)
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

    def process_batch_result(self, original: Any, scheduler: Any, *a: Any, **kw: Any) -> Any:
        result = original(scheduler, *a, **kw)
        if self._tap is not None:
            self._tap.guarded(self._tap.sweep)
        return result

    def abort_request(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        tap = self._tap
        if tap is None:
            return original(scheduler, *args, **kwargs)
        waiting = [req for req in scheduler.waiting_queue if req.rid in tap.followed]
        result = original(scheduler, *args, **kwargs)
        left = {id(req) for req in scheduler.waiting_queue}
        gone = [req for req in waiting if id(req) not in left]
        tap.guarded(tap.sweep, gone)
        return result


@dataclass
class _Followed:
    """A request seen in a forward pass."""

    req: Any
    sample: OpenSample | None
    """None for a request that is not to be captured."""
    first_position: int = 0
    """Where its first computed row lay: tokens before it came out of the radix cache."""
    next_position: int = 0


class Tap:
    """Follows the requests of one rank and hands their rows to the exporter."""

    def __init__(self, settings: Settings, info: SessionInfo, exporter: Exporter) -> None:
        self._all_rows = settings.rows == "all"
        self._tagged_only = settings.requests == "tagged"
        self._info = info
        self._exporter: Exporter | None = exporter
        self.followed: dict[str, _Followed] = {}

    def guarded(self, step: Any, *args: Any) -> Any:
        """Run a step of capture; an error ends capture, never serving."""
        if self._exporter is None:
            return None
        try:
            return step(*args)
        except Exception as e:
            logger.exception("hstransport: capture stopped, serving goes on: %s", e)
            exporter, self._exporter = self._exporter, None
            for f in self.followed.values():
                if f.sample is not None:
                    why = f"capture stopped: {e}"[:1000]
                    exporter.end(f.sample, ABORTED, *_extent(f.req, self._all_rows), detail=why)
            self.followed.clear()
            exporter.close()
            return None

    def plan(self, reqs: list[Any], forward_batch: Any) -> tuple[list[RowSpan], int]:
        """Which rows of the coming pass belong to which sample; and how many rows it computes."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return [], 0
        if mode.is_decode():
            if not self._all_rows:
                return [], 0
            lengths = forward_batch.seq_lens_cpu
            positions = None if lengths is None else [n - 1 for n in lengths.tolist()]
            counts = [1] * len(reqs)
        elif mode.is_extend() and not mode.is_target_verify():
            positions = list(forward_batch.extend_prefix_lens_cpu)
            counts = list(forward_batch.extend_seq_lens_cpu)
        else:
            raise CaptureError(f"forward mode {mode} is not one whose rows are understood")
        if len(reqs) != forward_batch.batch_size or len(counts) != len(reqs):
            raise CaptureError(
                f"a batch of {len(reqs)} requests has {forward_batch.batch_size} sequences"
            )
        spans = []
        row = 0
        for i, (req, count) in enumerate(zip(reqs, counts, strict=True)):
            followed = self._follow(req, None if positions is None else positions[i])
            if followed is not None and followed.sample is not None:
                position = followed.next_position if positions is None else positions[i]
                followed.next_position = position + count
                keep = count if self._all_rows else min(count, len(req.origin_input_ids) - position)
                if keep > 0:
                    spans.append(RowSpan(followed.sample, position, row, keep))
            row += count
        return spans, row

    def take(self, spans: list[RowSpan], rows: int, states: tuple[Any, Any] | None) -> None:
        """Copy the planned rows out of what the pass computed."""
        assert self._exporter is not None
        if states is None:
            raise CaptureError("the forward pass did not come through LogitsProcessor.forward")
        final, aux = states
        hidden, layers = self._info.hidden, self._info.layers
        arrays: list[Any] = []
        if layers:
            if aux is None:
                raise CaptureError("the model handed no captured layers to LogitsProcessor.forward")
            packed = hasattr(aux, "ndim")
            arrays = split_packed(aux, len(layers), hidden) if packed else list(aux)
        if len(arrays) != len(layers):
            raise CaptureError(f"the model captured {len(arrays)} layers, {len(layers)} were asked")
        if self._info.final:
            arrays.append(final)
        planes = [plane(a, hidden) for a in arrays]
        for p in planes:
            if p.rows < rows:
                raise CaptureError(f"a plane has {p.rows} rows, the batch has {rows}")
            if p.device != "cpu":
                raise CaptureError(f"states lie on {p.device}: this release copies from cpu only")
        self._exporter.rows(spans, planes)

    def sweep(self, gone: list[Any] | tuple[Any, ...] = ()) -> None:
        """End the samples of requests that are over; ``gone`` left the queue without a trace."""
        assert self._exporter is not None
        lost = {id(req) for req in gone}
        over = [
            rid
            for rid, f in self.followed.items()
            if f.req.finished_reason is not None or id(f.req) in lost
        ]
        for rid in over:
            f = self.followed.pop(rid)
            if f.sample is None:
                continue
            reason, detail = _reason(f.req)
            self._exporter.end(
                f.sample,
                reason,
                *_extent(f.req, self._all_rows),
                cached=f.first_position,
                detail=detail,
            )

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None

    def _follow(self, req: Any, position: int | None) -> _Followed | None:
        """The request's entry, made on its first pass; None for one that is already over."""
        followed = self.followed.get(req.rid)
        if followed is not None:
            return followed
        if req.finished_reason is not None:
            return None  # the overlap scheduler runs one more pass for a request that just ended
        if position is None:
            raise CaptureError("a request's first pass is a decode of unknown position")
        followed = _Followed(req, self._start(req), first_position=position)
        self.followed[req.rid] = followed
        return followed

    def _start(self, req: Any) -> OpenSample | None:
        assert self._exporter is not None
        params = req.sampling_params.custom_params
        tags = params if isinstance(params, dict) else {}
        sample_id = tags.get("hstransport_id")
        if req.rid.startswith(_HEALTH_CHECK) or (self._tagged_only and sample_id is None):
            return None
        labels, mask = _tagged(tags)
        rid = fit_id(req.rid)
        return self._exporter.start(
            fit_id(sample_id) if isinstance(sample_id, str) and sample_id else rid,
            rid,
            np.asarray(req.origin_input_ids, dtype=np.int32),
            labels,
            mask,
        )


def _tagged(tags: dict[str, Any]) -> tuple[dict[str, Label], tuple[int, ...] | None]:
    """Labels and loss mask that the caller sent; bad ones become a label that says so."""
    try:
        labels = check_labels(tags.get("hstransport_labels") or {})
        mask = tags.get("hstransport_loss_mask")
        return labels, None if mask is None else check_loss_mask(mask)
    except ProtocolError as e:
        return {"hstransport_error": str(e)[:500]}, None


def _extent(req: Any, all_rows: bool) -> tuple[int, Any]:
    """(rows that make the sample whole, generated token ids)."""
    output = list(req.output_ids)
    if req.finished_len is not None:
        output = output[: req.finished_len]
    # The last generated token was sampled but never an input, so it has no state.
    tokens = len(req.origin_input_ids) + (max(len(output) - 1, 0) if all_rows else 0)
    return tokens, np.asarray(output, dtype=np.int32)


def _reason(req: Any) -> tuple[str, str]:
    if req.finished_reason is None:
        return ABORTED, "aborted while waiting"
    said = req.finished_reason.to_json()
    reason = {"stop": FINISHED, "length": LENGTH}.get(said.get("type"), ABORTED)
    return reason, str(said.get("message") or "") if reason == ABORTED else ""


def _require(target: str) -> None:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as e:
        import sglang

        raise CaptureError(
            f"SGLang {sglang.__version__} has no {target} ({e}): this release of hstransport "
            "does not know it; use one of the releases listed in hstransport's README"
        ) from None


def _refuse_unproven(server_args: Any) -> None:
    for name, harmless, remedy in _REFUSED:
        value = getattr(server_args, name, harmless)
        if value != harmless:
            raise CaptureError(
                f"hstransport cannot capture exactly with {name}={value!r}: {remedy}, "
                "or unset HSTRANSPORT to serve without capture"
            )


def _session_info(settings: Settings, runner: Any, layers: tuple[int, ...], rank: int) -> SessionInfo:
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


def _open_exporter(settings: Settings, info: SessionInfo) -> Exporter:
    if info.planes == 0:
        raise ConfigError("HSTRANSPORT_LAYERS names no layer: give ids, 'eagle3' or 'final'")
    report_older_rings(settings.root, info)
    place = ring_path(settings.root, info.session, info.run, info.rank)
    ring = RingWriter.create(place.path, settings.ring_bytes, pack_info(info))
    try:
        exporter = Exporter(
            ring, Publisher(place.endpoint), info, policy=settings.policy, block_s=settings.block_s
        )
    except BaseException:
        ring.close()
        raise
    # An orderly exit says so in the ring; after a kill the kernel's lock tells the consumer.
    atexit.register(exporter.close)
    logger.info(
        "hstransport: session %s captures layers %s of %s, rows=%s requests=%s, into %s "
        "(%d MiB, policy %s)",
        info.session,
        ",".join(map(str, info.layer_names)),
        info.model,
        info.rows,
        settings.requests,
        place.path,
        settings.ring_bytes >> 20,
        settings.policy,
    )
    return exporter


def _tp_rank() -> int:
    from sglang.srt.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _dp_rank(scheduler: Any) -> int:
    """0.5.11 keeps it on the scheduler, later releases in ``ps``, 0.5.23 in the runtime context."""
    for owner in (scheduler, getattr(scheduler, "ps", None)):
        if hasattr(owner, "dp_rank"):
            return int(owner.dp_rank or 0)
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().dp_rank or 0)
