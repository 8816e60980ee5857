"""Host side of gemm_reduce: the product's tiles leave partials, which are combined in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.operands import Operands
from gemmserve_kernels.algorithms.common.partials import Partials, combine, epilogue_defines, local_bytes, outputs_of
from gemmserve_kernels.algorithms.simt.tile import resolve_simt
from gemmserve_kernels.algorithms.simt.tiled_kernel import Piece, TiledKernel, pieces
from gemmserve_kernels.device.struct_params import GemmReduceParams, StoredArray, matrix_view

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.simt.tile import SimtTile
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmReduceProblem


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | SimtTile | None,
    a: Any,
    b: Any,
    out: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The reductions of alpha op(a) op(b), and the product itself as "c" where the problem returns it.

    `out` has arrays for some or all of `problem.results`, of any strides; the rest is allocated. Raises
    ConfigInfeasible, CompileError.
    """
    results = dict(out or {})
    for name, (shape, dtype) in problem.results.items():
        if name not in results:
            results[name] = launcher.empty(shape, dtype)
    if problem.extent == 0:
        for name in problem.reductions:
            results[name][...] = 0  # sums alone come here: `problem` refuses the others
    elif 0 not in problem.outputs_shape:
        _execute(launcher, problem, config, a, b, results)
    return {name: results[name] for name in problem.results}


@dataclass(frozen=True)
class _SimtReducePlan:
    """Launches of the product, turned so that rows are reduced; `length` partials per result."""

    kernel: TiledKernel
    pieces: tuple[Piece, ...]
    swapped: bool
    length: int


@lru_cache(maxsize=1024)
def _plan(
    spec: DeviceSpec,
    problem: GemmReduceProblem,
    config: GemmConfig | SimtTile | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray | None,
) -> _SimtReducePlan:
    operands = Operands.of(problem, a, b)
    shape = (*problem.batch_shape, problem.m, problem.n)
    view = matrix_view(c, shape, planar=problem.planar) if c else None
    swapped = not problem.over_rows
    if swapped:
        operands, view = operands.transposed(), view.transposed() if view else None
        config = config.transposed() if config else None
    shared = local_bytes(problem)
    tile = resolve_simt(
        config,
        m=operands.m,
        n=operands.n,
        batch=problem.batch,
        accumulate=operands.accumulate,
        spec=spec,
        local_bytes=shared,
    )
    stored = problem.stored((), problem.dtype)[1]
    extra = epilogue_defines(problem)
    kernel = TiledKernel.build(
        "gemm_reduce", operands, tile, c_dtype=stored, d_dtype=stored, d=view, local_bytes=shared, extra=extra
    )
    # Where C is returned the epilogue reads none and writes D; without it the kernel is compiled without the store.
    written = [view, view] if view else []
    parts = tuple(pieces(kernel, operands, problem.batch_shape, written, complex(problem.alpha)))
    length = -(-operands.m // tile.block_m) * (problem.batch if problem.over_batch else 1)
    return _SimtReducePlan(kernel, parts, swapped, length)


def _execute(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | SimtTile | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Launches the product's tiles, then combines their partials into the `results`."""
    arrays = [a, b, *([results["c"]] if problem.return_c else [])]
    found = [StoredArray.of(launcher, array) for array in arrays]
    stored = [*(key for key, _ in found), None][:3]
    plan = _plan(launcher.spec, problem, config, *stored)
    bases = [base for _, base in found]
    if plan.swapped:
        bases[:2] = bases[1::-1]
    partials = Partials.allocate(launcher, problem, plan.length)
    params = GemmReduceParams(outputs=outputs_of(problem), partial=partials.params(launcher))
    params.reduce_batch = problem.over_batch
    for piece in plan.pieces:
        params.first_batch = piece.first_matrix
        params.gemm = piece.placed([*bases, *bases[2:]])
        plan.kernel.launch(launcher, "gemm_reduce", params, params.gemm, piece.tiles)
    combine(launcher, problem, partials, results)
