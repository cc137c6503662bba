"""``hstransport estimate``: the arithmetic, and what it says of arguments that do not fit."""

from __future__ import annotations

import json
import shutil

import pytest

from hstransport.cli import main
from hstransport.cli.estimate import ring_bytes
from hstransport.cli.units import size
from hstransport.client.progress import duration

SHAPE = ["--hidden", "7168", "--num-layers", "61"]


def estimate(capsys, *args):
    status = main(["estimate", *map(str, args), "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


def test_figures_of_the_run_that_this_project_grew_out_of(capsys):
    layers = ["--layers", "3,31,59,final"]
    status, e, _ = estimate(capsys, *SHAPE, *layers, "--tokens", 17_300_000, "--tokens-per-s", 1e4)
    assert status == 0
    assert e["row_bytes"] == 57_344
    assert e["raw_bytes"] == 17_300_000 * 57_344
    assert e["stored_bytes"] == round(e["raw_bytes"] / 1.49)
    assert e["seconds_serving"] == 1730
    assert e["layers"] == [3, 31, 59, "final"]


def test_shape_is_read_from_a_model_also_from_one_that_sees(capsys, tmp_path):
    config = {"text_config": {"hidden_size": 64, "num_hidden_layers": 6}, "hidden_size": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (tmp_path, tmp_path / "config.json"):
        _, e, _ = estimate(capsys, "--model", model, "--tokens", 10)
        assert (e["hidden"], e["layers"], e["raw_bytes"]) == (64, [2, 3, "final"], 10 * 3 * 64 * 2)


def test_tokens_of_a_file_are_counted_or_said_to_be_a_guess(capsys, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n')
    _, e, _ = estimate(capsys, *SHAPE, "--prompts", path)
    assert (e["tokens"], e["tokens_are_exact"]) == (3, True)
    path.write_text('{"input_ids": [1, 2, 3]}\n{"text": "twelve chars"}\n')
    _, e, _ = estimate(capsys, *SHAPE, "--prompts", path)
    assert (e["tokens"], e["tokens_are_exact"]) == (6, False)


def test_disk_that_is_too_small_is_status_1(capsys, tmp_path):
    free = shutil.disk_usage(tmp_path).free
    too_many = int(free * 1.6 / 57_344)
    out = tmp_path / "not" / "yet"
    layers = ["--layers", "3,31,59,final", "--out", out]
    status, e, _ = estimate(capsys, *SHAPE, *layers, "--tokens", too_many)
    assert (status, e["fits"]) == (1, False)
    assert estimate(capsys, *SHAPE, *layers, "--tokens", 1)[1]["fits"] is True
    assert not out.exists()
    main(["estimate", *SHAPE, *map(str, layers), "--tokens", str(too_many)])
    assert "does NOT fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give either --model, or --hidden and --num-layers"),
        (["--hidden", "8"], "--hidden and --num-layers go together"),
        ([*SHAPE], "give either --tokens or --prompts"),
        ([*SHAPE, "--tokens", "1", "--layers", "62"], "--layers: 62 cannot be captured"),
        ([*SHAPE, "--tokens", "1", "--layers", "last"], "--layers 'last'"),
        (["--model", "no-such-folder", "--tokens", "1"], "no-such-folder"),
    ],
)
def test_wrong_arguments_are_named(capsys, args, words):
    status, _, err = estimate(capsys, *args)
    assert status == 2
    assert words in err


def test_ring_has_room_for_a_pause_of_the_consumer():
    assert ring_bytes(1000, None) == 1 << 30
    assert ring_bytes(57_344, None) == 2 << 30  # four passes of 8192 tokens
    assert ring_bytes(57_344, 20_000) == 16 << 30  # ten seconds


def test_amounts_read_well():
    assert [size(n) for n in (0, 1023, 1536, 5 << 30)] == [
        "0 bytes",
        "1,023 bytes",
        "1.5 KiB",
        "5.0 GiB",
    ]
    assert [duration(s) for s in (3, 89, 90, 5400, 129_600)] == [
        "3 s",
        "89 s",
        "2 min",
        "1.5 h",
        "1.5 days",
    ]
