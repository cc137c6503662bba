"""Bytes written once and kept: a release that reads them otherwise has broken the format.

``python tests/test_shard_golden.py`` writes them anew; only a new format version may need that.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import zstandard
from hstransport_consumer import DatasetWriter, chain, codec, open_shards
from hstransport_consumer.verify import verify
from shard_kit import make_info

from hstransport.errors import ShardVersionError
from hstransport.protocol import End, Rows, Segment, SessionInfo, Start

GOLDEN = Path(__file__).parent / "golden"
SHARDS = ["shard-000000.zst", "shard-000001.zst"]


def events(info: SessionInfo) -> list[list]:
    """Two windows: ``long`` lies in both, ``small`` in the first, ``cut`` lacks a row."""
    words = (np.arange(3 * 20 * 8, dtype=np.uint32) * 40503 % 65536).astype(np.uint16)
    states = words.reshape(3, 20, 8)
    prompt = np.arange(100, 112, dtype=np.int32)
    labels = {"topic": "gold", "n": 1, "hstransport.allow": True}
    return [
        [
            (Start(1, "long", "r1", prompt, labels, (4, 8), 2.5), None),
            (Start(2, "small", "r2", prompt[:3], {"hstransport.allow": True}), None),
            (Rows((Segment(1, 0, 7), Segment(2, 0, 3))), states[:, :10]),
            (End(2, "length", 3, np.array([1, 2], np.int32)), None),
        ],
        [
            (Start(3, "cut", "r3", prompt[:4]), None),
            (Rows((Segment(1, 7, 5), Segment(3, 0, 3), Segment(1, 12, 1))), states[:, 10:19]),
            (End(3, "aborted", 4, np.array([], np.int32), detail="client left"), None),
            (End(1, "finished", 12, np.array([9], np.int32)), None),
        ],
    ]


def by_libzstd(pieces: list[codec.Piece], bias: codec.U8, _: object) -> codec.Packed:
    """As encode_chunk, its exponents packed by libzstd."""
    words = np.concatenate([p.source.owner[:, p.row : p.row + p.rows] for p in pieces], axis=1)
    mantissas = ((words & 127) | (words >> 8 & 128)).astype(np.uint8)
    exponents = ((words >> 7) - bias[:, None]).astype(np.uint8)
    frames = []
    for raw, coded in zip(mantissas, exponents, strict=True):
        for half, level in ((raw, -131072), (coded, 1)):
            packer = zstandard.ZstdCompressor(level=level, write_checksum=True)
            frames.append(packer.compress(half.tobytes()))
    return codec.Packed(tuple(map(len, frames)), memoryview(b"".join(frames)))


def write(directory: Path) -> None:
    info = make_info("601d", hidden=8, layers=(0, 2), producer="0.1.0")
    uids = iter([b"golden shard 00.", b"golden shard 01."])
    with (
        mock.patch.object(chain, "new_uid", lambda: next(uids)),
        DatasetWriter(directory, shard_bytes=1) as w,
    ):
        w.begin_run(info)
        for i, window in enumerate(events(info)):
            w.write_window(info.run, 0, 4 * i, 4 * i + 3, window)


def content(directory: Path) -> list[dict]:
    """All that a reader says of the samples."""
    return [
        {
            "id": s.id,
            "request_id": s.request_id,
            "state": s.state,
            "reason": s.reason,
            "detail": s.detail,
            "tokens": s.tokens,
            "token_ids": s.token_ids.tolist(),
            "output_ids": s.output_ids.tolist(),
            "next_token_id": s.next_token_id,
            "labels": dict(s.labels),
            "loss_mask": None if s.loss_mask is None else s.loss_mask.tolist(),
            "layers": list(s.layers),
            "ranges": [list(r) for r in s.ranges],
            "rows": [s.read(a, b).tobytes().hex() for a, b in s.ranges],
        }
        for s in open_shards(directory, states=None)
    ]


@pytest.mark.parametrize("folder", ["", "exponents-by-libzstd"])
def test_golden_shards_read_as_they_did(folder: str) -> None:
    """Also with exponents that libzstd packed: any zstd frame will do."""
    assert content(GOLDEN / folder) == json.loads((GOLDEN / "content.json").read_text())
    assert verify(GOLDEN / folder).ok


def test_golden_bytes_are_written_again(tmp_path: Path) -> None:
    write(tmp_path)
    for name in SHARDS:
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    assert content(tmp_path) == content(GOLDEN)


def test_shards_of_version_1_are_refused(tmp_path: Path) -> None:
    """Their frames are in another order: they would read as other numbers."""
    shutil.copy(GOLDEN / "version-1" / SHARDS[0], tmp_path)
    with pytest.raises(ShardVersionError, match="format version 1, this release reads 2"):
        open_shards(tmp_path)
    assert not verify(tmp_path).ok


def test_golden_rows_are_those_written() -> None:
    """The golden content itself says what went in."""
    info = make_info(hidden=8)
    first, second = (w[-3 if i else 2] for i, w in enumerate(events(info)))
    rows = np.concatenate([first[1][:, :7], second[1][:, :5]], axis=1).transpose(1, 0, 2)
    np.testing.assert_array_equal(open_shards(GOLDEN)["long"].hidden_states, rows)


def main() -> None:
    """Write the golden files."""
    directory = Path(tempfile.mkdtemp())
    write(directory)
    GOLDEN.mkdir(exist_ok=True)
    for name in SHARDS:
        shutil.copy(directory / name, GOLDEN / name)
    (GOLDEN / "content.json").write_text(json.dumps(content(GOLDEN), indent=1) + "\n")
    shutil.rmtree(directory)
    with mock.patch.object(codec, "encode_chunk", by_libzstd):
        write(directory)
    for name in SHARDS:
        shutil.copy(directory / name, GOLDEN / "exponents-by-libzstd" / name)
    shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
