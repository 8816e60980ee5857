"""Elements of a product computed again on a device: host side of cuda/freivalds/sampled.cu."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, flag
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import MatrixView, launches, set_factors
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.freivalds.device import launch_blocks, views_of
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


@device_struct("freivalds/sampled.cu")
class SampledParams(ctypes.Structure):
    """Arguments of sampled_elements."""


@device_struct("freivalds/sampled.cu")
class WorstParams(ctypes.Structure):
    """Arguments of sampled_worst."""


def figures_shape(problem: GemmProblem) -> tuple[int, int]:
    """Return the shape of what `run` fills: of each product its worst element, as `sampled.worst` takes them."""
    return problem.batch, FIGURES


def run(launcher: Launcher, problem: GemmProblem, a: Any, b: Any, c: Any | None, d: Any, seed: int, out: int) -> None:
    """The figures of elements that the number at address `seed` chooses, to address `out`.

    Arrays are those of `problem`, which has a result that is not empty. What it launches depends on no address and no
    data. Raises CompileError.
    """
    choice, bound = Choice.of(problem), Bound.of(problem)
    operands, views = views_of(launcher, problem, a, b, c, d)
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
        set_factors(params, problem)
        matrices = math.prod(inner)
        for low in range(0, matrices, step):
            some = min(step, matrices - low)
            params.first_product, params.first_matrix = first + low, low
            launch_blocks(launcher, source, "sampled_elements", some * choice.count, params, threads)
            found = WorstParams(
                samples=params.out, out=out + 8 * FIGURES * (first + low), products=some, sample_bits=choice.bits
            )
            launch_blocks(launcher, source, "sampled_worst", -(-some // (threads // 32)), found, threads)


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
