"""What verify and inspect say of states that no model computes, and of what is in a directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer.inspect import inspect
from hstransport_consumer.verify import verify
from shard_kit import Script, make_info, only_shard

from hstransport.protocol import Start


def write(directory: Path, script: Script) -> None:
    with DatasetWriter(directory) as writer:
        script.write(writer, [])


@pytest.mark.parametrize(
    ("value", "words"),
    [(0x0000, "only zeros"), (0x8000, "only zeros"), (0x3F80, "one value only")],
)
def test_a_row_of_one_value_is_found(value: int, words: str, tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 9)
    script.whole(2, 9)
    script.records[1][1][1, 4] = value
    write(tmp_path, script)
    (finding,) = verify(tmp_path).findings
    assert (finding.file, finding.sample) == ("shard-000000.zst", "sample-1")
    assert finding.what.startswith(f"1 rows hold {words}") and "at token 4" in finding.what


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0, 0xFFC1])
@pytest.mark.parametrize("allow", [False, True])
def test_inf_and_nan_are_found_unless_allowed(value: int, allow: bool, tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 9, labels={"hstransport.allow": True} if allow else {})
    script.records[1][1][2, 8, 5] = value
    write(tmp_path, script)
    found = [f.what for f in verify(tmp_path).findings]
    assert [f.startswith("1 rows hold Inf or NaN") for f in found] == ([] if allow else [True])


def test_states_that_are_not_whole_are_no_findings(tmp_path: Path) -> None:
    script = Script(make_info())
    script.start(1, 9)
    script.rows((1, 0, 4))
    script.records[1][1][:] = 0
    script.end(1, dropped=5)
    script.start(2, 0)
    script.end(2)
    write(tmp_path, script)
    report = verify(tmp_path)
    assert report.ok and (report.samples, report.whole, report.tokens) == (2, 0, 4)


def test_too_few_token_ids_are_found(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 9)
    event = script.records[0][0]
    assert isinstance(event, Start)
    script.records[0] = (Start(1, "sample-1", "r", event.prompt[:5]), None)
    write(tmp_path, script)
    (finding,) = verify(tmp_path).findings
    assert finding.what == "has 9 rows and 6 token ids"


def test_an_unfinished_file_is_verified_too(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 9)
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
        report = verify(tmp_path)
        assert report.ok and report.unfinished == ["shard-000000.zst.partial"]
        assert (report.shards, report.samples, report.tokens) == (0, 1, 9)


def test_inspect_says_what_is_there(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 90, labels={"topic": 1})
    script.whole(2, 10, labels={"topic": 2, "lang": "de"})
    script.start(3, 10)
    script.end(3, reason="aborted")
    write(tmp_path, script)
    found = inspect(tmp_path)
    size = only_shard(tmp_path).stat().st_size
    assert found["stored_bytes"] == size
    assert found["raw_bytes"] == 100 * script.info.row_bytes
    assert found["ratio"] == round(100 * script.info.row_bytes / size, 4)
    expected = {
        "samples": 3,
        "whole": 2,
        "tokens": 100,
        "states": {"aborted": 1, "whole": 2},
        "layers": [1, 3],
        "final": True,
        "hidden": 24,
        "num_layers": 4,
        "model": "model/a",
        "rows": "prompt",
        "sglang": ["0.5.11"],
        "labels": ["lang", "topic"],
        "runs": [{"run": "c0ffee00", "rank": 0, "session": "test", "created": 1.5}],
    }
    assert {k: found[k] for k in expected} == expected
    assert found["shards"] == [
        {
            "file": "shard-000000.zst",
            "bytes": size,
            "samples": 3,
            "tokens": 100,
            "finished": True,
        }
    ]


def test_inspect_of_a_directory_that_is_being_written(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 9)
    with DatasetWriter(tmp_path) as writer:
        with pytest.raises(FileNotFoundError):
            inspect(tmp_path)
        script.write(writer, [])
        assert inspect(tmp_path)["shards"][0]["finished"] is False
    assert inspect(tmp_path / "shard-000000.zst")["samples"] == 1


def test_runs_announced_before_anything_of_them_is_stored(tmp_path: Path) -> None:
    """A consumer announces the rings that it sees; which one stores first is another matter."""
    runs = [Script(make_info(f"c0ffee0{i}")) for i in range(4)]
    for number, run in enumerate(runs):
        run.whole(1, 9, id=f"sample-{number}")
    for pair in (runs[:2], runs[2:]):
        with DatasetWriter(tmp_path) as writer:
            for run in pair:
                writer.begin_run(run.info)
            pair[1].write(writer, [])
            writer.finish_shard()
            pair[0].write(writer, [])
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert len(list(tmp_path.glob("shard-*.zst"))) == 4


def test_bits_survive_that_no_arithmetic_would_keep(tmp_path: Path) -> None:
    """All 65536 words, in each plane."""
    script = Script(make_info(hidden=256))
    script.whole(1, 256, labels={"hstransport.allow": True})
    words = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    script.records[1][1][:] = np.stack([words, words[::-1], words.T])
    write(tmp_path, script)
    states = open_shards(tmp_path)[0].hidden_states
    np.testing.assert_array_equal(states.transpose(1, 0, 2), script.records[1][1])
    assert verify(tmp_path).ok
