"""Samples: the elements at even distances of arrays of any shape, order and dtype."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gemmserve_service.http.answers.samples import sample
from gemmserve_service.schemas import ArrayInfo


def info_of(array: np.ndarray, order: str) -> ArrayInfo:
    return ArrayInfo(
        id=f"arr_{0:026d}", dtype=array.dtype.name, shape=array.shape, order=order, nbytes=array.nbytes,
        created_at=datetime.now(UTC),
    )  # fmt: skip


@given(
    shape=arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9),
    order=st.sampled_from("CF"),
    dtype=st.sampled_from(["float16", "complex128", "int64"]),
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
)
def test_elements_of_the_first_matrix(shape, order, dtype, rows, columns):
    array = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    found = sample(memoryview(array.tobytes(order=order)), info_of(array, order), rows, columns)
    assert found.dtype == array.dtype
    assert found.flags.c_contiguous
    if array.ndim > 2:
        leading = array.shape[:-2]
        array = array[(0,) * len(leading)] if np.prod(leading) else np.empty((0, shape[-1]), dtype)
    matrix = np.atleast_2d(array)
    m, n = matrix.shape
    assert found.shape == (min(m, rows), min(n, columns))
    for i, j in np.ndindex(found.shape):
        assert found[i, j] == matrix[i * m // min(m, rows), j * n // min(n, columns)]


@pytest.mark.parametrize("shape", [(100_000, 3), (3, 100_000), (1 << 20,)])
def test_large_ones_are_cut_to_size(shape):
    array = np.arange(np.prod(shape), dtype="f8").reshape(shape)
    found = sample(memoryview(array).cast("B"), info_of(array, "C"), 64, 64)
    assert max(found.shape) == 64
    assert np.all(np.diff(found, axis=1) > 0)
