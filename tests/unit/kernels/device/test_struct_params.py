"""Strided views, batches cut into launches, vector widths: against NumPy's own indexing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_kernels.device.struct_params import (
    BATCH_DIMS,
    Access,
    MatrixView,
    StoredArray,
    choose_access,
    coalesce,
    launches,
    matrix_view,
    piece_of,
)


class Host:
    """Addresses of NumPy arrays."""

    def pointer(self, array):
        return array.ctypes.data


def _view(array, shape=None, *, planar=False):
    stored, base = StoredArray.of(Host(), array)
    assert base % 16 == 0
    return matrix_view(stored, shape or array.shape, planar=planar), base


def _element(view, base, offset):
    dtype = view.dtype
    return np.frombuffer(
        (np.ctypeslib.ctypes.c_char * dtype.itemsize).from_address(base + view.re + offset * dtype.itemsize), dtype
    )[0]


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(2, 3, 4),
        np.arange(24.0).reshape(2, 3, 4)[:, ::-1, ::2],
        np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        np.broadcast_to(np.arange(4.0), (2, 3, 4)),
        np.arange(12.0).reshape(1, 3, 4),
    ],
    ids=["c", "reversed", "f", "broadcast", "one"],
)
def test_views_find_every_element(array, trans):
    wanted = np.broadcast_to(array, (2, *array.shape[1:]))
    view, base = _view(array, wanted.shape)
    if trans:
        view, wanted = view.transposed(), wanted.swapaxes(-1, -2)
    for index in np.ndindex(*wanted.shape):
        batch, row, column = index
        offset = batch * view.batch_strides[0] + row * view.row_stride + column * view.column_stride
        assert _element(view, base, offset) == wanted[index]


def test_planar_views_have_two_addresses():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    view, base = _view(array, (3, 4), planar=True)
    assert view.im - view.re == array.strides[0]
    assert _element(view, base, 5) == array[0, 1, 1]


def test_what_does_not_fit_is_refused():
    array = np.zeros((3, 4))
    with pytest.raises(ValueError, match="does not broadcast"):
        _view(array, (4, 3))
    field = np.zeros(4, [("x", "f8"), ("y", "i1")])["x"].reshape(2, 2)
    with pytest.raises(ValueError, match="whole elements"):
        _view(field)


SHAPES = st.lists(st.integers(1, 3), min_size=0, max_size=6)


@given(SHAPES, st.lists(st.lists(st.integers(-7, 7), min_size=6, max_size=6), min_size=1, max_size=3))
def test_launches_visit_every_matrix_in_order(shape, strides):
    views = [MatrixView(0, 0, np.dtype("f4"), 1, 1, 0, 0, tuple(operand[: len(shape)])) for operand in strides]
    expected = [
        [sum(i * s for i, s in zip(index, view.batch_strides, strict=True)) for view in views]
        for index in np.ndindex(*shape)
    ]
    found = []
    for first, inner, pieces in launches(shape, views):
        assert len(inner) == BATCH_DIMS
        assert first == len(found)
        found += [
            [
                piece.re // 4 + sum(i * s for i, s in zip(index, piece.params().batch_stride, strict=True))
                for piece in pieces
            ]
            for index in np.ndindex(*inner)
        ]
    assert found == expected


def test_contiguous_batches_are_one_axis():
    assert coalesce((2, 1, 3, 4), [(24, 99, 8, 2), (0, 5, 0, 0)]) == ((24,), [(2,), (0,)])
    assert coalesce((2, 3), [(3, 1), (0, 1)]) == ((2, 3), [(3, 1), (0, 1)])
    assert coalesce((1, 1), [(7, 7)]) == ((), [()])


ALIGNED = np.zeros(1 << 14, np.uint8)
ALIGNED = ALIGNED[-ALIGNED.ctypes.data % 64 :]


def _matrix(dtype, rows, columns, *, leading=None, skip=0):
    dtype = np.dtype(dtype)
    leading = leading or columns
    block = np.ndarray((rows, leading), dtype, ALIGNED, skip * dtype.itemsize)
    return _view(block[:, :columns])[0]


ACCESSES = {
    "rows of complex64": (_matrix("c8", 16, 16), Access(along_k=True, vector=2)),
    "rows of float16": (_matrix("f2", 16, 16), Access(along_k=True, vector=8)),
    "complex128 fills 16 bytes": (_matrix("c16", 16, 16), Access(along_k=True, vector=1)),
    "columns": (_matrix("f4", 16, 16).transposed(), Access(along_k=False, vector=4)),
    "off by one element": (_matrix("f4", 16, 16, skip=1), Access(along_k=True, vector=1)),
    "off by two elements": (_matrix("f4", 16, 16, skip=2), Access(along_k=True, vector=2)),
    "odd leading dimension": (_matrix("f4", 16, 16, leading=17), Access(along_k=True, vector=1)),
    "leading dimension of pairs": (_matrix("f4", 16, 16, leading=18), Access(along_k=True, vector=2)),
    "odd k": (_matrix("f4", 16, 15, leading=16), Access(along_k=True, vector=1)),
    "one k": (_matrix("f4", 16, 1), Access(along_k=False, vector=4)),
    "one row": (_matrix("f4", 1, 16), Access(along_k=True, vector=4)),
}


@pytest.mark.parametrize(("view", "access"), ACCESSES.values(), ids=ACCESSES)
def test_vectors_only_where_nothing_cuts_them(view, access):
    assert choose_access(view, k_is_row=False, block=16, block_k=8) == access
    assert choose_access(view.transposed(), k_is_row=True, block=16, block_k=8) == access


def test_vectors_fit_the_tile():
    assert choose_access(_matrix("f4", 16, 16), k_is_row=False, block=16, block_k=6).vector == 2
    assert choose_access(_matrix("f4", 16, 16).transposed(), k_is_row=False, block=5, block_k=8).vector == 1


def test_pieces():
    assert [piece_of(8, count) for count in (1, 2, 3, 4)] == [1, 2, 1, 2]
    assert [piece_of(4, count) for count in (1, 2, 4, 6, 8)] == [1, 2, 4, 2, 4]
    assert piece_of(16, 8) == 1
