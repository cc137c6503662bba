"""The benchmarks run, check what they measured, and say where their figures come from.

How fast anything was is not asserted: that depends on the machine and on what else runs there.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


def smoke(name, out):
    """Run ``benchmarks/NAME --smoke``; what it wrote."""
    command = [sys.executable, BENCHMARKS / name, "--smoke", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


def check_provenance(written):
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", written["commit"])
    assert set(written["machine"]) == {"cpu", "cores", "memory_gib", "system"}
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


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_committed_results_say_where_they_come_from(path):
    written = json.loads(path.read_text())
    check_provenance(written)
    assert written["smoke"] is False and written["rounds"] >= 3
