"""Checks of the fused kernel, shared by the CPU shim and the device."""

from __future__ import annotations

import dataclasses

import numpy as np
from simt_cases import COMPLEX_ALPHA, Gemm, random, strided

from gemmserve_kernels.algorithms.fused import gemm as fused
from gemmserve_kernels.bench.kinds import KINDS, operands
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

TILES = {"64 x 64": GemmConfig(block_m=64), "128 x 64": GemmConfig(block_m=128)}
U = 2.0**-24
"""The unit roundoff of float32."""


def run(machine, a, b, c=None, *, config=None, out="plain", **options):
    """The problem, and its result on the host, from memory full of NaN."""
    config = dataclasses.replace(config or GemmConfig(), algorithm="fused")
    operands = [None if array is None else Operand.of(array) for array in (a, b, c)]
    problem = GemmProblem.build(*operands, config=config, **options)
    assert fused.supports(problem, machine.launcher.spec) is None
    into = machine.put(strided(np.full(problem.result_shape, np.nan, problem.result_dtype), out))
    on = [None if array is None else machine.put(array) for array in (a, b, c)]
    fused.run_gemm(machine.launcher, problem, config, *on, into)
    return problem, machine.get(into)


def elementwise(a, b, result):
    """The largest |D - R| / (|A| |B|) of `result` = a @ b: by moduli, and of each part against what it is a sum of, in
    units of U. Where nothing is added up, the result is 0.
    """
    parts = [np.asarray(x, np.longdouble) for x in (a.real, a.imag, b.real, b.imag)]
    sums = [np.matmul(parts[i], parts[2 + j]) for i, j in ((0, 0), (1, 1), (0, 1), (1, 0))]
    sizes = [np.matmul(np.abs(parts[i]), np.abs(parts[2 + j])) for i, j in ((0, 0), (1, 1), (0, 1), (1, 0))]
    worst = 0.0
    exact = sums[0] - sums[1], sums[2] + sums[3]
    for got, right, size in zip(
        (result.real, result.imag), exact, (sizes[0] + sizes[1], sizes[2] + sizes[3]), strict=True
    ):
        difference = np.abs(np.asarray(got, np.longdouble) - right)
        assert (difference[size == 0] == 0).all()
        worst = max(worst, float((difference[size > 0] / size[size > 0]).max(initial=0)))
    return worst / U


def plain(a, b):
    """a @ b in float32, one multiply-add after the other, as (re, im), or real."""
    dtype = np.result_type(a, b)
    a, b = a.astype(dtype), b.astype(dtype)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    found = np.zeros(shape, dtype)
    with np.errstate(all="ignore"):
        for k in range(a.shape[-1]):
            x, y = a[..., :, k, None], b[..., None, k, :]
            found.real += x.real * y.real
            if dtype.kind != "c":
                continue
            found.real -= x.imag * y.imag
            found.imag += x.real * y.imag
            found.imag += x.imag * y.real
    return found


def check_elements(machine, a, b, **options):
    """Every element is as near to the exact one as plain float32's, or within 4 U."""
    _, result = run(machine, a, b, **options)
    assert elementwise(a, b, result) <= max(4.0, 2 * elementwise(a, b, plain(a, b)))
    return result


def check_case(machine, case, config=None):
    """Every element within the a-priori bound of the reference in higher precision."""
    a, b, c = case.operands()
    problem, result = run(machine, a, b, c, config=config, out=case.out, **case.options)
    expected = reference.oracle_gemm(problem, a, b, c)
    assert result.shape == problem.result_shape
    difference = reference.logical(problem, result) - expected
    bound = reference.bound(problem, a, b, c)
    assert (np.abs(difference.real) <= bound).all()
    assert (np.abs(difference.imag) <= bound).all()


def check_same_bits(machine, other, a, b, c=None, *, config=None, **options):
    """Clusters on `machine` give every bit that tiles of 64 x 64 give on `other`; NaN may be any. Return the result."""
    config = config or GemmConfig()
    plain_tile = dataclasses.replace(config, block_m=64, split_k=1, stages=None)
    _, expected = run(other, a, b, c, config=plain_tile, **options)
    _, result = run(machine, a, b, c, config=dataclasses.replace(config, cluster=2), **options)
    ours, theirs = (np.ascontiguousarray(x).view(np.float32) for x in (result, expected))
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    there = ~np.isnan(theirs)
    np.testing.assert_array_equal(ours[there].view(np.uint32), theirs[there].view(np.uint32))
    return result


