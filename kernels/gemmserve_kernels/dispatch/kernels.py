"""Kernels that a problem takes on a device, without the device: what has to be compiled, or can be loaded ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.partials import outputs_of
from gemmserve_kernels.device.replay import LaunchRecorder, RecordedLaunch
from gemmserve_kernels.dispatch.planned_reduce import written_of
from gemmserve_kernels.dispatch.routes import as_uniform, plan, taken_problem
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.dispatch.routes import Plan
    from gemmserve_kernels.problem.problem import GemmReduceProblem

MAX_GRID: Final = 2**31 - 1


def kernels_of(
    problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec, chosen: Plan | None = None
) -> tuple[RecordedLaunch, ...]:
    """Return the launches of `problem` on `spec` by `chosen`, or by the plan that the dispatch takes; none where the
    vendor's BLAS does a product, or NumPy does it.

    Operands and results are taken to be aligned as fresh arrays are, operands not to be prepared. Raises
    ComputeUnsupported, ConfigInfeasible.
    """
    chosen = chosen or plan(problem, spec)
    if chosen.blas is not None or chosen.algorithm == "numpy" or _is_empty(problem):
        return ()
    recorder = LaunchRecorder(spec, MAX_GRID, 0)
    if isinstance(problem, GemmProblem):
        taken = as_uniform(problem)[0] if chosen.uniform else problem
        a, b = argument(recorder, taken.a), argument(recorder, taken.b)
        c = None if taken.c is None or taken.beta == 0 else argument(recorder, taken.c)
        out = argument(recorder, Operand.contiguous(taken.result_shape, taken.result_dtype, taken.order))
        chosen.run_gemm(recorder, taken, a, b, c, out)
    else:
        reduced = taken_problem(problem, chosen)
        a, b = argument(recorder, reduced.a), argument(recorder, reduced.b)
        results = {
            name: argument(recorder, Operand.contiguous(shape, dtype))
            for name, (shape, dtype) in written_of(reduced).items()
        }
        chosen.run_gemm_reduce(recorder, reduced, a, b, results)
    return launches(recorder)


def _is_empty(problem: GemmProblem | GemmReduceProblem) -> bool:
    """Whether there is nothing to launch."""
    return not isinstance(problem, GemmProblem) and (problem.vanishes or outputs_of(problem) == 0)


def argument(recorder: LaunchRecorder, operand: Operand) -> Any:
    """Return an array of the recorder that lies like `operand`, aligned as fresh arrays are."""
    item = operand.dtype.itemsize
    return recorder.argument(operand.shape, operand.dtype, tuple(item * stride for stride in operand.strides))


def launches(recorder: LaunchRecorder) -> tuple[RecordedLaunch, ...]:
    """Return what was launched on the recorder."""
    return tuple(step for step in recorder.steps if isinstance(step, RecordedLaunch))
