"""Range, If-Range and If-None-Match as RFC 9110 has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_service.http.headers.ranges import UnsatisfiableError, if_range_holds, none_match, parse_range


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes=0-99", range(100)),
        ("bytes=0-0", range(1)),
        ("bytes=900-", range(900, 1000)),
        ("bytes=900-5000", range(900, 1000)),
        ("bytes=-1", range(999, 1000)),
        ("bytes=-5000", range(1000)),
        ("Bytes=5-6", range(5, 7)),
    ],
)
def test_one_range(value, expected):
    assert parse_range(value, 1000) == expected


@pytest.mark.parametrize(
    "value",
    [None, "", "bytes=", "bytes=-", "bytes=5-4", "bytes=a-b", "items=0-5", "bytes=0-5,7-9", "0-5", "bytes=+1-2"],
)
def test_ignored(value):
    assert parse_range(value, 1000) is None


@pytest.mark.parametrize(
    ("value", "size"), [("bytes=1000-", 1000), ("bytes=-0", 1000), ("bytes=0-", 0), ("bytes=-5", 0)]
)
def test_unsatisfiable(value, size):
    with pytest.raises(UnsatisfiableError):
        parse_range(value, size)


@given(st.text(max_size=40), st.integers(0, 1 << 40))
def test_any_text_selects_within_the_size(text, size):
    try:
        span = parse_range(f"bytes={text}", size)
    except UnsatisfiableError:
        return
    assert span is None or (0 <= span.start < span.stop <= size)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 100))
def test_agrees_with_slicing(first, last, size):
    data = list(range(size))
    try:
        span = parse_range(f"bytes={first}-{last}", size)
    except UnsatisfiableError:
        assert data[first : last + 1] == []
    else:
        assert span is None if last < first else list(span) == data[first : last + 1]


def test_if_none_match():
    assert none_match('"x"', '"x"')
    assert none_match('W/"x", "y"', '"x"')
    assert none_match("*", '"x"')
    assert not none_match('"xy"', '"x"')
    assert not none_match(None, '"x"')


def test_if_range_is_strong():
    assert if_range_holds(None, '"x"')
    assert if_range_holds('"x"', '"x"')
    assert not if_range_holds('W/"x"', '"x"')
    assert not if_range_holds("Fri, 20 Nov 2026 21:00:00 GMT", '"x"')
