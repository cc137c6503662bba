"""SGLang's model files, read and never imported: what their setters leave, what they capture.

``python -m rig.model_sources`` (with PYTHONPATH=tests) writes the table in docs/layers.md.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hstransport.errors import CaptureError
from hstransport.sglang.layers import enable_capture

from .build_env import ROOT

VERSIONS = ("0.5.20", "0.5.23")
SETTERS = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture")
PAGE = ROOT / "docs" / "layers.md"
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
_CACHE = ROOT / "build" / "sglang-models"
_FLAG = "_is_layer_to_capture"
_HELPERS = (*SETTERS, "set_dspark_layers_to_capture", "capture_aux_hidden_states")
BEFORE, BY_LAYER = "before layer k", "by layer k"
AFTER, BARE = "after layer k", "before layer k, without the residual"
_INNER = ("model", "language_model", "llm")
_MIXERS = ("self_attn", "linear_attn", "attention", "attn", "conv", "mixer", "short_conv")
_BY_THE_LAYER = ("capture_output", "captured_last_layer_outputs")


class NoSources(Exception):
    """This release's model files cannot be had here; the message says why."""


def folder(version: str) -> Path:
    """Where that release's model files lie: in this environment, or downloaded once."""
    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)))
        if list(root.parent.glob(f"sglang-{version}.dist-info")):
            return root / "srt" / "models"
    place = _CACHE / version
    if not place.exists():
        _download(version, place)
    return place


