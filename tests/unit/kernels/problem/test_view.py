"""Views of contiguous arrays beside NumPy's own, and what reaches beyond them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

from gemmserve_kernels import Operand, ParameterInvalid, ShapeMismatch
from gemmserve_kernels.problem.view import MAX_NDIM, MAX_REACH, array_of_view, operand_of_view

SIZE = 24


@dataclass(frozen=True)
class View:
    offset: int = 0
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    part: str | None = None


def base(order="C", dtype="c8"):
    made = np.arange(SIZE).reshape(2, 3, 4)
    return np.array(made * (1 - 2j) if dtype[0] == "c" else made, dtype, order=order)


NUMBERS = st.one_of(st.integers(-30, 30), st.sampled_from([2**31, -(2**31), 2**62, -(2**62), 2**63, 2**64 + 1]))
EXTENTS = st.one_of(st.integers(0, 6), st.integers(-1, 30), st.sampled_from([2**31, 2**62]))


@given(
    offset=NUMBERS,
    axes=st.lists(st.tuples(EXTENTS, NUMBERS), max_size=4),
    order=st.sampled_from("CF"),
    part=st.sampled_from([None, "real", "imag"]),
)
def test_a_view_is_numpys_where_every_element_lies_inside_and_refused_elsewhere(offset, axes, order, part):
    array = base(order)
    array.flags.writeable = False
    view = View(offset, tuple(extent for extent, _ in axes), tuple(stride for _, stride in axes), part)
    inside = all(extent >= 0 for extent in view.shape)
    empty = 0 in view.shape
    if inside and not empty:
        reached = {offset}
        for extent, stride in axes:
            ends = {0, (extent - 1) * stride}
            reached = {start + end for start in reached for end in ends}
        inside = min(reached) >= 0 and max(reached) < SIZE
    try:
        seen = operand_of_view(Operand.of(array), view)
    except ShapeMismatch:
        assert empty or inside, "of zero strides alone"
        assert np.prod([max(extent, 1) for extent in view.shape], dtype=object) * 4 > 2**62
        return
    except ParameterInvalid as error:
        assert (inside, error.parameter in {"offset", "shape", "strides"}) == (False, True)  # noqa: PT017
        return
    assert inside
    item = 8
    flat = array.ravel(order="K")
    source = flat if part is None else getattr(flat, part)
    strides = tuple(0 if extent < 2 else stride * item for extent, stride in axes)
    if seen.size > 10_000:
        return
    if empty:
        expected = np.empty(view.shape, seen.dtype)
    else:
        expected = np.lib.stride_tricks.as_strided(source[offset:], view.shape, strides)
    made = array_of_view(array, view)
    np.testing.assert_array_equal(made, expected)
    assert (made.shape, made.dtype) == (seen.shape, seen.dtype)
    if not empty:
        assert Operand.of(made) == seen
        assert np.shares_memory(made, array)
        assert not made.flags.writeable


@given(
    index=basic_indices((2, 3, 4), allow_newaxis=True, allow_ellipsis=False),
    order=st.sampled_from("CF"),
    data=st.data(),
)
def test_slices_and_transpositions_are_views(index, order, data):
    array = base(order)
    taken = array[(*(index if isinstance(index, tuple) else (index,)), ...)]
    taken = taken.transpose(data.draw(st.permutations(range(taken.ndim))))
    start = (taken.ctypes.data - array.ctypes.data) // 8 if taken.size else 0
    view = View(start, taken.shape, tuple(stride // 8 for stride in taken.strides))
    np.testing.assert_array_equal(array_of_view(array, view), taken)
    again = np.ascontiguousarray(taken) if taken.flags.c_contiguous else None
    if again is not None and taken.size:
        assert operand_of_view(Operand.of(array), view) == Operand.contiguous(taken.shape, "c8")


@pytest.mark.parametrize("order", ["C", "F"])
def test_parts_of_a_whole_array(order):
    array = base(order)
    np.testing.assert_array_equal(array_of_view(array, View(part="real")), array.real)
    np.testing.assert_array_equal(array_of_view(array, View(part="imag")), array.imag)
    np.testing.assert_array_equal(array_of_view(array, View()), array)
    scalar = np.array(3 + 4j)
    assert array_of_view(scalar, View(part="imag")) == 4
    assert array_of_view(np.empty((0, 3), "c8"), View(part="imag")).shape == (0, 3)


@pytest.mark.parametrize(
    ("view", "dtype", "parameter"),
    [
        (View(part="real"), "f4", "part"),
        (View(offset=1), "c8", "offset"),
        (View(shape=(2,)), "c8", "strides"),
        (View(0, (2, 2), (1,)), "c8", "strides"),
        (View(0, (1,) * (MAX_NDIM + 1), (0,) * (MAX_NDIM + 1)), "c8", "shape"),
        (View(0, (-1,), (1,)), "c8", "shape"),
        (View(-1, (1,), (1,)), "c8", "offset"),
        (View(SIZE, (1,), (1,)), "c8", "offset"),
        (View(SIZE, (), ()), "c8", "offset"),
        (View(1, (SIZE,), (1,)), "c8", "strides"),
        (View(SIZE - 2, (SIZE,), (-1,)), "c8", "strides"),
        (View(0, (MAX_REACH, 2), (1, MAX_REACH)), "c8", "strides"),
        # Sums that wrap around to something small in 64 bits.
        (View(0, (2, 2), (2**63, -(2**63))), "c8", "strides"),
        (View(0, (2**32 + 1, 2), (2**32, 1)), "c8", "strides"),
    ],
)
def test_what_is_no_view(view, dtype, parameter):
    with pytest.raises(ParameterInvalid) as caught:
        operand_of_view(Operand.of(base(dtype=dtype)), view)
    assert caught.value.parameter == parameter


def test_a_view_of_nothing_reaches_nothing():
    assert array_of_view(base(), View(10**30, (0, 5), (10**30, -(10**30)))).shape == (0, 5)
    assert array_of_view(np.empty(0, "c8"), View(0, (3, 0), (1, 1))).shape == (3, 0)
    with pytest.raises(ParameterInvalid):
        array_of_view(np.empty(0, "c8"), View(0, (1,), (1,)))


def test_a_broadcast_view_has_a_size_all_the_same():
    with pytest.raises(ShapeMismatch):
        operand_of_view(Operand.of(base()), View(0, (2**31, 2**31), (0, 0)))
