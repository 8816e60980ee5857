"""Reductions of products of float64 and complex128 through residues: the product panel by panel, and a pass over it.

Large products by residues are two and three times as fast as those that tensor cores make in double, and reduce where
they are: more than writing them and reading them again costs. What is reduced are the elements of `ozaki.gemm`, or of
the transposed product where rows are reduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.operands import stored_dtype
from gemmserve_kernels.algorithms.common.panels import Panels, reduce_panels
from gemmserve_kernels.algorithms.ozaki import gemm
from gemmserve_kernels.algorithms.ozaki.plan import OzakiTile, Run
from gemmserve_kernels.device.struct_params import StoredArray

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.panels import Side
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem


def supports(problem: GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem` on `spec`, or None."""
    if problem.return_c:
        return "the product is made in panels, not where it is returned"
    if problem.dtype.name not in {"float64", "complex128"}:
        return f"reductions through residues are of float64 and complex128, not {problem.dtype.name}"
    return Panels.of(problem, problem.dtype.itemsize).unfit or gemm.supports(problem.product, spec)


def resolve(config: GemmConfig | None, problem: GemmReduceProblem, spec: DeviceSpec) -> OzakiTile:
    """Moduli and stages as of the product. Raises ConfigInfeasible."""
    return gemm.resolve(config, problem.product, spec)


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | OzakiTile | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes the reductions of alpha op(a) op(b) into `results`. Raises ConfigInfeasible, CompileError."""
    tile = config if isinstance(config, OzakiTile) else resolve(config, problem, launcher.spec)

    def multiply(product: GemmProblem, left: Side, right: Side, out: Any) -> None:
        stored, base = StoredArray.of(launcher, out)
        arrays, bases = [left.stored, right.stored, stored, stored], [left.base, right.base, base, base]
        Run(launcher, product, tile, arrays, bases, (None, None)).run()

    reduce_panels(launcher, problem, a, b, results, stored_dtype(problem), multiply)
