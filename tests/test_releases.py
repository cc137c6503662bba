"""Every SGLang release: what the plugin hooks and reads is there, in the shape that it expects.

Sources are downloaded once (``build/sglang``) and parsed, never imported. By default a few of the
releases in docs/releases.md are looked at, with ``SGLANG_RELEASES=all`` all of them, and pip is
asked whether there are others.
"""

import ast
import os
import re
from pathlib import Path

import pytest
from rig import releases
from rig.releases import HEAD, OPTIONAL, READS, lacks, listed, row, table
from rig.sglang_source import NoDownload, Source, offered

from hstransport.patching import known_patches

REFRESH = "run `PYTHONPATH=tests .venv/bin/python -m rig.releases`, and look at what changed"
ALL = os.environ.get("SGLANG_RELEASES") == "all"
FIRST_PLUGIN = "0.5.11"
ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "hstransport" / "sglang"


def chosen():
    there = list(listed())
    return there if ALL else [*known_patches(), FIRST_PLUGIN, there[-1]]


def get(release):
    try:
        return Source(release)
    except NoDownload as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module", params=chosen())
def source(request):
    return get(request.param)


def test_has_all_that_the_plugin_hooks_and_reads(source):
    assert list(lacks(source)) == []


def test_its_line_in_the_docs_is_what_was_found(source):
    assert listed()[source.release] == table([row(source)]).splitlines()[-1], REFRESH


def test_the_page_lists_every_release_that_pip_offers():
    if not ALL:
        pytest.skip("SGLANG_RELEASES=all asks pip")
    try:
        there = offered()
    except NoDownload as e:
        pytest.skip(str(e))
    assert list(listed()) == there, REFRESH
    assert table([]).splitlines()[0] in releases.PAGE.read_text(), HEAD


@pytest.mark.parametrize("release", known_patches())
def test_its_patch_applies_compiles_and_comes_out_to_the_very_bytes(release):
    patch = known_patches()[release]
    released = (get(release).root / "sglang" / patch.file).read_bytes()
    patched = patch.apply(released)
    assert patch.revert(patched) == released
    assert len(patch.lines) <= 30
    (function,) = [
        node
        for node in ast.parse(patched).body
        if isinstance(node, ast.FunctionDef) and node.name == patch.function
    ]
    calls = [
        node.func.id
        for node in sorted(
            (n for n in ast.walk(function) if isinstance(n, ast.Call)), key=lambda n: n.lineno
        )
        if isinstance(node.func, ast.Name)
    ]
    assert calls.count("install") == calls.count("Scheduler") == 1
    assert calls.index("install") < calls.index("Scheduler")


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (
            "managers/schedule_batch.py",
            "self.is_retracted = ",
            "self.is_taken_back = ",
            "sglang.srt.managers.schedule_batch.Req.is_retracted",
        ),
        (
            "layers/logits_processor.py",
            "hidden_states,\n        lm_head",
            "states,\n        lm_head",
            "LogitsProcessor.forward(self, input_ids, states, lm_head",
        ),
        ("managers/scheduler.py", "def abort_request(", "def abort(", "Scheduler.abort_request"),
        ("managers/scheduler.py", "    load_plugins()", "    pass", "a plugin system"),
        ("models/qwen3.py", "layers_to_capture", "layers_kept", "Qwen3ForCausalLM.set_eagle3_lay"),
    ],
)
def test_what_a_release_has_renamed_is_named(tmp_path, file, old, new, told):
    whole = get(list(listed())[-1])
    for entry in whole.srt.rglob("*.py"):
        link = tmp_path / entry.relative_to(whole.root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(entry)
    changed = tmp_path / "sglang" / "srt" / file
    text = changed.read_text()
    assert old in text
    changed.unlink()
    changed.write_text(text.replace(old, new))
    missing = list(lacks(Source(whole.release, tmp_path)))
    assert any(told in line for line in missing), missing


# The names by which the plugin has SGLang's objects in hand.
NAMES = {
    "req": "Req",
    "_req": "Req",
    "batch": "ScheduleBatch",
    "forward_batch": "ForwardBatch",
    "mode": "ForwardMode",
    "forward_mode": "ForwardMode",
    "runner": "ModelRunner",
    "_runner": "ModelRunner",
    "scheduler": "Scheduler",
    "output": "ModelRunnerOutput",
    "logits_metadata": "LogitsMetadata",
    "graph_runner": "DecodeCudaGraphRunner",
    "replayed": "DecodeCudaGraphRunner",
    "config": "ModelConfig",
    "server_args": "ServerArgs",
    "sampling_params": "SamplingParams",
    "finished_reason": "BaseFinishReason",
}


def test_all_that_the_plugin_reads_is_in_the_table():
    known = {cls: set() for cls in NAMES.values()}
    for table_ in (READS, OPTIONAL):
        for (_, cls), names in table_.items():
            known[cls] |= set(names.replace("|", " ").split())
    read = set()
    for node in (n for p in PLUGIN.glob("*.py") for n in ast.walk(ast.parse(p.read_text()))):
        if isinstance(node, ast.Attribute):
            read.add((holder(node.value), node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            name = node.args[1]
            if isinstance(name, ast.Constant):
                read.add((holder(node.args[0]), name.value))
    read = {(NAMES[name], attribute) for name, attribute in read if name in NAMES}
    assert len(read) > 30
    assert {(cls, name) for cls, name in read if name not in known[cls]} == set()


def test_nothing_else_names_what_is_in_sglang():
    uses = re.compile(r"^ *(?:from|import) sglang\b|\bsglang\.srt\b|layers_to_capture", re.M)
    files = [p for d in ("hstransport", "consumer") for p in (ROOT / d).rglob("*.py")]
    naming = {p for p in files if uses.search(p.read_text())}
    assert {p for p in naming if p.parent == PLUGIN} > {PLUGIN / "targets.py", PLUGIN / "layers.py"}
    assert {p.name for p in naming if p.parent != PLUGIN} == {"engine_host.py"}  # starts its Engine


def holder(node):
    """The last name of ``a.b.c``."""
    return getattr(node, "attr", getattr(node, "id", None))
