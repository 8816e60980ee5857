"""Events in any division of the stream."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmserve
from gemmserve._transfer.sse import Event, EventParser


@given(st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 9), max_size=5), st.integers(1, 40))
def test_any_division(newline, values, size) -> None:
    lines = [": keep-alive", ""]
    for value in values:
        lines += ["id: 1", "event: job", *(f"data: {part}" for part in ('{"n":', f"{value}}}")), ""]
    stream = newline.join([*lines, "data: unfinished"]).encode()
    parser = EventParser()
    seen = [event for at in range(0, len(stream), size) for event in parser.feed(stream[at : at + size])]
    assert seen == [Event({"n": value}, "1") for value in values]


def test_no_space_after_the_colon_is_needed() -> None:
    assert list(EventParser().feed(b"data:1\n\ndata:  2\n\n")) == [Event(1), Event(2)]


def test_an_id_holds_until_the_next_one() -> None:
    stream = b"id:7\ndata:1\n\ndata:2\n\nid: a b\n\ndata:3\n\nid:\0\ndata:4\n\n"
    assert [event.id for event in EventParser().feed(stream)] == ["7", "7", "a b", "a b"]


def test_other_data_are_an_error() -> None:
    with pytest.raises(gemmserve.ProtocolError):
        list(EventParser().feed(b"data: hello\n\n"))
    with pytest.raises(gemmserve.ProtocolError):
        list(EventParser().feed(b"data: " + json.dumps("x" * (1 << 20)).encode()))
