"""--on-shard: real consumers, real commands, and shards that are taken away."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer import verify as verify_module
from hstransport_consumer.directory import handed_over, note_handed_over
from hstransport_consumer.inspect import inspect
from hstransport_consumer.shard import open_shard
from hstransport_consumer.verify import verify
from rig.consumer import ConsumerProcess
from rig.producer import Producer, tokens
from shard_kit import Script, make_info

from hstransport.cli import main as hstransport
from hstransport.protocol import FINISHED

BIN = Path(sys.executable).parent


@pytest.fixture
def producer(ring_dir):
    producer = Producer(ring_dir)
    yield producer
    producer.close()


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def script(path: Path, code: str) -> str:
    """A command of its own, as a user would write one; ``code`` is shell, ``$1`` the shard."""
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    return shlex.quote(str(path))


def consume(out: Path, ring_dir: Path, *args: str, timeout: float = 60) -> tuple[int, str]:
    """Run a consumer until the server has ended: exit status and log."""
    done = subprocess.run(
        [
            *(BIN / "hstransport-consumer", "--out", out, "--dir", ring_dir),
            *("--flush-s", "0.05", "--exit-when-done", "--shard-size", "1", *args),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stderr


def shards(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.glob("shard-*"))


def feed(producer: Producer, names: str) -> dict[str, np.ndarray]:
    """Samples, each in a window of its own."""
    sent = {}
    for name in names:
        sent[name] = producer.sample(name, 20)
        wait_until(lambda: not producer.ring.used_bytes, f"{name} was not stored")
    return sent


def test_each_shard_is_verified_and_handed_over_once(producer, ring_dir, tmp_path):
    out, seen = tmp_path / "s", tmp_path / "seen"
    verify_one = shlex.quote(str(BIN / "hstransport")) + " verify {}"
    record = script(
        tmp_path / "record",
        f'{verify_one.replace("{}", chr(34) + "$1" + chr(34))} && echo "$1" >> {seen}',
    )
    consumer = ConsumerProcess(out, ring_dir, "--shard-size", "1", "--on-shard", record)
    with consumer:
        feed(producer, "abc")
        wait_until(lambda: "shard-000001.zst was handed over" in consumer.log_text(), "no command")
        assert consumer.stop() == 0
    assert shards(out) == [f"shard-{i:06d}.zst" for i in range(3)]
    names = [str(out / n) for n in shards(out)]
    assert seen.read_text().splitlines() == names, "the last one too, in order, each once"
    assert "handed over 3" in consumer.log_text()
    producer.close()
    # Another consumer of the directory has nothing to hand over but what is new.
    other = Producer(ring_dir, run="cd" * 6)
    other.sample("d", 20)
    other.close()
    status, log = consume(out, ring_dir, "--on-shard", record)
    assert status == 0, log
    assert seen.read_text().splitlines() == [*names, str(out / "shard-000003.zst")]


def test_place_of_the_path_in_the_command(producer, ring_dir, tmp_path):
    copies = tmp_path / "the copies"
    copies.mkdir()
    producer.sample("a", 5)
    producer.close()
    command = f"cp {{}} '{copies}'"
    status, log = consume(tmp_path / "s", ring_dir, "--on-shard", command)
    assert status == 0, log
    assert (copies / "shard-000000.zst").read_bytes() == (
        tmp_path / "s" / "shard-000000.zst"
    ).read_bytes()


def test_deleted_shards_do_not_stop_or_renumber_anything(producer, ring_dir, tmp_path):
    """Samples begin in a shard that is gone and go on after a restart; copies hold everything."""
    out, copies = tmp_path / "s", tmp_path / "copies"
    copies.mkdir()
    move = script(tmp_path / "move", f'cp "$1" {copies} && rm "$1"')
    args = ("--shard-size", "1", "--on-shard", move)
    long = producer.start("long", 30)
    consumer = ConsumerProcess(out, ring_dir, *args)
    parts = []
    for round_number in range(3):
        consumer.start()
        parts.append(producer.rows((long, 10 * round_number, 10)))
        if round_number == 2:
            producer.exporter.end(long, FINISHED, 30, tokens(0))
        sent = feed(producer, "xyz"[round_number])
        assert consumer.stop() == 0, consumer.log_text()
        assert shards(out) == [], "every shard was taken away"
    producer.close()
    names = shards(copies)
    assert len(names) >= 3 and names == [f"shard-{i:06d}.zst" for i in range(len(names))]
    dataset = open_shards(copies)
    assert sorted(dataset.ids) == ["long", "x", "y", "z"]
    whole = np.concatenate(parts, axis=1).transpose(1, 0, 2)
    assert np.array_equal(dataset["long"].hidden_states, whole)
    assert np.array_equal(dataset["z"].hidden_states, sent["z"].transpose(1, 0, 2))
    assert verify(copies).ok
    assert "orphan" not in consumer.log_text()


def test_failing_command_is_told_and_its_shard_stays_for_the_next(producer, ring_dir, tmp_path):
    out = tmp_path / "s"
    fail = script(tmp_path / "fail", 'case "$1" in *1.zst) echo no bucket >&2; exit 7;; esac')
    consumer = ConsumerProcess(out, ring_dir, "--shard-size", "1", "--on-shard", fail)
    with consumer:
        feed(producer, "abc")
        assert consumer.stop() == 3
    log = consumer.log_text()
    assert "shard-000001.zst stays: its command ended with status 7" in log and "no bucket" in log
    assert "handed over 2, 1 failed: shard-000001.zst" in log
    producer.close()
    assert verify(out).ok and len(open_shards(out)) == 3
    # The next consumer hands over that one, and no other.
    other = Producer(ring_dir, run="cd" * 6)
    other.close()
    seen = tmp_path / "seen"
    with ConsumerProcess(
        out,
        ring_dir,
        "--on-shard",
        f'{sys.executable} -c \'import sys; open("{seen}", "a").write(sys.argv[1])\'',
    ) as again:
        wait_until(seen.exists, "not handed over again")
        assert again.stop() == 0
    assert seen.read_text() == str(out / "shard-000001.zst")


def test_the_end_waits_for_a_slow_command(producer, ring_dir, tmp_path):
    out, done = tmp_path / "s", tmp_path / "done"
    slow = script(tmp_path / "slow", f'sleep 2; echo "$1" >> {done}')
    producer.sample("a", 5)
    producer.close()
    status, log = consume(out, ring_dir, "--on-shard", slow)
    assert status == 0 and "waiting for the commands of 1 shards" in log
    assert done.read_text().split() == [str(out / "shard-000000.zst")]


def test_ctrl_c_reaches_the_consumer_and_no_command(producer, ring_dir, tmp_path):
    """A terminal sends it to the whole process group."""
    out, started, done = tmp_path / "s", tmp_path / "started", tmp_path / "done"
    slow = script(tmp_path / "slow", f'echo >> {started}; sleep 1; echo "$1" >> {done}')
    producer.sample("a", 5)
    consumer = subprocess.Popen(
        [
            *(BIN / "hstransport-consumer", "--out", out, "--dir", ring_dir, "--flush-s", "0.05"),
            *("--shard-size", "1", "--on-shard", slow),
        ],
        start_new_session=True,
    )
    wait_until(lambda: not producer.ring.used_bytes, "not stored")
    producer.sample("b", 5)
    wait_until(started.exists, "no command")
    os.killpg(consumer.pid, signal.SIGINT)
    assert consumer.wait(20) == 0
    assert len(done.read_text().split()) == 2


def test_a_second_signal_ends_at_once_and_the_shard_comes_again(producer, ring_dir, tmp_path):
    out, started = tmp_path / "s", tmp_path / "started"
    hang = script(tmp_path / "hang", f"echo $$ >> {started}; exec sleep 60")
    consumer = ConsumerProcess(out, ring_dir, "--on-shard", hang)
    consumer.start()
    feed(producer, "a")
    consumer.process.terminate()
    wait_until(lambda: started.exists() and started.read_text().endswith("\n"), "no command")
    consumer.process.terminate()
    assert consumer.process.wait(5) != 0
    subprocess.run(["kill", started.read_text().strip()], check=True)
    producer.close()
    assert verify(out).ok and not handed_over(out)
    other = Producer(ring_dir, run="cd" * 6)
    other.close()
    with ConsumerProcess(out, ring_dir, "--on-shard", "true") as again:
        wait_until(lambda: "shard-000000.zst was handed over" in again.log_text(), "not again")
        assert again.stop() == 0
    assert len(handed_over(out)) == 1


def test_killed_consumer_hands_over_again_what_had_not_ended(producer, ring_dir, tmp_path):
    out, started = tmp_path / "s", tmp_path / "started"
    first = script(
        tmp_path / "first", f'echo $$ >> {started}; case "$1" in *0.zst) ;; *) exec sleep 60;; esac'
    )
    consumer = ConsumerProcess(out, ring_dir, "--shard-size", "1", "--on-shard", first)
    consumer.start()
    feed(producer, "abcd")
    wait_until(lambda: started.exists() and len(started.read_text().splitlines()) == 2, "no 2nd")
    consumer.kill()
    subprocess.run(["kill", started.read_text().split()[1]], check=True)
    seen = tmp_path / "seen"
    record = script(tmp_path / "record", f'echo "$1" >> {seen}')
    producer.sample("e", 20)
    producer.close()
    status, log = consume(out, ring_dir, "--on-shard", record)
    assert status == 0, log
    assert sorted(Path(p).name for p in seen.read_text().split()) == shards(out)[1:]
    assert verify(out).ok and len(open_shards(out)) == 5


def test_packing_waits_when_commands_do_not_keep_up(producer, ring_dir, tmp_path):
    out, go = tmp_path / "s", tmp_path / "go"
    wait_for_go = script(tmp_path / "wait", f"while ! test -e {go}; do sleep 0.05; done")
    args = ("--shard-size", "1", "--on-shard", wait_for_go, "--on-shard-backlog", "2")
    with ConsumerProcess(out, ring_dir, *args) as consumer:
        # One runs, two wait, one is being written; the shard is closed by the window after it.
        feed(producer, "abcd")
        wait_until(lambda: "packing waits" in consumer.log_text(), consumer.log_text())
        producer.sample("e", 20)
        time.sleep(0.5)
        assert producer.ring.used_bytes, "packing goes on"
        go.touch()
        wait_until(lambda: not producer.ring.used_bytes, "packing does not go on")
        assert consumer.stop() == 0
    assert consumer.log_text().count("packing waits") == 1
    assert len(handed_over(out)) == 5


@pytest.mark.parametrize(
    ("command", "told"),
    [("", "names no command"), ("'a", "quotation"), ("no-such-command {}", "no such command")],
)
def test_bad_command_is_named_at_once(ring_dir, tmp_path, command, told):
    status, log = consume(tmp_path / "s", ring_dir, "--on-shard", command)
    assert status == 2 and told in log and "Traceback" not in log
    assert not (tmp_path / "s").exists()


# Directories from which shards were taken away


@pytest.fixture
def parted(tmp_path) -> tuple[Script, Path]:
    """Three shards; sample 1 has its START in the first and a row in each."""
    script = Script(make_info())
    script.start(1, 30, labels={"topic": 1})
    for at in (0, 10, 20):
        script.rows((1, at, 10))
        script.whole(2 + at, 5, labels={"lang": "de"})
    script.end(1)
    with DatasetWriter(tmp_path / "d", shard_bytes=1) as writer:
        script.write(writer, [5, 4, 5])
    assert len(shards(tmp_path / "d")) == 3
    return script, tmp_path / "d"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_shard_is_verified_alone(parted, capsys, number, tmp_path):
    _, directory = parted
    alone = (directory / f"shard-{number:06d}.zst").rename(tmp_path / "any name")
    assert hstransport(["verify", str(alone), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["shards"], report["parted"]) == (1, int(number == 2))
    assert report["tokens"] == 15, "all rows were decoded"
    data = bytearray(alone.read_bytes())
    data[len(data) // 2] ^= 1
    alone.write_bytes(data)
    assert hstransport(["verify", str(alone)]) == 1


def test_verify_excuses_what_was_handed_over_and_nothing_else(parted):
    _, directory = parted
    first = directory / "shard-000000.zst"
    uid = open_shard(first).header.uid
    first.unlink()
    findings = verify(directory).findings
    assert findings and all("put it back" in f.what for f in findings)
    note_handed_over(directory, first.name, uid)
    report = verify(directory)
    assert report.ok and (report.samples, report.parted) == (3, 1)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_verify_misses_a_shard_that_nothing_else_needs(tmp_path, gone):
    script = Script(make_info())
    for sid in range(3):
        script.whole(sid, 5)
    with DatasetWriter(tmp_path, shard_bytes=1) as writer:
        script.write(writer, [3, 3, 3])
    path = tmp_path / f"shard-{gone:06d}.zst"
    uid = open_shard(path).header.uid
    path.unlink()
    assert [f.file for f in verify(tmp_path).findings] == [path.name]
    note_handed_over(tmp_path, path.name, uid)
    assert verify(tmp_path).ok


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_verify_of_a_directory_whose_shards_are_handed_over_meanwhile(parted, monkeypatch, gone):
    """Before it comes to it, and after."""
    _, directory = parted
    path = directory / f"shard-{gone:06d}.zst"
    uid = open_shard(path).header.uid
    real = verify_module.verify_file

    def verify_file(entry, number, *rest):
        if number == 1:
            path.unlink()
        found = real(entry, number, *rest)
        if number == 2:
            note_handed_over(directory, path.name, uid)
        return found

    monkeypatch.setattr(verify_module, "verify_file", verify_file)
    report = verify(directory)
    assert report.ok, report.findings
    assert report.parted or gone == 2


def test_reader_and_inspect_of_what_is_left(parted):
    script, directory = parted
    (directory / "shard-000000.zst").unlink()
    found = inspect(directory)
    assert found["samples"] == 3 and found["labels"] == ["lang"]
    dataset = open_shards(directory)
    expected = {s.id: s for s in script.samples.values()}
    for sample in dataset:
        if sample.id == "sample-1":
            assert len(sample.absent) == 1
            with pytest.raises(FileNotFoundError, match="put it back"):
                sample.read()
            part = sample.read(10, 30)
            assert np.array_equal(part, expected[sample.id].states(10, 30))
        else:
            assert not sample.absent
            assert np.array_equal(sample.hidden_states, expected[sample.id].states())


def test_a_shard_that_vanishes_while_a_directory_is_read_is_left_out(parted, monkeypatch):
    from hstransport_consumer import directory as shards

    _, directory = parted
    real = shards.list_shards

    def vanish(path):
        entries = real(path)
        entries[-1].path.unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(shards, "list_shards", vanish)
    assert len(open_shards(directory).shards) == 2
    assert verify(directory).shards == 1


@pytest.mark.parametrize("gone", [[2], [1, 2], [0, 1, 2]])
def test_writer_goes_on_where_the_shards_were_taken_away(tmp_path, gone):
    script = Script(make_info())
    script.start(1, 40)
    for at in range(0, 40, 10):
        script.rows((1, at, 10))
    script.end(1)
    directory = tmp_path / "d"
    with DatasetWriter(directory, shard_bytes=1) as writer:
        writer.begin_run(script.info)
        for first, last in ((0, 1), (2, 2), (3, 3)):
            script.write_window(writer, first, last)
    kept = tmp_path / "kept"
    kept.mkdir()
    for number in gone:
        name = f"shard-{number:06d}.zst"
        (directory / name).rename(kept / name)
    with DatasetWriter(directory) as writer:
        writer.begin_run(script.info)
        assert writer.next_seq(script.info.run, 0) == 4
        script.write_window(writer, 2, 5)  # the ring repeats what it had
    assert shards(directory)[-1] == "shard-000003.zst"
    for path in kept.iterdir():
        path.rename(directory / path.name)
    assert verify(directory).ok
    (sample,) = open_shards(directory)
    assert np.array_equal(sample.hidden_states, script.samples[1].states())


def test_torn_line_of_the_journal_spoils_no_other(tmp_path):
    note_handed_over(tmp_path, "shard-000000.zst", b"a" * 16)
    with (tmp_path / ".handed-over").open("ab") as file:
        file.write(b"shard-000001.zst 61")
    note_handed_over(tmp_path, "shard-000002.zst", b"c" * 16)
    assert handed_over(tmp_path) == {b"a" * 16, b"c" * 16}


def test_numbers_go_on_though_the_directory_came_without_its_hidden_files(tmp_path):
    script = Script(make_info())
    script.start(1, 20)
    script.rows((1, 0, 20))
    script.end(1)
    directory = tmp_path / "d"
    with DatasetWriter(directory, shard_bytes=1) as writer:
        writer.begin_run(script.info)
        script.write_window(writer, 0, 1)
        script.write_window(writer, 2, 2)
    (directory / ".next").unlink()  # `cp dir/*`, or a release that knew none
    DatasetWriter(directory).close()  # hands over what there is, and gets nothing new
    for path in directory.glob("shard-*"):
        path.unlink()
    with DatasetWriter(directory) as writer:
        writer.begin_run(script.info)
        assert writer.next_seq(script.info.run, 0) == 3
        other = Script(make_info(run="cd" * 6))
        other.start(1, 3)
        other.rows((1, 0, 3))
        writer.begin_run(other.info)
        other.write_window(writer, 0, 1)
    assert shards(directory) == ["shard-000002.zst"]
