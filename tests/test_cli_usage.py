"""The command line without a server: help, bad input, exit statuses, one line for each error."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time

import pytest
from rig.consumer import ConsumerProcess
from rig.stub import StubServer

from hstransport import __version__
from hstransport.cli import _parser, main
from hstransport.client import engine

COMMANDS = ["extract", "inspect", "verify", "repair", "top", "doctor", "estimate"]


def hstransport(capsys, *args):
    """(exit status, stdout, stderr)"""
    try:
        status = main([str(a) for a in args])
    except SystemExit as e:
        status = e.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input_ids": [1, 2, 3], "id": "a"}\n')
    return path


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_shows_an_example_that_parses(capsys, command):
    status, out, _ = hstransport(capsys, *filter(None, [command]), "--help")
    assert status == 0
    _, _, after = out.partition("example:\n")
    lines = after.partition("\n\n")[0].replace("\\\n", " ").splitlines()
    examples = [line.strip() for line in lines if line.strip().startswith("hstransport ")]
    assert examples
    for example in examples:
        words = shlex.split(example, comments=True)[1:]
        stop = next((i for i, w in enumerate(words) if w in ("|", "&&", "&")), len(words))
        _parser().parse_args(words[:stop])


def test_console_script_and_module_say_the_version():
    out = subprocess.check_output([sys.executable, "-m", "hstransport.cli", "--version"], text=True)
    assert out == f"hstransport {__version__}\n"


def test_no_command_is_a_usage_error(capsys):
    status, _, err = hstransport(capsys)
    assert status == 2
    assert "COMMAND" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--concurrency", "0"], "'0' is not at least 1"),
        (["--retries", "-1"], "'-1' is negative"),
        (["--timeout", "nan"], "'nan' is not a positive number"),
        (["--max-new-tokens", "x"], "'x' is not a whole number"),
        (["--server", "ftp://x"], "is not a URL such as"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE: that environment variable"),
    ],
)
def test_bad_argument_is_named(capsys, tmp_path, prompts, args, words):
    base = ["--server", "http://127.0.0.1:9", "--prompts", prompts, "--out", tmp_path / "out"]
    status, out, err = hstransport(capsys, "extract", *base, *args)
    assert (status, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "one of the arguments --server --model is required"),
        (["--server", "http://127.0.0.1:9", "--model", "m"], "not allowed with argument"),
        (["--server", "http://127.0.0.1:9", "--layers", "2"], "--layers needs --model"),
        (["--server", "http://127.0.0.1:9", "--", "--tp-size", "2"], "what follows -- needs --mod"),
        (["--model", "m", "--api-key-env", "KEY"], "--api-key-env needs --server"),
        (["--model", "m", "--layers", "two"], "HSTRANSPORT_LAYERS='two': 'two' is not allowed"),
        (["--model", "m", "--rows", "some"], "invalid choice: 'some'"),
        (["--model", "m", "--", "--model-path=n"], "--model-path=n after --"),
    ],
)
def test_server_and_model_exclude_each_other_and_what_is_only_for_one(
    capsys, monkeypatch, tmp_path, prompts, args, words
):
    monkeypatch.setattr(engine, "find_spec", lambda name: object())  # SGLang seems to be there
    base = ["--prompts", prompts, "--out", tmp_path / "out"]
    status, out, err = hstransport(capsys, "extract", *base, *args)
    assert (status, out) == (2, "")
    assert words in err
    assert not (tmp_path / "out").exists()


def test_model_without_sglang_says_what_to_do(capsys, monkeypatch, tmp_path, prompts):
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    args = ["--model", "m", "--prompts", prompts, "--out", tmp_path / "out"]
    status, out, err = hstransport(capsys, "extract", *args)
    assert (status, out) == (2, "")
    assert "SGLang, which is not installed here" in err


def test_directory_of_another_consumer_is_refused_before_the_model_loads(
    capsys, monkeypatch, tmp_path, ring_dir, prompts
):
    monkeypatch.setenv("HSTRANSPORT_DIR", str(ring_dir))
    monkeypatch.setattr(engine, "find_spec", lambda name: object())
    out_dir = tmp_path / "out"
    with ConsumerProcess(out_dir, ring_dir):
        lock = out_dir / ".lock"
        while not (lock.exists() and lock.read_text()):  # it says whose it is
            time.sleep(0.05)
        args = ["--model", "m", "--prompts", prompts, "--out", out_dir]
        status, out, err = hstransport(capsys, "extract", *args)
    assert (status, out) == (2, "")
    assert f"is writing into {out_dir}: wait for it" in err
    assert not list(ring_dir.iterdir())


def test_unreachable_server_is_status_3(capsys, tmp_path, prompts):
    with StubServer() as stub:
        url = stub.url
    status, out, err = hstransport(
        capsys, "extract", "--server", url, "--prompts", prompts, "--out", tmp_path
    )
    assert (status, out) == (3, "")
    assert err.startswith(f"hstransport: error: no server answers at {url} (")
    assert "HSTRANSPORT=1" in err
    assert err.count("\n") == 1


def test_bad_lines_are_listed_before_anything_is_sent(capsys, tmp_path, prompts):
    prompts.write_text('{"input_ids": [1]}\nrubbish\n{"text": ""}\n')
    with StubServer() as stub:
        args = ["extract", "--server", stub.url, "--prompts", prompts, "--out", tmp_path / "out"]
        status, out, err = hstransport(capsys, *args)
        assert (status, out, stub.requests) == (2, "", [])
        assert "line 2: not JSON" in err and "line 3: text is empty" in err
        # Left out when asked for, and then the exit status still tells.
        again = hstransport(capsys, *args, "--skip-bad", "--json", "--settle-timeout", "0.2")
        assert again[0] == 1
        summary = json.loads(again[1])
        assert [b["line"] for b in summary["bad_lines"]] == [2, 3]
        assert len(stub.requests) == 1


def test_summary_says_that_no_consumer_writes(capsys, tmp_path, prompts):
    out_dir = tmp_path / "out"
    with StubServer() as stub:
        args = ["--prompts", prompts, "--out", out_dir, "--settle-timeout", "0.2"]
        status, out, _ = hstransport(capsys, "extract", "--server", stub.url, *args)
    assert status == 1
    assert "0 of 1 samples are whole" in out
    assert "a (line 1): not_stored" in out
    assert f"no consumer seems to be writing {out_dir}" in out
    assert not out_dir.exists(), "the directory is the consumer's to make"


def test_server_that_fails_every_request_is_status_3(capsys, tmp_path, prompts):
    with StubServer(lambda n, body: (500, {"error": {"message": "broken"}})) as stub:
        args = ["--prompts", prompts, "--out", tmp_path / "out", "--retries", "0"]
        status, out, _ = hstransport(capsys, "extract", "--server", stub.url, *args)
    assert status == 3
    assert "the server was lost" in out and "broken" in out


def test_messages_need_a_tokenizer_that_the_server_names(capsys, tmp_path, prompts):
    prompts.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    with StubServer(info={"model_path": str(tmp_path)}) as stub:
        args = ["extract", "--server", stub.url, "--prompts", prompts, "--out", tmp_path / "out"]
        status, _, err = hstransport(capsys, *args)
    assert status == 2
    assert str(tmp_path) in err or "hstransport[chat]" in err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_directory_that_is_not_there_is_status_2(capsys, tmp_path, command):
    status, _, err = hstransport(capsys, command, tmp_path / "nothing")
    assert status == 2
    assert err.startswith("hstransport: error: ") and "nothing" in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        main(["inspect", str(tmp_path / "nothing"), "--debug"])


def test_missing_prompt_file_is_status_2(capsys, tmp_path):
    with StubServer() as stub:
        args = ["--prompts", tmp_path / "no.jsonl", "--out", tmp_path / "out"]
        status, _, err = hstransport(capsys, "extract", "--server", stub.url, *args)
    assert status == 2
    assert err == f"hstransport: error: {tmp_path / 'no.jsonl'}: No such file or directory\n"
