"""What both sides have counted, as Prometheus text on a port of this machine only."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hstransport.counters import DROPS
from hstransport.errors import ConfigError

from .handover import Handover
from .packer import Totals
from .states import STATES
from .stream import RingStream, Streams

ADDRESS = "127.0.0.1"


def serve(port: int, figures: Figures) -> tuple[int, Callable[[], None]]:
    """Answer ``GET /metrics`` on a thread of its own; returns the port, and what ends it.

    ``port`` 0 is one that is free. Raises ConfigError when it is taken.
    """
    registry = CollectorRegistry()
    registry.register(figures)
    try:
        server, _ = start_http_server(port, addr=ADDRESS, registry=registry)
    except OSError as e:
        raise ConfigError(f"--metrics-port {port}: {e.strerror}: choose another port") from None

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return server.server_port, stop


class Figures(Collector):
    """Read anew for every scrape, beside the thread that packs; docs/operations.md names them."""

    def __init__(
        self, out: Path, totals: Totals, streams: Streams, handover: Handover | None
    ) -> None:
        self._out = out
        self._totals = totals
        self._streams = streams
        self._handover = handover

    def collect(self) -> Iterator[Metric]:
        live = list(self._streams.live)  # first: Totals.servers() says why
        yield from _rings(live)
        yield from self._servers(live)
        yield from self._consumer()
        if self._handover is not None:
            handed = {"done": self._handover.done, "failed": len(self._handover.failed)}
            yield _counters("on_shard", "commands of --on-shard that ended", "result", handed)
            yield _gauge("on_shard_left", "shards whose command runs or waits", self._handover.left)
        try:
            free = shutil.disk_usage(self._out).free
        except OSError:
            return  # somebody has taken the directory away
        yield _gauge("disk_free_bytes", "what is left where the shards are written", free)

    def _servers(self, live: list[RingStream]) -> Iterator[Metric]:
        counted = self._totals.servers(live)
        yield _counter("server_records", "records that servers put into rings", counted.records)
        yield _counter("server_bytes", "their states, uncompressed", counted.bytes)
        drops = {reason: getattr(counted, reason) for reason in DROPS}
        yield _counters("dropped_pieces", "pieces of samples dropped", "reason", drops)
        yield _counter("dropped_bytes", "states dropped", counted.dropped_bytes)
        stalls = {"ring": counted.ring_stall_ns / 1e9, "stage": counted.stage_stall_ns / 1e9}
        yield _counters("stall_seconds", "waits of a server for room", "for", stalls)
        yield _counter("samples_lost", "samples without START or END", counted.samples_lost)
        yield _counter("budgets_spent", "servers that begin no new sample", counted.budget_spent)

    def _consumer(self) -> Iterator[Metric]:
        totals = self._totals
        # Copies, each made in one step of the interpreter: the packing thread goes on.
        states = {**dict.fromkeys(STATES, 0), **dict(totals.states)}
        yield _counters("samples", "samples ended", "state", states)
        yield _counter("records", "records stored", totals.records)
        yield _counter("tokens", "rows stored", totals.tokens)
        yield _counter("raw_bytes", "states stored, uncompressed", totals.raw_bytes)
        yield _counter("stored_bytes", "what they take in shards", totals.stored_bytes)
        skipped = {
            "repeated": totals.repeated,
            "malformed": totals.malformed,
            "torn": totals.torn,
        }
        yield _counters("skipped_records", "records not stored", "reason", skipped)
        yield _counter("orphan_rows", "rows of samples begun elsewhere", totals.orphan_rows)
        yield _counter("orphan_events", "START and END that fit nothing", totals.anomalies)
        waits = dict(totals.waited_s)
        yield _counters("wait_seconds", "time for which packing waited", "for", waits)


def _rings(live: list[RingStream]) -> Iterator[Metric]:
    labels = ["session", "run", "rank"]
    used = GaugeMetricFamily("hstransport_ring_used_bytes", "records not stored yet", labels=labels)
    size = GaugeMetricFamily("hstransport_ring_size_bytes", "size of the ring", labels=labels)
    for stream in live:
        info = stream.info
        values = [info.session, info.run, str(info.rank)]
        used.add_metric(values, stream.reader.used_bytes)
        size.add_metric(values, stream.reader.capacity_bytes)
    yield used
    yield size


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"hstransport_{name}", help, value=value)


def _counters(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"hstransport_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"hstransport_{name}", help, value=value)
