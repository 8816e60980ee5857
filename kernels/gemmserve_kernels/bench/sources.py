"""Which kernel sources a case would compile, without a device: its host code runs against a Tracer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.device.replay import Note, Tracer
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
    """What `case` compiles on `spec`, operands aligned as fresh arrays are.

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
    """What a check of a product (`freivalds`) compiles, operands and result aligned as fresh arrays are."""
    problem = case.problem()
    if not isinstance(problem, GemmProblem):
        return set()
    tracer = Tracer(spec, _MAX_GRID, 0)
    a, b, d = (_argument(tracer, x) for x in (problem.a, problem.b, problem.result))
    c = None if problem.c is None or problem.beta == 0 else _argument(tracer, problem.c)
    freivalds.figures(tracer, problem, a, b, c, d, seed=0)
    sampled.figures(tracer, problem, a, b, c, d, tracer.empty((1,), np.dtype(np.uint64)))
    return set(_noted(tracer))


def _argument(tracer: Tracer, operand: Operand) -> Any:
    item = operand.dtype.itemsize
    return tracer.argument(operand.shape, operand.dtype, tuple(item * stride for stride in operand.strides))


def _noted(tracer: Tracer) -> Iterator[KernelSource]:
    return (step.source for step in tracer.steps if isinstance(step, Note))


def _product(problem: GemmProblem, chosen: Plan, spec: DeviceSpec) -> Iterator[KernelSource]:
    tracer = Tracer(spec, _MAX_GRID, 0)
    a, b = _argument(tracer, problem.a), _argument(tracer, problem.b)
    c = None if problem.c is None or problem.beta == 0 else _argument(tracer, problem.c)
    out = _argument(tracer, Operand.contiguous(problem.result_shape, problem.result_dtype, problem.order))
    chosen.run_gemm(tracer, problem, a, b, c, out)
    return _noted(tracer)


def _reduction(problem: GemmReduceProblem, spec: DeviceSpec) -> Iterator[KernelSource]:
    chosen, tracer = plan(problem, spec), Tracer(spec, _MAX_GRID, 0)
    a, b = _argument(tracer, problem.a), _argument(tracer, problem.b)
    results = {
        name: _argument(tracer, Operand.contiguous(shape, np.dtype(dtype)))
        for name, (shape, dtype) in problem.results.items()
    }
    chosen.run_gemm_reduce(tracer, problem, a, b, results)
    return _noted(tracer)


def _preparation(case: Case, problem: GemmProblem, spec: DeviceSpec) -> Iterator[KernelSource]:
    for operand, side, trans in ((problem.a, "a", case.trans_a), (problem.b, "b", case.trans_b)):
        tracer = Tracer(spec, _MAX_GRID, 0)
        # It looks at the data in the end, and there are none.
        with suppress(AttributeError):
            prepare_on(tracer, _argument(tracer, operand), side, case.compute, trans=trans, layout=case.layout)
        yield from _noted(tracer)
