"""Files that lie. Each must end in the error that names it, and never in a wrong number."""

from __future__ import annotations

import re
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer.format import pack_frame, pack_trailer
from hstransport_consumer.tables import COLUMNS
from hstransport_consumer.verify import verify
from shard_kit import HEAD, Script, check, make_info, only_shard, split_frames

from hstransport.errors import (
    CorruptShardError,
    DatasetMismatchError,
    HsTransportError,
    NotAShardError,
    ShardError,
    ShardVersionError,
    TornShardError,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, bytes]:
    """One finished shard with whole, broken and open samples."""
    out = tmp_path_factory.mktemp("good")
    script = Script(make_info())
    script.start(1, 40)
    script.start(2, 9)
    script.rows((1, 0, 25), (2, 0, 9))
    script.end(2)
    script.rows((1, 25, 15))
    script.end(1)
    script.start(3, 5)
    script.rows((3, 0, 3))
    with DatasetWriter(out) as writer:
        script.write(writer, [4])
    return script, only_shard(out).read_bytes()


def read_all(directory: Path) -> None:
    """Open, and read every row, token and label."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = open_shards(directory, states=None)
    for sample in dataset:
        assert sample.id and sample.labels is not None and len(sample.token_ids) >= 0
        assert sample.reason and sample.run
        for a, b in sample.ranges:
            sample.read(a, b)


def put(directory: Path, data: bytes, name: str = "shard-000000.zst") -> Path:
    path = directory / name
    path.write_bytes(data)
    return path


def test_the_good_file_is_good(good: tuple[Script, bytes], tmp_path: Path) -> None:
    put(tmp_path, good[1])
    read_all(tmp_path)
    assert verify(tmp_path).ok


def test_no_flipped_bit_goes_unseen_by_verify(good: tuple[Script, bytes], tmp_path: Path) -> None:
    """Three places of every frame: its head, its middle, its last byte."""
    data = good[1]
    for kind, start, end in split_frames(data):
        for at in {start, start + 5, start + 9, start + 13, (start + end) // 2, end - 1}:
            bent = bytearray(data)
            bent[at] ^= 0x10
            put(tmp_path, bytes(bent))
            assert not verify(tmp_path).ok, f"{kind!r} frame at {start}, byte {at}"


def test_no_flipped_bit_yields_wrong_states(good: tuple[Script, bytes], tmp_path: Path) -> None:
    """Whatever is bent: the reader raises, or what it returns is right."""
    script, data = good
    rng = np.random.default_rng(0)
    raised = 0
    expected = [s for s in script.samples.values() if s.state]
    for at in rng.integers(0, len(data), 300).tolist():
        bent = bytearray(data)
        bent[at] ^= 1 << int(rng.integers(8))
        put(tmp_path, bytes(bent))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(open_shards(tmp_path, states=None), expected)
        except HsTransportError as e:
            assert "shard-000000.zst" in str(e)
            raised += 1
    assert raised > 200


def test_every_cut_is_torn(good: tuple[Script, bytes], tmp_path: Path) -> None:
    for _, start, _ in split_frames(good[1])[1:]:
        for cut in (start - 1, start, start + 1):
            put(tmp_path, good[1][:cut])
            with pytest.raises(TornShardError, match=r"at byte \d+.*restore"):
                open_shards(tmp_path)


# Lies with right checksums


def bend_frames(data: bytes, kind: bytes, edit: Callable[[dict[str, Any]], Any]) -> bytes:
    """Edit the body of each frame of a kind; the sizes that others know of it stay right only if
    the body's length does."""
    out = []
    for k, at, end in split_frames(data):
        part = data[at:end]
        if k == kind:
            body = msgpack.unpackb(part[16:])
            edited = edit(body)
            part = pack_frame(k, msgpack.packb(body if edited is None else edited))
        out.append(part)
    return b"".join(out)


