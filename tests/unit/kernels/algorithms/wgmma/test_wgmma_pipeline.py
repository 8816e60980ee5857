"""All of a product on a Hopper GPU that the CPU shim plays: pre-pass, wgmma, the wide way, fallback."""

from __future__ import annotations

import numpy as np
import pytest
from fresh_rng import fresh_rng
from simt_cases import ShimMachine, random
from simt_shim import Order, ShimLauncher

from gemmserve_kernels.algorithms.splits import gemm as planes
from gemmserve_kernels.bench.kinds import KINDS, operands
from gemmserve_kernels.device.element_counts import ElementCounts
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

M, N, K = 66, 67, 130
WGMMA = GemmConfig(algorithm="wgmma")


def run(a, b, c=None, **options):
    """The problem, its result from memory that was full of NaN, and how its elements were computed."""
    machine = ShimMachine(ShimLauncher(KNOWN["H200"], order=Order("shuffled", 4), optimize="-O0"))
    operands = [Operand.of(x) if x is not None else None for x in (a, b, c)]
    problem = GemmProblem.build(*operands, compute="auto", **options)
    out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype))
    on = [machine.put(x) if x is not None else None for x in (a, b, c)]
    planes.run_gemm(machine.launcher, problem, WGMMA, *on, out)
    assert "wgmma_gemm" in machine.launcher.launches
    return problem, machine.get(out), machine.launcher.counts()


def by_parts(x):
    """Real and imaginary part; of real data the number twice."""
    return (x.real, x.imag) if x.dtype.kind == "c" else (x, x)


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_batches_scalars_and_c(dtype):
    a, b, c = random(1, dtype, 2, M, K), random(2, dtype, K, N), random(3, dtype, M, 1)
    problem, d, _ = run(a, b, c, alpha=2, beta=-1)
    found = reference.errors(d, reference.oracle_gemm(problem, a, b, c))
    assert max(found.rel_real, found.rel_imag) <= 2e-7


def worst(d, a, b):
    """The largest elementwise error of a part, each against its own sums of magnitudes, in units of 2**-24."""
    if a.dtype.kind != "c":
        size, found = [np.abs(a).astype(float) @ np.abs(b).astype(float)], [d - a.astype(float) @ b]
    else:
        ar, ai, br, bi = (np.abs(x).astype(float) for x in (a.real, a.imag, b.real, b.imag))
        wide = d - a.astype(complex) @ b
        size, found = [ar @ br + ai @ bi, ar @ bi + ai @ br], [wide.real, wide.imag]
    return max(float((np.abs(e)[s > 0] / s[s > 0]).max(initial=0) * 2**24) for s, e in zip(size, found, strict=True))


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_a_dominant_term_keeps_its_bound(dtype):
    """Beyond the rule of all other data, by the planned way."""
    a, b = operands(np, "dominant-term", M, N, 64, dtype, 1)
    _, d, counts = run(a, b)
    assert counts.planned == d.size
    assert max(4.0, 2 * worst(a @ b, a, b)) < worst(d, a, b) <= KINDS["dominant-term"].bound


def spikes(rng, x):
    x = x * np.float32(1e-6)
    x[rng.random(x.shape) < 0.02] = 1e3
    return x


