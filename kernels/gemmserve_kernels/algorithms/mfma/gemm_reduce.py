"""Reductions of products by MFMA: `gemm`'s tiles leave partials, which are combined in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.matrix_units import reduce_stored
from gemmserve_kernels.algorithms.mfma import gemm
from gemmserve_kernels.algorithms.mfma.plan import dense_plan
from gemmserve_kernels.algorithms.mfma.tile import MfmaTile, dense_arithmetic

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmReduceProblem


supports = gemm.supports
resolve = gemm.resolve


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | MfmaTile | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes the reductions of alpha op(a) op(b), and the product as "c" where the problem returns it, into `results`.

    Raises ConfigInfeasible, CompileError.
    """
    arithmetic = dense_arithmetic(problem, launcher.spec)
    assert arithmetic is not None
    plan_of = partial(dense_plan, launcher.spec, problem, arithmetic, config)
    reduce_stored(launcher, problem, plan_of, a, b, results)
