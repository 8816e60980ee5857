"""Sums of squares of a product's rows or columns without the product: sum over i of |(A b)_i|^2 = b^H (A^H A) b.

8 k^2 (m + n) / 2 operations instead of 8 m n k: much less where both m and n are much larger than k. A^H A is made
in double, by parts of A's rows that are added up in order; then the forms, in double too, each with the bound of its
error (`plan`). Where the bound is too large for float32, or anything is not finite, the product is made and reduced in
plain FP32 (`splits.reduce_fallback`): nothing, on usual data. The host never waits.

64-bit data are refused: there is no wider arithmetic to make up for what squaring the condition costs.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, flag
from gemmserve_kernels.algorithms.common.partials import Partials, added_up, combine
from gemmserve_kernels.algorithms.gram.plan import (
    DEPTH,
    FORM_TILES,
    RUN,
    WORKSPACE,
    Cut,
    Tile,
    Turn,
    matrix_bytes,
    turns,
    wide_dtype,
)
from gemmserve_kernels.algorithms.gram.seconds import gram_seconds
from gemmserve_kernels.algorithms.simt.tiled_kernel import TiledKernel
from gemmserve_kernels.algorithms.splits import reduce_fallback
from gemmserve_kernels.algorithms.splits.flags import Flags
from gemmserve_kernels.algorithms.sums import gemm_reduce as sums
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    MatrixView,
    StoredArray,
    choose_access,
    dense_strides,
    launches,
    place,
    place_all,
)
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.vocabulary import PARTIAL_KINDS

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmReduceProblem

_SUMS: Final = ("sum", "mean")
_SUMS_S: Final = 3e-5
"""Seconds of a few more passes over the operands, for sums beside: no measurement."""


@device_struct("gram/gram.cu")
class GramParams(ctypes.Structure):
    """Arguments of gram."""


@device_struct("gram/gram_form.cu")
class GramFormParams(ctypes.Structure):
    """Arguments of gram_form."""


def supports(problem: GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem` on `spec`, or None."""
    if not spec.has_mma:
        return f"Gram matrices take compute capability 8.0, and {spec.name} is {spec.arch}"
    others = set(problem.reductions) - {"sumsq"}
    if "sumsq" not in problem.reductions or not others <= set(_SUMS) or problem.return_c:
        return "without the product there are sumsq, sum and mean alone"
    if problem.pre_op == "square" or (problem.pre_op == "abs" and others):
        return f"without the product there is no {problem.pre_op} of it"
    if problem.accumulate.itemsize != problem.dtype.itemsize and problem.dtype != np.float16:
        return f"{problem.accumulate.name} is asked for, and a Gram matrix in it would be less accurate"
    if problem.accumulate.name not in {"float32", "complex64"}:
        return f"a Gram matrix of {problem.dtype.name} in the same width would be less accurate than the product"
    if 0 in {problem.m, problem.n, problem.k, problem.batch}:
        return "an empty product"
    if matrix_bytes(wide_dtype(problem.dtype), problem.k) > WORKSPACE:
        return f"k = {problem.k}: one Gram matrix takes more than {WORKSPACE >> 20} MiB"
    return None


def resolve(config: GemmConfig | None, problem: GemmReduceProblem, spec: DeviceSpec) -> int:
    """Steps of the matrix instruction: 4, from Hopper on 8. Raises ConfigInfeasible for any other setting."""
    del problem
    if config is not None:
        config.only("gram", ("instruction_k",))
        if config.instruction_k not in {None, 4, 8}:
            raise ConfigInfeasible(f"instruction_k: in double there are 4 and 8, not {config.instruction_k}")
        if config.instruction_k is not None:
            return config.instruction_k
    return 8 if spec.capability >= 90 else 4


def seconds(problem: GemmReduceProblem, spec: DeviceSpec) -> float:
    """Return the estimated seconds of `problem`, which is supported."""
    m, n, of = (problem.m, problem.n, problem.a) if problem.over_rows else (problem.n, problem.m, problem.b)
    planar = 1 if problem.planar else 0
    axes = zip(of.shape[planar:-2], of.strides[planar:-2], strict=True)
    matrices = math.prod(extent for extent, step in axes if step != 0)
    tile, cut = Tile.of(problem.k), Cut.of(m, problem.k, wide_dtype(problem.dtype))
    found = gram_seconds(
        spec, problem.dtype.name, (problem.batch, m, n, problem.k), matrices, tile.cost(problem.k),
        tile.triangle(problem.k) * cut.parts,
    )  # fmt: skip
    beside = set(problem.reductions) & set(_SUMS)
    return found + (_SUMS_S if beside else 0.0)


