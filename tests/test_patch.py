"""``hstransport patch``: what it does to an installed SGLang, and what it refuses to touch."""

import compileall
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from py_compile import PycInvalidationMode
from types import SimpleNamespace

import pytest
from rig.sglang_source import NoDownload, Source

from hstransport import patched
from hstransport.cli import main
from hstransport.errors import PatchError
from hstransport.patching import Installed, Patch, digest, find_sglang, known_patches

RELEASE = "0.5.10.post1"
PATCH = known_patches()[RELEASE]


class Site:
    """A site-packages with the one file that matters, as released."""

    def __init__(self, path, release, content):
        self.path = path
        self.file = path / "sglang" / PATCH.file
        self.file.parent.mkdir(parents=True)
        self.file.write_bytes(content)
        self.released = content
        self.name(release)

    def name(self, release):
        folder = self.path / f"sglang-{release}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n"
        )

    def run(self, *arguments):
        return main(["patch", *arguments, "--site", str(self.path)])


@pytest.fixture(scope="module")
def released():
    try:
        return (Source(RELEASE).root / "sglang" / PATCH.file).read_bytes()
    except NoDownload as e:
        pytest.skip(str(e))


@pytest.fixture
def site(tmp_path, released):
    return Site(tmp_path / "site-packages", RELEASE, released)


def test_applied_twice_and_reverted_twice_it_ends_in_the_very_bytes(site, capsys):
    site.file.chmod(0o640)
    statuses = []
    for action in ("status", "apply", "apply", "status", "revert", "revert", "status"):
        statuses.append((action, site.run(action)))
        if action == "apply":
            assert PATCH.block in site.file.read_bytes()
            assert site.file.stat().st_mode & 0o777 == 0o640
    assert [status for _, status in statuses] == [1, 0, 0, 0, 0, 0, 1]
    assert site.file.read_bytes() == site.released
    assert site.file.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in site.file.parent.iterdir()] == [site.file.name]
    words = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert words == [
        *("not applied", "applied", "was already applied", "applied"),
        *("reverted", "was already reverted", "not applied"),
    ]


def test_dry_run_shows_the_difference_and_writes_nothing(site, capsys):
    assert site.run("apply", "--dry-run") == 0
    shown = capsys.readouterr().out
    added = [line[1:] for line in shown.splitlines() if line.startswith("+") and "+++" not in line]
    assert added == list(PATCH.lines)
    assert site.file.read_bytes() == site.released
    site.run("apply")
    capsys.readouterr()
    assert site.run("revert", "--dry-run") == 0
    assert "-        install()" in capsys.readouterr().out.splitlines()
    assert PATCH.block in site.file.read_bytes()


@pytest.mark.parametrize("after", [False, True], ids=["released", "patched"])
@pytest.mark.parametrize("action", ["status", "apply", "revert"])
def test_an_edited_file_is_named_and_left_alone(site, capsys, action, after):
    if after:
        site.run("apply")
    edited = site.file.read_bytes().replace(b"Create a scheduler", b"Make a scheduler")
    site.file.write_bytes(edited)
    assert site.run(action) == 2
    words = capsys.readouterr().err
    assert PATCH.file in words
    assert "edited" in words
    if action != "status":
        assert digest(edited) in words
        assert PATCH.sha256 in words
    assert site.file.read_bytes() == edited


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"anchor": "    dp_rank: Optional[int],"}, "stands there 2 times, not once"),
        ({"anchor": "    no such line"}, "stands there 0 times, not once"),
        ({"function": "run_scheduler"}, "stands in run_scheduler_process, expected was"),
        ({"anchor": "    scheduler: Scheduler"}, "stands there 0 times"),
        ({"anchor": "        self.init_profiler()"}, "stands in Scheduler."),
    ],
)
def test_an_anchor_elsewhere_is_refused(released, change, told):
    if change.get("anchor", "").strip().startswith(("dp_rank", "self.")):
        assert f"\n{change['anchor']}\n".encode() in released
    with pytest.raises(PatchError) as refused:
        replace(PATCH, **change).apply(released)
    assert told in str(refused.value)
    assert PATCH.file in str(refused.value)


def test_lines_that_do_not_compile_are_not_written(site):
    bad = replace(PATCH, lines=("    if True:",))
    with pytest.raises(SyntaxError):
        Installed(site.path / "sglang", RELEASE, bad).change(revert=False)
    assert site.file.read_bytes() == site.released


def test_releases_without_a_patch_need_none_or_are_refused(tmp_path, capsys):
    for release, status in (("0.5.8", 2), ("0.5.11rc1", 2), ("0.5.11", 0), ("0.6.0.post1", 0)):
        site = Site(tmp_path / release, release, b"")
        for action in ("status", "apply", "revert"):
            assert site.run(action) == status, release
        words = capsys.readouterr()
        if status:
            assert f"no patch for SGLang {release}: there are some for 0.5.10," in words.err
        else:
            assert words.out.count("needs no patch") == 3
        assert site.file.read_bytes() == b""


def test_a_site_with_no_sglang_or_several_is_refused(tmp_path, site):
    with pytest.raises(PatchError, match="no SGLang is installed in"):
        find_sglang(tmp_path)
    site.name("0.5.9")
    with pytest.raises(PatchError, match=r"SGLang 0\.5\.10\.post1 and 0\.5\.9"):
        find_sglang(site.path)


def test_a_missing_file_is_named(site, capsys):
    site.file.unlink()
    assert site.run("apply") == 2
    assert f"{site.file} is not there" in capsys.readouterr().err


def test_a_site_that_cannot_be_written_stays_as_it_was(site, monkeypatch, capsys):
    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    assert site.run("apply") == 2
    assert f"{site.file.parent} cannot be written" in capsys.readouterr().err
    assert site.file.read_bytes() == site.released
    assert [entry.name for entry in site.file.parent.iterdir()] == [site.file.name]


def test_an_installers_cache_that_the_file_is_linked_to_keeps_its_bytes(site, tmp_path):
    cache = tmp_path / "cache.py"
    os.link(site.file, cache)
    site.run("apply")
    assert cache.read_bytes() == site.released


def test_python_runs_the_new_lines_whatever_it_had_compiled(tmp_path):
    source = b"def answer():\n    number = 1\n    return number\n\n\nprint(answer())\n"
    module = tmp_path / "module.py"
    module.write_bytes(source)
    compileall.compile_file(module, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH, quiet=1)
    patch = Patch(
        "1", "module.py", digest(source), "answer", "    return number", ("    number = 2",)
    )
    installed = Installed(tmp_path, "1", patch)

    def run():
        command = [sys.executable, "-c", "import module"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.strip()

    assert run() == "1"
    installed.change(revert=False)
    assert run() == "2"
    installed.change(revert=True)
    assert run() == "1"


def test_what_the_call_site_calls_puts_hooks_around_as_sglang_would(monkeypatch):
    class Owner:
        def method(self, a, b=0):
            return [a, b]

    plain = Owner.method
    monkeypatch.setitem(sys.modules, "stand_in", SimpleNamespace(Owner=Owner))

    def hook(original, *args, **kwargs):
        return ["hooked", *original(*args, **kwargs)]

    monkeypatch.setattr(patched, "wanted_hooks", lambda: {"stand_in.Owner.method": hook})
    patched.install()
    assert Owner().method(1, b=2) == ["hooked", 1, 2]
    assert Owner.method.__wrapped__ is plain
    assert Owner.method.__name__ == "method"
