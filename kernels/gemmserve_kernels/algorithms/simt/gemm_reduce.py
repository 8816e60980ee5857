"""Host side of gemm_reduce: the product's tiles leave partials, which are combined in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.matrix_units import reduce_stored
from gemmserve_kernels.algorithms.simt.tiled_kernel import tiled_plan

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.simt.tile import SimtTile
    from gemmserve_kernels.device.launch import Launcher
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
        reduce_stored(launcher, problem, partial(tiled_plan, launcher.spec, problem, config), a, b, results)
    return {name: results[name] for name in problem.results}
