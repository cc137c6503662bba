"""``hstransport doctor`` beside real servers: right ones, and ones whose capture is broken."""

from __future__ import annotations

import json

import pytest
from hstransport_consumer import Consumer
from rig.consumer import ConsumerProcess, all_samples

from hstransport.cli import main
from hstransport.doctor.probe import LABEL
from hstransport.ring import inspect_ring
from hstransport.session import find_rings

pytestmark = pytest.mark.sglang


@pytest.fixture
def fault(module_ring_dir):
    """The file that tells the servers of this module what to break; nothing, when a test ends."""
    path = module_ring_dir / "fault"
    yield path
    path.write_text("")


def serve(servers, root, model, **env):
    (root / "fault").touch()
    return servers.get(
        model,
        env={
            "HSTRANSPORT": "1",
            "HSTRANSPORT_DIR": str(root),
            "HSTRANSPORT_SESSION": model,
            "HSTRANSPORT_RING_BYTES": "64MiB",
            "RIG_FAULT": str(root / "fault"),
            **env,
        },
    )


@pytest.fixture
def doctor(capsys, module_ring_dir):
    """(exit status, findings by name) of the command line."""

    def run(server, *args):
        command = ["doctor", "--server", server.url, "--dir", module_ring_dir, "--json", *args]
        status = main(list(map(str, command)))
        out, err = capsys.readouterr()
        if not out:
            return status, err
        said = json.loads(out)
        assert said["ok"] == (status == 0)
        return status, {f["name"]: f for f in said["findings"]}

    return run


def ask(server, sample_id, input_ids):
    tags = {"hstransport_id": sample_id}
    server.generate(
        input_ids=input_ids, sampling_params={"max_new_tokens": 1, "custom_params": tags}
    )


def named(findings, status):
    return {name for name, f in findings.items() if f["status"] == status}


@pytest.fixture
def llama(servers, module_ring_dir):
    """Its ring holds what doctor asks for and nothing else; generated tokens too."""
    env = {"HSTRANSPORT_ROWS": "all", "HSTRANSPORT_REQUESTS": "tagged"}
    return serve(servers, module_ring_dir, "llama", **env)


def test_a_right_server_passes_every_check_and_its_ring_is_left_empty(
    llama, doctor, model_dir, module_ring_dir
):
    status, findings = doctor(llama, "--reference", model_dir("llama"))
    assert status == 0
    assert named(findings, "ok") == findings.keys()
    assert list(findings) == [
        *("versions", "ring", "consumer", "rows", "values", "batch", "prefix"),
        *("layer 2", "layer 3", "final", "lm_head", "norm"),
    ]
    (ring,) = find_rings(module_ring_dir, "llama")
    look = inspect_ring(ring.path)
    assert (look.records, look.consumer_attached) == (0, False)


@pytest.mark.parametrize(
    ("broken", "found", "words"),
    [
        ("layers one too high", {"layer 2", "layer 3"}, "holds the states of layer 3 ("),
        ("before the norm", {"final", "lm_head", "norm"}, "BEFORE the norm"),
        ("rows of another request", {"batch"}, "rows of requests in one batch are mixed up"),
        ("zeros", {"values", "layer 2", "batch"}, "only zeros: layer 2 of doctor-"),
        ("noise", {"layer 3", "batch", "prefix"}, "is not transformers'"),
    ],
)
def test_broken_capture_is_found_by_the_check_that_is_meant_for_it(
    llama, doctor, fault, model_dir, broken, found, words
):
    fault.write_text(broken)
    status, findings = doctor(llama, "--reference", model_dir("llama"))
    assert status == 1
    # Where the two that changed places are of equal length, lm_head sees it too.
    assert named(findings, "fail") - {"lm_head"} == found - {"lm_head"}, findings
    assert found <= named(findings, "fail")
    assert any(words in findings[name]["text"] for name in found), findings


