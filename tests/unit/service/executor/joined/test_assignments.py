"""What a link may read and write follows from the tasks that it has now, and ends with them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from works import form_of

from gemmserve_service.executor.join_protocol import WriteResult
from gemmserve_service.executor.joined.assignments import Assignments, Elsewhere, File, Stale
from gemmserve_service.executor.protocol import Kind, Part, Work, Write, row_without_place
from gemmserve_service.schemas import GemmParams

SQUARE = Kind(dtype="float32", shape=(8, 8), order="C")
NBYTES = 256
FORM = form_of(GemmParams(), {"a": SQUARE, "b": SQUARE}, {"d": SQUARE})
SHARED = ("file", "/p/file", 1 << 20, 4096, None)  # an extent that begins within a file
OPERAND = ("big", "/p/big", 8192, 0, "arr_1")
RESULT = ("out", "/p/out", 4096, 0, "arr_2")


def work(task="t", attempt=1, result=RESULT) -> Work:
    part = Part(FORM, "numpy", {"a": [(0, 64)], "b": [(1, 0)]}, {"d": [(2, 0)]})
    return Work(task, [SHARED, OPERAND, result], [part], attempt=attempt)


def put(offset=0, attempt=1, extent="out", task="t") -> WriteResult:
    return WriteResult(task, attempt, extent, offset)


@pytest.fixture
def held() -> Assignments:
    assignments = Assignments()
    assignments.add(work())
    return assignments


def test_operands_are_read_where_they_lie_in_their_files(held):
    assert held.reads("file", 4096 + 64, NBYTES) == File("file", "/p/file", 1 << 20)
    assert held.reads("big", 0, NBYTES) == File("big", "/p/big", 8192)
    assert held.reads("big", 100, 1) is not None


@pytest.mark.parametrize(
    ("extent", "offset", "length"),
    [
        ("file", 4096, NBYTES),  # the neighbour's
        ("file", 4096 + 65, NBYTES),
        ("file", 4096 + 63, 2),
        ("file", 0, 1),
        ("big", 0, NBYTES + 1),
        ("big", NBYTES, 1),
        ("big", 0, 0),
        ("out", 0, NBYTES),  # a result is written, not read: another array's bytes are there yet
        ("/p/big", 0, 1),
        ("", 0, 1),
    ],
)
def test_nothing_else_is_read(held, extent, offset, length):
    assert held.reads(extent, offset, length) is None


def test_a_result_is_written_to_its_place(held):
    assert held.writes(put(), NBYTES) == File("out", "/p/out", 4096)


@pytest.mark.parametrize("asked", [put(1), put(NBYTES), put(extent="big"), put(extent="file", offset=4160)])
def test_nothing_else_is_written(held, asked):
    with pytest.raises(Elsewhere):
        held.writes(asked, NBYTES)


@pytest.mark.parametrize("asked", [put(attempt=0), put(attempt=2), put(task="u")])
def test_another_attempt_is_stale(held, asked):
    with pytest.raises(Stale):
        held.writes(asked, NBYTES)


def test_with_its_answer_all_of_a_task_ends(held):
    held.answered("t", written=True)
    assert held.reads("big", 0, 1) is None
    with pytest.raises(Stale):
        held.writes(put(), NBYTES)
    assert not held.waits_for("t")


def test_one_task_goes_and_what_another_reads_stays(held):
    held.add(work("u"))
    held.answered("t", written=True)
    assert held.reads("big", 0, NBYTES) is not None


def test_a_second_attempt_makes_the_first_stale(held):
    held.came(put(), 0, NBYTES)
    held.add(work(attempt=2))
    with pytest.raises(Stale):
        held.writes(put(attempt=1), NBYTES)
    assert held.writes(put(attempt=2), NBYTES)
    assert not held.complete("t")  # what the first one wrote is not the second's


def test_a_result_is_complete_when_every_byte_has_come(held):
    assert not held.complete("t")
    held.came(put(), 0, 100)
    held.came(put(), 150, NBYTES)
    held.came(put(), 0, 100)  # once more
    assert not held.complete("t")
    held.came(put(), 90, 160)
    assert held.complete("t")


def test_nobody_asks_for_bytes_that_nobody_wants(held):
    held.unwanted(["t", "unknown"])
    assert held.complete("t")


def test_an_unknown_task_is_not_complete(held):
    assert not held.complete("u")


@given(
    cuts=st.lists(st.integers(0, NBYTES), max_size=12),
    order=st.randoms(use_true_random=False),
    missing=st.integers(0, NBYTES - 1),
)
def test_pieces_in_any_order_are_complete_together(cuts, order, missing):
    marks = sorted({0, *cuts, NBYTES})
    pieces = list(itertools.pairwise(marks))
    order.shuffle(pieces)
    whole, holed = Assignments(), Assignments()
    for held in (whole, holed):
        held.add(work())
    for start, end in pieces:
        whole.came(put(), start, end)
        for first, last in ((start, min(end, missing)), (max(start, missing + 1), end)):
            if first < last:
                holed.came(put(), first, last)
    assert whole.complete("t")
    assert not holed.complete("t")


class TestDeferred:
    """Results that get their place after the answer."""

    @pytest.fixture
    def held(self) -> Assignments:
        assignments = Assignments()
        assignments.add(work(result=row_without_place("arr_2")))
        assignments.answered("t", written=False)
        return assignments

    def test_before_they_have_a_place_nothing_is_written(self, held):
        with pytest.raises(Elsewhere):
            held.writes(put(), NBYTES)
        assert not held.complete("t")

    def test_operands_are_read_no_more(self, held):
        assert held.reads("big", 0, 1) is None

    def test_then_they_are_written_there(self, held):
        held.placed(Write(task="t", places={"arr_2": ("out", "/p/out", 4096, 1024, "arr_2")}))
        assert held.writes(put(1024), NBYTES)
        with pytest.raises(Elsewhere):
            held.writes(put(), NBYTES)
        held.came(put(1024), 1024, 1024 + NBYTES)
        assert held.complete("t")

    def test_to_be_told_that_it_is_urgent_changes_nothing(self, held):
        message = Write(task="t", places={"arr_2": RESULT})
        held.placed(message)
        held.came(put(), 0, NBYTES)
        held.placed(message.model_copy(update={"urgent": True}))
        assert held.complete("t")

    def test_places_of_other_arrays_are_none_of_it(self, held):
        held.placed(Write(task="t", places={"arr_9": RESULT}))
        with pytest.raises(Elsewhere):
            held.writes(put(), NBYTES)

    def test_when_they_are_written_it_is_over(self, held):
        held.placed(Write(task="t", places={"arr_2": RESULT}))
        held.over(["t"])
        with pytest.raises(Stale):
            held.writes(put(), NBYTES)


def test_operands_are_named_once(held):
    assert list(held.add(work("u")).operands()) == [
        (File("file", "/p/file", 1 << 20), 4160, NBYTES, None),
        (File("big", "/p/big", 8192), 0, NBYTES, "arr_1"),
    ]
