"""A directory whose files are not what their names say: pipes, links, directories."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer.directory import HANDED_OVER, NEXT, handed_over, note_handed_over
from hstransport_consumer.verify import verify
from shard_kit import Script, make_info

from hstransport.errors import HsTransportError, NotAShardError

SHARD = "shard-000000.zst"
PARTIAL = "shard-000001.zst.partial"


@pytest.fixture
def died(tmp_path: Path) -> Path:
    """A directory of one shard and one unfinished one, whose writer died."""
    script = Script(make_info())
    for sid in range(6):
        script.whole(sid, 30)
    writer = DatasetWriter(tmp_path / "out", shard_bytes=9000)
    script.write(writer, [3] * 100)
    writer._lock.close()
    assert sorted(p.name for p in writer.directory.glob("shard-*")) == [SHARD, PARTIAL]
    return writer.directory


def write_more(directory: Path) -> None:
    script = Script(make_info("another"))
    script.whole(1, 3)
    with DatasetWriter(directory) as writer:
        script.write(writer, [])
        note_handed_over(directory, SHARD, b"u" * 16)
    handed_over(directory)


def read(directory: Path) -> None:
    for sample in open_shards(directory, partial=True):
        assert len(sample.hidden_states)


THINGS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", [SHARD, PARTIAL])
def test_what_is_no_file_is_no_shard(name: str, thing: str, died: Path) -> None:
    (died / name).unlink()
    THINGS[thing](died / name)
    for step in (read, write_more):
        with pytest.raises(NotAShardError, match=rf"{name} is no regular file.*move it out"):
            step(died)
    assert any("no regular file" in f.what for f in verify(died).findings)


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", [NEXT, HANDED_OVER, ".lock"])
def test_what_is_no_file_are_no_notes(name: str, thing: str, died: Path) -> None:
    (died / name).unlink(missing_ok=True)
    THINGS[thing](died / name)
    with pytest.raises(NotAShardError, match=rf"{name} is no regular file"):
        write_more(died)


@pytest.mark.parametrize("name", [NEXT, f"{NEXT}.new", HANDED_OVER, ".lock", PARTIAL])
def test_nothing_is_written_through_a_link(name: str, died: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    if name in (NEXT, PARTIAL):  # what a writer goes on with
        shutil.move(died / name, elsewhere)
    else:
        (died / name).unlink(missing_ok=True)
        elsewhere.write_bytes(b"somebody's")
    before = elsewhere.read_bytes()
    (died / name).symlink_to(elsewhere)
    try:
        write_more(died)
    except HsTransportError as e:
        assert f"{name} is no regular file" in str(e)
    assert elsewhere.read_bytes() == before


def test_a_finished_shard_may_be_a_link(died: Path, tmp_path: Path) -> None:
    """Many keep one copy and several directories."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / SHARD).symlink_to(died / SHARD)
    assert len(open_shards(elsewhere)) > 0
    read(elsewhere)
