"""Kernel sources that a case would compile, without a device: its host code runs against a LaunchRecorder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.device.replay import LaunchRecorder, RecordedLaunch
from gemmserve_kernels.dispatch.prepare import prepare_on
from gemmserve_kernels.dispatch.routes import WITHOUT_PRODUCT, candidates, plan
from gemmserve_kernels.freivalds import device as freivalds
from gemmserve_kernels.freivalds import sampled_device as sampled
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.bench.cases import Case
    from gemmserve_kernels.device.compiler import KernelSource
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.dispatch.routes import Plan
    from gemmserve_kernels.problem.problem import GemmReduceProblem

_MAX_GRID = 2**31 - 1


def sources(case: Case, spec: DeviceSpec, *, every: bool = True) -> set[KernelSource]:
    """Return the sources that `case` compiles on `spec`, operands aligned as fresh arrays are.

    `every`: by all algorithms that can run it, and what prepares its operands; else by the one that is chosen. Empty
    where the device cannot run it.
    """
    try:
        problem = case.problem()
        if not isinstance(problem, GemmProblem):
            found = set(_reduction(problem, spec))
            if every and problem.config is None and plan(problem, spec).algorithm in WITHOUT_PRODUCT:
                found |= set(_reduction(replace(problem, config=GemmConfig(algorithm="product")), spec))
            return found
        plans = candidates(problem, spec) if every and problem.config is None else [plan(problem, spec)]
    except KernelError:
        return set()
    found = set()
    for each in plans:
        if each.blas is None:
            found |= set(_product(problem, each, spec))
    return found | (set(_preparation(case, problem, spec)) if every else set())


def check_sources(case: Case, spec: DeviceSpec) -> set[KernelSource]:
    """Return the sources that a check of a product (`freivalds`) compiles, operands and result aligned as fresh arrays
    are.
    """
    problem = case.problem()
    if not isinstance(problem, GemmProblem):
        return set()
    recorder = LaunchRecorder(spec, _MAX_GRID, 0)
    a, b, d = (_argument(recorder, x) for x in (problem.a, problem.b, problem.result))
    c = None if problem.c is None or problem.beta == 0 else _argument(recorder, problem.c)
    freivalds.figures(recorder, problem, a, b, c, d, seed=0)
    sampled.figures(recorder, problem, a, b, c, d, recorder.empty((1,), np.dtype(np.uint64)))
    return set(_noted(recorder))


def _argument(recorder: LaunchRecorder, operand: Operand) -> Any:
    item = operand.dtype.itemsize
    return recorder.argument(operand.shape, operand.dtype, tuple(item * stride for stride in operand.strides))


def _noted(recorder: LaunchRecorder) -> Iterator[KernelSource]:
    return (step.source for step in recorder.steps if isinstance(step, RecordedLaunch))


def _product(problem: GemmProblem, chosen: Plan, spec: DeviceSpec) -> Iterator[KernelSource]:
    recorder = LaunchRecorder(spec, _MAX_GRID, 0)
    a, b = _argument(recorder, problem.a), _argument(recorder, problem.b)
    c = None if problem.c is None or problem.beta == 0 else _argument(recorder, problem.c)
    out = _argument(recorder, Operand.contiguous(problem.result_shape, problem.result_dtype, problem.order))
    chosen.run_gemm(recorder, problem, a, b, c, out)
    return _noted(recorder)


def _reduction(problem: GemmReduceProblem, spec: DeviceSpec) -> Iterator[KernelSource]:
    chosen, recorder = plan(problem, spec), LaunchRecorder(spec, _MAX_GRID, 0)
    a, b = _argument(recorder, problem.a), _argument(recorder, problem.b)
    results = {
        name: _argument(recorder, Operand.contiguous(shape, np.dtype(dtype)))
        for name, (shape, dtype) in problem.results.items()
    }
    chosen.run_gemm_reduce(recorder, problem, a, b, results)
    return _noted(recorder)


def _preparation(case: Case, problem: GemmProblem, spec: DeviceSpec) -> Iterator[KernelSource]:
    for operand, side, trans in ((problem.a, "a", case.trans_a), (problem.b, "b", case.trans_b)):
        recorder = LaunchRecorder(spec, _MAX_GRID, 0)
        # It looks at the data in the end, and there are none.
        with suppress(AttributeError):
            prepare_on(recorder, _argument(recorder, operand), side, case.compute, trans=trans, layout=case.layout)
        yield from _noted(recorder)
