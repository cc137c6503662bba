"""``hstransport repair``: indexes made anew, and what cannot be saved is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer.verify import verify
from shard_kit import Script, check, make_info, split_frames

from hstransport.cli import main


@pytest.fixture
def dataset(tmp_path: Path) -> tuple[Script, Path]:
    """Three shards; samples begin in one and end in the next."""
    script = Script(make_info())
    for sid in range(12):
        script.start(sid, 40)
        script.rows((sid, 0, 25))
        script.rows((sid, 25, 15))
        script.end(sid)
    with DatasetWriter(tmp_path / "shards", shard_bytes=1) as writer:
        script.write(writer, [14, 17, 17])
    assert len(list((tmp_path / "shards").glob("*.zst"))) == 3
    return script, tmp_path / "shards"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, dict]]:
    """(exit status, outcomes by file)"""
    status = main(["repair", *map(str, arguments), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["lost"] == (status == 1)
    return status, {f["file"]: f for f in said["files"]}


def place(path: Path, kind: bytes, nth: int = -1) -> tuple[int, int]:
    """Begin and end of a frame in a file."""
    found = [(at, end) for name, at, end in split_frames(path.read_bytes()) if name == kind]
    return found[nth]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no trailer": lambda p: p.write_bytes(p.read_bytes()[:-48]),
    "a trailer of zeros": lambda p: p.write_bytes(p.read_bytes()[:-48] + bytes(48)),
    "a bit of the trailer": lambda p: flip(p, p.stat().st_size - 20),
    "a bit of the footer": lambda p: flip(p, place(p, b"HSft")[0] + 60),
    "half a footer": lambda p: p.write_bytes(p.read_bytes()[: place(p, b"HSft")[0] + 50]),
    "no footer": lambda p: p.write_bytes(p.read_bytes()[: place(p, b"HSft")[0]]),
    "bytes behind it": lambda p: p.write_bytes(p.read_bytes() + b"more"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_index_is_made_anew_byte_for_byte(
    dataset: tuple[Script, Path], capsys: pytest.CaptureFixture[str], damage: str, number: int
) -> None:
    script, folder = dataset
    path = sorted(folder.glob("*.zst"))[number]
    before = path.read_bytes()
    DAMAGE[damage](path)
    bent = path.read_bytes()
    assert not verify(folder).ok

    status, files = run(capsys, folder, "--dry-run")
    assert (status, files[path.name]["needed"]) == (0, True)
    assert path.read_bytes() == bent and len(list(folder.glob("*.damaged"))) == 0

    status, files = run(capsys, folder)
    assert status == 0
    assert [f["needed"] for f in files.values()] == [i == number for i in range(3)]
    assert path.read_bytes() == before
    assert path.with_name(path.name + ".damaged").read_bytes() == bent
    assert verify(folder).ok
    check(open_shards(folder), script.samples.values())
    assert main(["repair", str(folder)]) == 0
    assert "nothing to repair" in capsys.readouterr().out


def test_what_is_cut_off_is_named(
    dataset: tuple[Script, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of two windows is gone with the index."""
    script, folder = dataset
    path = folder / "shard-000000.zst"
    with DatasetWriter(folder.parent / "one") as writer:
        script.write(writer, [14, 34])
    path.write_bytes((folder.parent / "one" / path.name).read_bytes())
    for other in sorted(folder.glob("*.zst"))[1:]:
        other.unlink()
    (folder / ".next").unlink()
    at, _ = place(path, b"HSwn")
    path.write_bytes(path.read_bytes()[: at + 200])
    status, files = run(capsys, folder)
    assert status == 1
    words = files[path.name]["what"]
    assert f"or ended in the 200 bytes behind byte {at:,} that are lost" in words
    assert "3 samples end in it, 1 go on" in words
    samples = open_shards(folder)
    check(samples, [script.samples[i] for i in range(3)])
    assert verify(folder).ok


def test_damage_before_the_index_is_cut_only_when_the_index_is_gone_too(
    dataset: tuple[Script, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = dataset
    path = folder / "shard-000001.zst"
    at, end = place(path, b"data")
    flip(path, (at + end) // 2)
    bent = path.read_bytes()
    status, _ = run(capsys, folder)
    assert status == 0 and path.read_bytes() == bent  # verify names the sample, the rest reads
    DAMAGE["no trailer"](path)
    status, files = run(capsys, path)
    assert status == 1 and "0 windows" in files[path.name]["what"]


def test_a_damaged_header_is_beyond_repair(
    dataset: tuple[Script, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = dataset
    path = folder / "shard-000001.zst"
    flip(path, 30)
    bent = path.read_bytes()
    status, files = run(capsys, path)
    assert status == 1 and "cannot be repaired" in files[path.name]["what"]
    assert path.read_bytes() == bent and len(list(folder.glob("shard-*"))) == 3


def test_an_unfinished_file_is_finished(
    dataset: tuple[Script, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    script, folder = dataset
    path = folder / "shard-000002.zst"
    partial = path.with_name(path.name + ".partial")
    path.rename(partial)
    DAMAGE["half a footer"](partial)
    status, files = run(capsys, folder)
    assert status == 0 and "was unfinished and is finished" in files[path.name]["what"]
    assert verify(folder).ok
    check(open_shards(folder), script.samples.values())


def test_where_a_consumer_writes_nothing_is_touched(
    dataset: tuple[Script, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = dataset
    with DatasetWriter(folder):
        assert main(["repair", str(folder)]) == 2
    assert "is writing into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [("nothing", "does not exist"), ("x.txt", "is no shard's name"), ("", "holds no")],
)
def test_bad_paths_say_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    (tmp_path / "x.txt").write_text("")
    assert main(["repair", str(tmp_path / name)]) == 2
    assert told in capsys.readouterr().err
