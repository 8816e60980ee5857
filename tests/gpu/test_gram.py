"""Sums of squares from Gram matrices on the device: to the last place where they are kept, the product's elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from host_products import array, on_device

from gemmserve_kernels import GemmConfig, GemmReduceProblem, Operand, gemm_reduce, plan
from gemmserve_kernels.algorithms.gram.gemm_reduce import supports
from gemmserve_kernels.algorithms.gram.plan import ACCURACY
from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_kernels.numerics.reference import oracle_gemm_reduce

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

ROUNDED = 2.0**-24 + ACCURACY
GRAM = GemmConfig(algorithm="gram")


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def problem_of(a, b, **options):
    found = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce="sumsq", **options)
    if reason := supports(found, DeviceSpec.current()):
        pytest.skip(reason)
    return found


def check(a, b, **options):
    problem = problem_of(a, b, **options)
    options = {"config": GRAM} | options
    found = gemm_reduce(on_device(a), on_device(b), reduce="sumsq", **options).get()
    exact = oracle_gemm_reduce(problem, a, b)["sumsq"]
    assert (np.abs(found - exact) <= ROUNDED * exact).all(), np.abs(found / exact - 1).max()
    again = gemm_reduce(on_device(a), on_device(b), reduce="sumsq", **options).get()
    assert again.tobytes() == found.tobytes()
    return found


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
def test_every_dtype_and_axis(rng, dtype, axis):
    check(array(rng, (3, 700, 70), dtype), array(rng, (3, 70, 900), dtype), axis=axis, alpha=2)


@pytest.mark.parametrize("instruction_k", [None, 4, 8])
@pytest.mark.parametrize("k", [1, 7, 32, 33, 64, 65, 200])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_tiles_and_instructions(rng, dtype, k, instruction_k):
    config = GemmConfig(algorithm="gram", instruction_k=instruction_k)
    check(array(rng, (5000, k), dtype), array(rng, (k, 333), dtype), config=config)


@pytest.mark.parametrize("trans_b", "NTCR")
@pytest.mark.parametrize("trans_a", "NTCR")
def test_operations(rng, trans_a, trans_b):
    a, b = array(rng, (64, 64), "c8"), array(rng, (64, 64), "c8")
    for axis in "mn":
        check(a, b, trans_a=trans_a, trans_b=trans_b, alpha=1 - 2j, axis=axis)


@pytest.mark.parametrize("view", ["F", "gaps", "reversed", "broadcast"])
def test_strides_and_layouts(rng, view):
    check(array(rng, (3, 300, 40), "c8", view), array(rng, (3, 40, 200), "c8", view))
    check(array(rng, (2, 3, 300, 40), "f4"), array(rng, (2, 40, 200), "f4"), layout="planar", axis="n")
    check(array(rng, (300, 40), "f4"), array(rng, (40, 200), "c8"))


def test_a_batch_in_turns(rng):
    """Gram matrices of 150 MB in all."""
    check(array(rng, (600, 1200, 64), "c8"), array(rng, (600, 64, 5), "c8"))


def test_auto_takes_it_where_it_pays_and_is_as_accurate_as_the_product(rng):
    a, b = array(rng, (2, 65536, 64), "c8"), array(rng, (2, 64, 4096), "c8")
    problem = problem_of(a, b)
    spec = DeviceSpec.current()
    if plan(problem, spec).algorithm != "gram":
        pytest.skip(f"nothing is gained by it on {spec.name}")
    b = b[..., :40].copy()  # as the oracle can afford
    exact = oracle_gemm_reduce(problem_of(a, b), a, b)["sumsq"]
    errors = {}
    for name in ("gram", "product"):
        found = gemm_reduce(on_device(a), on_device(b), reduce="sumsq", config=GemmConfig(algorithm=name)).get()
        errors[name] = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert errors["gram"] <= 2.0**-24
    assert errors["gram"] <= 1.1 * errors["product"]


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"]], ids=",".join)
def test_cancellation_is_left_to_the_product(rng, dtype, axis):
    a, b = array(rng, (2, 3000, 40), dtype), array(rng, (2, 40, 400), dtype)
    a[..., 1] = a[..., 0] * np.float32(1 + 2.0**-20)
    columns = [7, 31, 32, 333]
    b[..., columns] = 0
    b[..., 0, columns], b[..., 1, columns] = 1, -1
    if "n" in axis:
        a, b = b.swapaxes(-1, -2), a.swapaxes(-1, -2)
    exact = oracle_gemm_reduce(problem_of(a, b, axis=axis), a, b)["sumsq"]
    found = gemm_reduce(on_device(a), on_device(b), reduce="sumsq", axis=axis, config=GRAM).get()
    # float32 holds every product here, and subtracts neighbours without an error.
    assert (np.abs(found - exact) <= 4e-6 * exact).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("axis", ["m", "n"])
def test_not_finite(rng, axis, value):
    for side in range(2):
        a, b = array(rng, (3, 400, 9), "f4"), array(rng, (3, 9, 500), "f4")
        problem_of(a, b)
        a[:, 4], b[:, :, 6] = 0, 0
        (a if side == 0 else b)[1, 3, 2] = value
        results = [
            gemm_reduce(on_device(a), on_device(b), reduce="sumsq", axis=axis, config=config).get()
            for config in (GRAM, GemmConfig(algorithm="simt"))
        ]
        np.testing.assert_array_equal(np.isnan(results[0]), np.isnan(results[1]))
        np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def test_beside_sums(rng):
    a, b = array(rng, (3000, 50), "c8"), array(rng, (50, 700), "c8")
    problem_of(a, b)
    found = gemm_reduce(on_device(a), on_device(b), reduce=["sum", "sumsq", "mean"], config=GRAM)
    product = a.astype("c16") @ b
    np.testing.assert_allclose(found["sumsq"].get(), (np.abs(product) ** 2).sum(0), rtol=2e-7)
    np.testing.assert_allclose(found["mean"].get() * 3000, product.sum(0), atol=1e-4)
    np.testing.assert_allclose(found["sum"].get(), product.sum(0), atol=1e-4)