@dataclass(frozen=True)
class _Turn:
    """A share of the batch: arguments whose addresses count from the arrays' bases, with the blocks of each launch.
    `inner`: elements of its Gram matrices.
    """

    inner: int
    gram: tuple[tuple[GramParams, int], ...]
    form: tuple[tuple[GramFormParams, int], ...]


@dataclass(frozen=True)
class _GramPlan:
    """`swapped`: columns are reduced, so that rows of the transposed product are."""

    swapped: bool
    cut: Cut
    gram: KernelSource
    threads: int
    form: TiledKernel
    turns: tuple[_Turn, ...]


@lru_cache(maxsize=1024)
def _plan(problem: GemmReduceProblem, a: StoredArray, b: StoredArray, instruction_k: int) -> _GramPlan:
    operands = Operands.of(problem, a, b)
    swapped = not problem.over_rows
    if swapped:
        operands = operands.transposed()
    wide, k = wide_dtype(problem.dtype), operands.k
    cut, tile = Cut.of(operands.m, k, wide), Tile.of(k)
    form = TiledKernel.build(
        "gram_form",
        _forms(operands, wide, ()),
        FORM_TILES[wide.name],
        c_dtype=wide,
        d_dtype=wide,
        d=None,
        local_bytes=16,
    )
    each = cut.parts * matrix_bytes(wide, k)
    made = tuple(
        _turn(problem, operands, turn, cut, tile, form)
        for turn in turns(problem.batch_shape, operands.a, operands.b, each)
    )
    return _GramPlan(swapped, cut, _source(operands, tile, form.tile.block_m, instruction_k), tile.threads, form, made)


def _source(operands: Operands, tile: Tile, share: int, instruction_k: int) -> KernelSource:
    view = operands.a
    access = choose_access(view, k_is_row=True, block=tile.block, block_k=DEPTH)
    reach = abs(view.column_stride) * tile.block + abs(view.row_stride) * DEPTH
    defines = {
        "TYPE_X": TYPES[view.dtype.name],
        "TYPE_ELEMENT": "Complex<float>" if operands.accumulate.kind == "c" else "float",
        "PLANAR": flag(operands.planar),
        "INDEX": "int" if reach < 2**31 else "long long",
        "VECTOR": str(access.vector),
        "ALONG_K": flag(access.along_k),
        "BLOCK": str(tile.block),
        "SHARE": str(share),
        "RUN": str(RUN),
        "DEPTH": str(DEPTH),
        "THREADS": str(tile.threads),
        "MIN_BLOCKS": str(tile.min_blocks),
        "INSTRUCTION_K": str(instruction_k),
    }
    return KernelSource("gram", tuple(defines.items()))


