"""What is written is what is read: bit for bit, whatever the interleaving."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, open_shards, plan
from hstransport_consumer.verify import verify
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_kit import Script, check, ended, make_info, only_shard


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 10 rows, shared by samples of fewer than 4."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 240)
    monkeypatch.setattr(plan, "SMALL_BYTES", 96)


def test_one_sample(tmp_path: Path) -> None:
    script = Script(make_info(), special=0.2)
    script.whole(5, 33, labels={"topic": "x", "n": 3}, loss_mask=(30, 2))
    with DatasetWriter(tmp_path / "out") as writer:
        (result,) = script.write(writer, [])
    assert [(e.id, e.state, e.tokens) for e in result.ended] == [("sample-5", "whole", 33)]
    assert result.raw_bytes == 33 * script.info.row_bytes
    dataset = open_shards(tmp_path / "out")
    check(dataset, script.samples.values())
    sample = dataset["sample-5"]
    assert sample.layers == (1, 3, "final") == dataset.layers
    assert sample.labels == {"topic": "x", "n": 3}
    assert sample.request_id == "rid-5"
    assert sample.prompt_tokens == 33
    assert sample.loss_mask.tolist() == [0] * 30 + [1] * 2 + [1]
    assert sample.next_token_id == 7 and sample.output_ids.tolist() == [7]
    assert sample.run == script.info
    assert dataset.model == "model/a" and dataset.info.hidden == 24
    np.testing.assert_array_equal(sample["final"], sample.hidden_states[:, 2])
    np.testing.assert_array_equal(sample.read(3, 9, [3, 1]), sample.hidden_states[3:9, [1, 0]])
    out = np.empty((33, 3, 24), np.uint16)
    assert sample.read(out=out) is out
    np.testing.assert_array_equal(out, sample.hidden_states)
    with pytest.raises(ValueError, match="is due"):
        sample.read(0, 3, out=out)
    assert dataset[-1].id == dataset[0].id == dataset[0:1][0].id == dataset.ids[0]
    assert "sample-5" in dataset and "nobody" not in dataset


def test_zero_copy_views_of_any_row_stride_are_read_in_place(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 20)
    event, states = script.records[1]
    wide = np.zeros((3, 41, 24), np.uint16)
    wide[:, 1::2] = states
    view = wide[:, 1::2]
    view.flags.writeable = False
    script.records[1] = (event, view)
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
    check(open_shards(tmp_path), script.samples.values())


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Script, list[int], int, int, list[int]]:
    """Some samples in any interleaving, with all that can go wrong on the server's side."""
    script = Script(make_info(), draw(st.integers(0, 99)), special=draw(st.sampled_from([0, 0.3])))
    todo: list[list[tuple]] = []
    for sid in range(draw(st.integers(1, 6))):
        n = draw(st.integers(0, 40))
        steps: list[tuple] = [("start", sid, n)]
        at = 0
        while at < n:
            step = draw(st.sampled_from([1, 1, 3, 17, 64]))
            kind = draw(st.sampled_from(["rows"] * 8 + ["lost", "skip"]))
            steps.append((kind, sid, at, min(step, n - at)))
            at += step
        if n and draw(st.booleans()):  # retracted: computed again from some position on
            again = draw(st.integers(0, n - 1))
            steps.append(("rows", sid, again, n - again + draw(st.integers(0, 2))))
        how = draw(st.sampled_from(["finished", "finished", "finished", "aborted"]))
        more = draw(st.sampled_from([{}, {}, {"dropped": 2}, {"cached": 5}]))
        steps.append(("end", sid, how, more))
        todo.append(steps)
    while todo:
        i = draw(st.integers(0, len(todo) - 1))
        kind, sid, *rest = todo[i].pop(0)
        if kind == "start":
            script.start(sid, rest[0])
        elif kind == "end":
            script.end(sid, reason=rest[0], **rest[1])
        elif kind != "skip":
            script.rows((sid, *rest), lost=kind == "lost")
        if not todo[i]:
            todo.pop(i)
    windows = draw(st.lists(st.integers(1, 20), max_size=12))
    shard_bytes = draw(st.sampled_from([1, 4000, 20_000, 1 << 30]))
    reopen = draw(st.lists(st.integers(0, len(script.records)), max_size=3))
    return script, windows, shard_bytes, draw(st.integers(1, 2)), reopen


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=scripts(), data=st.data())
def test_any_interleaving_comes_back(
    small_chunks: None, case: tuple[Script, list[int], int, int, list[int]], data: st.DataObject
) -> None:
    script, windows, shard_bytes, threads, reopen = case
    out = Path(tempfile.mkdtemp(prefix="hst-roundtrip-"))
    ahead = data.draw(st.integers(0, 3), "windows begun before the oldest is written")
    try:
        done = 0
        for stop in [*sorted(reopen), len(script.records)]:
            with DatasetWriter(out, shard_bytes=shard_bytes, threads=threads) as writer:
                writer.begin_run(script.info)
                assert writer.next_seq(script.info.run, 0) == done
                for n in [*windows, 10**6]:
                    # Some records again, as a ring would repeat them.
                    first = max(done - data.draw(st.integers(0, 6)), 0)
                    last = min(first + n, stop) - 1
                    if last >= done:
                        script.begin_window(writer, first, last)
                        done = last + 1
                    while writer.begun > ahead:
                        writer.finish_window()
                while writer.begun:
                    writer.finish_window()
        dataset = open_shards(out, states=None)
        check(dataset, script.samples.values())
        assert not [f for f in verify(out).findings if "label" not in f.what]
        for sample in dataset:
            for a, b in sample.ranges:
                start = data.draw(st.integers(a, b))
                stop = data.draw(st.integers(start, b))
                layers = data.draw(st.lists(st.sampled_from([1, 3, "final"]), min_size=1))
                planes = [[1, 3, "final"].index(k) for k in layers]
                if stop > start:
                    expected = script.samples[int(sample.id[7:])].states(start, stop)[:, planes]
                    np.testing.assert_array_equal(sample.read(start, stop, layers), expected)
    finally:
        shutil.rmtree(out)


