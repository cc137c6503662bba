"""The sources of SGLang's releases, downloaded with pip, and what classes in them have.

Nothing is installed or imported: sources are parsed. They are kept under ``build/sglang/RELEASE``.
"""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "sglang"
FIRST = Version("0.5.9")


class NoDownload(Exception):
    """pip could not get what was asked; the message holds its last words."""


def offered() -> list[str]:
    """Releases of SGLang from 0.5.9 on that pip offers, in order."""
    words = _pip("index", "versions", "sglang")
    (line,) = [line for line in words.splitlines() if line.startswith("Available versions:")]
    versions = [Version(word) for word in line.partition(":")[2].split(",")]
    return [str(v) for v in sorted(versions) if v >= FIRST]


class Source:
    """One release: ``sglang/srt`` of its wheel, or of what lies under ``root``."""

    def __init__(self, release: str, root: Path | None = None) -> None:
        self.release = release
        self.root = root or _fetched(release)
        self.srt = self.root / "sglang" / "srt"

    def has(self, module: str) -> bool:
        return self.file(module).exists()

    def file(self, module: str) -> Path:
        """``sglang.srt.a.b`` -> its file."""
        base = self.root / module.replace(".", "/")
        package = base / "__init__.py"
        return package if package.exists() else base.with_suffix(".py")

    @functools.cache  # noqa: B019 (lives as long as the tests)
    def tree(self, module: str) -> ast.Module:
        return ast.parse(self.file(module).read_text())

    def function(self, module: str, name: str) -> ast.FunctionDef | None:
        """A function of the module itself."""
        found = [n for n in self.tree(module).body if isinstance(n, ast.FunctionDef)]
        return next((f for f in found if f.name == name), None)

    def cls(self, module: str, name: str) -> ast.ClassDef | None:
        if not self.has(module):
            return None
        found = [n for n in self.tree(module).body if isinstance(n, ast.ClassDef)]
        return next((c for c in found if c.name == name), None)

    def method(self, module: str, cls: str, name: str) -> ast.FunctionDef | None:
        """A method of the class or of what it inherits from."""
        for owner in self._lineage(module, cls):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return node
        return None

    @functools.cache  # noqa: B019
    def members(self, module: str, cls: str) -> set[str]:
        """Methods, fields, and what methods store in ``self``; of bases too."""
        names = set()
        for owner in self._lineage(module, cls):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef):
                    names.add(node.name)
                elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names |= {t.id for t in targets if isinstance(t, ast.Name)}
            for node in ast.walk(owner):
                stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if stored and isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
        return names

    def _lineage(self, module: str, name: str) -> list[ast.ClassDef]:
        """The class and all of its bases that are SGLang's own."""
        node = self.cls(module, name)
        if node is None:
            return []
        found = [node]
        for base in node.bases:
            if isinstance(base, ast.Name):
                found += self._lineage(self._home(module, base.id), base.id)
        return found

    def _home(self, module: str, name: str) -> str:
        """The module that ``name`` was imported from."""
        for node in self.tree(module).body:
            if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
                return node.module or module
        return module


def arguments(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in function.args.posonlyargs + function.args.args]


def _fetched(release: str) -> Path:
    target = CACHE / release
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            wanted = f"sglang=={release}"
            _pip("download", "--no-deps", "--only-binary", ":all:", "-d", scratch, wanted)
            (wheel,) = Path(scratch).glob("*.whl")
            made = Path(scratch) / "made"
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith("sglang/srt/")]
                archive.extractall(made, [n for n in names if n.endswith(".py")])
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)  # last: a folder that is there is whole
    return target


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise NoDownload(f"pip {' '.join(arguments[:2])}: {last}")
    return done.stdout