def _turn(problem: GemmReduceProblem, operands: Operands, turn: Turn, cut: Cut, tile: Tile, form: TiledKernel) -> _Turn:
    wide, k = wide_dtype(problem.dtype), operands.k
    inner = math.prod(turn.own) * k * k
    steps = dense_strides(turn.own, k * k)
    grams = []
    once = tuple(0 if n == 1 else s for n, s in zip(turn.own, turn.a.batch_strides, strict=True))
    into = MatrixView(0, 0, wide, k, k, k, 1, steps)
    for _, shape, (x, out) in launches(turn.own, [replace(turn.a, batch_strides=once), into]):
        gram = GramParams(
            a=x.params(), rows=operands.m, columns=k, out=out.re, part_stride=inner, part_rows=cut.rows,
            parts=cut.parts, tiles=-(-k // tile.block), triangle=tile.triangle(k), conjugate=operands.conjugate_a,
        )  # fmt: skip
        gram.batch_shape[:] = shape
        gram.out_stride[:] = out.params().batch_stride[:]
        grams.append((gram, tile.triangle(k) * cut.parts * math.prod(shape)))
    forms = []
    of = _forms(replace(operands, b=turn.b), wide, steps)
    squared = replace(problem, alpha=complex(problem.alpha.real**2 + problem.alpha.imag**2))
    for first, shape, views in launches(turn.batch_shape, [of.a, of.b]):
        gemm, tiles = form.gemm_params(squared, of, shape, views)
        params = GramFormParams(gemm, tolerance=cut.tolerance(k, wide), first_matrix=turn.first + first)
        forms.append((params, tiles // gemm.tiles_m))
    return _Turn(inner, tuple(grams), tuple(forms))


def _forms(operands: Operands, wide: np.dtype[Any], steps: tuple[int, ...]) -> Operands:
    """G by op(B): `steps` are elements to the next of G's matrices."""
    k = operands.k
    g = MatrixView(0, 0, wide, k, k, k, 1, steps)
    return Operands(g, operands.b, False, operands.conjugate_b, wide, operands.planar)


def run_gemm_reduce(
    launcher: Launcher, problem: GemmReduceProblem, config: GemmConfig | None, a: Any, b: Any, results: dict[str, Any]
) -> None:
    """Writes sumsq of alpha op(a) op(b) over its rows or columns, sum and mean beside it, into `results`.

    Raises CompileError.
    """
    if rest := tuple(name for name in problem.reductions if name in _SUMS):
        sums.run_gemm_reduce(launcher, replace(problem, reductions=rest), None, a, b, results)
    problem = replace(problem, reductions=("sumsq",), pre_op="identity", reproducible=True)
    (stored_a, base_a), (stored_b, base_b) = (StoredArray.of(launcher, x) for x in (a, b))
    plan = _plan(problem, stored_a, stored_b, resolve(config, problem, launcher.spec))
    bases = (base_b, base_a) if plan.swapped else (base_a, base_b)
    partials = Partials.allocate(launcher, problem, problem.batch if problem.over_batch else 1)
    values = partials.values[PARTIAL_KINDS.index("sumsq")]
    columns = problem.m if plan.swapped else problem.n
    flags = launcher.empty((problem.batch * columns,), np.dtype(np.int32))
    words = launcher.zeros((1,), np.dtype(np.int32))
    status = launcher.pointer(words)
    for turn in plan.turns:
        g = _gram(launcher, problem, plan, turn, bases[0])
        for piece, blocks in turn.form:
            params = GramFormParams.from_buffer_copy(piece)
            place_all(params.gemm, (launcher.pointer(g), bases[1]))
            params.values, params.flags = launcher.pointer(values), launcher.pointer(flags)
            params.status = status
            plan.form.launch(launcher, "gram_form", params, params.gemm, blocks)
    address = launcher.pointer(flags)
    every, none = _steps(problem.batch_shape), (0,) * len(problem.batch_shape)
    flagged = Flags(
        rows=address if plan.swapped else 0,
        columns=0 if plan.swapped else address,
        deficits_a=0,
        deficits_b=0,
        status=(status, status),
        matrices_a=every if plan.swapped else none,
        matrices_b=none if plan.swapped else every,
        counters=launcher.counters(problem.batch * problem.m * problem.n),
    )
    reduce_fallback.run(launcher, problem, a, b, flagged, partials, 1, 0)
    combine(launcher, problem, partials, results)


def _gram(launcher: Launcher, problem: GemmReduceProblem, plan: _GramPlan, turn: _Turn, base: int) -> Any:
    """The Gram matrices of one turn, their parts added up."""
    wide = wide_dtype(problem.dtype)
    made = launcher.empty((plan.cut.parts * turn.inner,), wide)
    for piece, blocks in turn.gram:
        params = GramParams.from_buffer_copy(piece)
        place([params.a], [base])
        params.out += launcher.pointer(made)
        for first in range(0, blocks, launcher.max_grid):
            params.first_block = first
            grid = min(blocks - first, launcher.max_grid)
            launcher.launch(plan.gram, "gram", grid=grid, block=plan.threads, shared=0, params=params)
    if plan.cut.parts == 1:
        return made
    return added_up(launcher, problem, made, plan.cut.parts)


def _steps(batch_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Products to the next one along each axis."""
    return tuple(math.prod(batch_shape[axis + 1 :]) for axis in range(len(batch_shape)))
