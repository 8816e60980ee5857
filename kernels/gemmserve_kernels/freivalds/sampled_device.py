"""Elements of a product computed again on a device: host side of cuda/freivalds/sampled.cu."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, flag
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    BATCH_DIMS,
    MatrixParams,
    MatrixView,
    StoredArray,
    launches,
    matrix_view,
)
from gemmserve_kernels.freivalds.sampled import FIGURES, Bound, Choice

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.problem.problem import GemmProblem

_THREADS: Final = 256
_BLOCKS_PER_SM: Final = 2
_SHORT: Final = 512
_MANY: Final = 16
"""Number of products above which elements of fewer than `_SHORT` terms are a warp's: there are many."""
_WORKSPACE: Final = 64 << 20
"""Bytes of what is found of single elements; of batches that would need more, a part is looked at at a time."""


class SampledParams(ctypes.Structure):
    """Mirror of SampledParams in cuda/freivalds/sampled.cu."""

    _fields_ = (
        ("a", MatrixParams),
        ("b", MatrixParams),
        ("c", MatrixParams),
        ("d", MatrixParams),
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("batch_shape", ctypes.c_int64 * BATCH_DIMS),
        ("seed", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("products", ctypes.c_int64),
        ("first_product", ctypes.c_int64),
        ("first_matrix", ctypes.c_int64),
        ("first_block", ctypes.c_int64),
        ("sample_bits", ctypes.c_int32),
        ("row_bits", ctypes.c_int32),
        ("a_bits", ctypes.c_int32),
        ("b_bits", ctypes.c_int32),
        ("has_c", ctypes.c_int32),
        ("conjugate_a", ctypes.c_int32),
        ("conjugate_b", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("alpha", ctypes.c_double * 2),
        ("beta", ctypes.c_double * 2),
        ("per_root", ctypes.c_double),
        ("rest", ctypes.c_double),
        ("floor", ctypes.c_double),
        ("largest", ctypes.c_double),
    )


class WorstParams(ctypes.Structure):
    """Mirror of WorstParams."""

    _fields_ = (
        ("samples", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("products", ctypes.c_int64),
        ("first_block", ctypes.c_int64),
        ("sample_bits", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


PARAMS: Final[dict[str, type[ctypes.Structure]]] = {"sampled_elements": SampledParams, "sampled_worst": WorstParams}
"""Argument structure of each kernel."""


def figures_shape(problem: GemmProblem) -> tuple[int, int]:
    """Return the shape of what `run` fills: of each product its worst element, as `sampled.worst` takes them."""
    return problem.batch, FIGURES


def run(launcher: Launcher, problem: GemmProblem, a: Any, b: Any, c: Any | None, d: Any, seed: int, out: int) -> None:
    """The figures of elements that the number at address `seed` chooses, to address `out`.

    Arrays are those of `problem`, which has a result that is not empty. What it launches depends on no address and no
    data. Raises CompileError.
    """
    choice, bound = Choice.of(problem), Bound.of(problem)
    given = [a, b, d] if c is None or problem.beta == 0 else [a, b, d, c]
    stored = [StoredArray.of(launcher, array) for array in given]
    operands = Operands.of(problem, stored[0][0], stored[1][0])
    shape = (*problem.batch_shape, problem.m, problem.n)
    views = [operands.a, operands.b, *(matrix_view(x, shape, planar=problem.planar) for x, _ in stored[2:])]
    views = [view.shifted_by(base) for view, (_, base) in zip(views, stored, strict=True)]
    source = _source(problem, bound, views)
    threads = int(dict(source.defines)["THREADS"])
    step = max(1, min(problem.batch, _WORKSPACE // (8 * FIGURES * choice.count)))
    samples = launcher.empty((step, choice.count, FIGURES), np.dtype(np.float64))
    for first, inner, pieces in launches(problem.batch_shape, views):
        params = SampledParams(
            a=pieces[0].params(), b=pieces[1].params(), d=pieces[2].params(), m=problem.m, n=problem.n, k=problem.k,
            seed=seed, out=launcher.pointer(samples), products=problem.batch, sample_bits=choice.bits,
            row_bits=choice.row_bits, a_bits=choice.large_bits(problem.m * problem.k),
            b_bits=choice.large_bits(problem.k * problem.n), has_c=len(pieces) > 3, conjugate_a=operands.conjugate_a,
            conjugate_b=operands.conjugate_b, per_root=bound.per_root, rest=bound.rest, floor=bound.floor,
            largest=bound.largest,
        )  # fmt: skip
        if params.has_c:
            params.c = pieces[3].params()
        params.batch_shape[:] = inner
        params.alpha[:] = problem.alpha.real, problem.alpha.imag
        params.beta[:] = problem.beta.real, problem.beta.imag
        matrices = math.prod(inner)
        for low in range(0, matrices, step):
            some = min(step, matrices - low)
            params.first_product, params.first_matrix = first + low, low
            _launch(launcher, source, "sampled_elements", threads, some * choice.count, params)
            found = WorstParams(
                samples=params.out, out=out + 8 * FIGURES * (first + low), products=some, sample_bits=choice.bits
            )
            _launch(launcher, source, "sampled_worst", threads, -(-some // (threads // 32)), found)


def figures(launcher: Launcher, problem: GemmProblem, a: Any, b: Any, c: Any | None, d: Any, seed: Any) -> Any:
    """`run` into a fresh array (products, FIGURES) on the launcher's device; `seed`: there, one uint64."""
    out = launcher.empty(figures_shape(problem), np.dtype(np.float64))
    run(launcher, problem, a, b, c, d, launcher.pointer(seed), launcher.pointer(out))
    return out


def _source(problem: GemmProblem, bound: Bound, views: list[MatrixView]) -> KernelSource:
    a, b, d, *c = (TYPES[view.dtype.name] for view in views)
    defines = {
        "TYPE_A": a,
        "TYPE_B": b,
        "TYPE_C": c[0] if c else d,
        "TYPE_D": d,
        "TYPE_ACC": TYPES["complex128" if problem.dtype.kind == "c" else "float64"],
        "PLANAR": flag(problem.planar),
        "COMPENSATED": flag(bound.compensated),
        "NORMS": flag(bound.by_norms),
        "MIN_BLOCKS": str(_BLOCKS_PER_SM),
        "THREADS": str(32 if problem.batch > _MANY and problem.k < _SHORT else _THREADS),
    }
    return KernelSource("sampled", tuple(defines.items()))


def _launch(launcher: Launcher, source: KernelSource, entry: str, threads: int, blocks: int, params: Any) -> None:
    for first in range(0, blocks, launcher.max_grid):
        params.first_block = first
        grid = min(blocks - first, launcher.max_grid)
        launcher.launch(source, entry, grid=grid, block=threads, shared=0, params=params)
