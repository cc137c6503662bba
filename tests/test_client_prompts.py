"""Prompt files: what is accepted, what is refused with which words, which ids samples get."""

from __future__ import annotations

import json

import pytest

from hstransport.client.prompts import BadPrompts, read_prompts
from hstransport.tags import decode_loss_mask


def no_tokenizer():
    raise AssertionError("no chat here: nobody needs a tokenizer")


def read(tmp_path, *lines, **options):
    path = tmp_path / "prompts.jsonl"
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return read_prompts(path, no_tokenizer, **options)


def test_line_of_each_kind_is_read(tmp_path):
    found = read(
        tmp_path,
        {"input_ids": [5, 6, 7], "id": "mine", "labels": {"a": 1, "b": None}},
        b"",
        {"text": "hello"},
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0]},
    )
    assert not found.bad
    first, second, third = found.prompts
    assert (first.id, first.tokens.tolist(), first.labels) == (
        "mine",
        [5, 6, 7],
        {"a": 1, "b": None},
    )
    assert (second.text, second.tokens, second.line) == ("hello", None, 3)
    assert decode_loss_mask(third.loss_mask, 4).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b'"text"', "not an object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": "a", "labels": {"x": NaN}}', "NaN"),
        ({}, "exactly one of messages, text, input_ids; has none"),
        ({"text": "a", "input_ids": [1]}, "has text and input_ids"),
        ({"text": "a", "lables": {}}, "unknown key 'lables'"),
        ({"text": ""}, "text is empty"),
        ({"text": 5}, "text must be a string, not int"),
        ({"text": "\ud800"}, "lone surrogate"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": "12"}, "must be a list of token ids"),
        ({"input_ids": [1, True]}, r"input_ids\[1\] is True"),
        ({"input_ids": [1, 2.0]}, r"input_ids\[1\] is 2.0"),
        ({"input_ids": [-1]}, r"input_ids\[0\] is -1"),
        ({"input_ids": [1 << 31]}, "not a token id"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a string"),
        ({"messages": [{"role": 1, "content": ""}]}, r"messages\[0\].role must be a string"),
        ({"input_ids": [1], "id": 7}, "id must be a string"),
        ({"input_ids": [1], "id": ""}, "id must be a string"),
        ({"input_ids": [1], "id": "x" * 600}, "id has 600 bytes"),
        ({"input_ids": [1], "labels": [1]}, "labels must be a map"),
        ({"input_ids": [1], "labels": {"a": [1]}}, "label 'a'"),
        ({"input_ids": [1], "labels": {"a": 1 << 70}}, "labels cannot be stored"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "1 entries for 2 tokens"),
        ({"input_ids": [1], "loss_mask": [2]}, "a list of 0 and 1"),
        ({"input_ids": [1], "loss_mask": [True]}, "a list of 0 and 1"),
        ({"text": "a", "loss_mask": [1]}, "loss_mask with text"),
    ],
)
def test_bad_line_is_refused_by_number_with_the_reason(tmp_path, line, reason):
    path = tmp_path / "prompts.jsonl"
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(b'{"text": "good"}\n' + raw + b'\n{"text": "good too"}\n')
    found = read_prompts(path, lambda: None)
    assert [p.text for p in found.prompts] == ["good", "good too"]
    ((number, _),) = found.bad
    assert number == 2
    with pytest.raises(BadPrompts, match=rf"1 lines cannot be used(.|\n)*line 2: .*{reason}"):
        raise BadPrompts(path, found.bad, "correct them")


def test_id_follows_from_what_is_sent_and_from_nothing_else(tmp_path):
    lines = [
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "labels": {"a": 1}, "loss_mask": [0, 1]},
        {"input_ids": [1, 3]},
        {"text": "ab"},
    ]
    ids = [read(tmp_path, line).prompts[0].id for line in lines]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    # Written down: another value would make every earlier dataset be asked for again.
    assert ids[0] == "8156e9bf1ff4704d621987d8"
    assert ids[3] == "5da22893cda431fdd131b2ac"


def test_repeated_ids_get_numbers_and_are_named(tmp_path):
    lines = [{"input_ids": [1], "id": i} for i in ("a", "a#2", "a", "b", "a")]
    found = read(tmp_path, *lines)
    assert [p.id for p in found.prompts] == ["a", "a#2", "a#3", "b", "a#4"]
    assert found.renamed == [(3, "a", "a#3"), (5, "a", "a#4")]


def test_limit_takes_the_first_prompts(tmp_path):
    found = read(tmp_path, {"text": "a"}, {"text": "b"}, b"not json", limit=2)
    assert [p.text for p in found.prompts] == ["a", "b"]
    assert not found.bad
