"""One dataset in many processes and threads, as torch and numpy arrays, and with a million ids."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import DatasetWriter, Sample, open_shards
from shard_kit import Script, make_info


@pytest.fixture(scope="module")
def dataset_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("workers")
    script = Script(make_info(hidden=64))
    for sid in range(40):
        script.whole(sid, 10 + sid)
    with DatasetWriter(out, shard_bytes=40_000) as writer:
        writer.begin_run(script.info)
        for first in range(0, len(script.records), 6):
            script.write_window(writer, first, first + 5)
    return out


def collate(samples: list[Sample]) -> list[tuple[str, object]]:
    return [(s.id, s.torch()) for s in samples]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_workers_read_the_same_bits(dataset_path: Path, method: str) -> None:
    torch = pytest.importorskip("torch")
    dataset = open_shards(dataset_path)
    dataset[0].read()  # the parent has used it
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=5,
        num_workers=2,
        collate_fn=collate,
        multiprocessing_context=method,
    )
    seen = [pair for batch in loader for pair in batch]
    assert [i for i, _ in seen] == list(dataset.ids)
    for sample_id, states in seen:
        assert states.dtype == torch.bfloat16
        bits = states.view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits, dataset[sample_id].hidden_states)


def test_threads_read_the_same_bits(dataset_path: Path) -> None:
    dataset = open_shards(dataset_path)
    expected = [s.hidden_states for s in dataset]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for a, b in zip(expected, pool.map(lambda s: s.hidden_states, dataset), strict=True):
                np.testing.assert_array_equal(a, b)


def test_arrays_of_other_libraries_are_the_same_bits(dataset_path: Path) -> None:
    sample = open_shards(dataset_path)[3]
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert sample.bfloat16().dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(sample.bfloat16().view(np.uint16), sample.hidden_states)


def test_the_import_needs_neither_torch_nor_sglang() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["sglang"] = sys.modules["ml_dtypes"] = None
from hstransport_consumer import DatasetWriter, open_shards
from hstransport_consumer import verify, inspect
"""
    subprocess.run([sys.executable, "-c", code], check=True)
