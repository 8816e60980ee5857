"""Words that describe a problem, each list once; HTTP schemas, command line and device code agree with it."""

from __future__ import annotations

from typing import Final, Literal, get_args

Dtype = Literal["float16", "float32", "float64", "complex64", "complex128"]
"""Element types of operands."""

Trans = Literal["N", "T", "C", "R"]
"""As stored, transposed, conjugate transposed, conjugate."""
TRANS: Final = get_args(Trans)

Order = Literal["C", "F"]
"""Memory order of a fresh result: row by row, column by column."""
ORDERS: Final = get_args(Order)

Layout = Literal["interleaved", "planar"]
"""Complex numbers as pairs, or real arrays with a leading axis (re, im)."""
LAYOUTS: Final = get_args(Layout)

Compute = Literal[
    "auto", "fp32", "fp64", "tf32", "1xtf32", "3xtf32", "3xfp16", "3xfp16-3m", "6xbf16", "9xbf16", "ozaki"
]
"""Compute modes: arithmetics by which a product may be formed (docs/kernels.md)."""
COMPUTE_MODES: Final = get_args(Compute)

Reduction = Literal["sum", "max", "min", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin"]
"""Reductions of a product's rows or columns."""
REDUCTIONS: Final = get_args(Reduction)

PARTIAL_KINDS: Final = ("sum", "sumsq", "max", "min", "absmax", "absmin", "argmax", "argmin")
"""Partials that kernels keep of a reduction, in the order of enum Kind in cuda/epilogue/reductions.cuh; a mean keeps
its sum.
"""

Axis = Literal["m", "n", "batch"]
"""Axes that are reduced."""
AXES: Final = get_args(Axis)

PreOp = Literal["identity", "abs", "square"]
"""Functions of an element before it is reduced; enum PreOp in cuda/epilogue/pre_op.cuh."""
PRE_OPS: Final = get_args(PreOp)

Fill = Literal["both", "lower", "upper"]
"""Triangles of a Hermitian result that are filled; the other one is zero."""
FILLS: Final = get_args(Fill)

Assumption = Literal["general", "positive", "lower", "upper"]
"""Knowledge of a matrix to be solved with: none, Hermitian positive definite, a triangle."""
ASSUMPTIONS: Final = get_args(Assumption)

Rounding = Literal["nearest", "toward_zero", "half_ulp_truncate", "half_ulp_truncate_flush"]
"""Ways from float32 to TF32: to nearest even; truncated; half a unit added, then truncated (ties away from zero); the
same with subnormals truncated. CUTLASS rounds big parts towards zero and small ones by half_ulp_truncate. enum Rounding
in cuda/mma/round.cuh."""
ROUNDINGS: Final = get_args(Rounding)

AlgorithmName = Literal[
    "numpy",
    "vendor",
    "simt",
    "small",
    "wgmma",
    "fused",
    "mma",
    "mfma",
    "dmma",
    "ozaki",
    "sums",
    "gram",
    "screen",
    "product",
]
"""numpy: the CPU. vendor: its BLAS. simt: the portable kernels. small: batched small products. wgmma: Hopper's tensor
cores. fused: these, with operands split by the kernel that multiplies them. mma: tensor cores from sm_80 on. mfma:
AMD's matrix units. dmma: double precision on tensor cores. ozaki: residues on INT8 tensor cores. sums, gram: reductions
without the product. screen: extremes of double precision, looked for in float16. product: a reduction by whatever makes
the product."""
ALGORITHMS: Final = get_args(AlgorithmName)
