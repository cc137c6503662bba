"""hstransport repair: indexes made anew from the frames alone."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer import repair as module
from hstransport_consumer.repair import Repair
from hstransport_consumer.verify import verify
from shard_kit import Script, check, split_frames
from test_shard_crash import flip, long_script

from hstransport.cli import main
from hstransport.errors import CorruptShardError, DatasetBusyError, ShardError, TornShardError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, Path]:
    """A directory of two finished shards; samples go over from the first into the second."""
    script = long_script(samples=12)
    out = tmp_path_factory.mktemp("good") / "out"
    with DatasetWriter(out, shard_bytes=90_000) as writer:
        script.write(writer, [5] * 100)
    assert len(list(out.glob("shard-*.zst"))) == 2
    return script, out


@pytest.fixture
def out(good: tuple[Script, Path], tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(good[1], tmp_path / "out"))


def repair(path: Path) -> list[Repair]:
    return list(module.repair(path))


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != ".lock"}


def footer_at(path: Path) -> int:
    return next(at for kind, at, _ in split_frames(path.read_bytes()) if kind == b"HSft")


def test_a_footer_or_trailer_bent_or_cut_anywhere_comes_back_byte_for_byte(
    good: tuple[Script, Path], out: Path
) -> None:
    before = contents(good[1])
    path = min(out.glob("*.zst"))
    data, start = path.read_bytes(), footer_at(path)
    rng = random.Random(1)
    for _ in range(40):
        if rng.random() < 0.5:
            flip(path, rng.randrange(start + 12, len(data)), rng.randrange(8))
        else:
            os.truncate(path, rng.randrange(start + 12, len(data)))
        with pytest.raises(ShardError):
            open_shards(path)
        mended, sound = repair(out)
        assert mended.repaired and not mended.lost and mended.what.endswith("nothing is lost")
        assert sound.what == "nothing is wrong"
        assert contents(out) == before
    check(open_shards(out), good[0].samples.values())
    assert verify(out).ok


def test_sound_shards_are_left_alone(good: tuple[Script, Path], out: Path) -> None:
    inodes = {p: p.stat().st_ino for p in out.iterdir()}
    assert not any(r.repaired or r.lost for r in repair(out))
    assert {p: p.stat().st_ino for p in out.iterdir()} == inodes


def test_what_stays_of_a_cut_shard_is_read_and_the_rest_is_named(
    good: tuple[Script, Path], out: Path
) -> None:
    """Cut in the midst of its windows, as a copy that did not come to its end."""
    script, path = good[0], min(out.glob("*.zst"))
    expected = {s.id: s for s in script.samples.values()}
    windows = [at for kind, at, _ in split_frames(path.read_bytes()) if kind == b"HSwn"]
    cut = windows[len(windows) // 2]
    for size in (cut + 100, cut):
        shutil.copy(good[1] / path.name, path)
        os.truncate(path, size)
        with pytest.raises(TornShardError):
            open_shards(path)
        (done,) = repair(path)
        assert done.repaired and done.lost and f"lost from byte {cut:,} on" in done.what
        kept = out / f"{path.name}.damaged"
        assert kept.stat().st_size == size
        alone = open_shards(path, states=None)
        assert len(alone)
        check(alone, [expected[i] for i in alone.ids])
        assert not [f for f in verify(path).findings if f.file == path.name]
        kept.unlink()


def test_windows_behind_damage_are_read_through_a_sound_index_and_not_thrown_away(
    good: tuple[Script, Path], out: Path
) -> None:
    path = min(out.glob("*.zst"))
    kinds = [b"data", b"HSck", b"HSwn", b"HSen"]
    frames = split_frames(path.read_bytes())
    for kind in kinds:
        shutil.copy(good[1] / path.name, path)
        _, at, end = next(f for f in frames if f[0] == kind)
        flip(path, (at + end) // 2)
        before = path.read_bytes()
        done, _ = repair(out)
        assert done.lost and not done.repaired and "its index is sound" in done.what
        assert path.read_bytes() == before


def test_without_an_index_damaged_blocks_cost_their_own_samples_only(
    good: tuple[Script, Path], out: Path
) -> None:
    path = min(out.glob("*.zst"))
    _, at, end = next(f for f in split_frames(path.read_bytes()) if f[0] == b"data")
    flip(path, (at + end) // 2)
    flip(path, footer_at(path) + 30)
    done, _ = repair(out)
    assert done.repaired and done.lost and "1 blocks are damaged" in done.what
    assert not (out / f"{path.name}.damaged").exists()
    findings = verify(out).findings
    dataset = open_shards(out)
    broken = {f.sample for f in findings} - {""}
    assert broken and all("data frame" in f.what for f in findings if not f.sample)
    expected = {s.id: s for s in good[0].samples.values()}
    assert len(broken) < len(dataset.ids) // 2
    for name in set(dataset.ids) - broken:
        sample = dataset[name]
        for a, b in sample.ranges:
            assert (sample.read(a, b) == expected[name].states(a, b)).all()


def test_a_footer_that_says_another_thing_than_the_frames_is_made_anew(out: Path) -> None:
    from test_shard_corrupt import bend_footer

    path = min(out.glob("*.zst"))
    data = path.read_bytes()
    path.write_bytes(bend_footer(data, column=("segment.position", 2, 20)))
    assert not verify(path).ok
    assert repair(path)[0].what.endswith("nothing is lost")
    assert path.read_bytes() == data


def test_a_partial_file_without_its_writer_is_finished(tmp_path: Path) -> None:
    script = long_script(samples=12)
    out, half = tmp_path / "out", len(script.records) // 2
    writer = DatasetWriter(out)
    writer.begin_run(script.info)
    script.write_window(writer, 0, half)
    with pytest.raises(DatasetBusyError, match=f"process {os.getpid()} "):
        repair(out)
    writer._lock.close()  # dies, in the midst of a window
    (partial,) = out.glob("*.partial")
    with partial.open("ab") as file:
        file.write(bytes(1000))
    (done,) = repair(out)
    assert done.repaired and not done.lost and not partial.exists()
    assert verify(out).ok
    with DatasetWriter(out) as writer:  # and the run goes on
        script.write(writer, [5] * 100, first=writer.next_seq(script.info.run, 0))
    check(open_shards(out), script.samples.values())
    assert verify(out).ok


def test_the_new_file_gets_the_name_only_when_it_verifies(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = min(out.glob("*.zst"))
    flip(path, footer_at(path) + 30)
    before = contents(out)
    real = module._write

    def bend(fresh: Path, *rest: object) -> None:
        real(fresh, *rest)  # type: ignore[arg-type]
        flip(fresh, fresh.stat().st_size // 2)

    with monkeypatch.context() as patch, pytest.raises(CorruptShardError, match="does not verify"):
        patch.setattr(module, "_write", bend)
        repair(out)
    assert contents(out) == before
    os.truncate(path, footer_at(path) - 50)
    before = contents(out) | {f"{path.name}.damaged": b"of last time"}
    (out / f"{path.name}.damaged").write_bytes(b"of last time")
    with pytest.raises(FileExistsError, match="move it out"):
        repair(out)
    assert contents(out) == before


def test_a_repair_leaves_the_next_writer_as_careful_as_it_was(out: Path) -> None:
    """The partial file may be older than the machine's last start, whenever repair ran."""
    for boot in ("another-boot", None):
        if boot:
            (out / ".lock").write_text(f"1 {boot}\n")
        else:
            (out / ".lock").unlink()
        repair(out)
        lock = module.directory.Lock(out)
        assert not lock.same_boot
        lock.close()


def test_the_command_says_what_became_of_each_file(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = sorted(out.glob("*.zst"))
    assert main(["repair", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{p.name}: nothing is wrong" for p in (first, second)
    ]
    flip(first, footer_at(first) + 30)
    assert main(["repair", str(out), "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [s["repaired"] for s in said] == [True, False]
    flip(first, 20)
    assert main(["repair", str(first)]) == 1
    assert "cannot be repaired" in capsys.readouterr().out
    assert main(["repair", str(out / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
