"""All of a product on a Hopper GPU that the CPU shim plays: split, balance, wgmma and fallback, as `auto` runs them."""

from __future__ import annotations

import numpy as np
import pytest
from simt_cases import ShimMachine, random
from simt_shim import Order, ShimLauncher

from gemmserve_kernels import reference
from gemmserve_kernels.config import GemmConfig
from gemmserve_kernels.device import KNOWN
from gemmserve_kernels.planes import gemm as planes
from gemmserve_kernels.problem import GemmProblem, Operand

M, N, K = 66, 67, 130
WGMMA = GemmConfig(algorithm="wgmma")


def run(a, b, c=None, **options):
    """The problem, and its result from memory that was full of NaN."""
    machine = ShimMachine(ShimLauncher(KNOWN["H200"], order=Order("shuffled", 4), optimize="-O0"))
    operands = [Operand.of(x) if x is not None else None for x in (a, b, c)]
    problem = GemmProblem.build(*operands, compute="auto", **options)
    out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype))
    on = [machine.put(x) if x is not None else None for x in (a, b, c)]
    planes.run_gemm(machine.launcher, problem, WGMMA, *on, out)
    assert "wgmma_gemm" in machine.launcher.launches
    return problem, machine.get(out)


def by_parts(x):
    """Real and imaginary part; of real data the number twice."""
    return (x.real, x.imag) if x.dtype.kind == "c" else (x, x)


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_batches_scalars_and_c(dtype):
    a, b, c = random(1, dtype, 2, M, K), random(2, dtype, K, N), random(3, dtype, M, 1)
    problem, d = run(a, b, c, alpha=2, beta=-1)
    found = reference.errors(d, reference.oracle_gemm(problem, a, b, c))
    assert max(found.rel_real, found.rel_imag) <= 2e-7


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_grading_along_k(dtype):
    grade = 2.0 ** (40 * np.arange(K) / K)
    a, b = (random(1, dtype, M, K) * grade).astype(dtype), (random(2, dtype, K, N) / grade[:, None]).astype(dtype)
    problem, d = run(a, b)
    found = reference.errors(d, reference.oracle_gemm(problem, a, b))
    assert max(found.rel_real, found.rel_imag) <= 2e-7


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_what_is_not_finite_and_the_ends_of_the_range(dtype):
    a, b = random(1, dtype, M, K), random(2, dtype, K, N)
    a[3, 5], a[7, 7], b[9, 11] = np.nan, np.inf, -np.inf
    a[21] *= 1e-42
    a[22], b[:, 22] = a[22] * np.float32(1e36), b[:, 22] * np.float32(1e-36)
    _, d = run(a, b)
    plain = np.zeros_like(d)
    with np.errstate(all="ignore"):
        for x, y in zip(a.T, b, strict=True):
            if dtype == "float32":
                plain += np.outer(x, y)
                continue
            plain.real += np.outer(x.real, y.real)
            plain.real -= np.outer(x.imag, y.imag)
            plain.imag += np.outer(x.real, y.imag)
            plain.imag += np.outer(x.imag, y.real)
    for ours, theirs in zip(by_parts(d), by_parts(plain), strict=True):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_array_equal(ours[np.isinf(theirs)], theirs[np.isinf(theirs)])
        finite = np.isfinite(theirs)
        assert np.isfinite(ours[finite]).all()
    keep = np.delete(np.arange(M), [3, 7]), np.delete(np.arange(N), [11])
    left, right = a[keep[0]].astype(complex), b[:, keep[1]].astype(complex)
    limit = 1e-6 * (np.abs(left) @ np.abs(right)) + 1e-44  # a few subnormal steps
    assert (np.abs(d[np.ix_(*keep)] - left @ right) <= limit).all()


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_small_integers_are_exact(dtype):
    rng = np.random.default_rng(1)

    def whole(*shape):
        x = rng.integers(-20, 21, shape) + (1j * rng.integers(-20, 21, shape) if dtype == "complex64" else 0)
        return x.astype(dtype)

    a, b = whole(M, K), whole(K, N)
    _, d = run(a, b)
    np.testing.assert_array_equal(d, a.astype(complex) @ b.astype(complex))
