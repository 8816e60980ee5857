"""A set of integers as spans, against a set of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gemmserve_service.store.resumable.byte_ranges import Spans

SPAN = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(st.lists(st.tuples(st.booleans(), SPAN), max_size=12), st.integers(0, 45))
def test_spans_are_a_set(steps, length):
    spans, model = Spans(), set()
    for adds, (start, end) in steps:
        if adds:
            spans.add(start, end)
            model |= set(range(start, end))
        else:
            spans.remove(start, end)
            model -= set(range(start, end))
        assert {n for low, high in spans for n in range(low, high)} == model
        found = list(spans)
        assert all(low < high for low, high in found)
        assert all(one[1] < other[0] for one, other in pairwise(found)), "they touch"
    assert {n for low, high in spans.missing(length) for n in range(low, high)} == set(range(length)) - model


def test_meets():
    spans = Spans([(2, 4), (8, 9)])
    assert [spans.meets(start, end) for start, end in ((0, 2), (0, 3), (4, 8), (3, 8), (5, 20), (9, 10))] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]