def test_a_window_knows_what_ended_in_one_that_is_not_written_yet(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 4)
    script.rows((1, 4, 2))
    with DatasetWriter(tmp_path) as writer:
        writer.begin_run(script.info)
        script.begin_window(writer, 0, 2)
        script.begin_window(writer, 3, 3)
        assert [writer.finish_window().orphan_rows for _ in range(2)] == [0, 2]
    assert verify(tmp_path).ok


def test_large_samples_are_cut_and_small_ones_share_a_chunk(tmp_path: Path) -> None:
    script = Script(make_info(hidden=2048, layers=(2,), final=False))
    script.whole(1, 513)
    for sid in range(2, 12):
        script.whole(sid, 5)
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
    dataset = open_shards(tmp_path)
    check(dataset, script.samples.values())
    assert dataset.shards[0].tables.c["chunk.rows"].tolist() == [256, 257, 50]


def test_a_layer_is_read_without_touching_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hstransport_consumer import codec

    script = Script(make_info(hidden=2048))
    script.whole(1, 1200)
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
    sample = open_shards(tmp_path)[0]
    calls = []
    for name in ("decode_frame", "PlaneRead"):  # a frame of a part, both of a whole chunk
        real = getattr(codec, name)
        monkeypatch.setattr(
            codec, name, lambda *a, n=name, f=real, **k: calls.append(n) or f(*a, **k)
        )
    sample.read(0, 10, layers=[3])
    assert calls == ["decode_frame"] * 2
    calls.clear()
    sample.read(layers=["final"])
    assert calls == ["PlaneRead"] * 3  # three chunks


