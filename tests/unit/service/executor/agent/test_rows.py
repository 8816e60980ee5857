"""Rows of tasks: what is read and written of the front's extents, and the same task on the node's."""

from __future__ import annotations

import pytest
from works import form_of

from gemmserve_service.executor.agent.rows import merged, on_node, result_bytes, uses_of
from gemmserve_service.executor.protocol import Kind, Part, ProtocolError, Work, row_without_place
from gemmserve_service.schemas import GemmParams
from gemmserve_service.store.extents.extents import ExtentPool

KIND = Kind(dtype="float64", shape=(4, 4), order="C")
SIZE = 128
FORM = form_of(GemmParams(op="gemm"), {"a": KIND, "b": KIND}, {"d": KIND})


def work(rows, *parts):
    made = [Part(form=FORM, algorithm="blas", operands={"a": a, "b": b}, results={"d": d}) for a, b, d in parts]
    return Work(task="t", extents=rows, parts=made)


@pytest.fixture
def extent():
    pool = ExtentPool(None, keep_bytes=0)
    extent = pool.take(1 << 20)
    yield extent
    pool.give(extent)


def test_ranges_that_touch_become_one():
    assert merged([(4, 8), (0, 4), (10, 12), (5, 7), (9, 10)]) == [(0, 8), (9, 12)]
    assert merged([]) == []


def test_what_is_read_and_written_of_each_row(extent):
    rows = [("x", "/x", 4096, 64, "a1"), ("y", "/y", 4096, 0, None), ("z", "/z", 4096, 0, None)]
    task = work(rows, ([(0, 0)] * 2, [(1, 0), (1, SIZE)], [(1, 1024), (1, 1024 + SIZE)]))
    a, y, unused = uses_of(task)
    assert (a.reads, a.writes, a.shared, a.nbytes) == ([(0, SIZE)], [], True, SIZE)
    assert (y.reads, y.writes, y.shared) == ([(0, 2 * SIZE)], [(1024, 1024 + 2 * SIZE)], False)
    assert y.nbytes == 1024 + 2 * SIZE
    assert unused is None
    moved = on_node(task, [a, y, unused], {0: extent})
    assert moved.extents[0] == (extent.name, extent.path, extent.capacity, 0, "a1")
    assert moved.extents[1:] == rows[1:]
    assert moved.parts == task.parts


def test_far_inside_an_extent_places_are_moved(extent):
    far = 5 << 20
    task = work([("x", "/x", 64 << 20, 0, None)], ([(0, far)], [(0, far + SIZE)], [(0, far + 2 * SIZE)]))
    (use,) = uses_of(task)
    assert use.first == far
    assert use.nbytes == 3 * SIZE
    (part,) = on_node(task, [use], {0: extent}).parts
    assert (part.operands, part.results) == ({"a": [(0, 0)], "b": [(0, SIZE)]}, {"d": [(0, 2 * SIZE)]})


def test_empty_arrays_and_those_without_a_place_stay_as_they_are():
    empty = Kind(dtype="float64", shape=(0, 4), order="C")
    form = form_of(GemmParams(op="gemm"), {"a": KIND, "b": empty}, {"d": KIND})
    part = Part(form=form, algorithm="blas", operands={"a": [(0, 0)], "b": [(-1, 0)]}, results={"d": [(1, 0)]})
    task = Work(task="t", extents=[row_without_place("a1"), row_without_place("d1")], parts=[part], defer=True)
    a, d = uses_of(task)
    assert a.placeless
    assert d.placeless
    assert on_node(task, [a, d], {}).extents == task.extents
    assert result_bytes(task) == {"d1": SIZE}


@pytest.mark.parametrize(
    "part",
    [
        Part(form=FORM, algorithm="blas", operands={"a": [(0, 0)]}, results={"d": [(0, 0)]}),
        Part(form=FORM, algorithm="blas", operands={"a": [(1, 0)], "b": [(0, 0)]}, results={"d": [(0, 0)]}),
        Part(form="{}", algorithm="blas", operands={}, results={}),
    ],
)
def test_tasks_that_make_no_sense(part):
    with pytest.raises(ProtocolError, match="task t"):
        uses_of(Work(task="t", extents=[("x", "/x", 4096, 0, None)], parts=[part]))
