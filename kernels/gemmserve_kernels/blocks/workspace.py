"""Needs of one block beside its panels and its window of the result: memory of its algorithm, and time. Pure.

Memory is an upper bound of what the algorithm allocates at once; time is the estimate by which algorithms are chosen.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.common.panels import panel_bytes, pass_seconds
from gemmserve_kernels.algorithms.common.splits import SCHEMES, strip_shape
from gemmserve_kernels.algorithms.cpu.gemm import BLOCK_BYTES
from gemmserve_kernels.algorithms.ozaki import wide
from gemmserve_kernels.algorithms.ozaki.gemm import resolve as resolve_ozaki
from gemmserve_kernels.algorithms.ozaki.lines import OUTLIER_WORDS, PITCH
from gemmserve_kernels.algorithms.ozaki.moduli import Moduli
from gemmserve_kernels.algorithms.ozaki.plan import panel_bytes as residue_bytes
from gemmserve_kernels.algorithms.ozaki.plan import panel_shape
from gemmserve_kernels.algorithms.screen.gemm_reduce import screened_bytes
from gemmserve_kernels.algorithms.screen.seconds import screen_seconds
from gemmserve_kernels.algorithms.splits.gemm import widening_module
from gemmserve_kernels.algorithms.splits.prepass import plane_bytes
from gemmserve_kernels.algorithms.vendor.blas import copied_bytes
from gemmserve_kernels.dispatch.estimate import estimate
from gemmserve_kernels.dispatch.routes import WITHOUT_PRODUCT, Plan, as_uniform, plan, taken_problem
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.operand import real_dtype
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem
from gemmserve_kernels.problem.vocabulary import PARTIAL_KINDS

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.ozaki.plan import OzakiTile
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.vocabulary import AlgorithmName

_SPARE: Final = 1 << 20
"""Bytes for what is small: exponents, flags, deficits are a few words a row, and allocations end at 512 bytes."""
_WORDS: Final = 64
"""Bytes of such words for each row and each column."""
_CORE_RATE: Final = 2e10
"""Operations a second of a processor's core, about."""
_UNKNOWN_RATE: Final = 1e13
"""Operations a second of a device of which nothing is known."""
_READ_RATE: Final = 1e12
"""Bytes a second of operands that are read once, about."""
_SPLIT: Final = 2.0
"""Bytes read and written for each byte of an operand that is made into planes."""
_CONVERTED: Final = 3.5
"""The same of one that is made into residues: the model's passes over operands (`common.time_model`)."""
_SPLIT_RATE: Final = 2e12
"""Such bytes a second, about (an H200's memory is copied at 4e12)."""
_LEAST_TILE: Final = 32
"""Rows or columns of the smallest tile that leaves partial results."""
_PARTIAL: Final = 16
"""Bytes of the largest partial result: a complex sum in double, or a place with its value."""
_TILE: Final = 1 << 16
"""Elements of the largest tile that a kernel has."""
_PARTS: Final = 16
"""Parts that k is split into at most."""
_PARTIALS: Final = 256 << 20
"""Bytes of them at most (`algorithms.mma.plan`)."""
_SINGLE_BYTES: Final = 4
_PLANES: Final = ("3xfp16", "3xfp16-3m", "1xfp16", "6xbf16", "9xbf16")


STRIPS: Final = (1, 2, 4, 8, 16)
"""Strips that a block may be computed in (`GemmConfig.strips`), by algorithms that make planes, or residues in their
place."""