def test_a_better_bias_table_follows_when_more_rows_were_seen(tmp_path: Path) -> None:
    script = Script(make_info())
    for sid in range(20):
        script.whole(sid, 100)
    with DatasetWriter(tmp_path, shard_bytes=100_000) as writer:
        script.write(writer, [3] * 20)
    dataset = open_shards(tmp_path)
    first, second = ([rows for _, rows in s.tables.bias] for s in dataset.shards)
    assert first == [100, 800]
    assert second == [100 * dataset.shards[0].tables.samples + 100]
    check(dataset, script.samples.values())


def test_shards_go_on_with_a_settled_bias_table(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(0, 5000)
    for sid in range(1, 5):
        script.whole(sid, 50)
    with DatasetWriter(tmp_path, shard_bytes=1) as writer:
        writer.begin_run(script.info)
        script.write_window(writer, 0, 2)
        script.write_window(writer, 3, 5)
    with DatasetWriter(tmp_path, shard_bytes=1) as writer:
        script.write(writer, [3] * 3, first=6)
    dataset = open_shards(tmp_path)
    tables = []
    for shard in dataset.shards:
        assert [rows for _, rows in shard.tables.bias] == [1024]
        with shard.open() as fd:
            tables.append(shard.bias(fd, 0).tobytes())
    assert len(tables) == 5 and len(set(tables)) == 1
    check(dataset, script.samples.values())


def test_of_retries_the_first_whole_one_is_listed(tmp_path: Path) -> None:
    script = Script(make_info())
    script.start(1, 8, id="a")
    script.rows((1, 0, 4))
    script.end(1, reason="aborted")
    for sid in (2, 3):
        script.whole(sid, 8, id="a")
    for sid in (4, 5):
        script.start(sid, 8, id="b")
        script.end(sid, reason="aborted", output=[sid])
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
    check(open_shards(tmp_path), [script.samples[2]])
    dataset = open_shards(tmp_path, states=None)
    assert list(dataset.ids) == ["a", "b"]
    assert dataset["a"].request_id == "rid-2" and dataset["b"].request_id == "rid-5"
    assert list(open_shards(tmp_path, states=["aborted"]).ids) == ["b"]


def test_zstd_itself_accepts_a_shard(tmp_path: Path) -> None:
    zstd = shutil.which("zstd")
    if zstd is None:
        pytest.skip("no zstd on this machine")
    script = Script(make_info())
    script.whole(1, 100)
    writer = DatasetWriter(tmp_path)
    script.write(writer, [])
    partial = only_shard(tmp_path)
    subprocess.run([zstd, "-tq", partial], check=True)
    writer.close()
    subprocess.run([zstd, "-tq", only_shard(tmp_path)], check=True)
    plain = subprocess.run([zstd, "-dcq", only_shard(tmp_path)], check=True, capture_output=True)
    assert len(plain.stdout) == 100 * script.info.row_bytes
    data = bytearray(only_shard(tmp_path).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bent.zst").write_bytes(data)
    assert subprocess.run([zstd, "-tq", tmp_path / "bent.zst"], capture_output=True).returncode


def test_two_runs_and_two_ranks_share_a_directory(tmp_path: Path) -> None:
    scripts = [Script(make_info("aa", rank=r), seed=r) for r in (0, 1)] + [Script(make_info("bb"))]
    for i, script in enumerate(scripts):
        script.start(1, 30, id=f"s{i}")
        script.rows((1, 0, 20))
        script.rows((1, 20, 10))
        script.end(1)
    with DatasetWriter(tmp_path, shard_bytes=2000) as writer:
        for n in range(4):
            for script in scripts:
                writer.begin_run(script.info)
                script.write_window(writer, n, n)
    dataset = open_shards(tmp_path)
    assert len(dataset.shards) > 1
    check(dataset, [s.samples[1] for s in scripts])
    assert dataset["s1"].run.rank == 1 and dataset["s2"].run.run == "bb"


def test_a_closed_run_leaves_unfinished_samples(tmp_path: Path) -> None:
    script = Script(make_info())
    script.start(1, 30)
    script.rows((1, 0, 20))
    script.start(2, 5)
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
    with DatasetWriter(tmp_path) as writer:
        assert writer.open_runs() == [script.info]
        closed = writer.close_run(script.info.run, 0, "the server died")
        assert {(e.id, e.state, e.tokens) for e in closed} == {
            ("sample-1", "unfinished", 20),
            ("sample-2", "unfinished", 0),
        }
        assert writer.close_run(script.info.run, 0, "again") == []
        assert writer.next_seq(script.info.run, 0) == 3
    dataset = open_shards(tmp_path, states=["unfinished"])
    assert dataset["sample-1"].detail == "the server died"
    np.testing.assert_array_equal(
        dataset["sample-1"].hidden_states, script.samples[1].states(0, 20)
    )
    assert verify(tmp_path).ok
    assert len(open_shards(tmp_path)) == 0


def test_rows_without_a_start_are_counted_and_left_out(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 10)
    script.whole(2, 10)
    with DatasetWriter(tmp_path) as writer:
        writer.begin_run(script.info)
        script.write_window(writer, 0, 2)
        result = script.write_window(writer, 4, 5)  # the START of 2 is lost
    assert (result.orphan_rows, result.anomalies, result.rows) == (10, 1, 0)
    check(open_shards(tmp_path, states=None), [script.samples[1]])


def test_a_dataset_is_pickled_by_its_path(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 10)
    with DatasetWriter(tmp_path) as writer:
        script.write(writer, [])
    dataset = open_shards(tmp_path, layers=["final", 1])
    dumped = pickle.dumps(dataset)
    assert len(dumped) < 500
    again = pickle.loads(dumped)
    assert again.layers == ("final", 1)
    np.testing.assert_array_equal(again[0].hidden_states, script.samples[1].states()[:, [2, 0]])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(dataset[0])).read(), again[0].read())