def test_another_model_than_the_one_served_is_not_taken_for_its_reference(llama, doctor, model_dir):
    status, findings = doctor(llama, "--reference", model_dir("smollm2"))
    assert status == 1
    assert "has 30 layers of 576, the server 6 of 64" in findings["layers"]["text"]
    assert named(findings, "fail") >= {"layers", "norm"}


def test_a_reference_that_is_not_here_skips_what_needs_it(llama, doctor):
    status, findings = doctor(llama, "--reference", "nobody/nothing")
    assert status == 0
    assert named(findings, "skipped") == {"layers", "lm_head", "norm"}
    assert "give its folder with --reference" in findings["layers"]["text"]


def test_without_a_reference_the_servers_own_checkpoint_tells_the_norm(llama, doctor):
    status, findings = doctor(llama)
    assert status == 0
    assert named(findings, "skipped") == {"layers"}
    assert "give --reference MODEL" in findings["layers"]["text"]
    assert "1.000 +- 0.00" in findings["norm"]["text"]


def test_capture_that_has_ended_is_said(llama, servers, doctor, fault):
    fault.write_text("end")
    status, findings = doctor(llama, "--settle-timeout", "3")
    assert status == 1
    assert "gone since doctor began" in findings["ring"]["text"]
    status, said = doctor(llama)
    servers.stop()  # nobody else has a use for it
    assert status == 2
    assert "capture has ended (its log says why" in said


@pytest.fixture
def smollm2(servers, module_ring_dir):
    """Captures every request: SGLang's own warm-up is in its ring."""
    return serve(servers, module_ring_dir, "smollm2")


@pytest.mark.exhaustive
def test_records_of_others_stay_in_the_ring(smollm2, doctor, model_dir, module_ring_dir):
    ask(smollm2, "somebody's", [5, 6, 7, 8])
    (ring,) = find_rings(module_ring_dir, "smollm2")
    tail = inspect_ring(ring.path).tail
    status, findings = doctor(smollm2, "--session", "smollm2", "--reference", model_dir("smollm2"))
    assert status == 0
    assert named(findings, "ok") == findings.keys()
    assert "records of others stay in the ring" in findings["consumer"]["text"]
    assert inspect_ring(ring.path).tail == tail
    with Consumer.attach("smollm2", root=module_ring_dir) as samples:
        assert "somebody's" in [s.id for s, _ in zip(samples, range(3), strict=False)]


def test_beside_a_consumer_doctor_reads_what_that_one_writes(
    smollm2, doctor, tmp_path, module_ring_dir
):
    out = tmp_path / "shards"
    mine = ["--session", "smollm2"]
    status, said = doctor(smollm2, *mine, "--shards", out)
    assert (status, "no consumer is attached" in said) == (2, True)
    with ConsumerProcess(out, module_ring_dir, *mine) as consumer:
        ask(smollm2, "somebody's", [5, 6, 7, 8])
        consumer.wait_for(["somebody's"])
        status, said = doctor(smollm2, *mine)
        assert (status, "name the directory that it writes with --shards" in said) == (2, True)

        status, findings = doctor(smollm2, *mine, "--shards", out)
        assert status == 0
        assert named(findings, "skipped") == {"layers"}

        elsewhere = tmp_path / "elsewhere"
        status, findings = doctor(smollm2, *mine, "--shards", elsewhere, "--settle-timeout", "1")
        assert status == 1
        assert "is " + str(elsewhere) + " what the" in findings["consumer"]["text"]
        assert "rows" not in findings

        samples = all_samples(out)
        own = [s for s in samples if s.id.startswith("doctor-")]
        assert len(own) >= 28  # and what the test before left in the ring
        assert all(s.labels[LABEL] and not s.loss_mask.any() for s in own)


def test_session_that_is_not_there_is_told(smollm2, doctor):
    status, said = doctor(smollm2, "--session", "nowhere")
    assert (status, "no live server has a ring of session 'nowhere'" in said) == (2, True)


def test_server_that_does_not_answer_is_status_2(doctor, servers, smollm2):
    servers.stop()
    status, said = doctor(smollm2)
    assert status == 2
    assert "does not answer as it should" in said and "correct --server" in said
