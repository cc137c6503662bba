"""All checks of one server, in order, each as soon as it is known."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import __version__
from ..client.http import Server
from ..counters import RingCounters
from ..errors import ConfigError
from ..protocol import PROTOCOL_VERSION
from . import truth
from .checkpoint import Checkpoint, Unknown
from .checks import Bits, check_batch, check_prefix, check_rows, check_values
from .compare import F32, floats
from .finding import FAIL, OK, SKIPPED, WARN, Finding
from .place import Place, find_place
from .probe import Probes, new_prefix, send
from .reference import load_states
from .samples import OwnConsumer, wait_for

if TYPE_CHECKING:
    from hstransport_consumer.sample import Sample


@dataclass(frozen=True)
class Options:
    """What to look at; see ``hstransport doctor --help``."""

    root: Path
    session: str | None = None
    shards: Path | None = None
    reference: str | None = None
    trust_remote_code: bool = False
    settle_timeout_s: float = 30.0


def diagnose(server: Server, options: Options) -> Iterator[Finding]:
    """Send a few requests and judge what is stored of them.

    Raises ConfigError when there is nothing to look at, ServerError when the server goes away.
    """
    model = server.model_info().model
    place = find_place(options.root, options.session, model)
    _check_consumer_known(place, options.shards)
    yield check_versions(place, model, server.version())
    prefix = new_prefix()
    with ExitStack() as stack:
        directory, own = options.shards, None
        if directory is None:
            own = stack.enter_context(OwnConsumer(place, prefix))
            directory = own.directory
        probes = send(server, prefix, place.info.vocab_size)
        samples = wait_for(directory, (p.id for p in probes), options.settle_timeout_s)
        if own is not None:
            own.raise_error()
        try:
            yield check_ring(place, find_place(options.root, place.session, model))
        except ConfigError as e:
            yield Finding("ring", FAIL, f"it is gone since doctor began: {e}")
            return
        yield check_arrival(place, probes, samples, options, own.foreign if own else 0)
        if len(samples) == len(probes):
            yield from _judge(place, probes, samples, options, model)


def _check_consumer_known(place: Place, shards: Path | None) -> None:
    """A ring has one consumer: doctor reads what it writes, or takes its place."""
    if place.consumer_attached and shards is None:
        raise ConfigError(
            f"a consumer is attached to session {place.session!r} and owns its records: name the "
            "directory that it writes with --shards DIR, or stop it for as long as doctor runs"
        )
    if not place.consumer_attached and shards is not None:
        raise ConfigError(
            f"no consumer is attached to session {place.session!r}: start hstransport-consumer "
            f"--out {shards}, or leave --shards out and doctor packs its own samples"
        )


def check_versions(place: Place, model: str, sglang: str | None) -> Finding:
    """Both sides are of one release, and the session is that of the server that was asked."""
    info = place.info
    words = (
        f"SGLang {info.sglang}, hstransport {info.producer} in the server and {__version__} here, "
        f"protocol {PROTOCOL_VERSION}, torch here {_version('torch')}, transformers "
        f"{_version('transformers')}; session {place.session}, {info.model}"
    )
    if info.model != model or (sglang is not None and sglang != info.sglang):
        return Finding(
            "versions",
            FAIL,
            f"{words}; but --server serves {model} with SGLang {sglang}: the session is another "
            "server's, name the right one with --session and --dir",
        )
    if info.producer != __version__:
        return Finding("versions", WARN, f"{words}: use one release of hstransport on both sides")
    return Finding("versions", OK, words)


def check_ring(before: Place, after: Place) -> Finding:
    """The rings have room, and nothing was dropped."""
    looks = [ring.look for ring in after.live]
    fill = max(look.bytes / look.capacity_bytes for look in looks)
    counted = reduce(RingCounters.plus, (look.counters for look in looks))
    dropped = counted.dropped_records
    lately = dropped - sum(ring.look.counters.dropped_records for ring in before.live)
    capacity = looks[0].capacity_bytes >> 20
    drops = f"{counted.drop_words} drops since the start"
    words = f"{len(looks)} of {capacity} MiB, {fill:.0%} full, {drops}"
    todo = "a consumer that keeps up (--threads), or a larger HSTRANSPORT_RING_BYTES"
    if lately:
        return Finding("ring", FAIL, f"{words}, {lately} of them just now: it needs {todo}")
    if dropped or fill > 0.5:
        return Finding("ring", WARN, f"{words}: it needs {todo}")
    return Finding("ring", OK, words)


def check_arrival(
    place: Place,
    probes: Probes,
    samples: Mapping[str, Sample],
    options: Options,
    foreign: int,
) -> Finding:
    """What was asked for has come through the ring, the consumer and the shards.

    ``foreign``: records of others that doctor's own consumer came upon.
    """
    sent = len(probes)
    by = "doctor's own consumer" if options.shards is None else f"the consumer of {options.shards}"
    words = f"{len(samples)} of {sent} samples were stored by {by}"
    if foreign:
        words += f" ({foreign} records of others stay in the ring, and doctor's with them)"
    if len(samples) == sent:
        return Finding("consumer", OK, words)
    todo = "see the server's log for 'hstransport': capture ends when a call fails or when weights "
    todo += f"are updated; and see that session {place.session} is this server's"
    if options.shards is not None:
        todo += f"; is {options.shards} what the attached consumer writes?"
    return Finding(
        "consumer",
        FAIL,
        f"{words}, and nothing more came for {options.settle_timeout_s:g} s: {todo}",
    )


def _judge(
    place: Place, probes: Probes, samples: Mapping[str, Sample], options: Options, model: str
) -> Iterator[Finding]:
    rows = check_rows(probes, samples, place.info.rows)
    yield rows
    if rows.status != OK:
        why = "rows must be right first"
        for name in ("values", "batch", "prefix", "layers", "lm_head", "norm"):
            yield Finding(name, SKIPPED, why)
        return
    layers = place.info.layer_names
    states = {probe.id: samples[probe.id].hidden_states for probe in probes.whole}
    yield check_values(layers, states)
    checkpoint, why = _find_checkpoint(options.reference or model)
    mixture = None if checkpoint is None else checkpoint.mixture
    yield check_batch(probes, samples, states, mixture)
    yield check_prefix(probes, samples, states)
    if checkpoint is None:
        for name in ("layers", "lm_head", "norm"):
            yield Finding(name, SKIPPED, why)
        return
    yield from _check_layers(layers, probes, samples, states, checkpoint, options)
    if "final" not in layers:
        for name in ("lm_head", "norm"):
            yield Finding(name, SKIPPED, "final is not captured (HSTRANSPORT_LAYERS)")
        return
    final = {i: floats(bits[:, layers.index("final")]) for i, bits in states.items()}
    yield truth.check_lm_head(probes.whole, final, checkpoint)
    yield truth.check_norm(final, checkpoint)


def _find_checkpoint(model: str) -> tuple[Checkpoint | None, str]:
    """The checkpoint, or why there is none to read."""
    try:
        return Checkpoint.find(model), ""
    except Unknown as e:
        return None, str(e)


def _check_layers(
    layers: tuple[int | str, ...],
    probes: Probes,
    samples: Mapping[str, Sample],
    states: Mapping[str, Bits],
    checkpoint: Checkpoint,
    options: Options,
) -> Iterator[Finding]:
    """Every captured layer against transformers, when there is a reference."""
    if options.reference is None:
        yield Finding(
            "layers",
            SKIPPED,
            "whether each is the layer that it is called: give --reference MODEL, which "
            "transformers loads in float32 on the CPU",
        )
        return
    info = samples[probes.alone[0].id].run
    shape = checkpoint.config.get("num_hidden_layers"), checkpoint.config.get("hidden_size")
    if shape != (info.num_layers, info.hidden):
        yield Finding(
            "layers",
            FAIL,
            f"{checkpoint.folder} has {shape[0]} layers of {shape[1]}, the server "
            f"{info.num_layers} of {info.hidden}: name the checkpoint that is served",
        )
        return
    try:
        sequences = [samples[probe.id].token_ids for probe in probes.alone]
        reference = load_states(checkpoint, sequences, trust_remote_code=options.trust_remote_code)
    except Unknown as e:
        yield Finding("layers", SKIPPED, str(e))
        return
    known = truth.candidates(reference, _norm(checkpoint))
    for i, layer in enumerate(layers):
        mine = [floats(np.ascontiguousarray(states[p.id][:, i])) for p in probes.alone]
        yield truth.check_layer(layer, mine, known, checkpoint.mixture)


def _norm(checkpoint: Checkpoint) -> F32 | None:
    try:
        return checkpoint.norm()
    except Unknown:
        return None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
