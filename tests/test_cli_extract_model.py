"""``hstransport extract --model``: SGLang's Engine, its samples, and whatever of it may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hstransport_consumer import open_shards
from rig.consumer import ConsumerProcess
from rig.server import arguments, environment
from rig.states import named

from hstransport.cli import main

pytestmark = pytest.mark.sglang

DEMO = Path(__file__).resolve().parent.parent / "demo" / "prompts.jsonl"


class Command:
    """``hstransport extract``, in a process group of its own as a terminal would start it."""

    def __init__(self, ring_dir, *args):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hstransport.cli", "extract", *map(str, args)],
            env=environment(1, "on", {"HSTRANSPORT_DIR": str(ring_dir)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self):
        """(exit status, stdout, stderr)"""
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out, err

    def family(self):
        """Title of each process that it has started, and those have, by process id."""
        found = {self.process.pid: ""}
        for pid in sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
            if pid not in found and parent(pid) in found:
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = title.replace(b"\0", b" ").decode()
        del found[self.process.pid]
        return found


def parent(pid):
    """Its parent's process id; None when it is gone."""
    try:
        state, ppid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(ppid)


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def write(path, lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


@pytest.mark.exhaustive  # five engines
def test_whatever_dies_the_same_command_goes_on(ring_dir, tmp_path, model_dir, capsys):
    prompts = named("p", 150, seed=22)
    lines = [{"id": i, "input_ids": p} for i, p in prompts.items()]
    path, out, model = write(tmp_path / "p.jsonl", lines), tmp_path / "out", model_dir("llama")

    def whole():
        return len(open_shards(out, partial=True)) if any(out.glob("shard-*")) else 0

    def run(how=None):
        """The command, killed by ``how(command, family)`` once it has stored something."""
        before = whole()
        command = Command(
            ring_dir,
            *("--model", model, "--prompts", path, "--out", out, "--concurrency", 2, "--json"),
            *("--max-new-tokens", 8, "--", *arguments(model)),
        )
        if how is None:
            return command.end()
        wait_until(lambda: whole() > before or command.process.poll() is not None)
        family = command.family()
        how(command, family)
        ended = command.end()
        wait_until(lambda: all(parent(pid) is None for pid in family), 60)
        assert before < whole() < len(lines), ended
        return ended

    def kill_one(word):
        def how(command, family):
            (pid,) = [pid for pid, title in family.items() if word in title]
            os.kill(pid, signal.SIGKILL)

        return how

    status, stdout, _ = run(kill_one("hstransport_consumer"))
    assert status == 3
    assert "hstransport-consumer ended (exit status -9" in json.loads(stdout)["server_lost"]

    status, stdout, _ = run(kill_one("sglang::scheduler"))
    assert status == 3
    assert "SGLang's engine ended" in json.loads(stdout)["server_lost"]

    run(lambda command, family: command.process.kill())

    # As Ctrl-C does it: to everything in the foreground.
    status, stdout, _ = run(lambda command, family: os.killpg(command.process.pid, signal.SIGINT))
    summary = json.loads(stdout)
    assert (status, summary["interrupted"]) == (1, True)
    assert summary["states"].keys() == {"not_asked"}, "requests under way came to their end"

    status, stdout, stderr = run()
    assert status == 0, stderr
    summary = json.loads(stdout)
    assert summary["already_whole"] > 0
    assert summary["whole"] + summary["already_whole"] == len(lines)
    assert not list(ring_dir.iterdir()), "a ring or its session's directory is left"

    samples = open_shards(out)
    assert sorted(samples.ids) == sorted(prompts), "a sample is missing, or there twice"
    assert all(s.token_ids.tolist() == prompts[s.id] for s in samples)
    assert main(["verify", str(out)]) == 0, capsys.readouterr().out

    # Nothing is left to ask, so nothing is started.
    status, stdout, stderr = run()
    assert (status, json.loads(stdout)["already_whole"]) == (0, len(lines))
    assert "starting" not in stderr


@pytest.mark.parametrize(
    ("status", "extra", "told"),
    [
        (2, ["--", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        pytest.param(
            *(3, ["--layers", "6"], "layer 6 of LlamaForCausalLM cannot be captured"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_engine_that_does_not_start_says_why(ring_dir, tmp_path, model_dir, status, extra, told):
    path, model = write(tmp_path / "p.jsonl", [{"input_ids": [1]}]), model_dir("llama")
    base = ("--model", model, "--prompts", path, "--out", tmp_path / "out")
    at = extra.index("--") if "--" in extra else len(extra)
    ended = Command(ring_dir, *base, *extra[:at], "--", *arguments(model), *extra[at + 1 :]).end()
    assert ended[:2] == (status, ""), ended
    assert told in ended[2]
    assert not list(ring_dir.iterdir())


def test_samples_are_the_servers_bit_for_bit(servers, ring_dir, tmp_path, model_dir):
    chats = [json.loads(line) for line in DEMO.read_text().splitlines()[:5]]
    lines = [
        *chats,
        {"id": "text", "text": "The capital of France is"},
        *({"id": i, "input_ids": p, "labels": {"n": i}} for i, p in named("ids", 6, 21).items()),
        {"id": "masked", "input_ids": [7, 8, 9], "loss_mask": [0, 1, 0]},
        {"id": "long", "input_ids": [5] * 9000},
    ]
    prompts = write(tmp_path / "prompts.jsonl", lines)
    # One at a time, so that the batches are the same.
    how = ("--prompts", prompts, "--concurrency", 1, "--max-new-tokens", 4, "--json")
    model, mine, theirs = model_dir("smollm2"), tmp_path / "mine", tmp_path / "theirs"
    capture = ("--layers", "2,15,final", "--rows", "all", "--threads", 2)
    own = Command(
        *(ring_dir, "--model", model, "--out", mine, *how, *capture),
        # Their warm-ups leave different prefixes in their caches, and so make other batches.
        *("--", *arguments(model), "--disable-radix-cache"),
    )
    status, stdout, stderr = own.end()
    assert status == 1, stderr
    assert not list(ring_dir.iterdir()), "a ring or its session's directory is left"
    summary = json.loads(stdout)

    capture = {"HSTRANSPORT_LAYERS": "2,15,final", "HSTRANSPORT_ROWS": "all"}
    env = {"HSTRANSPORT": "1", "HSTRANSPORT_DIR": str(ring_dir), "HSTRANSPORT_REQUESTS": "tagged"}
    server = servers.get("smollm2", env=env | capture, extra_args=["--disable-radix-cache"])
    with ConsumerProcess(theirs, ring_dir):
        status, stdout, stderr = Command(
            ring_dir, "--server", server.url, "--out", theirs, *how
        ).end()
        assert status == 1, stderr
    reference = json.loads(stdout)

    for found in (summary, reference):
        (job,) = found["not_whole"]
        assert (job["id"], job["state"], job["requests"]) == ("long", "refused", 1)
        assert "The input (9000 tokens) is longer" in job["reason"]
    same = ("whole", "already_whole", "requests", "prompt_tokens", "states", "model")
    assert [summary[key] for key in same] == [reference[key] for key in same]

    ours, wanted = open_shards(mine), open_shards(theirs)
    assert list(ours.ids) == list(wanted.ids) == [line["id"] for line in lines[:-1]]
    for sample, want in zip(ours, wanted, strict=True):
        assert sample.layers == want.layers
        assert np.array_equal(sample.token_ids, want.token_ids)
        assert np.array_equal(sample.hidden_states, want.hidden_states)
        assert sample.next_token_id == want.next_token_id
        assert sample.labels == want.labels
        assert (sample.loss_mask is None) == (want.loss_mask is None)
        if want.loss_mask is not None:
            assert np.array_equal(sample.loss_mask, want.loss_mask)
