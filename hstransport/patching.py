"""Patches of SGLang releases that have no plugins: found, applied and taken out again.

A patch is data (``patches/*.json``): lines that are added to one function of one file, whose bytes
are known. So a file is in one of three states: as released, patched, or neither, which is never
touched.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .errors import PatchError

FIRST_WITH_PLUGINS = (0, 5, 11)
RELEASED, PATCHED, EDITED = "not applied", "applied", "edited"


@dataclass(frozen=True)
class Patch:
    """Lines for one file of one release of SGLang."""

    release: str
    file: str
    """Path in the package ``sglang``."""
    sha256: str
    """Of the file as released."""
    function: str
    """The module's function that the lines are added to."""
    anchor: str
    """The line before which they are added; it is there once."""
    lines: tuple[str, ...]

    @property
    def block(self) -> bytes:
        return "".join(f"{line}\n" for line in self.lines).encode()

    def apply(self, source: bytes) -> bytes:
        """The file with the lines in it. Raises PatchError saying what is not as expected."""
        self._expect(digest(source), source)
        lines = source.splitlines(keepends=True)
        anchor = f"{self.anchor}\n".encode()
        at = [number for number, line in enumerate(lines) if line == anchor]
        if len(at) != 1:
            raise self._error(f"{self.anchor.strip()!r} stands there {len(at)} times, not once")
        found = _functions_at(source, at[0] + 1)
        if found != [self.function]:
            raise self._error(
                f"{self.anchor.strip()!r} stands in {'.'.join(found) or 'no function'}, expected "
                f"was {self.function}"
            )
        patched = b"".join([*lines[: at[0]], self.block, *lines[at[0] :]])
        compile(patched, self.file, "exec")
        return patched

    def revert(self, patched: bytes) -> bytes:
        """The file as it was released. Raises PatchError."""
        source = patched.replace(self.block, b"", 1)
        self._expect(digest(source), patched)
        return source

    def state(self, content: bytes) -> str:
        """RELEASED, PATCHED or EDITED."""
        if digest(content) == self.sha256:
            return RELEASED
        whole = digest(content.replace(self.block, b"", 1)) == self.sha256
        return PATCHED if whole else EDITED

    def _expect(self, found: str, content: bytes) -> None:
        if found != self.sha256:
            raise self._error(
                f"it is not the file of SGLang {self.release}: its sha256 is {digest(content)}, "
                f"expected was {self.sha256}; somebody edited it, so it is left alone (install "
                f"sglang=={self.release} anew)"
            )

    def _error(self, why: str) -> PatchError:
        return PatchError(f"{self.file}: {why}")


@dataclass(frozen=True)
class Installed:
    """An SGLang on disk, with the patch for its release."""

    package: Path
    """The folder of the package ``sglang``."""
    release: str
    patch: Patch | None
    """None for a release that has plugins."""

    @property
    def path(self) -> Path:
        assert self.patch is not None
        return self.package / self.patch.file

    def state(self) -> str:
        return EDITED if self.patch is None else self.patch.state(self._read())

    def change(self, *, revert: bool, write: bool = True) -> str:
        """Apply the patch, or take it out; returns the difference, empty where nothing is to do.

        With ``write`` off nothing is written. Raises PatchError.
        """
        if self.patch is None:
            return ""
        old = self._read()
        if self.patch.state(old) == (RELEASED if revert else PATCHED):
            return ""
        new = self.patch.revert(old) if revert else self.patch.apply(old)
        if write:
            _replace(self.path, new)
        return _difference(self.path, old, new)

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            raise PatchError(f"{self.path} is not there: SGLang is not whole") from None


def known_patches() -> dict[str, Patch]:
    """Release -> its patch."""
    # In a wheel they lie in the package, in a clone beside it.
    here = Path(__file__).parent
    folders = [f for f in (here / "patches", here.parent / "patches") if f.is_dir()]
    if not folders:
        raise PatchError("hstransport was installed without its patches: install it anew")
    patches = (_read_patch(path) for path in sorted(folders[0].glob("*.json")))
    return {patch.release: patch for patch in patches}


def find_sglang(site: Path | None = None) -> Installed:
    """The SGLang that this Python imports, or the one in ``site`` (a folder ``site-packages``).

    Raises PatchError where there is none, or one of a release that is not known.
    """
    if site is None:
        spec = importlib.util.find_spec("sglang")
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        found = [Path(folder) for folder in folders[:1]]
        # Of several on sys.path the first is the one that is imported.
        releases = _releases(sys.path)[:1]
        where, otherwise = "this Python", "; name its site-packages with --site"
    else:
        found = [site / "sglang"] if (site / "sglang").is_dir() else []
        releases = _releases([str(site)])
        where, otherwise = str(site), "; --site takes the folder that holds sglang/"
    if not found or not releases:
        raise PatchError(f"no SGLang is installed in {where}{otherwise}")
    if len(releases) > 1:
        several = " and ".join(sorted(releases))
        raise PatchError(f"{where} has the metadata of SGLang {several}: install one of them anew")
    (release,) = releases
    return Installed(found[0], release, patch_for(release))


def patch_for(release: str) -> Patch | None:
    """The patch for a release of SGLang, None where it needs none; PatchError for any other."""
    patches = known_patches()
    if release in patches:
        return patches[release]
    if _numbers(release) >= FIRST_WITH_PLUGINS:
        return None
    raise PatchError(
        f"there is no patch for SGLang {release}: there are some for {', '.join(patches)}; "
        f"{'.'.join(map(str, FIRST_WITH_PLUGINS))} and later need none"
    )


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_patch(path: Path) -> Patch:
    fields = json.loads(path.read_text())
    return Patch(**{**fields, "lines": tuple(fields["lines"])})


def _releases(path: list[str]) -> list[str]:
    return [found.version for found in importlib.metadata.distributions(name="sglang", path=path)]


def _numbers(release: str) -> tuple[int, ...]:
    numbers = []
    for part in release.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _functions_at(source: bytes, line: int) -> list[str]:
    """Names of the functions and classes, from the outermost one, that hold this line."""
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return [node.name for node in sorted(nodes, key=lambda node: node.lineno)]


def _difference(path: Path, old: bytes, new: bytes) -> str:
    a, b = (content.decode().splitlines(keepends=True) for content in (old, new))
    return "".join(difflib.unified_diff(a, b, str(path), str(path)))


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all; the file's mode is kept. Raises PatchError where it may not be written.

    The file is replaced rather than written into: installers link it to their cache.
    """
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        beside = Path(name)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(path, beside)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        # Python notices the new size, but for files compiled with --invalidation-mode
        # unchecked-hash.
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            with contextlib.suppress(FileNotFoundError):
                stale.unlink()
    except PermissionError as e:
        raise PatchError(
            f"{path.parent} cannot be written ({e.strerror}): run this as the user who installed "
            "SGLang there"
        ) from None
