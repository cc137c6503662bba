"""What a consumer started with ``--metrics-port 0`` says of itself."""

from __future__ import annotations

import re
import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from .consumer import ConsumerProcess

Figures = dict[tuple[str, ...], float]


def address(consumer: ConsumerProcess) -> str:
    """Its URL, out of its log; waits for it."""
    pattern = r"metrics at (http://127\.0\.0\.1:\d+/metrics)"
    deadline = time.monotonic() + 20
    while not (found := re.search(pattern, consumer.log_text())):
        assert time.monotonic() < deadline, consumer.log_text()
        time.sleep(0.05)
    return found[1]


def scrape(url: str) -> Figures:
    """{(name, values of its labels, which are in order of their names): value}"""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name.removeprefix("hstransport_"), *s.labels.values()): s.value for s in samples}
