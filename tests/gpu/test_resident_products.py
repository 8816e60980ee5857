"""Products of copies that a worker's device has, several under way, with the bits of the long way."""

from __future__ import annotations

import numpy as np
import pytest
from express_backend import express_backend

from gemmserve_service.executor.protocol import Kind
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.schemas import GemmParams, GemmReduceParams

pytestmark = pytest.mark.gpu

ROUNDS = 4


@pytest.fixture(scope="module")
def backend():
    return express_backend()


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


def test_c_and_reductions(backend):
    n, dtype = 512, "complex64"
    rng = np.random.default_rng(1)
    arrays = {name: (rng.standard_normal((n, n)) + 1j).astype(dtype) for name in "abc"}
    arrays["a"][3, 5] = np.nan
    operands = {name: HostArray(array, f"more-{name}") for name, array in arrays.items()}
    square, line = Kind(dtype=dtype, shape=(n, n), order="C"), Kind(dtype="float32", shape=(n,), order="C")
    cases = [
        (GemmParams(alpha=2, beta=0.5j), ("a", "b", "c"), {"d": square}),
        (GemmReduceParams(reduce="absmax", axis="m"), ("a", "b"), {"absmax": line}),
    ]
    for params, names, results in cases:
        given = {name: operands[name] for name in names}
        for _ in range(2):
            expected = {name: np.zeros(kind.shape, kind.dtype) for name, kind in results.items()}
            backend.run(params, given, expected)
        products = backend.resident(params, dict.fromkeys(names, square), results)
        there = products.resident([operand.cache_id for operand in given.values()])
        begun = [products.begin(there) for _ in range(ROUNDS)]
        for product in begun:
            product.finish()
            for name, array in expected.items():
                np.testing.assert_array_equal(product.made[name].get(), array)