def test_a_window_that_repeats_some_records_stores_the_new_ones(tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 10)
    script.whole(2, 10)
    with DatasetWriter(tmp_path) as writer:
        writer.begin_run(script.info)
        script.write_window(writer, 0, 2)
        result = script.write_window(writer, 0, 5)
        assert (result.repeated, result.anomalies, result.duplicate_rows) == (3, 0, 0)
        assert [e.id for e in result.ended] == ["sample-2"]
        assert not writer.open_runs()
        events = script.records[3:]
        with pytest.raises(ValueError, match="one for each is needed"):
            writer.write_window(script.info.run, 0, 4, 7, events)
    check(open_shards(tmp_path, states=None), script.samples.values())
    assert open_shards(tmp_path, states=None).shards[0].tables.samples == 2


def test_a_shard_whose_index_is_full_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hstransport_consumer.chain.FULL_INDEX_BYTES", 200)
    script = Script(make_info())
    for sid in range(6):
        script.whole(sid, 2)
    with DatasetWriter(tmp_path) as writer:
        writer.begin_run(script.info)
        for first in range(0, 18, 3):
            script.write_window(writer, first, first + 2)
    assert len(open_shards(tmp_path).shards) > 1
    check(open_shards(tmp_path), script.samples.values())


def test_an_empty_writer_leaves_no_shard(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path) as writer:
        writer.begin_run(make_info())
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    with pytest.raises(FileNotFoundError, match="no shards"):
        open_shards(tmp_path)


def test_results_say_what_was_not_stored(tmp_path: Path) -> None:
    script = Script(make_info())
    script.start(1, 10)
    script.rows((1, 0, 10))
    script.rows((1, 4, 8))
    script.end(1)
    script.records.append((None, None))
    with DatasetWriter(tmp_path) as writer:
        (result,) = script.write(writer, [])
        assert (result.rows, result.duplicate_rows, result.anomalies) == (12, 6, 1)
        assert script.write_window(writer, 0, 4).repeated == 5
        assert (writer.samples, writer.whole, writer.tokens) == (1, 1, 12)
    check(open_shards(tmp_path), script.samples.values())
    assert len(ended([result])) == 1