def product(m, n, k, batch=(), trans="NN", **options):
    """A batch of m x n x k products, stored as `trans` says."""
    a = (*batch, k, m) if trans[0] in "TC" else (*batch, m, k)
    b = (*batch, n, k) if trans[1] in "TC" else (*batch, k, n)
    more = {"trans_a": trans[0], "trans_b": trans[1], **options.pop("options", {})}
    return Gemm(a, b, options=more, **options)


CASES = {
    **{
        f"{m}x{n}x{k}": product(m, n, k)
        for m, n, k in (
            (64, 64, 64), (1, 1, 32), (33, 35, 33), (70, 130, 65), (64, 64, 200), (3, 100, 129), (100, 5, 48),
        )
    },
    **{
        f"{trans} {k}": product(36, 68, k, (2,), trans)
        for trans in ("NN", "TN", "NT", "TT", "CR", "RC", "CC", "CN", "NR")
        for k in (64, 70)
    },
    "odd lengths": product(65, 67, 71, (3,), "TN"),
    "complex alpha and beta": product(40, 50, 60, (2,), c=(2, 40, 50), options=COMPLEX_ALPHA),
    "c is a row": product(40, 50, 60, (2,), c=(1, 50), options=COMPLEX_ALPHA),
    **{
        f"strides {how_a}, {how_b}, {out}": product(40, 36, 66, (2,), strides=(how_a, how_b), out=out)
        for how_a, how_b, out in (
            ("fortran", "plain", "fortran"), ("gaps", "reversed", "gaps"), ("offset", "offset", "offset"),
            ("padded", "padded", "padded"), ("constant rows", "plain", "reversed"),
        )
    },
    "a for all": Gemm((40, 64), (3, 64, 36)),
    "b for all": Gemm((3, 40, 64), (64, 36)),
    "broadcast both ways": Gemm((2, 1, 34, 40), (3, 40, 33), (3, 34, 33), options=COMPLEX_ALPHA),
    "five batch axes": Gemm((2, 1, 2, 1, 2, 33, 34), (1, 2, 1, 2, 1, 34, 35), options={"trans_a": "R"}),
}  # fmt: skip


def real(case):
    """The same of float32."""
    options = {name: value.real if isinstance(value, complex) else value for name, value in case.options.items()}
    return dataclasses.replace(case, dtypes=("float32",), options=options)


REAL_CASES = {
    **{name: real(case) for name, case in CASES.items()},
    **{
        f"{trans} {k}, {how}": real(product(68, 36, k, (2,), trans, strides=(how, how)))
        for trans in ("NN", "TT")
        for k in (62, 84)  # rows that begin at multiples of 8 bytes, chunks of 40 and 44 steps
        for how in ("plain", "offset")
    },
}

WHOLE = GemmConfig(block_m=128, promote=64)
"""Sums leave the tensor core once for each chunk: of tall tiles, on request."""

SPLITS = {
    "two": (product(64, 70, 130, (2,)), GemmConfig(split_k=2)),
    "three, uneven": (product(66, 40, 300, c=(66, 40), options=COMPLEX_ALPHA), GemmConfig(split_k=3)),
    "six, two levels": (product(40, 40, 520, (2,)), GemmConfig(split_k=6)),
    "as chosen": (product(33, 34, 1000), None),
}
REAL_SPLITS = {name: (real(case), config) for name, (case, config) in SPLITS.items()}


