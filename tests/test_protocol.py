"""Metadata and messages: what is packed comes back, what is malformed is refused."""

import contextlib
import tracemalloc
from functools import partial

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hstransport.errors import ProtocolError
from hstransport.protocol import (
    END,
    ROWS,
    START,
    End,
    Message,
    Rows,
    Segment,
    SessionInfo,
    Start,
    pack_event,
    pack_info,
    pack_messages,
    unpack_event,
    unpack_info,
    unpack_messages,
)
from hstransport.tags import (
    MAX_LABEL_BYTES,
    check_labels,
    decode_loss_mask,
    encode_loss_mask,
    fit_id,
)

INFO = SessionInfo("ab12", "s", "m", "0.5.20", (2, 3), True, 64, 6)


def tokens(*ids):
    return np.array(ids, np.int32)


def test_events_come_back_as_they_were():
    start = Start(7, "id", "rid", tokens(1, 2, 3), {"k": "v", "n": 1, "b": True}, (1, 2), 5.5)
    kind, data = pack_event(start)
    back = unpack_event(kind, data)
    assert kind == START
    assert back.prompt.tolist() == [1, 2, 3]
    assert (back.sid, back.id, back.rid, back.labels, back.loss_mask, back.time) == (
        7,
        "id",
        "rid",
        {"k": "v", "n": 1, "b": True},
        (1, 2),
        5.5,
    )
    rows = Rows((Segment(7, 0, 3), Segment(9, 12, 1)))
    assert unpack_event(*pack_event(rows)) == rows
    end = End(7, "length", 3, tokens(9), dropped=2, cached=1, detail="why")
    back = unpack_event(*pack_event(end))
    assert (back.sid, back.reason, back.tokens, back.output.tolist()) == (7, "length", 3, [9])
    assert (back.dropped, back.cached, back.detail) == (2, 1, "why")


def test_fields_appended_by_a_later_release_are_ignored():
    kind, data = pack_event(End(1, "finished", 2, tokens()))
    raw = msgpack.unpackb(data) | {"later": [1, 2]}
    assert unpack_event(kind, msgpack.packb(raw)).tokens == 2
    message = [*msgpack.unpackb(pack_messages([Message("ab", 0, ROWS, 1, 64, 128, b"x")])), "later"]
    message[3][0].append("later")
    assert unpack_messages(msgpack.packb(message))[0].seq == 1
    info = msgpack.unpackb(pack_info(INFO)) | {"later": 1}
    assert unpack_info(msgpack.packb(info)) == INFO


def map_with(event, **changes):
    kind, data = pack_event(event)
    return kind, msgpack.packb(msgpack.unpackb(data) | changes)


