"""Triangles of matrices, and what they stand for, beside NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from linalg_cases import random, run

from gemmserve_kernels import DtypeUnsupported, Operand, ParameterInvalid, ShapeMismatch
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.operations import triangle
from gemmserve_kernels.operations.triangle import Triangle

SHAPES = array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=7)
DTYPES = st.sampled_from(["f2", "f4", "f8", "c8", "c16"])


@given(
    shape=SHAPES, dtype=DTYPES, fill=st.sampled_from(["lower", "upper"]), unit=st.booleans(),
    limit=st.sampled_from([1, 5, 1 << 20]), data=st.data(),
)  # fmt: skip
def test_triangles(shape, dtype, fill, unit, limit, data):
    a = random(np.random.default_rng(3), shape, dtype)
    a = a.transpose(data.draw(st.permutations(range(len(shape)))))
    below = np.tri(*a.shape[-2:], dtype=bool) if fill == "lower" else ~np.tri(*a.shape[-2:], k=-1, dtype=bool)
    a[..., ~below] = np.nan  # not to be read
    expected = np.where(below, a, 0).astype(dtype)
    if unit:
        np.einsum("...ii->...i", expected[..., : min(a.shape[-2:]), : min(a.shape[-2:])])[...] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triangle, "_HOST_ELEMENTS", limit)
        _, made, found = run(Triangle, {"a": a}, fill=fill, unit=unit)
    np.testing.assert_array_equal(made, expected)
    assert made.dtype == a.dtype
    assert (found.residual, found.excess) == (0, 0)


@given(
    batch=st.lists(st.integers(0, 3), max_size=2), n=st.integers(0, 7), dtype=DTYPES,
    fill=st.sampled_from(["lower", "upper"]), structure=st.sampled_from(["hermitian", "symmetric"]),
    limit=st.sampled_from([1, 9, 1 << 20]),
)  # fmt: skip
def test_what_a_triangle_stands_for(batch, n, dtype, fill, structure, limit):
    a = random(np.random.default_rng(4), (*batch, n, n), dtype)
    other = ~np.tri(n, dtype=bool) if fill == "lower" else np.tri(n, k=-1, dtype=bool)
    a[..., other] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triangle, "_HOST_ELEMENTS", limit)
        _, made, found = run(Triangle, {"a": a}, fill=fill, structure=structure)
    mirrored = made.swapaxes(-1, -2)
    np.testing.assert_array_equal(made, mirrored.conj() if structure == "hermitian" else mirrored)
    inner = ~other & ~np.eye(n, dtype=bool)
    np.testing.assert_array_equal(made[..., inner], a[..., inner])
    assert not np.isnan(made).any()
    assert (found.residual, found.excess) == (0, 0)


def test_a_long_row_is_cut_and_can_be_interrupted(monkeypatch):
    monkeypatch.setattr(triangle, "_HOST_ELEMENTS", 4)
    looks = []
    with interruptible(lambda: looks.append(1)):
        _, made, _ = run(Triangle, {"a": np.ones((2, 20))})
    assert len(looks) == 10
    np.testing.assert_array_equal(made, np.tri(2, 20))


@pytest.mark.parametrize("place", [(3, 1), (1, 3), (2, 2)])
def test_a_wrong_element_is_found(place):
    a = np.random.default_rng(1).standard_normal((4, 4))
    operation, made, _ = run(Triangle, {"a": a}, structure="hermitian")
    made[place] += 1
    assert operation.find({"a": a}, {"d": made}, 5).excess == np.inf


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "error"),
    [
        ((3,), "f8", {}, ShapeMismatch),
        ((3, 4), "f8", {"structure": "hermitian"}, ShapeMismatch),
        ((3, 3), "i8", {}, DtypeUnsupported),
        ((3, 3), "f8", {"fill": "both"}, ParameterInvalid),
        ((3, 3), "f8", {"structure": "banded"}, ParameterInvalid),
        ((3, 3), "f8", {"structure": "symmetric", "unit": True}, ParameterInvalid),
    ],
)
def test_what_is_refused(shape, dtype, options, error):
    with pytest.raises(error):
        Triangle.build(a=Operand.contiguous(shape, dtype), **options)
