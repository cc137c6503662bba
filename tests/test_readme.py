"""Every command and every piece of code in README.md runs, as it stands there; every link leads on.

``make demo`` and ``make test`` are run by this file and by CI. Only names that a reader must choose
(addresses, directories, the model) are replaced.
"""

import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hstransport_consumer.cli import _parser as consumer_parser
from rig.producer import Producer
from rig.server import SGLangServer

from hstransport.cli import main as hstransport

ROOT = Path(__file__).parent.parent
FOLDERS = "docs", "consumer", "benchmarks", "patches"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *(p for d in FOLDERS for p in sorted((ROOT / d).glob("*.md")))]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for language, block in BLOCKS
    if language != "python" and "┌" not in block
    for line in block.splitlines()
    if line.strip()
]
CODE = [block for language, block in BLOCKS if language == "python"]
INLINE = re.findall(r"`((?:make|hstransport(?:-consumer)?) [^`]+)`", README)


@pytest.fixture(scope="session")
def demo():
    """``make demo`` in this very checkout; returns what it printed."""
    done = subprocess.run(
        ["make", "-C", str(ROOT), "demo"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_readme_has_the_commands_that_are_tested_here():
    assert COMMANDS == [
        "make demo",
        "make test",
        "pip install .",
        "HSTRANSPORT=1 python -m sglang.launch_server --model-path MODEL --port 30000",
        "hstransport-consumer --out /data/shards",
        "hstransport extract --server http://127.0.0.1:30000 --prompts prompts.jsonl "
        "--out /data/shards",
    ]
    assert len(CODE) == 2
    assert {c.split()[0] + " " + c.split()[1] for c in INLINE} >= {
        "hstransport inspect",
        "hstransport verify",
        "hstransport estimate",
        "make check",
        "make help",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_the_pages_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            assert anchor in [h.lower().replace(" ", "-") for h in headings], link


def test_ci_runs_the_tests_as_the_readme_says():
    assert re.search(r"^make .*\b(check|test)\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    helped = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True)
    for target in ("demo", "test", "check", "help"):
        assert re.search(rf"^{target} ", helped.stdout, re.MULTILINE), target


@pytest.mark.sglang
def test_make_demo_ends_with_verified_shards(demo):
    assert "every checksum, every row" in demo
    shards = list((ROOT / "data" / "shards").glob("shard-*.zst"))
    assert shards
    for shard in shards:  # the standard tool accepts them too
        subprocess.run(["zstd", "-tq", str(shard)], check=True)


@pytest.mark.sglang
def test_demo_is_real_and_a_third_smaller(demo, capsys):
    import json

    assert hstransport(["inspect", str(ROOT / "data" / "shards"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == facts["whole"] > 30
    assert facts["ratio"] >= 1.48
    assert facts["final"] is True
    assert len(facts["layers"]) == 3


@pytest.mark.sglang
def test_reading_code_runs_on_the_demos_shards(demo):
    code = CODE[0].replace("/data/shards", str(ROOT / "data" / "shards"))
    code = code.replace("my-id", "x").replace("read(100, 200, layers=[16])", "read(0, 9, [2])")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_embedding_code_runs(ring_dir):
    producer = Producer(ring_dir, session="default")
    producer.sample("a", 5)
    ending = threading.Timer(0.5, producer.close)
    ending.start()
    trained = []
    code = CODE[1].replace('attach("default")', 'attach("default", root=root)')
    exec(code, {"train": lambda *args: trained.append(args), "root": ring_dir})
    ending.join()
    assert [states.shape for _, states in trained] == [(5, 64)]


@pytest.mark.exhaustive
@pytest.mark.sglang
def test_four_lines_for_ones_own_server(model_dir, ring_dir, tmp_path):
    """The README's lines themselves, with the CPU's arguments added to the server's."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "The capital of France is"}\n{"input_ids": [5, 6, 7]}\n')
    names = {"/data/shards": str(tmp_path / "shards"), "prompts.jsonl": str(prompts)}
    environment = {"HSTRANSPORT": "1", "HSTRANSPORT_DIR": str(ring_dir)}
    assert COMMANDS[3].startswith("HSTRANSPORT=1 python -m sglang.launch_server")
    with SGLangServer(model_dir("smollm2"), env=environment) as server:
        names["http://127.0.0.1:30000"] = server.url
        consume, extract = (_command(c, names) for c in COMMANDS[4:6])
        consumer = subprocess.Popen([*consume, "--dir", str(ring_dir)])
        try:
            done = subprocess.run(extract, capture_output=True, text=True, timeout=120)
        finally:
            consumer.terminate()
            consumer.wait(30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 samples are whole" in done.stdout


def test_consumer_line_is_what_the_consumer_takes():
    arguments = consumer_parser().parse_args(shlex.split(COMMANDS[4])[1:])
    assert str(arguments.out) == "/data/shards"


def _command(line, names):
    for name, value in names.items():
        line = line.replace(name, value)
    program, *rest = shlex.split(line)
    return [os.path.join(os.path.dirname(sys.executable), program), *rest]  # noqa: PTH118, PTH120
