"""Threads of the BLAS by the size of a product."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_service.executor.worker.host.blas import BlasThreads, flops_per_call
from gemmserve_service.schemas import GemmParams, GemmReduceParams


@pytest.fixture
def threads():
    """A BLAS of sixteen threads that notes what it is told."""
    found = BlasThreads()
    found.most, found.told = 16, []
    found._set = found.told.append
    return found


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "dtype", "params", "flops"),
    [
        ((64, 32), (32, 16), "c8", GemmParams(), 8 * 64 * 32 * 16),
        ((32, 64), (32, 16), "f4", GemmParams(trans_a="T"), 2 * 64 * 32 * 16),
        ((5, 64, 32), (5, 32, 16), "f8", GemmParams(), 2 * 64 * 32 * 16),  # one call each
        ((5, 64, 32), (32, 16), "f8", GemmReduceParams(), 5 * 2 * 64 * 32 * 16),  # one call for all
        ((2, 64, 32), (2, 32, 16), "f4", GemmParams(layout="planar"), 8 * 64 * 32 * 16),
        ((64, 0), (0, 16), "f4", GemmParams(), 0),
        ((0, 32), (32, 16), "f4", GemmParams(), 0),
    ],
)
def test_operations_of_one_call(shape_a, shape_b, dtype, params, flops):
    assert flops_per_call(params, np.zeros(shape_a, dtype), np.zeros(shape_b, dtype)) == flops


@pytest.mark.parametrize(("n", "expected"), [(8, 1), (256, 2), (512, 16), (4096, 16)])
def test_a_small_product_gets_few_threads_and_a_large_one_all(threads, n, expected):
    with threads.limited(8 * n**3) as given:
        assert given == expected
    assert threads.told == ([expected, 16] if expected < 16 else [])


def test_the_count_comes_back_after_an_error(threads):
    with pytest.raises(MemoryError), threads.limited(1):
        raise MemoryError
    assert threads.told == [1, 16]


def test_numpy_s_own_openblas_is_found():
    if "openblas" not in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]:
        pytest.skip("this NumPy has another BLAS")
    threads = BlasThreads()
    assert threads._set is not None
    assert threads.most >= 1