HOSTILE = {
    "heavy tails": lambda rng, x: x * np.exp(6 * rng.standard_normal(x.shape)),
    "spikes": spikes,
    "60 binades": lambda rng, x: x * np.exp2(rng.uniform(-30, 30, x.shape)),
    "sparse": lambda rng, x: x * (rng.random(x.shape) < 0.05),
    "the ends of the range": lambda rng, x: x * np.exp2(rng.uniform(-70, 60, x.shape)),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_hostile_data_go_the_wide_way(kind, dtype):
    rng = fresh_rng()
    a, b = (HOSTILE[kind](rng, random(s, dtype, *shape)).astype(dtype) for s, shape in ((1, (M, K)), (2, (K, N))))
    _, d, counts = run(a, b)
    assert counts.planned == 0
    if kind != "the ends of the range":
        assert counts.plain == 0
    # Truncations of two units each, where one term is most of the sum, and the roundings of five promotions.
    assert worst(d, a, b) <= 12


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
@pytest.mark.parametrize("case", ["identity", "permutation", "scaled permutation", "gate"])
def test_products_of_one_term_are_exact(dtype, case):
    rng = fresh_rng()
    a = np.eye(K, dtype=dtype)[:M]
    if case != "identity":
        a = np.eye(K, dtype=dtype)[rng.permutation(K)[:M]]
    if case == "scaled permutation":
        a *= np.exp2(rng.integers(-20, 20, (M, 1))).astype(np.float32)
    b = (random(rng.integers(1 << 30), dtype, K, N) * np.exp(4 * rng.standard_normal((K, N)))).astype(dtype)
    if case == "gate":  # sums of two numbers of few bits
        a = np.kron(np.eye(K // 2), [[1, 1], [1, -1]]).astype(dtype)[:M]
        b = (np.round(64 * b / np.abs(b)) / 8).astype(dtype)
    _, d, _ = run(a, b)
    np.testing.assert_array_equal(d, a.astype(complex) @ b.astype(complex))


def test_a_tile_alone_goes_the_wide_way():
    a, b = random(1, "float32", 300, 70), random(2, "float32", 70, 280)
    a[280, 1], b[3, 7] = 1e9, 1e9
    _, spiky, counts = run(a, b, c := random(3, "float32", 300, 280), alpha=2, beta=-1)
    assert worst((spiky + c) / 2, a, b) < 8
    served = 256 * (280 - 256)  # rows without the spike by columns without the other
    assert counts == ElementCounts(served, 300 * 280 - served, 0)
    a[280, 1], b[3, 7] = 1, 1
    _, plain, counts = run(a, b, c, alpha=2, beta=-1)
    assert counts == ElementCounts(300 * 280)
    np.testing.assert_array_equal(spiky[:256, 256:], plain[:256, 256:])


@pytest.mark.parametrize(
    "config", [{"split_k": 2}, {"split_k": 8}, {"cluster": 2, "block_m": 64, "block_n": 64}], ids=str
)
def test_tiles_of_every_shape(config):
    """k cut over a cluster or over grids, clusters that share operands: a bad row and a bad column."""
    a, b = random(1, "complex64", 280, 300), random(2, "complex64", 300, 260)
    a[3, 1] = 1e9
    b[:, 257] = 0
    b[3, 257], b[4, 257] = 2.0**60, 2.0**-50  # deep and sparse
    problem, machine = (
        GemmProblem.build(Operand.of(a), Operand.of(b)),
        ShimMachine(ShimLauncher(KNOWN["H200"], optimize="-O0")),
    )
    out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype))
    with np.errstate(all="ignore"):
        planes.run_gemm(
            machine.launcher,
            problem,
            GemmConfig(algorithm="wgmma", **config),
            machine.put(a),
            machine.put(b),
            out=out,
            c=None,
        )
        d = machine.get(out)
    # The column that is deep and sparse has been computed the wide way with its tiles, and then in double.
    served = 24 * 256
    assert machine.launcher.counts() == ElementCounts(served, 280 * 260 - served - 280, 280)
    assert worst(d, a, b) <= 8


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_grading_along_k(dtype):
    grade = 2.0 ** (40 * np.arange(K) / K)
    a, b = (random(1, dtype, M, K) * grade).astype(dtype), (random(2, dtype, K, N) / grade[:, None]).astype(dtype)
    problem, d, _ = run(a, b)
    found = reference.errors(d, reference.oracle_gemm(problem, a, b))
    assert max(found.rel_real, found.rel_imag) <= 2e-7


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_what_is_not_finite_and_the_ends_of_the_range(dtype):
    a, b = random(1, dtype, M, K), random(2, dtype, K, N)
    a[3, 5], a[7, 7], b[9, 11] = np.nan, np.inf, -np.inf
    a[21] *= 1e-42
    a[22], b[:, 22] = a[22] * np.float32(1e36), b[:, 22] * np.float32(1e-36)
    _, d, _ = run(a, b)
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
    _, d, _ = run(a, b)
    np.testing.assert_array_equal(d, a.astype(complex) @ b.astype(complex))
