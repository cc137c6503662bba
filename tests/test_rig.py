"""The rig itself: the models are what they claim, and a real server starts, answers and stops."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rig import build_env, server
from rig.server import ServerDied, SGLangServer

PROMPT = list(range(3, 80))
ONE_TOKEN = {"temperature": 0, "max_new_tokens": 1}


def test_second_setup_has_nothing_to_do(tmp_path):
    rig = build_env.Rig(build_env.DEFAULT_SGLANG)
    rig.state = tmp_path
    rig.log = tmp_path / "log"
    ran = tmp_path / "ran"
    for _ in range(2):
        rig._step("a step", "key", ["sh", "-c", f"echo x >> {ran}"])
    assert ran.read_text() == "x\n"
    rig._step("a step", "another key", ["sh", "-c", f"echo x >> {ran}"])
    assert ran.read_text() == "x\nx\n"


def test_failed_step_shows_the_end_of_its_output_and_is_tried_again(tmp_path):
    rig = build_env.Rig(build_env.DEFAULT_SGLANG)
    rig.state = tmp_path
    rig.log = tmp_path / "log"
    with pytest.raises(build_env.SetupError, match=r"no such wheel(.|\n)*exit status 3"):
        rig._step("a step", "key", ["sh", "-c", "echo no such wheel; exit 3"])
    assert not list(tmp_path.glob("*.stamp"))


def test_release_pins_replace_the_common_ones():
    common = build_env.merged_constraints("0.5.20").splitlines()
    other = build_env.merged_constraints("0.5.23").splitlines()
    assert "transformers==5.12.1" in common
    assert [line for line in other if line.startswith("transformers==")] == ["transformers==5.19.0"]
    assert len(common) == len(other)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "deepseek_v3"])
def test_tiny_model_is_the_same_bytes_every_time(architecture, tmp_path):
    tiny_models = pytest.importorskip("rig.tiny_models", reason="torch is not installed")
    sums = set()
    for name in ("a", "b"):
        tiny_models.save(architecture, tmp_path / name)
        sums.add(hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest())
    assert len(sums) == 1
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == (architecture, 64)


@pytest.mark.exhaustive
@pytest.mark.sglang
def test_server_that_cannot_start_says_why(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ServerDied, match="no-such-model"):
        SGLangServer(tmp_path).start()


@pytest.mark.sglang
@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_model_serves_in_chunks(servers, model):
    served = servers.get(model, chunked_prefill=32)
    answer = served.generate(input_ids=PROMPT, sampling_params=ONE_TOKEN)
    assert answer["meta_info"]["prompt_tokens"] == len(PROMPT)
    assert len(served.scheduler_pids()) == 1
    assert served.log_text().count("Prefill batch") >= len(PROMPT) // 32


@pytest.mark.sglang
@pytest.mark.exhaustive
def test_deepseek_serves_on_two_ranks_and_its_group_is_gone_after_the_stop(servers):
    served = servers.get("dsv3", tp=2, plugin="off")
    answer = served.generate(input_ids=PROMPT, sampling_params=ONE_TOKEN)
    assert len(answer["output_ids"]) == 1
    assert len(served.scheduler_pids()) == 2
    leader = served.pid()
    served.stop(abrupt=True)
    assert server._group(leader) == []


@pytest.mark.sglang
@pytest.mark.exhaustive
def test_smollm2_is_the_real_model(servers):
    served = servers.get("smollm2")
    answer = served.generate(
        text="The capital of France is", sampling_params={"temperature": 0, "max_new_tokens": 4}
    )
    assert "Paris" in answer["text"]


@pytest.mark.sglang
@pytest.mark.exhaustive
def test_killed_test_run_leaves_no_server(model_dir):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from rig.server import SGLangServer\n"
        "s = SGLangServer(sys.argv[2]); s.start(); print(s.pid(), flush=True); input()\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(model_dir("llama"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        leader = int(run.stdout.readline())
        assert server._group(leader)
        run.kill()
    deadline = time.monotonic() + 10
    while server._group(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server._group(leader) == []
