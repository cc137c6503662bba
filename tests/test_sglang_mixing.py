"""Rows of one request never end up in another's sample, however requests are batched."""

import concurrent.futures

import numpy as np
import pytest
from rig.consumer import ConsumerProcess, all_samples
from test_sglang_bits import ask, prompts, start

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("config", ["chunked"])
def test_200_concurrent_requests_equal_themselves_sent_alone(
    servers, tmp_path, module_ring_dir, config
):
    server = start(servers, "llama", config, module_ring_dir)
    requests = {f"m{i}": p for i, p in enumerate(prompts(200, seed=4, low=1, high=120))}
    with ConsumerProcess(tmp_path / "shards", module_ring_dir) as consumer:
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            list(pool.map(lambda r: ask(server, *r), requests.items()))
        together = consumer.wait_for(requests)
        alone_ids = {f"alone-{i}": p for i, p in requests.items()}
        for sample_id, ids in alone_ids.items():
            ask(server, sample_id, ids)
        alone = consumer.wait_for(alone_ids)
        assert len(all_samples(tmp_path / "shards")) == 400
    for sample_id, ids in requests.items():
        one, other = together[sample_id], alone[f"alone-{sample_id}"]
        assert (one.state, other.state) == ("whole", "whole")
        assert one.token_ids.tolist() == ids
        assert one.labels == {"n": sample_id}
        a, b = one.hidden_states, other.hidden_states
        # Batches of another shape may round differently in bf16; another request's rows would
        # differ everywhere.
        assert a.shape == b.shape
        x, y = (np.asarray(v, np.uint32) << 16 for v in (a, b))
        x, y = x.view(np.float32).reshape(len(ids), -1), y.view(np.float32).reshape(len(ids), -1)
        cosine = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
        assert cosine.min() > 0.999, sample_id
