"""float16 planes by MFMA on the CPU shim: pre-pass on waves of 64 lanes, product, fallback, reductions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reduce_cases
from kernel_models import mfma as model
from kernel_models.splits import split
from mma_cases import planes_of
from simt_cases import ShimMachine, random
from simt_shim import ShimLauncher

from gemmserve_kernels.algorithms.mfma import gemm as mfma
from gemmserve_kernels.algorithms.splits import gemm as planes
from gemmserve_kernels.algorithms.splits import gemm_reduce as planes_reduce
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

SMALL = GemmConfig(algorithm="mfma", block_m=64, block_n=32, warp_m=32, warp_n=32)
M, N, K = 70, 44, 100
CLASS = {"3xfp16": 4e-7, "tf32": 5e-4}
"""Relative Frobenius error of normal data."""


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(KNOWN["MI300X"], optimize="-O0"))


def run(machine, compute, a, b, c=None, *, order="C", **options):
    problem = GemmProblem.build(*(None if x is None else Operand.of(x) for x in (a, b, c)), compute=compute, **options)
    out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype, order=order))
    held = [None if x is None else machine.put(x) for x in (a, b, c)]
    planes.run_gemm(machine.launcher, problem, SMALL, *held, out)
    return problem, machine.get(out)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("compute", ["3xfp16", "tf32"])
def test_products(machine, dtype, compute):
    """Rows of very different sizes, a batch that shares B, alpha and beta, a tail in every direction."""
    a, b, c = random(1, dtype, 2, M, K), random(2, dtype, K, N), random(3, dtype, 2, M, N)
    a[:, 3] *= 1e-30
    b[:, 5] *= 1e20
    problem, result = run(machine, compute, a, b, c, trans_a="R", alpha=2, beta=-1)
    assert machine.launcher.launches == ["split_clear", "split", "mfma_gemm", "fallback"]
    expected = reference.oracle_gemm(problem, a, b, c)
    norms = np.linalg.norm(a.astype("c16"), axis=-1), np.linalg.norm(b.astype("c16"), axis=0)
    size = 2 * norms[0][..., None] * norms[1] + np.abs(c)
    assert (np.abs(result - expected) <= 4 * CLASS[compute] * size).all()


def test_operands_across_k_into_columns(machine):
    a, b = random(1, "float32", K, M), random(2, "float32", N, K)
    problem, result = run(machine, "3xfp16", a, b, trans_a="T", trans_b="T", order="F")
    errors = reference.errors(result, reference.oracle_gemm(problem, a, b, None))
    assert errors.rel_fro <= CLASS["3xfp16"]


def test_what_is_not_finite_is_plain_float32(machine):
    a, b = random(1, "complex64", M, K), random(2, "complex64", K, N)
    a[5, 7], a[9, 11], b[3, 4] = np.inf, complex(np.nan, 1), complex(0, -np.inf)
    _, result = run(machine, "3xfp16", a, b)
    plain = np.zeros_like(result)
    with np.errstate(all="ignore"):
        for x, y in zip(a.T, b, strict=True):
            plain.real += np.outer(x.real, y.real)
            plain.real -= np.outer(x.imag, y.imag)
            plain.imag += np.outer(x.real, y.imag)
            plain.imag += np.outer(x.imag, y.real)
    for ours, theirs in ((result.real, plain.real), (result.imag, plain.imag)):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_array_equal(np.isinf(ours), np.isinf(theirs))
    others = np.isfinite(plain)
    np.testing.assert_allclose(result[others], plain[others], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("scheme", ["3xfp16", "1xfp16"])
def test_the_models_bits(machine, dtype, scheme):
    a, b = random(1, dtype, M, K), random(2, dtype, K, N)
    _, result = run(machine, "3xfp16" if scheme == "3xfp16" else "tf32", a, b)
    left, right = split(a, scheme, "a"), split(np.ascontiguousarray(b.T), scheme, "b")
    found = model.multiply(left.planes, right.planes, scheme)
    scale = np.exp2((left.exponents[:, None] + right.exponents).astype(np.float32))
    np.testing.assert_array_equal(result, found * scale)


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_reductions(machine, dtype, axis):
    a, b = random(1, dtype, 3, M, K), random(2, dtype, K, N)
    names = reduce_cases.COMPLEX if dtype == "complex64" else reduce_cases.REAL
    a[1, 4, 5] = 0
    options = {"reduce": list(names), "axis": axis, "alpha": 2, "return_c": True, "compute": "3xfp16"}
    reduce_cases.check(machine, planes_reduce.run_gemm_reduce, a, b, config=SMALL, **options)


def test_reductions_of_what_is_flagged(machine):
    """The partials of a product with an infinity are replaced by plain float32's, whatever the number of tiles."""
    a, b = np.abs(random(1, "float32", 150, K)) + 1, np.abs(random(2, "float32", K, N)) + 1
    a[130, 3] = np.inf
    options = {"reduce": ["max", "argmax", "min"], "compute": "3xfp16", "config": SMALL}
    _, found = reduce_cases.run(machine, planes_reduce.run_gemm_reduce, a, b, **options)
    assert np.isinf(found["max"]).all()
    assert (found["argmax"] == 130).all()
    plain = np.delete(a.astype(np.float64), 130, 0) @ b.astype(np.float64)
    np.testing.assert_allclose(found["min"], plain.min(0), rtol=1e-5)


def test_every_access_is_inside_and_ordered():
    """Bounds, races and reads of shared memory that nothing wrote, of the product alone."""
    machine = ShimMachine(ShimLauncher(KNOWN["MI300X"], checked=True))
    a, b = random(1, "float32", 1, 35, 70), random(2, "float32", 1, 41, 70)
    problem = GemmProblem.build(Operand.of(a[0]), Operand.of(b[0].T), compute="3xfp16")
    left, right = (planes_of(machine, x, "3xfp16", side) for x, side in ((a, "a"), (b, "b")))
    out = machine.put(np.full((35, 41), np.nan, "f4"))
    tile = mfma.resolve_planes(SMALL, problem, "3xfp16", machine.launcher.spec)
    mfma.multiply(machine.launcher, problem, tile, left, right, None, out)
    errors = reference.errors(machine.get(out), reference.oracle_gemm(problem, a[0], b[0].T, None))
    assert errors.rel_fro <= CLASS["3xfp16"]


def test_supports():
    problem = GemmProblem.build(
        Operand.contiguous((8, 8), np.dtype("f4")), Operand.contiguous((8, 8), np.dtype("f4")), compute="3xfp16"
    )
    assert planes.supports(problem, KNOWN["MI300X"]) is None
    assert planes.supports(problem, KNOWN["MI355X"]) is None
    assert "subnormal" in planes.supports(problem, KNOWN["MI250X"])
    assert planes.supports(problem, KNOWN["RX7900XTX"]) is None
    assert "3m" in mfma.supports_planes(problem, "3xfp16-3m", KNOWN["MI300X"])
    double = dataclasses.replace(problem, dtype=np.dtype("f8"))
    assert "float64" in mfma.supports_planes(double, "3xfp16", KNOWN["MI300X"])
