"""Host side of the portable kernels: runs a problem on arrays through a `Launcher`, whatever stands behind it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.operands import Operands, runs_along_rows
from gemmserve_kernels.algorithms.simt.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.algorithms.simt.tile import resolve_simt
from gemmserve_kernels.algorithms.simt.tiled_kernel import Piece, TiledKernel, pieces
from gemmserve_kernels.device.struct_params import StoredArray, matrix_view

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.simt.tile import SimtTile
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmProblem

__all__ = ["run_gemm", "run_gemm_reduce"]


def run_gemm(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | SimtTile | None,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    The arrays are those of `problem`, on the launcher's device. Raises ConfigInfeasible, CompileError.
    """
    if 0 in problem.result_shape:
        return
    arrays = [a, b, out if c is None or problem.beta == 0 else c, out]
    found = [StoredArray.of(launcher, array) for array in arrays]
    plan = _plan(launcher.spec, problem, config, *(stored for stored, _ in found))
    bases = [base for _, base in found]
    if plan.swapped:
        bases[:2] = bases[1::-1]
    for piece in plan.pieces:
        params = piece.placed(bases)
        plan.kernel.launch(launcher, "gemm", params, params, piece.tiles)


@dataclass(frozen=True)
class _SimtPlan:
    """Launches of a product; `swapped` where it is the transposed product, so that A and B change places."""

    kernel: TiledKernel
    pieces: tuple[Piece, ...]
    swapped: bool


@lru_cache(maxsize=1024)
def _plan(
    spec: DeviceSpec,
    problem: GemmProblem,
    config: GemmConfig | SimtTile | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray,
    d: StoredArray,
) -> _SimtPlan:
    operands = Operands.of(problem, a, b)
    shape = (*problem.batch_shape, problem.m, problem.n)
    c_view, d_view = (matrix_view(array, shape, planar=problem.planar) for array in (c, d))
    swapped = runs_along_rows(d_view)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        config = config.transposed() if config else None
    tile = resolve_simt(
        config, m=operands.m, n=operands.n, batch=problem.batch, accumulate=operands.accumulate, spec=spec
    )
    kernel = TiledKernel.build("gemm", operands, tile, c_dtype=c.dtype, d_dtype=d.dtype, d=d_view)
    alpha, beta = complex(problem.alpha), complex(problem.beta)
    parts = pieces(kernel, operands, problem.batch_shape, [c_view, d_view], alpha, beta)
    return _SimtPlan(kernel, tuple(parts), swapped)
