"""Products of copies that a worker's device has, several under way, with the bits of the long way."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_service.executor.protocol import Kind
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.cuda.backend import CupyBackend
from gemmserve_service.schemas import GemmParams

pytestmark = pytest.mark.gpu

ROUNDS = 4


@pytest.fixture(scope="module")
def backend():
    cupy = pytest.importorskip("cupy")
    made = CupyBackend("rocm" if cupy.cuda.runtime.is_hip else "cuda", 0, 0.1)
    made.enter(express=True)
    return made


@pytest.mark.parametrize("n", [200, 512, 1024])
@pytest.mark.parametrize("dtype", ["complex64", "float64"])
def test_the_bits_are_those_of_the_long_way(backend, n, dtype):
    rng = np.random.default_rng(n)
    params = GemmParams(trans_b="C", alpha=2)
    arrays = {name: rng.standard_normal((n, n)).astype(dtype) for name in "abcd"}
    operands = {name: HostArray(array, f"{dtype}-{n}-{name}") for name, array in arrays.items()}
    kind = Kind(dtype=dtype, shape=(n, n), order="C")
    products = backend.resident(params, {"a": kind, "b": kind}, {"d": kind})
    assert products is not None
    pairs = [("a", "b"), ("c", "d"), ("a", "d"), ("c", "b")]
    expected = []
    for left, right in pairs:  # each twice, so that what is prepared of them is there
        for _ in range(2):
            out = np.zeros_like(arrays[left])
            backend.run(params, {"a": operands[left], "b": operands[right]}, {"d": out})
        expected.append(out)
    begun = []
    for _ in range(ROUNDS):
        for left, right in pairs:
            there = products.resident([operands[left].cache_id, operands[right].cache_id])
            assert there is not None
            begun.append(products.begin(there))
    for number, product in enumerate(begun):
        timings, counted = product.finish()
        assert product.over
        assert 0 < timings.kernel_s < 1
        assert counted is None or counted.planned + counted.wide + counted.plain == n * n
        np.testing.assert_array_equal(product.made["d"].get(), expected[number % len(pairs)])
