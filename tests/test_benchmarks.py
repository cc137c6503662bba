"""The benchmarks run, check what they measured, and say where their figures come from.

How fast anything was is not asserted: that depends on the machine and on what else runs there.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hstransport_consumer import DatasetWriter
from shard_kit import Script, make_info

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


def run(name, out, *arguments):
    """Run ``benchmarks/NAME``; how it ended, and what it wrote (JSON), if anything."""
    command = [sys.executable, BENCHMARKS / name, "--out", out, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    is_json = out.suffix == ".json" and out.exists()
    return done, json.loads(out.read_text()) if is_json else None


def smoke(name, out, *arguments):
    """Run ``benchmarks/NAME --smoke``; what it wrote."""
    done, written = run(name, out, "--smoke", *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return written


def check_provenance(written):
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", written["commit"])
    machine = {"cpu", "cores", "memory_gib", "system"}
    assert set(written["machine"]) - {"gpu", "driver"} == machine
    names = {"python", "torch", "sglang", "hstransport", "numpy", "zstandard", "zstd"}
    assert set(written["versions"]) == names
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", written["date"])
    assert written["command"].startswith("python benchmarks/")
    assert str(ROOT) not in json.dumps(written)


def check_positive(written, names):
    missing = [n for n in names if not written.get(n, 0) > 0]
    assert not missing, {n: written.get(n) for n in missing}


def test_ring_smoke_has_its_figures(tmp_path):
    written = smoke("ring.py", tmp_path / "ring.json")
    check_provenance(written)
    sizes = ("4kib", "64kib", "1mib", "16mib")
    check_positive(written, [f"ring_{s}_gb_per_s" for s in sizes])
    check_positive(written, [f"ring_{s}_records_per_s" for s in sizes])
    check_positive(written, [f"ring_{s}_of_memcpy" for s in sizes])


def test_codec_smoke_has_its_figures(tmp_path):
    written = smoke("codec.py", tmp_path / "codec.json")
    check_provenance(written)
    codecs = ("hstransport", "writer", "zstd3", "split_zstd1")
    figures = ("ratio", "in_gb_per_s", "out_gb_per_s", "bytes_of_zstd3", "in_of_zstd3")
    check_positive(written, [f"synthetic_{c}_{f}" for c in codecs for f in figures])
    assert written["synthetic_zstd3_bytes_of_zstd3"] == 1


@pytest.mark.exhaustive
def test_durability_smoke_has_its_figures(tmp_path):
    out = tmp_path / "durability.json"
    written = smoke("durability.py", out, "--place", tmp_path / "place")
    check_provenance(written)
    for window in ("64mib", "4mib", "256kib"):
        ways = (f"process_{window}_gb_per_s", f"machine_{window}_gb_per_s")
        check_positive(written, [*ways, f"machine_{window}_of_process"])


@pytest.mark.exhaustive
@pytest.mark.sglang
def test_serving_smoke_has_its_figures_and_lost_nothing(tmp_path):
    written = smoke("serving.py", tmp_path / "serving.json")
    check_provenance(written)
    ways = ("no_capture", "hstransport", "baseline", "json")
    check_positive(written, [f"{w}_tokens_per_s" for w in ways])
    check_positive(written, [f"{w}_seconds_per_sample" for w in ways])
    check_positive(written, [f"{w}_ratio" for w in ways[1:]])
    check_positive(written, [f"{w}_bytes_per_sample" for w in ways[1:]])
    assert written["samples_whole"] > 0 and written["samples_lost"] == 0
    assert written["samples_bit_identical"] == 3
    # Less than raw would be on disk, and far less than text.
    raw = written["raw_bytes_per_sample"]
    assert written["hstransport_bytes_per_sample"] < raw < written["json_bytes_per_sample"]


@pytest.mark.exhaustive
@pytest.mark.sglang
def test_serving_gpu_smoke_has_its_figures_and_lost_nothing(tmp_path):
    written = smoke("serving_gpu.py", tmp_path / "serving.json")
    check_provenance(written)
    for kind in ("prefill", "decode"):
        check_positive(written, [f"{kind}_ratio", f"baseline_{kind}_ratio"])
        ways = ("off_again", "aux_only", "untouched")
        check_positive(written, [f"{way}_{kind}_ratio" for way in ways])
        check_positive(written, [f"tap_us_{kind}_p50", f"tap_us_{kind}_p99"])
        assert written["tap_us_p50"][kind] == written[f"tap_us_{kind}_p50"]
        assert written["tap_us_p99"][kind] >= written["tap_us_p50"][kind]
    # 3 timed passes of 8 decode steps; a batch may come as two, and a step more is run at the end.
    assert written["tap_prefill_passes"] >= 6 and written["tap_decode_passes"] >= 21
    assert written["samples_whole"] == written["samples_sent"] > 0
    assert written["tokens_stored"] == written["tokens_sent"] > 0
    assert written["records_dropped"] == written["verify_findings"] == 0


def test_pack_smoke_stores_every_bit_out_of_the_ring(tmp_path):
    written = smoke(
        "pack.py", tmp_path / "pack.json", "--place", tmp_path / "place", "--consumers", "2"
    )
    check_provenance(written)
    names = (
        "ratio",
        "pack_gbs_per_core",
        "pack_scaling_threads2",
        "pack_gbs_consumers",
        "zstd3_gbs_per_core",
        "read_gbs_per_core",
        "read_ckpt_gz_gbs_per_core",
        "read_sample_ms_p50_warm",
        "read_sample_ms_p50_cold",
        "read_sample_cold_of_torch_mmap",
    )
    check_positive(written, [f"synthetic_{name}" for name in names])
    check_positive(written, ["open_ms", "open_resident_mb"])
    assert written["open_samples"] == 20_000
    assert 1.4 < written["synthetic_ratio"] < 1.6
    assert not list((tmp_path / "place").iterdir())


@pytest.mark.skipif(not shutil.which("fio"), reason="no fio (Debian: apt-get install fio)")
def test_writes_smoke_compares_all_ways(tmp_path):
    written = smoke("writes.py", tmp_path / "writes.json", "--place", tmp_path / "place")
    check_provenance(written)
    ways = ("pages", "direct", "uring_direct", "uring_pages")
    check_positive(written, [f"{way}_gb_per_s" for way in ways])
    assert not list((tmp_path / "place").iterdir())


@pytest.mark.exhaustive
@pytest.mark.sglang
def test_seed_run_smoke_packs_verifies_and_deletes_every_shard(tmp_path):
    written = smoke("seed_run.py", tmp_path / "seed.json", "--prompts", "200", "--offset", "40")
    check_provenance(written)
    assert written["errors"] == 0 and written["samples"] == written["sent"] == 200
    assert written["complete"] is False  # of the 10,000
    check_positive(written, ["minutes", "tokens", "raw_gib", "stored_gib", "gb_per_s", "lag_s"])
    assert written["verified_shards"] >= 2


@pytest.fixture
def seed_run(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("seed_run")


def shards(folder, samples):
    """Two shards for each sample, which begins in one and ends in the next; tokens of all."""
    script = Script(make_info())
    for sid in range(samples):
        script.start(sid, 5 + sid)
        script.rows((sid, 0, 3))
        script.rows((sid, 3, 2 + sid))
        script.end(sid)
    with DatasetWriter(folder, shard_bytes=1) as writer:
        script.write(writer, [2] * 2 * samples)
    return sum(5 + sid for sid in range(samples))


@pytest.mark.parametrize("damaged", [False, True])
def test_seed_run_verifies_samples_that_lie_in_two_shards(tmp_path, seed_run, damaged):
    tokens = shards(tmp_path / "shards", 5)
    paths = sorted((tmp_path / "shards").glob("*.zst"))
    assert len(paths) == 10
    if damaged:
        data = bytearray(paths[6].read_bytes())
        data[len(data) // 2] ^= 1
        paths[6].write_bytes(data)
    (tmp_path / "incoming").mkdir()
    verifier = seed_run.Verifier(tmp_path / "incoming", 2)
    for path in paths[:8]:  # the consumer hands on most, and is stopped before the rest
        path.rename(verifier.incoming / path.name)
        assert verifier.backlog() >= 0
    verifier.finish(tmp_path / "shards")
    if damaged:
        assert any(f.startswith(paths[6].name) for f in verifier.findings)
    else:
        assert verifier.findings == []
        assert verifier.counts["shards"] == 10 and verifier.counts["whole"] == 5
        assert verifier.counts["tokens"] == tokens
    assert not list(tmp_path.rglob("*.zst"))


@pytest.fixture
def part(seed_run):
    """``part(path, offset, FIELD=…)``: a made-up result of a part of 5000 prompts; its path."""

    def write(path, offset, **fields):
        one = dict.fromkeys((*seed_run._SUMS, *seed_run._SAME), 0)
        one |= {"offset": offset, "prompts": 5000, "samples_whole": 5000, "tokens": 8_650_000}
        one |= {"seconds": 120.0, "lag_s": 3.0, "raw_bytes": 3 << 30, "stored_bytes": 2 << 30}
        one |= fields
        args = argparse.Namespace(out=path, smoke=False, commit="0" * 40)
        seed_run.finish(args, seed_run.figures([one]))
        return path

    return write


def test_parts_of_a_seed_run_add_up(tmp_path, part):
    parts = [part(tmp_path / "b", 5000, lag_s=4.0), part(tmp_path / "a", 0)]
    done, written = run("seed_run.py", tmp_path / "whole.json", "--merge", *parts)
    assert done.returncode == 0, done.stderr
    made = json.loads(parts[0].read_text())
    assert {k: written[k] for k in ("commit", "date")} == {k: made[k] for k in ("commit", "date")}
    assert written["minutes"] == 4 and written["samples"] == 10_000 and written["complete"]
    assert written["tokens"] == 17_300_000 and written["raw_gib"] == 6 and written["ratio"] == 1.5
    assert written["lag_s"] == 4 and [p["offset"] for p in written["parts"]] == [0, 5000]


@pytest.mark.parametrize(
    ("offset", "fields", "words"),
    [
        (4999, {}, "prompts from 4999 on are in two of the parts"),
        (5000, {"ring": "1GiB"}, "the parts differ in ring"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, part, offset, fields, words):
    parts = [part(tmp_path / "a", 0), part(tmp_path / "b", offset, **fields)]
    done, _ = run("seed_run.py", tmp_path / "whole.json", "--merge", *parts)
    assert done.returncode == 1 and words in done.stderr


def test_seed_run_refuses_prompts_that_there_are_not(tmp_path):
    done, _ = run("seed_run.py", tmp_path / "x.json", "--offset", "9000", "--prompts", "2000")
    assert done.returncode == 2 and "there are 10000 prompts" in done.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="has a GPU")
@pytest.mark.parametrize("name", ["serving_gpu.py", "seed_run.py"])
def test_without_a_gpu_the_full_run_says_so(tmp_path, name):
    done, _ = run(name, tmp_path / "x.json")
    assert done.returncode == 1 and "no NVIDIA GPU" in done.stderr


def test_seed_prompts_are_as_many_tokens_as_promised(seed_run):
    lengths = seed_run.lengths(seed_run.GPU)
    assert len(lengths) == 10_000 and lengths.min() >= 200 and lengths.max() <= 4000
    assert abs(lengths.sum() - 17_300_000) < 173_000


def test_picture_is_drawn_from_the_result_alone(tmp_path):
    pytest.importorskip("matplotlib")
    result = {"machine": {"gpu": "NVIDIA H200"}, "model": "qwen3-8b", "weights": "dummy weights"}
    result |= {"layers": "2,18,33,final", "hidden": 4096}
    for kind in ("prefill", "decode"):
        result |= {kind: "some prompts", f"{kind}_ratio": 0.99, f"baseline_{kind}_ratio": 0.5}
        for way in ("off", "hstransport", "baseline"):
            result[f"{way}_{kind}_tokens_per_s"] = 1000.0
    (tmp_path / "serving_h200.json").write_text(json.dumps(result))
    out = tmp_path / "picture.png"
    done, _ = run("picture.py", out, tmp_path / "serving_h200.json")
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")


def test_picture_names_a_result_that_is_not_there(tmp_path):
    done, _ = run("picture.py", tmp_path / "x.png", tmp_path / "serving_h200.json")
    assert done.returncode == 2 and "serving_h200.json" in done.stderr


GPU_RUN = BENCHMARKS / "gpu" / "run.sh"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--out DIR is needed"),
        (["--out"], "--out needs a value"),
        (["--out", "OUT", "dance"], "dance is neither an option nor a step"),
        (["--out", "OUT", "--deadline", "soon"], "--deadline takes whole seconds"),
    ],
)
def test_gpu_run_names_a_bad_argument(tmp_path, arguments, words):
    arguments = [str(tmp_path / a) if a == "OUT" else a for a in arguments]
    done = subprocess.run([GPU_RUN, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and words in done.stderr
    assert not list(tmp_path.iterdir())


def test_gpu_run_leaves_its_log_and_says_what_failed(tmp_path):
    """With a Python that has nothing: the install fails, and nothing else is tried."""
    work, out = tmp_path / "work", tmp_path / "out"
    env = {**os.environ, "PYTHON": "/bin/false", "WORK": str(work)}
    command = [GPU_RUN, "--out", out, "--deadline", "60", "ring", "serving"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert "install: FAILED" in done.stdout
    assert "serving: not run, nothing is installed" in done.stdout
    assert "SGLang is not installed" in (out / "run.log").read_text()


def test_a_stand_in_can_be_imported_and_not_called(tmp_path):
    (tmp_path / "flashinfer").mkdir()
    text = (BENCHMARKS / "gpu" / "standin.py").read_text()
    (tmp_path / "flashinfer" / "__init__.py").write_text(text)
    program = """
import flashinfer.sampling
from flashinfer.decode import Wrapper, plan
assert isinstance(Wrapper, type)
for name in (Wrapper, plan, flashinfer.sampling.top_k):
    try:
        name()
    except RuntimeError as e:
        assert "stand-in" in str(e)
    else:
        raise AssertionError(name)
try:
    import flashinfer.norm
except ImportError:
    print("good")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "good\n", done.stderr


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_committed_results_say_where_they_come_from(path):
    written = json.loads(path.read_text())
    check_provenance(written)
    assert written["smoke"] is False
    if path.stem.startswith("seed_run"):  # one long run, not rounds
        assert written["errors"] == 0
    else:
        assert written["rounds"] >= 3
