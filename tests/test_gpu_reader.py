"""States joined on a device are those that the CPU joins, bit for bit.

What needs no CUDA runs on torch's CPU, through the same functions.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, Sample, codec, open_shards, plan
from shard_kit import Script, bf16, make_info, only_shard, split_frames
from test_benchmarks import check_positive, check_provenance, smoke

from hstransport.errors import CorruptShardError, ShardError

torch = pytest.importorskip("torch")
upload = pytest.importorskip("hstransport_consumer.upload")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available")
    return str(request.param)


def bits(tensor: Any) -> np.ndarray:
    """bf16 bits; ends the test if they are of another type."""
    assert tensor.dtype == torch.bfloat16
    return np.asarray(tensor.view(torch.int16).cpu().numpy().view(np.uint16))


def joined(sample: Sample, device: str, *args: Any, **kwargs: Any) -> np.ndarray:
    """Through the join of a device, whether it is CUDA or not."""
    states = sample._join_on(device, *args, **kwargs)
    assert states.device.type == device and states.is_contiguous()
    return bits(states)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 10 rows, shared by samples of fewer than 4."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 240)
    monkeypatch.setattr(plan, "SMALL_BYTES", 96)


def written(out: Path, script: Script, windows: list[int], **options: Any) -> Any:
    with DatasetWriter(out, **options) as writer:
        script.write(writer, windows)
    return open_shards(out, states=None)


@pytest.mark.parametrize("staging", [64, 500, 8 << 20])
def test_every_sample_range_and_layer(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, device: str, staging: int
) -> None:
    """Large and small samples, shared chunks, two bias tables, many shards; holes between rows."""
    monkeypatch.setattr(upload, "STAGING_BYTES", staging)
    script = Script(make_info(), special=0.2)
    for sid, tokens in enumerate([1, 57, 2, 3, 200, 1, 33, 800, 3, 64]):
        script.whole(sid, tokens)
    script.start(10, 30)
    script.rows((10, 0, 12))
    script.rows((10, 20, 10))
    script.end(10)
    dataset = written(tmp_path, script, [3] * 9, shard_bytes=20_000)
    assert len(dataset.shards) > 2 and len(dataset.shards[0].tables.bias) > 1
    rng = np.random.default_rng(1)
    for sample in dataset:
        expected = script.samples[int(sample.id[7:])]
        for a, b in sample.ranges:
            np.testing.assert_array_equal(joined(sample, device, a, b), expected.states(a, b))
            for _ in range(5):
                start, stop = sorted(rng.integers(a, b + 1, 2).tolist())
                layers = [[3], ["final", 1], [1, 3, "final"], [3, 3]][rng.integers(4)]
                np.testing.assert_array_equal(
                    joined(sample, device, start, stop, layers), sample.read(start, stop, layers)
                )
    with pytest.raises(ShardError, match="row at 12 is missing"):
        sample._join_on(device)


def test_neighbours_under_different_bias_tables(tmp_path: Path, device: str) -> None:
    """They are not joined together; the table becomes better while the sample is being stored."""
    script = Script(make_info())
    script.start(1, 2000)
    for at in range(0, 2000, 100):
        script.rows((1, at, 100))
        script.records[-1][1][:] += (at > 0) * 4 << 7  # later rows are 16 times as large
    script.end(1)
    dataset = written(tmp_path, script, [2, *[1] * 20])
    shard = dataset.shards[0]
    with shard.open() as fd:
        tables = [shard.bias(fd, chunk) for chunk in range(shard.tables.chunks)]
    assert {t.tobytes() for t in tables} > {tables[0].tobytes()}
    np.testing.assert_array_equal(joined(dataset[0], device), script.samples[1].states())


@pytest.mark.parametrize("rows, planes, hidden", [(1, 1, 1), (3, 2, 1), (7, 1, 129), (513, 4, 96)])
def test_shapes(tmp_path: Path, device: str, rows: int, planes: int, hidden: int) -> None:
    layers = tuple(range(1, planes))
    script = Script(make_info(layers=layers, hidden=hidden, num_layers=9), special=0.1)
    script.whole(1, rows)
    sample = written(tmp_path, script, [])[0]
    assert sample._join_on(device).shape == (rows, planes, hidden)
    np.testing.assert_array_equal(joined(sample, device), script.samples[1].states())
    assert sample._join_on(device, 1, 1).shape == (0, planes, hidden)


def test_every_word_under_every_bias(device: str) -> None:
    words = np.tile(np.arange(65536, dtype=np.uint16), (256, 1)).T.copy()
    bias = np.arange(256, dtype=np.uint8)
    exponents = ((words >> 7 & 255) - bias).astype(np.uint8)
    mantissas = (words & 127 | words >> 8 & 128).astype(np.uint8)
    native = np.empty_like(words)
    codec.join(exponents.ravel(), mantissas.ravel(), bias, native)
    out = torch.empty(words.shape, dtype=torch.int16, device=device)
    upload.join(*(torch.from_numpy(a).to(device) for a in (exponents, mantissas, bias)), out)
    np.testing.assert_array_equal(native, words)
    np.testing.assert_array_equal(bits(out.view(torch.bfloat16)), words)


def test_every_word_through_a_shard(tmp_path: Path, device: str) -> None:
    script = Script(make_info(layers=(), hidden=256))
    script.start(1, 256)
    script.rows((1, 0, 256))
    script.end(1)
    every = np.random.default_rng(0).permutation(65536).astype(np.uint16).reshape(1, 256, 256)
    script.records[1] = (script.records[1][0], every)
    sample = written(tmp_path, script, [])[0]
    np.testing.assert_array_equal(joined(sample, device)[:, 0], every[0])


def test_to_is_read_as_a_tensor(tmp_path: Path, device: str) -> None:
    script = Script(make_info())
    script.whole(1, 40)
    sample = written(tmp_path, script, [])["sample-1"]
    states = sample.to(device)
    assert states.device.type == device
    np.testing.assert_array_equal(bits(states), sample.hidden_states)
    there = sample.to(torch.device(device), 3, 9, layers=["final"])
    np.testing.assert_array_equal(bits(there), sample.read(3, 9, ["final"]))
    assert sample.to(device, 5, 5).shape == (0, 3, 24)
    with pytest.raises(IndexError, match="3:41"):
        sample.to(device, 3, 41)
    with pytest.raises(KeyError, match="layer 2 was not captured"):
        sample.to(device, layers=[2])


def test_the_bits_go_to_other_libraries_without_a_copy(tmp_path: Path) -> None:
    """As the docstring says for cupy, which reads the same protocol as numpy."""
    script = Script(make_info())
    script.whole(1, 40)
    sample = written(tmp_path, script, [])[0]
    states = sample.to("cpu")
    array = np.from_dlpack(states.view(torch.int16))
    assert array.ctypes.data == states.data_ptr()
    np.testing.assert_array_equal(array.view(np.uint16), sample.hidden_states)


def test_a_chunk_is_unpacked_in_place_and_no_plane_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    script = Script(make_info(hidden=2048))
    script.whole(1, 1200)
    sample = written(tmp_path, script, [])[0]
    sizes = []
    real = codec.decode_frame_into
    monkeypatch.setattr(
        codec, "decode_frame_into", lambda f, out: sizes.append(out.size) or real(f, out)
    )
    monkeypatch.setattr(codec, "decode_frame", lambda *_: pytest.fail("decoded beside its place"))
    sample._join_on(device, layers=["final"])
    assert sum(sizes) == 2 * 1200 * 2048 and len(sizes) == 6  # three chunks


def test_threads_share_no_staging(tmp_path: Path, device: str) -> None:
    script = Script(make_info(hidden=512))
    for sid in range(16):
        script.whole(sid, 300 + sid)
    dataset = written(tmp_path, script, [])
    expected = [s.hidden_states for s in dataset]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = list(pool.map(lambda s: s._join_on(device), dataset))
            for a, b in zip(expected, got, strict=True):
                np.testing.assert_array_equal(a, bits(b))


@pytest.mark.parametrize("cut", [1, 4, 5, 100, -1])
def test_frames_unpacked_in_place_must_be_whole(cut: int) -> None:
    """zstd itself does not miss a checksum that is cut off when it streams; nor what follows."""
    states = bf16(np.random.default_rng(0), 1, 300, 1000)
    piece = codec.Piece(codec.source(states, 1, 1000), 0, 0, 300)
    packed = codec.encode_chunk([piece], np.full((1, 1000), 120, np.uint8), codec.FrameBuffer())
    n = packed.sizes[0]
    for frame in bytes(packed.data[:n]), bytes(packed.data[n:]):
        out = np.zeros(300_000, np.uint8)
        codec.decode_frame_into(frame, out)
        np.testing.assert_array_equal(out, codec.decode_frame(frame, out.size))
        bent = frame[:-cut] if cut > 0 else frame + b"\0"
        for decode in (codec.decode_frame_into, lambda f, o: codec.decode_frame(f, o.size)):
            with pytest.raises(ValueError):
                decode(bent, out)
        with pytest.raises(ValueError, match="are due"):
            codec.decode_frame_into(frame, out[:-1])


def test_no_flipped_bit_yields_wrong_states(tmp_path: Path, device: str) -> None:
    script = Script(make_info(hidden=256))
    script.whole(1, 300)
    dataset = written(tmp_path, script, [])
    path = only_shard(tmp_path)
    data = path.read_bytes()
    right = joined(dataset[0], device)
    frames = [(start, end) for kind, start, end in split_frames(data) if kind == b"data"]
    for start, end in frames:
        for at in (*range(start, start + 16), (start + end) // 2, end - 5, end - 1):
            bent = bytearray(data)
            bent[at] ^= 1 << at % 8
            path.write_bytes(bent)
            try:
                got = joined(open_shards(tmp_path)[0], device)
            except CorruptShardError as e:
                assert path.name in str(e)
            else:  # a bit that means nothing
                np.testing.assert_array_equal(got, right)


@pytest.mark.gpu
def test_staging_waits_for_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is busy while several samples are queued behind it through the same buffers."""
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available")
    monkeypatch.setattr(upload, "STAGING_BYTES", 1 << 20)
    script = Script(make_info(hidden=1024))
    for sid in range(4):
        script.whole(sid, 2000)
    dataset = written(tmp_path, script, [])
    expected = [s.hidden_states for s in dataset]
    dataset[0].to("cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            got = [s.to("cuda") for s in dataset]
            stream.synchronize()
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_array_equal(a, bits(b))
    for staging in upload._local.staging:
        assert staging._memory.is_pinned()


@pytest.mark.gpu
def test_every_gpu(tmp_path: Path) -> None:
    """Also one that is not the current one, and the same buffers for one after another."""
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available")
    script = Script(make_info(hidden=1024))
    script.whole(1, 2000)
    sample = written(tmp_path, script, [])[0]
    for i in [*range(torch.cuda.device_count())] * 2:
        states = sample.to(f"cuda:{i}")
        assert states.device.index == i
        np.testing.assert_array_equal(bits(states), sample.hidden_states)


def test_read_gpu_smoke_has_its_figures(tmp_path: Path) -> None:
    out = smoke("read_gpu.py", tmp_path / "read.json")
    check_provenance(out)
    ways = ("cpu_join", "cpu_join_pinned", "device_join")
    check_positive(out, [f"{w}_{t}_gb_per_s" for w in ways for t in ("1_threads", "2_threads")])
    check_positive(out, [f"{w}_{t}_ms_p50" for w in ways for t in ("1_threads", "2_threads")])
