"""The decoder on the page that defines the format reads a real shard."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, format, plan, tables
from hstransport_consumer.states import STATES
from shard_kit import Script, make_info, only_shard

PAGE = Path(__file__).parents[1] / "consumer" / "FORMAT.md"


@pytest.fixture(scope="module")
def read_shard() -> Callable[[Path], dict[str, tuple[str, int, dict[int, Any]]]]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    reader: Callable[[Path], dict[str, tuple[str, int, dict[int, Any]]]] = names["read_shard"]
    return reader


def test_the_decoder_of_the_page_reads_a_shard(
    read_shard: Callable[[Path], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 240)
    monkeypatch.setattr(plan, "SMALL_BYTES", 96)
    script = Script(make_info(), special=0.3)
    script.start(1, 50)
    script.start(2, 12)
    script.start(3, 9)
    script.rows((1, 0, 20), (2, 0, 12))
    script.rows((1, 20, 33), (3, 4, 5))  # three rows too many
    script.rows((1, 10, 5))  # and five again
    script.end(2)
    script.end(1)
    script.end(3, dropped=4)
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [4, 1, 2])
    found = read_shard(only_shard(tmp_path))
    assert list(found) == ["sample-2", "sample-1", "sample-3"]
    for expected in script.samples.values():
        state, tokens, rows = found[expected.id]
        assert (state, tokens) == (expected.state, expected.tokens)
        assert sorted(rows) == sorted(expected.rows)
        for position, row in rows.items():
            np.testing.assert_array_equal(row, expected.rows[position])


def test_the_page_names_what_the_code_has() -> None:
    page = PAGE.read_text()
    for state in STATES:
        assert f"| `{state}` |" in page
    for name in tables.COLUMNS:
        _, column = name.split(".")
        assert f"`{name}`" in page or f"`.{column}`" in page, name
    kinds = [v for k, v in vars(format).items() if k.isupper() and isinstance(v, bytes)]
    assert len(kinds) == 10
    for kind in kinds:
        assert f"`{kind.decode()}`" in page
    assert f"{format.MAX_FRAME_BYTES >> 20} MiB a metadata frame" in page
    assert f"({format.MAX_INDEX_BYTES >> 30} GiB carry and footer)" in page
    assert f"{format.MAX_PLANES} planes" in page
    assert format.MAX_HIDDEN == 2**20 and format.MAX_BIAS_BYTES == 2**25
    assert format.MAX_CHUNK_BYTES == 2**24 and format.TRAILER_BYTES == 48
