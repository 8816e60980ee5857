"""Reductions of TF32 products by mma.sync: `gemm`'s tiles leave partials, which are combined."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.matrix_units import reduce_stored
from gemmserve_kernels.algorithms.mma import gemm
from gemmserve_kernels.algorithms.mma.plan import tf32_plan

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.mma.tile import MmaTile
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmReduceProblem


supports = gemm.supports
resolve = gemm.resolve


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | MmaTile | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes the reductions of alpha op(a) op(b), and the product as "c" where the problem returns it, into `results`.

    `problem.compute` is "3xtf32", "1xtf32" or "tf32". Raises ConfigInfeasible, CompileError.
    """
    reduce_stored(launcher, problem, partial(tf32_plan, launcher.spec, problem, config), a, b, results)
