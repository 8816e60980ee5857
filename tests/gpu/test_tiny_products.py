"""Tiny products of a worker, from memory of the host and from copies on the device, with the bits of the long way."""

from __future__ import annotations

import numpy as np
import pytest
from express_backend import express_backend

from gemmserve_kernels import Operand, plan
from gemmserve_service.executor.protocol import Kind
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.products import build
from gemmserve_service.schemas import Elements, GemmParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def backend():
    return express_backend()


def kind_of(array, order="C"):
    return Kind(dtype=array.dtype.name, shape=array.shape, order=order)


@pytest.mark.parametrize("n", [5, 16, 64, 200])
@pytest.mark.parametrize("dtype", ["complex64", "float64"])
def test_the_bits_are_those_of_the_long_way(backend, n, dtype):
    rng = np.random.default_rng(n)
    params = GemmParams(trans_b="C", alpha=2)
    pairs = [[rng.standard_normal((n, n)).astype(dtype) for _ in "ab"] for _ in range(3)]
    products = backend.tiny(params, dict.fromkeys("ab", kind_of(pairs[0][0])), {"d": kind_of(pairs[0][0])})
    assert products is not None
    given = {name: Operand.contiguous((n, n), dtype) for name in "ab"}
    plain = plan(build(params, given), backend.spec).arithmetic == "plain"
    for number, (a, b) in enumerate(pairs):
        expected = np.zeros_like(a)
        backend.run(params, {"a": HostArray(a), "b": HostArray(b)}, {"d": expected})
        assert np.linalg.norm(expected - 2 * a @ b.conj().T) <= 1e-5 * np.linalg.norm(expected)
        made, ids = [], [f"{dtype}-{n}-{number}-{side}" for side in "ab"]
        for name, array in zip(ids, (a, b), strict=True):
            backend.copies.load(HostArray(array, name))
        for operands in ([a, b], products.resident(ids), [products.resident(ids[:1])[0], b]):
            out = np.zeros_like(a)
            products.begin([x.reshape(-1).view(np.uint8) if isinstance(x, np.ndarray) else x for x in operands])
            products.store("d", out.reshape(-1).view(np.uint8))
            timings, counted = products.finish({"d": f"{ids[0]}-{len(made)}"})
            assert counted == (None if plain else Elements(planned=n * n))
            assert 0 < timings.kernel_s < 1
            assert 0 < timings.d2h_s < 1
            assert (timings.h2d_s > 0) == any(isinstance(x, np.ndarray) for x in operands)
            made.append(out)
            np.testing.assert_array_equal(backend.copies.resident.peek(f"{ids[0]}-{len(made) - 1}").get(), expected)
        for out in made:
            np.testing.assert_array_equal(out, expected)