def hostile(k=96):
    """Pairs of matrices that float16 planes do not serve, or that look as if they did not: by name."""
    rng = np.random.default_rng(5)

    def normal(*shape):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)

    a, b = normal(70, k), normal(k, 66)
    found = {"normal": (a, b)}
    found["rows and columns of any scale"] = (
        (a * 2.0 ** rng.integers(-40, 40, (70, 1))).astype(np.complex64),
        (b * 2.0 ** rng.integers(-20, 20, (1, 66))).astype(np.complex64),
    )
    found["spread out"] = tuple((x * np.exp(6 * rng.standard_normal(x.shape))).astype(np.complex64) for x in (a, b))
    spiky = a.copy()
    spiky[:, 7] *= 1e6
    faint = b.copy()
    faint[7] = 0
    found["spikes against nothing"] = (spiky, faint)
    grade = 2.0 ** (30 * np.arange(k) / k)
    found["graded along k"] = ((a * grade).astype(np.complex64), (b / grade[:, None]).astype(np.complex64))
    found["sparse"] = tuple(np.where(rng.random(x.shape) < 0.05, x, 0).astype(np.complex64) for x in (a, b))
    found["identity"] = (np.eye(70, k, dtype=np.complex64), b)
    found["positive"] = tuple((np.abs(x.real) + 1j * np.abs(x.imag)).astype(np.complex64) for x in (a, b))
    found["imaginary parts that cancel"] = (a, np.concatenate([b[: k // 2], -b[: k // 2].conj()]).astype(np.complex64))
    found["real"] = (a.real.astype(np.complex64), b.real.astype(np.complex64))
    found["imaginary by real"] = ((1j * a.real).astype(np.complex64), b.real.astype(np.complex64))
    found["faint imaginary parts"] = tuple((x.real + 1e-9j * x.imag).astype(np.complex64) for x in (a, b))
    found["a faint imaginary part"] = ((a.real + 1e-9j * a.imag).astype(np.complex64), b)
    found["phases"] = tuple(
        np.exp(2j * np.pi * np.outer(np.arange(m), np.arange(n)) / k).astype(np.complex64)
        for m, n in ((70, k), (k, 66))
    )
    found["nothing"] = (np.zeros_like(a), b)
    found["small integers"] = tuple(np.rint(3 * x).astype(np.complex64) for x in (a, b))
    found["one step large"] = (np.where(np.arange(k) == k - 1, 1, 1e-4 * a).astype(np.complex64), b)
    found["tiny"] = ((a * 1e-30).astype(np.complex64), b)
    found["tiny by huge"] = ((a * 1e-30).astype(np.complex64), (b * 1e33).astype(np.complex64))
    return found


HOSTILE = hostile()
SERVED = {
    "normal", "rows and columns of any scale", "positive", "imaginary parts that cancel", "real", "imaginary by real",
    "a faint imaginary part", "nothing", "small integers",
}  # fmt: skip
"""Those that planes must serve."""
REAL_HOSTILE = {
    name: (np.ascontiguousarray(a.real), np.ascontiguousarray(b.real))
    for name, (a, b) in HOSTILE.items()
    if "imaginary" not in name and name != "real"
}
REAL_SERVED = {"normal", "rows and columns of any scale", "positive", "nothing"}
"""Those that planes must serve: of small integers an eighth are zeros."""


def one_sign(shape, seed, dtype="complex64"):
    """Numbers of which all parts are positive."""
    rng = np.random.default_rng(seed)
    found = rng.random(shape)
    return np.asarray(found + 1j * rng.random(shape) if dtype == "complex64" else found, dtype)


def check_long_promotion(machine, config, k, dtype="complex64"):
    """Sums of 32 steps of numbers of one sign (real ones: 64) are no worse than plain float32's, those of half as many
    are better.
    """
    a, b = one_sign((70, k), 11, dtype), one_sign((k, 66), 12, dtype)
    most = 32 if dtype == "complex64" else 64
    long, short = (
        elementwise(a, b, run(machine, a, b, config=dataclasses.replace(config, promote=promote))[1])
        for promote in (most, most // 2)
    )
    assert short < long <= elementwise(a, b, plain(a, b))


def check_dominant_term(machine, config=None, shape=(64, 64, 64), dtype="complex64"):
    """Sums that one term dominates are beyond the rule of all other data, and within the bound of their kind."""
    pairs = [operands(np, "dominant-term", *shape, dtype, seed) for seed in (1, 2, 3)]
    a, b = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
    _, result = run(machine, a, b, config=config)
    assert machine.launcher.counts().plain == 0
    rule = max(4.0, 2 * elementwise(a, b, plain(a, b)))
    assert rule < elementwise(a, b, result) <= KINDS["dominant-term"].bound


def check_not_finite(machine, config=None, dtype="complex64"):
    """Infinities, NaN and what overflows are what plain float32 makes of them; all other elements are not disturbed."""
    a, b = random(1, dtype, 70, 100), random(2, dtype, 100, 80)
    if dtype == "float32":
        a = np.abs(a)  # sums that overflow do so in any order
    a[5, 3], a[6, 9], b[50, 7] = np.inf, np.nan, complex(0, -np.inf) if dtype == "complex64" else -np.inf
    a[8], b[:, 9] = 0, 1e38
    a[9] = 1e38
    _, result = run(machine, a, b, config=config)
    right = plain(a, b)
    for ours, theirs in ((result.real, right.real), (result.imag, right.imag)):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
    rows, columns = [i for i in range(70) if i not in (5, 6, 9)], [j for j in range(80) if j not in (7, 9)]
    assert elementwise(a[rows], b[:, columns], result[np.ix_(rows, columns)]) <= 8
