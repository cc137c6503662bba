"""docs/modes.md: what it says is proved is a test, and what it says is refused is refused."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from hstransport.errors import CaptureError
from hstransport.sglang.modes import REFUSED, refuse_unproven

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_page_names_exists():
    page = (ROOT / "docs" / "modes.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    sources = "".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, f"no test is named: {row}"
        for name in named:
            assert f"def {name}(" in sources, name


@pytest.mark.parametrize(("name", "harmless", "remedy"), REFUSED, ids=[r[0] for r in REFUSED])
def test_modes_that_are_not_proven_are_refused_by_name(name, harmless, remedy):
    calm = SimpleNamespace(**{n: value for n, value, _ in REFUSED})
    refuse_unproven(calm)
    wild = {bool: True, int: 2, str: "prefill"}.get(type(harmless), ["something"])
    setattr(calm, name, wild)
    with pytest.raises(CaptureError, match=f"{name}={re.escape(repr(wild))}.*{re.escape(remedy)}"):
        refuse_unproven(calm)


def test_what_sglang_decides_by_itself_is_refused_too():
    overrides = pytest.importorskip("sglang.srt.arg_groups.overrides")
    if not hasattr(overrides, "resolution_result"):
        pytest.skip("this SGLang resolves its arguments in place")
    calm = SimpleNamespace(**{n: value for n, value, _ in REFUSED})
    calm._raw_input = dict(vars(calm))
    calm._resolved_overrides = [("some model's own choice", {"enable_dp_attention": True})]
    with pytest.raises(CaptureError, match="enable_dp_attention=True"):
        refuse_unproven(calm)


def test_what_is_written_down_and_not_used_is_not_refused():
    """An aux-only server names an algorithm for its layer ids; SGLang then clears it."""
    overrides = pytest.importorskip("sglang.srt.arg_groups.overrides")
    if not hasattr(overrides, "resolution_result"):
        pytest.skip("this SGLang resolves its arguments in place")
    calm = SimpleNamespace(**{n: value for n, value, _ in REFUSED})
    calm.speculative_algorithm = "EAGLE3"
    calm._raw_input = dict(vars(calm))
    calm._resolved_overrides = [("aux capture", {"speculative_algorithm": None})]
    refuse_unproven(calm)