def bend_footer(
    data: bytes,
    head: Callable[[dict[str, Any]], None] = lambda h: None,
    column: tuple[str, int, int] | None = None,
) -> bytes:
    """Edit the footer's head, or one item of a column, and make trailer and checksums right."""
    (start, end) = next((a, b) for k, a, b in split_frames(data) if k == b"HSft")
    body = data[start + 16 : end]
    length = struct.unpack_from("<I", body)[0]
    fields = msgpack.unpackb(body[4 : 4 + length])
    blob = bytearray(body[4 + length :])
    if column:
        name, item, value = column
        code = "<" + COLUMNS.get(name, "B")
        at = fields["columns"][name][0] + item * struct.calcsize(code)
        struct.pack_into(code, blob, at, value)
    head(fields)
    packed = msgpack.packb(fields)
    footer = pack_frame(b"HSft", struct.pack("<I", len(packed)) + packed + bytes(blob))
    uid = msgpack.unpackb(data[16 : 8 + HEAD.unpack_from(data)[1]])["uid"]
    return data[:start] + footer + pack_trailer(start, len(footer), uid)


def set_key(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.__setitem__(key, value)


def set_dataset(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["dataset"].__setitem__(key, value)


def trailer(offset: int, length: int, uid: bytes | None = None) -> Callable[[bytes], bytes]:
    def bend(data: bytes) -> bytes:
        own = msgpack.unpackb(data[16 : 8 + HEAD.unpack_from(data)[1]])["uid"]
        return data[:-48] + pack_trailer(offset, length, uid or own)

    return bend


BENT: dict[str, tuple[Callable[[bytes], bytes], type[Exception], str]] = {
    "empty": (lambda d: b"", NotAShardError, "is empty"),
    "text": (lambda d: b"hello world, " * 9, NotAShardError, "not an hstransport shard"),
    "other zstd": (lambda d: zstandard.compress(b"x" * 99), NotAShardError, "not an hst"),
    "other skippable": (lambda d: b"\x50\x2a\x4d\x18" + d[4:], NotAShardError, "not an hst"),
    "next version": (
        lambda d: bend_frames(d, b"HShd", set_key("version", 3)),
        ShardVersionError,
        "version 3, this release reads 2",
    ),
    "hidden 2^40": (
        lambda d: bend_frames(d, b"HShd", set_dataset("hidden", 1 << 40)),
        CorruptShardError,
        "out of bounds",
    ),
    "many planes": (
        lambda d: bend_frames(d, b"HShd", set_dataset("layers", list(range(2000)))),
        CorruptShardError,
        "out of bounds",
    ),
    "planes * hidden": (
        lambda d: bend_frames(
            bend_frames(d, b"HShd", set_dataset("layers", list(range(900)))),
            b"HShd",
            set_dataset("hidden", 1 << 20),
        ),
        CorruptShardError,
        "exceeds",
    ),
    "layers are text": (
        lambda d: bend_frames(d, b"HShd", set_dataset("layers", ["a", "b"])),
        CorruptShardError,
        "layer is 'a'",
    ),
    "other dtype": (
        lambda d: bend_frames(d, b"HShd", set_dataset("dtype", "float8")),
        CorruptShardError,
        "float8",
    ),
    "final is text": (
        lambda d: bend_frames(d, b"HShd", set_dataset("final", "yes")),
        CorruptShardError,
        "final is 'yes', not of type bool",
    ),
    "hidden is no whole number": (
        lambda d: bend_frames(d, b"HShd", set_dataset("hidden", 24.0)),
        CorruptShardError,
        "hidden is 24.0, not of type int",
    ),
    "arrays in arrays": (
        lambda d: pack_frame(b"HShd", b"\xdd\0\0\x80\0" * 13000) + d[300:],
        CorruptShardError,
        "not msgpack",
    ),
    "header no map": (
        lambda d: bend_frames(d, b"HShd", lambda b: [1]),
        CorruptShardError,
        "list, not a map",
    ),
    "header with an object": (
        lambda d: pack_frame(b"HShd", b"\x80\x04cos\nsystem\n") + d[300:],
        CorruptShardError,
        "not msgpack",
    ),
    "frame of 4 GiB": (
        lambda d: d[:4] + b"\xff\xff\xff\xff" + d[8:],
        CorruptShardError,
        "at most",
    ),
    "footer outside": (trailer(1 << 60, 100), CorruptShardError, "does not end at"),
    "footer in a chunk": (
        lambda d: trailer(400, len(d) - 448)(d),
        CorruptShardError,
        "start of a metadata frame",
    ),
    "trailer of another": (
        lambda d: trailer(*struct.unpack("<QQ", d[-32:-16]), b"?" * 16)(d),
        CorruptShardError,
        "another shard",
    ),
    "no trailer": (lambda d: d[:-48], TornShardError, "was cut"),
    "two bytes more": (lambda d: d + b"\0\0", TornShardError, "was cut"),
    "no columns": (
        lambda d: bend_footer(d, set_key("columns", None)),
        CorruptShardError,
        "is missing",
    ),
    "column of 2^50": (
        lambda d: bend_footer(d, lambda h: h["columns"].__setitem__("sample.start", [0, 1 << 50])),
        CorruptShardError,
        "sample.start",
    ),
    "column past the end": (
        lambda d: bend_footer(d, lambda h: h["columns"].__setitem__("sample.start", [200, 50])),
        CorruptShardError,
        "reaches past the footer",
    ),
    "short column": (
        lambda d: bend_footer(d, lambda h: h["columns"]["sample.state"].__setitem__(1, 1)),
        CorruptShardError,
        "different lengths",
    ),
    "few sizes": (
        lambda d: bend_footer(d, lambda h: h["columns"]["chunk.sizes"].__setitem__(1, 3)),
        CorruptShardError,
        "frame sizes",
    ),
    "shard table": (
        lambda d: bend_footer(d, set_key("shards", [b"x" * 16])),
        CorruptShardError,
        "table of shards",
    ),
    "chunk outside": (
        lambda d: bend_footer(d, column=("chunk.offset", 0, 1 << 50)),
        CorruptShardError,
        "a chunk lies outside",
    ),
    "chunk reaches out": (
        lambda d: bend_footer(d, column=("chunk.sizes", 0, 1 << 31)),
        CorruptShardError,
        "a chunk reaches outside",
    ),
    "chunk of 2^31 rows": (
        lambda d: bend_footer(d, column=("chunk.rows", 0, 1 << 31)),
        CorruptShardError,
        "a chunk is too large",
    ),
    "chunk of no rows": (
        lambda d: bend_footer(d, column=("chunk.rows", 0, 0)),
        CorruptShardError,
        "a chunk has no rows",
    ),
    "bias table": (
        lambda d: bend_footer(d, column=("chunk.bias", 0, 9)),
        CorruptShardError,
        "unknown bias table",
    ),
    "bias elsewhere": (
        lambda d: bend_footer(d, set_key("bias", [[0, 1]])),
        CorruptShardError,
        "no bias table",
    ),
    "segment's shard": (
        lambda d: bend_footer(d, column=("segment.shard", 0, 7)),
        CorruptShardError,
        "segment names an unknown shard",
    ),
    "segment's chunk": (
        lambda d: bend_footer(d, column=("segment.chunk", 0, 99)),
        CorruptShardError,
        "unknown chunk",
    ),
    "segment's row": (
        lambda d: bend_footer(d, column=("segment.row", 0, 1 << 31)),
        CorruptShardError,
        "outside of its chunk",
    ),
    "segments overlap": (
        lambda d: bend_footer(d, column=("segment.position", 2, 20)),
        ShardError,
        "overlap",
    ),
    "sample's tokens": (
        lambda d: bend_footer(d, column=("sample.tokens", 0, 1 << 31)),
        CorruptShardError,
        "absurd number of tokens",
    ),
    "rows past the tokens": (
        lambda d: bend_footer(d, column=("sample.tokens", 0, 3)),
        ShardError,
        "has rows up to 9, and 3 tokens",
    ),
    "ids are no text": (
        lambda d: bend_footer(d, column=("ids", 0, 0xFF)),
        CorruptShardError,
        "not UTF-8",
    ),
    "sample's run": (
        lambda d: bend_footer(d, column=("sample.run", 0, 3)),
        CorruptShardError,
        "unknown run",
    ),
    "sample's state": (
        lambda d: bend_footer(d, column=("sample.state", 0, 77)),
        CorruptShardError,
        "unknown state",
    ),
    "sample's segments": (
        lambda d: bend_footer(d, column=("sample.segment_end", 0, 1 << 30)),
        CorruptShardError,
        "segment ranges",
    ),
    "sample's id": (
        lambda d: bend_footer(d, column=("sample.id_end", 0, 1 << 30)),
        CorruptShardError,
        "ids are out of order",
    ),
    "another's START": (
        lambda d: bend_footer(d, column=("sample.start", 0, 1 << 50)),
        ShardError,
        "too few",
    ),
    "END elsewhere": (
        lambda d: bend_footer(d, column=("sample.end", 0, 0)),
        CorruptShardError,
        "an END is due",
    ),
    "frame sizes swapped": (
        lambda d: bend_footer(d, column=("chunk.sizes", 0, 40)),
        CorruptShardError,
        "chunk 0, plane 0",
    ),
}


@pytest.mark.parametrize("name", BENT)
def test_a_bent_file_ends_in_its_own_error(
    name: str, good: tuple[Script, bytes], tmp_path: Path
) -> None:
    bend, error, words = BENT[name]
    put(tmp_path, bend(good[1]))
    with pytest.raises(error, match=words) as caught:
        read_all(tmp_path)
    assert "shard-000000.zst" in str(caught.value)
    assert not verify(tmp_path).ok


WALKED: dict[str, tuple[bytes, Callable[[dict[str, Any]], Any], str]] = {
    "window too long": (b"HSwn", set_key("bytes", 1 << 40), "reaches past"),
    "window too short": (b"HSwn", set_key("bytes", 5), "reaches past|too few"),
    "window of no run": (b"HSwn", set_key("run", 3), "run 3 has no frame"),
    "window again": (b"HSwn", set_key("first", 0), "is due"),
    "chunk of 2^40 rows": (b"HSck", set_key("rows", 1 << 40), "rows is"),
    "chunk of other rows": (b"HSck", set_key("rows", 7), "chunk of 7"),
    "chunk's frames": (b"HSck", set_key("sizes", [1]), "frames of data"),
    "chunk's huge frame": (b"HSck", set_key("sizes", [1 << 31] * 6), "frame size"),
    "chunk of nobody": (b"HSck", lambda b: b["seg"].__setitem__(0, 99), "not open"),
    "chunk's bias": (b"HSck", set_key("bias", 4), "bias table 4"),
    "bias of 1 byte": (b"HSbi", set_key("table", b"x"), "no bias table"),
    "end of nobody": (
        b"HSen",
        lambda b: b.__setitem__("end", b["end"].replace(b"\xa3sid\x02", b"\xa3sid\x09")),
        "not open",
    ),
    "unknown state": (b"HSen", set_key("state", "fine"), "unknown"),
    "other run": (b"HSrn", lambda b: b.__setitem__("info", b"\x80"), "protocol version"),
    "run of no name": (
        b"HSrn",
        lambda b: b.__setitem__("info", msgpack.packb(msgpack.unpackb(b["info"]) | {"run": [1]})),
        r"run is \[1\], not of type str",
    ),
    "long id": (b"HSst", set_key("id", "x" * 600), "512"),
}


@pytest.mark.parametrize("name", WALKED)
def test_a_walk_sees_frames_that_contradict_each_other(
    name: str, good: tuple[Script, bytes], tmp_path: Path
) -> None:
    kind, edit, words = WALKED[name]
    bent = bend_frames(good[1], kind, edit)
    put(tmp_path, bent)
    findings = verify(tmp_path).findings
    assert any(f.file == "shard-000000.zst" for f in findings)
    assert re.search(words, " ".join(f.what for f in findings)), findings


def test_a_bomb_is_refused_before_anything_is_allocated(
    good: tuple[Script, bytes], tmp_path: Path
) -> None:
    bomb = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1 << 30))
    out, first = [], True
    for kind, at, end in split_frames(good[1]):
        part = good[1][at:end]
        if kind == b"data" and first:
            first = False
            part = bomb[: end - at]
        out.append(part)
    put(tmp_path, b"".join(out))
    tracemalloc.start()
    with pytest.raises(CorruptShardError, match=r"says 1073741824 bytes"):
        read_all(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_an_absurd_frame_size_allocates_nothing(good: tuple[Script, bytes], tmp_path: Path) -> None:
    data = good[1]
    put(tmp_path, data[:4] + (60 << 20).to_bytes(4, "little") + data[8:])
    tracemalloc.start()
    with pytest.raises(TornShardError, match="reaches past"):
        read_all(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_absurd_tokens_allocate_nothing(good: tuple[Script, bytes], tmp_path: Path) -> None:
    put(tmp_path, bend_footer(good[1], column=("sample.tokens", 0, (1 << 31) - 1)))
    with pytest.raises(ShardError, match="is missing"):
        _ = open_shards(tmp_path)[0].hidden_states


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/b", "..", "x\0y", "ü" * 200]
)
def test_ids_are_names_and_never_paths(name: str, tmp_path: Path) -> None:
    script = Script(make_info())
    script.whole(1, 3, id=name)
    with DatasetWriter(tmp_path / "out") as writer:
        script.write(writer, [])
    assert open_shards(tmp_path / "out")[name].id == name
    names = [".lock", ".next", "out", "shard-000000.zst"]
    assert sorted(p.name for p in tmp_path.rglob("*")) == names


def test_shards_of_two_models_do_not_mix(good: tuple[Script, bytes], tmp_path: Path) -> None:
    put(tmp_path, good[1])
    script = Script(make_info("other", hidden=32))
    script.whole(1, 3)
    with DatasetWriter(tmp_path / "other") as writer:
        script.write(writer, [])
    put(tmp_path, only_shard(tmp_path / "other").read_bytes(), "shard-000001.zst")
    with pytest.raises(DatasetMismatchError, match="hidden is 24 there, 32 here"):
        open_shards(tmp_path)
    assert any("hidden is 24" in f.what for f in verify(tmp_path).findings)


def test_a_copied_shard_is_found(good: tuple[Script, bytes], tmp_path: Path) -> None:
    put(tmp_path, good[1])
    put(tmp_path, good[1], "shard-000001.zst")
    findings = [f.what for f in verify(tmp_path).findings]
    assert any("copy of shard-000000.zst" in w for w in findings)
    assert any("under another name" in w for w in findings)
    assert len(open_shards(tmp_path)) == 2  # each id once


def test_a_newer_field_is_ignored(good: tuple[Script, bytes], tmp_path: Path) -> None:
    data = bend_footer(good[1], set_key("later", [1, 2]))
    put(tmp_path, data)
    read_all(tmp_path)


def test_other_files_in_the_directory_are_left_alone(
    good: tuple[Script, bytes], tmp_path: Path
) -> None:
    put(tmp_path, good[1])
    for name in ("notes.txt", "shard-1.zst", "shard-000000.zst.bak", "xshard-000000.zst"):
        put(tmp_path, b"?", name)
    read_all(tmp_path)
    (tmp_path / "link").symlink_to("/nowhere")
    assert len(open_shards(tmp_path)) == 2


def test_missing_things_are_python_errors(good: tuple[Script, bytes], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_shards(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no shards"):
        open_shards(tmp_path)
    put(tmp_path, good[1])
    dataset = open_shards(tmp_path)
    with pytest.raises(KeyError, match="no sample 'x'"):
        dataset["x"]
    with pytest.raises(IndexError):
        dataset[2]
    with pytest.raises(IndexError, match="it has 9"):
        dataset["sample-2"].read(0, 10)
    with pytest.raises(KeyError, match=r"layer 2 was not captured.*\[1, 3, 'final'\]"):
        dataset[0][2]
    with pytest.raises(KeyError, match="was not captured"):
        open_shards(tmp_path, layers=[99])
    with pytest.raises(ValueError, match="unknown: choose from whole"):
        open_shards(tmp_path, states=["fine"])
