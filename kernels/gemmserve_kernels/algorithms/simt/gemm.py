"""Host side of the portable kernels: runs a problem on arrays through a `Launcher`, whatever stands behind it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.matrix_units import run_stored
from gemmserve_kernels.algorithms.simt.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.algorithms.simt.tiled_kernel import tiled_plan

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.simt.tile import SimtTile
    from gemmserve_kernels.device.launch import Launcher
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
    if 0 not in problem.result_shape:
        run_stored(launcher, problem, partial(tiled_plan, launcher.spec, problem, config), a, b, c, out)
