"""What a node was sent is known by place, array and length, and forgotten when there is too much."""

from __future__ import annotations

import pytest

from gemmserve_service.executor.joined.assignments import File, Operand
from gemmserve_service.executor.joined.sent_operands import MAX_SENT, SentOperands


def operand(start=0, nbytes=64, array="arr_1", name="file"):
    return Operand(File(name, f"/p/{name}", 1 << 20), start, nbytes, array)


@pytest.mark.parametrize(
    ("other", "known"),
    [
        (operand(), True),
        (operand(nbytes=32), True),
        (operand(nbytes=65), False),
        (operand(start=64), False),
        (operand(array="arr_2"), False),
        (operand(array=None), False),
        (operand(name="other"), False),
    ],
    ids=["the same", "its beginning", "more of it", "behind it", "another in its place", "no array", "another file"],
)
def test_the_same_bytes_of_the_same_array_are_known(other, known):
    sent = SentOperands()
    sent.add(operand())
    assert sent.has(other) == known


def test_bytes_of_no_array_are_not_remembered():
    sent = SentOperands()
    sent.add(operand(array=None))
    assert len(sent) == 0


def test_those_used_longest_ago_are_forgotten():
    sent = SentOperands()
    for number in range(MAX_SENT):
        sent.add(operand(start=number, array=f"arr_{number}"))
    assert sent.has(operand(start=0, array="arr_0"))
    sent.add(operand(start=MAX_SENT, array="more"))
    assert len(sent) == MAX_SENT
    assert sent.has(operand(start=0, array="arr_0"))
    assert not sent.has(operand(start=1, array="arr_1"))