START_OK = Start(1, "i", "r", tokens(1))
MALFORMED = {
    "not msgpack": (ROWS, b"\xc1", "not msgpack"),
    "truncated": (ROWS, pack_event(Rows((Segment(1, 0, 1),)))[1][:-1], "not msgpack"),
    "bytes after it": (ROWS, pack_event(Rows((Segment(1, 0, 1),)))[1] + b"x", "not msgpack"),
    "not a map": (ROWS, msgpack.packb([1, 2, 3]), "a list, not a map"),
    "keys that are no text": (ROWS, msgpack.packb({1: 2}), "not msgpack"),
    "too large": (ROWS, bytes((8 << 20) + 1), "8388609 bytes exceeds 8388608"),
    "unknown kind": (77, msgpack.packb({}), "kind 77 is unknown"),
    "absent field": (END, msgpack.packb({"sid": 1}), "end metadata: KeyError: 'reason'"),
    "segments not in threes": (ROWS, msgpack.packb({"seg": [1, 2]}), "not a multiple of 3"),
    "no segments": (ROWS, msgpack.packb({"seg": []}), "0 segment numbers"),
    "empty segment": (ROWS, msgpack.packb({"seg": [1, 2, 0]}), "an empty segment"),
    "negative position": (ROWS, msgpack.packb({"seg": [1, -2, 1]}), "-2 is not a non-negative"),
    "float for a number": (ROWS, msgpack.packb({"seg": [1, 2.0, 1]}), "2.0 is not a non-negative"),
    "boolean for a number": (ROWS, msgpack.packb({"seg": [1, True, 1]}), "True is not a non"),
    "absurd number": (ROWS, msgpack.packb({"seg": [1, 2**63, 1]}), "9223372036854775808 is not"),
    "tokens not in fours": (*map_with(START_OK, prompt=b"abc"), "a multiple of 4"),
    "tokens as text": (*map_with(START_OK, prompt="abcd"), "a multiple of 4"),
    "id too long": (*map_with(START_OK, id="x" * 600), "at most 512 bytes"),
    "id no text": (*map_with(START_OK, id=b"x"), "not a string"),
    "time no number": (*map_with(START_OK, time="soon"), "could not convert"),
    "labels not a map": (*map_with(START_OK, labels=[1]), "labels must be a map"),
    "nested label": (*map_with(START_OK, labels={"a": {"b": 1}}), "label 'a'"),
    "labels too large": (*map_with(START_OK, labels={"a": "x" * MAX_LABEL_BYTES}), "at most 65536"),
    "mask of negatives": (*map_with(START_OK, mask=[-1]), "-1 is not a non-negative"),
    "mask no list": (*map_with(START_OK, mask=7), "must be a list of run lengths"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_metadata_is_refused(case):
    kind, data, words = MALFORMED[case]
    with pytest.raises(ProtocolError, match=words):
        unpack_event(kind, data)


BAD_MESSAGES = {
    "not msgpack": (b"\xc1", "not msgpack"),
    "too large": (bytes((16 << 20) + 1), "16777217 bytes exceeds 16777216"),
    "a pickle": (b"\x80\x04cos\nsystem\n", "not msgpack"),
    "another version": (msgpack.packb([2, "ab", 0, []]), "version 1"),
    "too short": (msgpack.packb([1, "ab", 0]), "array of 4 fields"),
    "a map": (msgpack.packb({"v": 1}), "array of 4 fields"),
    "run no text": (msgpack.packb([1, b"ab", 0, []]), "not a string"),
    "rank negative": (msgpack.packb([1, "ab", -1, []]), "-1 is not a non-negative"),
    "records no list": (msgpack.packb([1, "ab", 0, {}]), "no list of records"),
    "record too short": (msgpack.packb([1, "ab", 0, [[1, 2, 3, 4]]]), "array of 5 fields"),
    "record of text": (msgpack.packb([1, "ab", 0, ["abcde"]]), "array of 5 fields"),
    "position too large": (msgpack.packb([1, "ab", 0, [[1, 2, 1 << 63, 4, b""]]]), "is not a non"),
    "metadata as text": (msgpack.packb([1, "ab", 0, [[1, 2, 3, 4, "x"]]]), "is not bytes"),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_a_malformed_message_is_refused(case):
    data, words = BAD_MESSAGES[case]
    with pytest.raises(ProtocolError, match=words):
        unpack_messages(data)


@given(st.binary(max_size=200), st.sampled_from([ROWS, START, END, 0, 9]))
def test_random_bytes_never_raise_anything_else(data, kind):
    for unpack in (lambda: unpack_event(kind, data), lambda: unpack_messages(data)):
        with contextlib.suppress(ProtocolError):
            unpack()


def test_arrays_that_are_not_there_take_no_memory():
    """Each of them announces 32,768 items, and there are few bytes: unpackb makes room level by
    level."""
    bomb = b"\xdd\0\0\x80\0" * 13000
    tracemalloc.start()
    for unpack in (unpack_messages, unpack_info, partial(unpack_event, START)):
        with pytest.raises(ProtocolError, match="not msgpack"):
            unpack(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize(
    "change",
    [
        *({"v": 2}, {"hidden": 0}, {"hidden": 1 << 30}, {"dtype": "float32"}, {"layers": [-1]}),
        *({"hidden": 64.0}, {"final": "yes"}, {"final": 0.5}, {"run": ["ab12"]}, {"rank": -1}),
    ],
)
def test_session_info_of_another_version_or_shape_is_refused(change):
    raw = msgpack.unpackb(pack_info(INFO)) | change
    with pytest.raises(ProtocolError):
        unpack_info(msgpack.packb(raw))


def test_version_mismatch_names_both_versions():
    raw = msgpack.unpackb(pack_info(INFO)) | {"v": 9}
    with pytest.raises(ProtocolError, match=r"9.*1"):
        unpack_info(msgpack.packb(raw))


@given(st.lists(st.integers(0, 1), max_size=60))
def test_loss_mask_runs_are_reversible(mask):
    runs = encode_loss_mask(mask)
    assert decode_loss_mask(runs, len(mask)).tolist() == mask


def test_loss_mask_begins_with_zeros_and_generated_tokens_count():
    assert encode_loss_mask([0, 0, 1, 1, 1]) == (2, 3)
    assert encode_loss_mask([1, 0]) == (0, 1, 1)
    assert decode_loss_mask((2, 1), 5).tolist() == [0, 0, 1, 1, 1]


def test_long_ids_are_shortened_and_stay_distinct():
    a, b = "x" * 1000 + "a", "x" * 1000 + "b"
    assert fit_id("short") == "short"
    assert fit_id(a) != fit_id(b)
    assert len(fit_id(a).encode()) <= 512


def test_labels_keep_scalars_and_refuse_the_rest():
    assert check_labels({"a": None, "b": 1.5}) == {"a": None, "b": 1.5}
    with pytest.raises(ProtocolError, match="labels must be a map"):
        check_labels("x")
    with pytest.raises(ProtocolError):
        check_labels({"huge": 2**80})