@lru_cache(maxsize=1024)
def algorithm_with_strips(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> AlgorithmName | None:
    """Return the algorithm of a block that can be computed in strips, with the same bits; None of others. Raises what
    planning it raises (ComputeUnsupported, ConfigInfeasible).
    """
    if isinstance(problem, GemmReduceProblem) or problem.batch > 1 or spec.kind == "cpu":
        return None
    chosen = plan(problem, spec)
    if chosen.arithmetic == "ozaki":
        return chosen.algorithm if real_dtype(problem.dtype).itemsize == _SINGLE_BYTES else None
    return chosen.algorithm if chosen.algorithm in {"wgmma", "mma", "mfma"} and chosen.arithmetic in _PLANES else None


@lru_cache(maxsize=1024)
def workspace_bytes(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec, strips: int = 1) -> int:
    """Return bytes that a block takes at most beside operands and results, in `strips` where it can be. Raises what
    planning it raises (ComputeUnsupported, ConfigInfeasible).
    """
    chosen = plan(problem, spec)
    if strips > 1 and chosen.arithmetic == "ozaki" and algorithm_with_strips(problem, spec) is not None:
        assert isinstance(problem, GemmProblem)
        config = replace(chosen.config or GemmConfig(), strips=strips)
        return _product_bytes(problem, replace(chosen, config=config), spec)
    if strips > 1 and isinstance(problem, GemmProblem) and algorithm_with_strips(problem, spec) is not None:
        # All but planes is as for the whole, whose tiles it has; flags and deficits are each strip's own.
        m, n = strip_shape(problem.m, problem.n, strips)
        strip = replace(problem, m=min(problem.m, m), n=min(problem.n, n))
        planes = _algorithm_bytes(chosen, problem, spec) - _algorithm_bytes(chosen, strip, spec)
        return _product_bytes(problem, chosen, spec) - planes + strips * _WORDS * (problem.m + problem.n)
    if isinstance(problem, GemmReduceProblem):
        return _SPARE + 3 * BLOCK_BYTES if spec.kind == "cpu" else _reduction_bytes(problem, chosen, spec)
    return _product_bytes(problem, chosen, spec)


def _reduction_bytes(problem: GemmReduceProblem, chosen: Plan, spec: DeviceSpec) -> int:
    """Return bytes of partial results, and of what the product takes."""
    tiles = -(-problem.extent // _LEAST_TILE)  # and one in 32 of them again, when they are combined
    partials = len(PARTIAL_KINDS) * _PARTIAL * math.prod(problem.outputs_shape) * (tiles + tiles // 16 + 2)
    needed = partials + _SPARE + _WORDS * problem.batch * (problem.m + problem.n)
    uniform = as_uniform(problem)[0]
    if chosen.uniform:
        needed += uniform.a.nbytes + uniform.b.nbytes
    if chosen.algorithm == "sums":
        return needed + _WORDS * problem.batch * problem.k * (1 + (problem.m + problem.n) // _LEAST_TILE)
    if chosen.algorithm == "gram":
        wide = 16 if problem.dtype.kind == "c" else 8
        depth = problem.batch * problem.k
        return needed + wide * depth * (2 * problem.k + problem.m + problem.n)
    if chosen.algorithm == "screen":
        return needed + screened_bytes(problem)
    if chosen.algorithm == "vendor":
        taken = taken_problem(problem, chosen)
        copied = sum(own.nbytes for own, before in ((taken.a, problem.a), (taken.b, problem.b)) if own is not before)
        return needed + copied + panel_bytes(problem, problem.accumulate.itemsize)
    if chosen.arithmetic == "ozaki":
        needed += panel_bytes(problem, problem.dtype.itemsize)
    return needed + _algorithm_bytes(chosen, uniform.product, spec)


def _product_bytes(problem: GemmProblem, plan: Plan, spec: DeviceSpec) -> int:
    if spec.kind == "cpu":
        return 3 * BLOCK_BYTES  # of the product and of both operands
    uniform = as_uniform(problem)[0] if plan.uniform else problem
    needed = _SPARE + _WORDS * problem.batch * (problem.m + problem.n) + _partial_bytes(problem, spec)
    if plan.uniform:
        needed += sum(x.nbytes for x in (uniform.a, uniform.b, uniform.c) if x is not None)
    if plan.blas is not None:
        return needed + copied_bytes(problem, plan.blas)
    return needed + _algorithm_bytes(plan, uniform, spec)


def _partial_bytes(problem: GemmProblem, spec: DeviceSpec) -> int:
    """Return bytes of partial sums, which there are where k is split: with fewer tiles than multiprocessors."""
    if problem.batch * problem.m * problem.n >= spec.sm_count * _TILE:
        return 0
    return min(_PARTIALS, _PARTS * problem.batch * problem.m * problem.n * problem.accumulate.itemsize)


def _algorithm_bytes(plan: Plan, problem: GemmProblem, spec: DeviceSpec) -> int:
    if plan.arithmetic == "ozaki":
        return _residue_bytes(problem, resolve_ozaki(plan.config, problem, spec), spec)
    if plan.arithmetic in _PLANES:
        scheme = SCHEMES[problem.compute]
        return plane_bytes(problem, scheme, widens=widening_module(problem, plan.config, spec) is not None)
    return 0


def _residue_bytes(problem: GemmProblem, tile: OzakiTile, spec: DeviceSpec) -> int:
    """Return bytes of residues of a panel, or of the planes that lie there afterwards, and of outliers."""
    planes = Moduli.first(tile.moduli, complex_=problem.dtype.kind == "c").planes
    pitch = -(-problem.k // PITCH) * PITCH
    rows, columns = panel_shape(problem.m, problem.n, pitch, planes, tile.workspace, tile.strips)
    m, n = strip_shape(problem.m, problem.n, tile.strips)
    whole = residue_bytes(min(problem.m, m), min(problem.n, n), pitch, planes) * problem.batch
    needed = min(whole, max(tile.workspace, residue_bytes(rows, columns, pitch, planes)))
    if wide.serves(problem, spec):
        needed = max(needed, wide.plane_bytes(problem, tile.strips, tile.workspace))
    return needed + (4 * OUTLIER_WORDS * problem.batch * (problem.m + problem.n) if tile.outliers else 0)


@lru_cache(maxsize=1024)
def block_seconds(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec, strips: int = 1) -> float:
    """Return seconds that a block takes on a device, by the tables of what was measured where there are any; each of
    several strips makes the planes of its rows and columns anew, or the residues of its columns.
    """
    if spec.kind == "cpu":
        return problem.flops() / (_CORE_RATE * max(1, spec.sm_count))
    chosen = plan(problem, spec)
    shape = (problem.batch, problem.m, problem.n, problem.k)
    if isinstance(problem, GemmReduceProblem) and chosen.algorithm == "screen":
        return screen_seconds(problem, spec, partial(estimate, spec, "wgmma", "fp16", "float16"))
    if chosen.algorithm in WITHOUT_PRODUCT:
        return (problem.a.nbytes + problem.b.nbytes) / _READ_RATE
    in_panels = isinstance(problem, GemmReduceProblem) and chosen.algorithm in {"ozaki", "vendor"}
    written = isinstance(problem, GemmProblem) or in_panels or problem.return_c
    seconds = estimate(spec, chosen.algorithm, chosen.arithmetic, problem.dtype.name, shape, written=written)
    if not math.isfinite(seconds):
        return problem.flops() / _UNKNOWN_RATE
    if isinstance(problem, GemmReduceProblem) and in_panels:
        seconds += pass_seconds(problem, spec, problem.accumulate.itemsize)
    rows, columns = strip_shape(problem.m, problem.n, strips)
    again = (-(-problem.m // rows) - 1) * problem.b.nbytes
    if chosen.arithmetic == "ozaki":  # whose residues of rows serve all columns
        return seconds + _CONVERTED * again / _SPLIT_RATE
    again += (-(-problem.n // columns) - 1) * problem.a.nbytes
    return seconds + _SPLIT * again / _SPLIT_RATE
