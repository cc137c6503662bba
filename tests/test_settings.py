"""Settings from the environment: what is allowed works, what is not is named."""

from pathlib import Path

import pytest

from hstransport.errors import ConfigError
from hstransport.settings import (
    ENVIRONMENT,
    Selection,
    from_environment,
    parse_layers,
    parse_selection,
    parse_size,
)

ON = {"HSTRANSPORT": "1"}


@pytest.mark.parametrize("environ", [{}, {"HSTRANSPORT": ""}, {"HSTRANSPORT": "0"}])
def test_capture_is_off_unless_switched_on(environ):
    assert from_environment(environ) is None


def test_defaults_are_eagle3_layers_and_final_of_prompts():
    settings = from_environment(ON)
    assert settings.layers.resolve(32) == (2, 16, 29)
    assert settings.layers.final
    assert (settings.rows, settings.policy) == ("prompt", "block")
    assert settings.requests == Selection() and settings.budget_bytes is None
    assert str(settings.root).startswith("/dev/shm/hstransport-")


def test_every_setting_is_taken():
    settings = from_environment(
        ON
        | {
            "HSTRANSPORT_SESSION": "kimi.2",
            "HSTRANSPORT_DIR": "/tmp/rings",
            "HSTRANSPORT_LAYERS": "3, 31,59",
            "HSTRANSPORT_ROWS": "all",
            "HSTRANSPORT_REQUESTS": "tagged",
            "HSTRANSPORT_RING_BYTES": "1.5MiB",
            "HSTRANSPORT_POLICY": "drop",
            "HSTRANSPORT_BLOCK_S": "0.25",
            "HSTRANSPORT_ON_DEAD_HOOK": "serve",
        }
    )
    assert settings.session == "kimi.2"
    assert settings.root == Path("/tmp/rings")
    assert settings.layers.resolve(61) == (3, 31, 59)
    assert not settings.layers.final
    assert settings.rows == "all"
    assert settings.requests == Selection("tagged")
    assert settings.ring_bytes == 1572864
    assert (settings.policy, settings.block_s) == ("drop", 0.25)
    assert settings.on_dead_hook == "serve"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("HSTRANSPORT", "yes", "1 (on)"),
        ("HSTRANSPORT_SESSION", "a/b", "letters, digits"),
        ("HSTRANSPORT_SESSION", "..", "letters, digits"),
        ("HSTRANSPORT_LAYERS", "2,-1", "'-1' is not allowed"),
        ("HSTRANSPORT_LAYERS", "2,2", "named twice"),
        ("HSTRANSPORT_LAYERS", "", "is not allowed"),
        ("HSTRANSPORT_LAYERS", "last", "'final'"),
        ("HSTRANSPORT_ROWS", "some", "prompt and all"),
        ("HSTRANSPORT_REQUESTS", "none", "rid:PREFIX, label:NAME"),
        ("HSTRANSPORT_RING_BYTES", "big", "512MiB"),
        ("HSTRANSPORT_RING_BYTES", "4096", "at least 1MiB"),
        ("HSTRANSPORT_POLICY", "wait", "block and drop"),
        ("HSTRANSPORT_BLOCK_S", "-1", "0 to 3600"),
        ("HSTRANSPORT_BLOCK_S", "nan", "0 to 3600"),
        ("HSTRANSPORT_ON_DEAD_HOOK", "go on", "stop and serve"),
        ("HSTRANSPORT_LAYER", "2", "not a setting"),
    ],
)
def test_bad_value_is_named_with_what_is_allowed(name, value, told):
    with pytest.raises(ConfigError) as caught:
        from_environment(ON | {name: value})
    assert told in str(caught.value)
    assert name in str(caught.value) or name == "HSTRANSPORT_SESSION"


def test_eagle3_and_named_layers_are_joined_without_repeats():
    assert parse_layers("eagle3,2,5,final").resolve(6) == (2, 3, 5)


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("2K", 2048), ("512MiB", 512 << 20), ("8 GB", 8 << 30)]
)
def test_sizes_are_binary(text, size):
    assert parse_size(text) == size


def test_every_variable_is_documented_with_its_default_or_values():
    root = Path(__file__).parent.parent
    pages = "".join((root / page).read_text() for page in ("README.md", "docs/operations.md"))
    for name in ENVIRONMENT:
        assert name in pages, f"{name} is missing from README.md and docs/operations.md"


LABELS = {"set": "train", "n": 3, "on": True}
RID, TAGS = "job-7-abc", {"hstransport_id": "x", "hstransport_labels": LABELS}


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        ("all", True),
        ("tagged", True),
        ("rid:job-7", True),
        ("rid:job-8", False),
        ("label:set", True),
        ("label:set=train", True),
        ("label:set=test", False),
        ("label:n=3", True),
        ("label:on=true", True),
        ("label:other", False),
        ("100%", True),
    ],
)
def test_which_requests(text, wants):
    selection = parse_selection(text)
    assert selection.wants(RID, TAGS) is wants
    assert parse_selection(str(selection)) == selection
    if text not in ("all", "rid:job-7", "100%"):
        assert not selection.wants(RID, {})


def test_a_share_is_drawn_by_the_request_id():
    selection = parse_selection("2.5 %")
    drawn = [f"r{i}" for i in range(40_000) if selection.wants(f"r{i}", {})]
    assert 850 < len(drawn) < 1150
    assert drawn == [rid for rid in drawn if parse_selection("2.5%").wants(rid, TAGS)]
    more = parse_selection("10%")
    assert all(more.wants(rid, {}) for rid in drawn)


@pytest.mark.parametrize("text", ["", "rid:", "label:", "label:=x", "0%", "101%", "5", "some"])
def test_selections_that_are_none(text):
    with pytest.raises(ConfigError, match=r"rid:PREFIX.*5%"):
        parse_selection(text)
