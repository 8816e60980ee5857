"""Pictures: PNG files that hold the magnitudes, whatever the numbers are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from png import levels

from gemmserve._handles.picture import magnitudes


def test_levels_are_magnitudes():
    found = levels(magnitudes(np.array([[0, 3 + 4j, -10], [2.5, 10j, 5]])))
    assert found.tolist() == [[0, 127, 254], [63, 254, 127]]


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128", "int64"])
def test_nothing_but_zeros_is_dark(dtype):
    assert not levels(magnitudes(np.zeros((3, 2), dtype))).any()


def test_what_is_not_finite():
    found = levels(magnitudes(np.array([[np.nan, np.inf], [1.0, 0.5]])))
    assert found.tolist() == [[255, 254], [254, 127]]
    assert levels(magnitudes(np.array([[np.inf, np.nan, 0.0]]))).tolist() == [[254, 255, 0]]


@given(
    arrays.arrays(
        st.sampled_from(["float16", "float64", "complex64", "complex128", "int64"]),
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=8),
    )
)
def test_any_numbers_give_a_picture(sample):
    found = levels(magnitudes(sample))
    assert found.shape == sample.shape
    assert np.array_equal(found == 255, np.isnan(sample))