def _download(version: str, place: Path) -> None:
    with tempfile.TemporaryDirectory() as there:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command = [*pip, "--dest", there, f"sglang=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        wheels = list(Path(there).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise NoSources(f"pip cannot download sglang {version}: {last}")
        prefix = "sglang/srt/models/"
        half = place.with_suffix(".partial")
        half.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                rest = name.removeprefix(prefix)
                if name.startswith(prefix) and rest.endswith(".py") and "/" not in rest:
                    (half / rest).write_bytes(wheel.read(name))
    half.rename(place)


class ModelClass:
    """One class of a model file."""

    def __init__(self, sources: Sources, file: str, node: ast.ClassDef) -> None:
        self._sources = sources
        self.file = file
        self.node = node

    @property
    def name(self) -> str:
        return self.node.name

    @cached_property
    def family(self) -> list[ModelClass]:
        """Itself and the classes that it inherits from, as far as they are in model files."""
        found = [self]
        for base in self.node.bases:
            if isinstance(base, ast.Name) and (known := self._sources.find(base.id, self.file)):
                found += [c for c in known.family if c not in found]
        return found

    def own(self, name: str) -> ast.FunctionDef | None:
        """The method, if the class itself defines it."""
        for item in self.node.body:
            if isinstance(item, ast.FunctionDef) and item.name == name:
                return item
        return None

    def method(self, name: str) -> tuple[ModelClass, ast.FunctionDef] | None:
        """The method and the class that defines it."""
        for one in self.family:
            if item := one.own(name):
                return one, item
        return None

    @cached_property
    def inner(self) -> dict[str, ModelClass]:
        """The classes of the language models that it keeps as ``self.name``, by that name."""
        found: dict[str, ModelClass] = {}
        for name in _INNER:
            made = (
                inner
                for one, value in self._values(f"self.{name}")
                for inner in self._classes_in(value, one.file)
            )
            if (inner := next(made, self)) is not self:
                found[name] = inner
        return found

    def _values(self, target: str) -> Iterator[tuple[ModelClass, ast.expr]]:
        """What is assigned to ``target`` anywhere in the class, or is a parameter's default."""
        for one in self.family:
            yield from ((one, value) for value in one._assigned.get(target, ()))

    @cached_property
    def _assigned(self) -> dict[str, list[ast.expr]]:
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign):
                first = node.targets[0]
                for target in first.elts if isinstance(first, ast.Tuple) else [first]:
                    found.setdefault(ast.unparse(target), []).append(node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                found.setdefault(ast.unparse(node.target), []).append(node.value)
            elif isinstance(node, ast.FunctionDef):
                args = node.args
                for arg, value in zip(reversed(args.args), reversed(args.defaults), strict=False):
                    found.setdefault(arg.arg, []).append(value)
        return found

    def _classes_in(self, value: ast.AST, file: str) -> Iterator[ModelClass]:
        """The model classes that an expression may make, through names and methods."""
        for node in ast.walk(value):
            if isinstance(node, ast.Name):
                if found := self._sources.find(node.id, file):
                    yield found
                elif node.id != "self":
                    for one, behind in self._values(node.id):
                        if ast.unparse(behind) != node.id:
                            yield from self._classes_in(behind, one.file)
            elif not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            elif node.value.id != "self":  # file.Class
                if found := self._sources.defined(node.attr, node.value.id):
                    yield found
            else:
                if method := self.method(node.attr):
                    for statement in method[1].body:
                        yield from self._classes_in(statement, method[0].file)
                else:
                    for one, behind in self._values(node.attr):
                        yield from self._classes_in(behind, one.file)

    @cached_property
    def captures(self) -> bool:
        """Whether it runs decoder layers and may keep their ids in ``layers_to_capture``."""
        return any(True for _ in self._values("self.layers_to_capture"))

    @cached_property
    def _has_layers(self) -> bool:
        return any(True for _ in self._values("self.layers"))

    def stand_in(self, num_layers: int) -> Any:
        """A torch module with this class's own setters, and what they touch."""
        members: dict[str, Any] = {}
        for one in reversed(self.family):
            for item in one.node.body:
                if isinstance(item, ast.FunctionDef) and item.name in _HELPERS:
                    members[item.name] = _compiled(item, one.file)
        module = type(self.name, (torch.nn.Module,), members)()
        text = SimpleNamespace(num_hidden_layers=num_layers)
        module.config = SimpleNamespace(num_hidden_layers=num_layers, text_config=text)
        module.pp_group = _PP_GROUP
        module.carries_bank_slices = False  # read by a setter of kimi_k3
        if self.captures:
            module.layers_to_capture = ()
        if self._has_layers:
            module.layers = torch.nn.ModuleList(_layer(i) for i in range(num_layers))
        for name, inner in self.inner.items():
            setattr(module, name, inner.stand_in(num_layers))
        return module

    def decoders(self) -> list[ModelClass]:
        """The classes in it that hold ``layers_to_capture``."""
        found = [self] if self.captures else []
        for inner in self.inner.values():
            found += inner.decoders()
        return found


_PP_GROUP = SimpleNamespace(is_last_rank=True, is_first_rank=True, world_size=1)
_PARALLEL = SimpleNamespace(pp_group=_PP_GROUP)


def _layer(i: int) -> torch.nn.Module:
    layer = torch.nn.Identity()
    layer.layer_id = i  # type: ignore[assignment]
    layer.mlp_ar_fusable = True  # type: ignore[assignment]  # read by a setter of inkling
    return layer


def _compiled(function: ast.FunctionDef, file: str) -> Any:
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module([*future, function], type_ignores=[])
    names: dict[str, Any] = {
        "get_parallel": lambda: _PARALLEL,
        "get_pp_group": lambda: _PP_GROUP,
    }
    exec(compile(module, file, "exec"), names)
    return names[function.name]


@cache
def sources(version: str) -> Sources:
    """Read once; raises NoSources."""
    return Sources(version)


class Sources:
    """The model files of one release."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._trees = {
            path.stem: ast.parse(path.read_text()) for path in sorted(folder(version).glob("*.py"))
        }
        self._classes: dict[str, dict[str, ModelClass]] = {}
        for file, tree in self._trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self._classes.setdefault(node.name, {})[file] = ModelClass(self, file, node)

    def defined(self, name: str, file: str) -> ModelClass | None:
        return self._classes.get(name, {}).get(file)

    def find(self, name: str, file: str) -> ModelClass | None:
        """The class that ``name`` means in ``file``."""
        if found := self.defined(name, file):
            return found
        for node in ast.walk(self._trees[file]):
            if isinstance(node, ast.ImportFrom) and any(
                (a.asname or a.name) == name for a in node.names
            ):
                real = next(a.name for a in node.names if (a.asname or a.name) == name)
                module = (node.module or "").rpartition(".")[2]
                return self.defined(real, module)
        return None

    def classes(self) -> Iterator[ModelClass]:
        for places in self._classes.values():
            yield from places.values()

    def models(self) -> list[ModelClass]:
        """The classes whose own body defines a setter and that no other holds as its decoder."""
        return [
            one
            for one in self.classes()
            if any(getattr(item, "name", "") in SETTERS for item in one.node.body)
            and not one.captures
        ]


def left_by(model: ModelClass, layers: Sequence[int], num_layers: int) -> list[int]:
    """What ``enable_capture`` leaves in a stand-in of the model; raises CaptureError as it does."""
    stand_in = model.stand_in(num_layers)
    enable_capture(stand_in, layers, num_layers)
    (held,) = [m for m in stand_in.modules() if getattr(m, "layers_to_capture", None)]
    return sorted(held.layers_to_capture)


def capture_point(decoder: ModelClass) -> str:
    """Where the decoder's forward takes the state of an id k in ``layers_to_capture``."""
    found = decoder.method("forward")
    assert found is not None, decoder.name
    loops = [n for n in ast.walk(found[1]) if isinstance(n, ast.For) and _tests(n) and _calls(n)]
    if not loops:
        return "?"
    return " / ".join(sorted({_point_in(loop) for loop in loops}))


def _point_in(loop: ast.For) -> str:
    test, call = _tests(loop)[0], _calls(loop)[0]
    inside = any(node is test for node in ast.walk(call))
    by_argument = {k.arg for k in call.keywords} & set(_BY_THE_LAYER)
    if inside or by_argument:
        return BY_LAYER
    if (test.lineno, test.col_offset) > (call.lineno, call.col_offset):
        next_one = isinstance(test, ast.Compare) and ast.unparse(test.left).endswith("+ 1")
        return BEFORE if next_one else AFTER
    residual = any(isinstance(n, ast.Name) and n.id == "residual" for n in ast.walk(loop))
    (branch,) = [n for n in ast.walk(loop) if isinstance(n, ast.If) and _within(test, n.test)]
    added = "residual" in "".join(ast.unparse(n) for n in branch.body)
    return BARE if residual and not added else BEFORE


def _within(node: ast.AST, tree: ast.AST) -> bool:
    return any(n is node for n in ast.walk(tree))


def _tests(loop: ast.For) -> list[ast.expr]:
    """Where the loop asks whether a layer is to be captured."""
    return [
        n
        for n in ast.walk(loop)
        if (isinstance(n, ast.Compare) and "layers_to_capture" in ast.unparse(n.comparators[0]))
        or (
            isinstance(n, ast.Call) and _FLAG in ast.unparse(n) and "getattr" in ast.unparse(n.func)
        )
        or (isinstance(n, ast.Attribute) and n.attr == _FLAG)
    ]


def _calls(loop: ast.For) -> list[ast.Call]:
    """Where the loop runs a decoder layer."""
    names = ("layer", "layer.forward", "self.layers[i]", "self.layers[layer_idx]")
    names += ("self.layers[layer_id]",)
    calls = [n for n in ast.walk(loop) if isinstance(n, ast.Call)]
    return [n for n in calls if ast.unparse(n.func) in names]


def mixed_before_captured(release: Sources) -> list[str]:
    """Decoder layers that are told to capture and do so after they have begun to compute."""
    late = []
    for one in release.classes():
        forward = one.own("forward")
        told = [a.arg for a in forward.args.args + forward.args.kwonlyargs] if forward else []
        for name in set(told) & set(_BY_THE_LAYER):
            uses = [n for n in ast.walk(forward) if isinstance(n, ast.Name) and n.id == name]
            calls = [
                n.lineno
                for n in ast.walk(forward)
                if isinstance(n, ast.Call)
                and ast.unparse(n.func) in (f"self.{part}" for part in _MIXERS)
            ]
            if calls and min(n.lineno for n in uses) > min(calls):
                late.append(f"{one.file}.{one.name}")
    return late


CHOICES = tuple(
    (n, layers)
    for n in (8, 12, 61)
    for layers in ([1, 3], [1], [2, n // 2, n - 3], [3, 5], list(range(1, n)), [n - 1])
)


def verdict(model: ModelClass) -> str:
    """One cell of the table."""
    refusals = []
    for n, layers in CHOICES:
        try:
            left_by(model, layers, n)
        except CaptureError as e:
            refusals.append(str(e))
    points = {capture_point(d) for d in model.decoders()}
    if len(refusals) == len(CHOICES):
        if not points:
            return "refused: keeps its ids elsewhere"
        return f"refused: keeps ids as given and captures {', '.join(points)}"
    assert not refusals, f"{model.file}.{model.name} takes some layers only: {refusals[0]}"
    if BARE in points:
        return "stopped: captures without the residual"
    return "yes"


def table() -> str:
    """Which model files capture inner layers, in Markdown."""
    cells: dict[str, dict[str, set[str]]] = {}
    for version in VERSIONS:
        for model in sources(version).models():
            row = cells.setdefault(model.file, {})
            row.setdefault(version, set()).add(verdict(model))
    lines = [f"| model file | {' | '.join(VERSIONS)} |", "|---" * (len(VERSIONS) + 1) + "|"]
    for file, row in sorted(cells.items()):
        said = ["; ".join(sorted(row.get(v, {"no setter"}))) for v in VERSIONS]
        lines.append(f"| `{file}` | {' | '.join(said)} |")
    return "\n".join(lines)


def written() -> str:
    """The table as docs/layers.md has it."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    text = PAGE.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}")


if __name__ == "__main__":
    main()
