"""Cases for the kernel for small products, shared by the CPU shim and the device."""

from __future__ import annotations

import numpy as np
from simt_cases import COMPLEX_ALPHA, Gemm, assert_within, random, strided

from gemmserve_kernels.algorithms.small import gemm as small
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand

TF32 = {"compute": "3xtf32"}
"""What puts products of complex64 on tensor cores."""


def run_small(machine, case, operands=None, config=None):
    """Runs `case` into an output full of NaN and returns (problem, a, b, c, result)."""
    a, b, c = operands or case.operands()
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), None if c is None else Operand.of(c), **case.options)
    out = machine.put(strided(np.full(problem.result_shape, np.nan, problem.result_dtype), case.out))
    held = [None if array is None else machine.put(array) for array in (a, b, c)]
    small.run_gemm(machine.launcher, problem, config, *held, out)
    return problem, a, b, c, machine.get(out)


def check_small(machine, case, config=None):
    """Every part of every element is within the a-priori bound of the higher-precision reference."""
    problem, a, b, c, result = run_small(machine, case, config=config)
    assert result.shape == problem.result_shape
    expected = reference.oracle_gemm(problem, a, b, c)
    assert_within(reference.logical(problem, result), expected, reference.bound(problem, a, b, c))


def check_non_finite_and_tiny(machine, options):
    """Infinities, NaN, overflow and numbers too small for two TF32 parts give what float32 gives."""
    a, b = (random(seed, "complex64", 30, 32, 32) for seed in (1, 2))
    a[3, 4, 5], b[7, 2, 3], a[8, 0, 0] = complex(np.inf, 1), complex(0, np.nan), complex(-np.inf, np.nan)
    a[5, 1, 1] = np.frombuffer(np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32), np.complex64)[0]  # NaN of all ones
    a[9] *= 1e-34
    b[9] *= 1e30
    a[10, 3], b[11], a[12, :, 7] = 1e-42, 0, 0
    case = product(32, 32, 32, (30,), options=options)
    result = run_small(machine, case, (a, b, None))[-1]
    with np.errstate(all="ignore"):
        parts = [x.astype(np.float64) for x in (a.real, a.imag, b.real, b.imag)]
        wide = parts[0] @ parts[2] - parts[1] @ parts[3], parts[0] @ parts[3] + parts[1] @ parts[2]
    for got, expected in zip((result.real, result.imag), wide, strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        infinite = np.isinf(expected)
        np.testing.assert_array_equal(got[infinite], expected[infinite])
    finite = np.array([i for i in range(30) if np.isfinite(result[i]).all()])
    problem = GemmProblem.build(Operand.of(a[finite]), Operand.of(b[finite]))
    expected = reference.oracle_gemm(problem, a[finite], b[finite])
    bound = reference.bound(problem, a[finite], b[finite])
    assert (np.abs((result[finite] - expected).real) <= bound).all()
    assert (np.abs((result[finite] - expected).imag) <= bound).all()


def product(m, n, k, batch, trans="NN", **options):
    """A batch of m x n x k products, stored as `trans` says."""
    a = (*batch, k, m) if trans[0] in "TC" else (*batch, m, k)
    b = (*batch, n, k) if trans[1] in "TC" else (*batch, k, n)
    more = {"trans_a": trans[0], "trans_b": trans[1], **options.pop("options", {})}
    return Gemm(a, b, options=more, **options)


SMALL_CASES = {
    # ---- extents
    **{
        f"{m}x{n}x{k}, {batch} {dtype}": product(m, n, k, (batch,), dtypes=(dtype,))
        for m, n, k, batch, dtype in (
            (1, 1, 1, 300, "complex64"),
            (2, 2, 2, 131, "complex64"),
            (2, 3, 5, 77, "complex64"),
            (3, 3, 3, 100, "float32"),
            (4, 4, 4, 50, "float16"),
            (5, 5, 5, 29, "complex128"),
            (7, 6, 5, 40, "float64"),
            (8, 8, 8, 33, "complex64"),
            (12, 12, 12, 9, "complex64"),
            (16, 16, 16, 9, "float32"),
            (1, 32, 7, 12, "complex64"),
            (32, 1, 32, 12, "float64"),
            (32, 32, 1, 5, "float32"),
            (31, 32, 29, 3, "complex64"),
            (24, 24, 24, 3, "complex64"),
            (32, 32, 32, 3, "float16"),
            (32, 32, 32, 2, "complex128"),
        )
    },
    "one product": product(6, 5, 4, ()),
    "empty batch": product(6, 5, 4, (0,)),
    # ---- operations
    **{f"{trans}": product(7, 9, 6, (11,), trans) for trans in ("NN", "TN", "NT", "TT", "CR", "RC", "CC", "RN", "NC")},
    **{
        f"{dtype} {trans}": product(8, 12, 16, (5,), trans, dtypes=(dtype,), c=(5, 8, 12), options=COMPLEX_ALPHA)
        for dtype, trans in (("complex64", "TN"), ("complex128", "NC"), ("complex64", "CT"))
    },
    "float32 TT with c": product(
        8, 12, 16, (5,), "TT", dtypes=("float32",), c=(5, 8, 12), options={"alpha": 1.5, "beta": -0.5}
    ),
    # ---- scalars and c
    "complex alpha and beta": product(5, 6, 7, (9,), c=(9, 5, 6), options=COMPLEX_ALPHA),
    "c is a row": product(5, 6, 7, (9,), c=(1, 6), options=COMPLEX_ALPHA),
    "c is one for all": product(8, 8, 4, (9,), c=(8, 8), options=COMPLEX_ALPHA),
    # ---- strides
    **{
        f"strides {how_a}, {how_b}, {out} {dtype}": product(
            8, 10, 6, (7,), dtypes=(dtype,), strides=(how_a, how_b), out=out
        )
        for dtype, how_a, how_b, out in (
            ("complex64", "fortran", "fortran", "fortran"),
            ("complex64", "reversed", "gaps", "reversed"),
            ("float32", "gaps", "reversed", "gaps"),
            ("complex64", "offset", "offset", "offset"),
            ("float16", "padded", "padded", "padded"),
            ("complex128", "constant rows", "plain", "fortran"),
            ("float64", "fortran", "constant rows", "gaps"),
        )
    },
    # ---- batches
    "a for all": Gemm((6, 5), (40, 5, 7)),
    "b for all": Gemm((40, 6, 8), (8, 4), dtypes=("float32",)),
    "broadcast both ways": Gemm((2, 1, 3, 7, 6), (4, 1, 6, 9), (4, 3, 7, 9), options=COMPLEX_ALPHA),
    "six batch axes": Gemm((2, 1, 2, 1, 2, 1, 5, 6), (1, 2, 1, 2, 1, 2, 6, 7), options={"trans_a": "R"}),
    # ---- types
    **{
        "x".join(dtypes): Gemm((8, 6, 11), (8, 11, 9), (8, 6, 9), dtypes, options={"beta": 1, "alpha": 2})
        for dtypes in (
            ("float32", "complex64", "float16"),
            ("float16", "float32", "float32"),
            ("float32", "float32", "complex128"),
        )
    },
    "fp64 on complex64": product(7, 5, 9, (6,), options={"compute": "fp64"}),
    # ---- planar
    **{
        f"planar {trans} {out}": Gemm(
            (9, 7, 6) if trans[0] in "TC" else (9, 6, 7),
            (9, 8, 7) if trans[1] in "TC" else (9, 7, 8),
            (9, 6, 8),
            dtypes,
            out=out,
            options={"layout": "planar", "trans_a": trans[0], "trans_b": trans[1], **COMPLEX_ALPHA},
        )
        for trans, dtypes, out in (
            ("NN", ("float32",), "plain"),
            ("CR", ("float32",), "fortran"),
            ("TC", ("float64",), "gaps"),
            ("NT", ("float32", "float64"), "plain"),
        )
    },
    "planar, a for all": Gemm((5, 7), (9, 7, 5), dtypes=("float32",), options={"layout": "planar"}),
}
