"""Kernel sources that a case would compile, without a device: its host code runs against a LaunchRecorder."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gemmserve_kernels.device.replay import LaunchRecorder
from gemmserve_kernels.dispatch.kernels import MAX_GRID, argument, kernels_of, launches
from gemmserve_kernels.dispatch.prepare import prepare_on
from gemmserve_kernels.dispatch.routes import WITHOUT_PRODUCT, candidates, plan
from gemmserve_kernels.freivalds.kernels import check_kernels_of
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gemmserve_kernels.bench.cases import Case
    from gemmserve_kernels.device.compiler import KernelSource
    from gemmserve_kernels.device.replay import RecordedLaunch
    from gemmserve_kernels.device.spec import DeviceSpec


def sources(case: Case, spec: DeviceSpec, *, every: bool = True) -> set[KernelSource]:
    """Return the sources that `case` compiles on `spec`, operands aligned as fresh arrays are.

    `every`: by all algorithms that can run it, and what prepares its operands; else by the one that is chosen. Empty
    where the device cannot run it.
    """
    try:
        problem = case.problem()
        if not isinstance(problem, GemmProblem):
            found = _sources(kernels_of(problem, spec))
            if every and problem.config is None and plan(problem, spec).algorithm in WITHOUT_PRODUCT:
                product = replace(problem, config=GemmConfig(algorithm="product"))
                found |= _sources(kernels_of(product, spec))
            return found
        plans = candidates(problem, spec) if every and problem.config is None else [plan(problem, spec)]
    except KernelError:
        return set()
    found = {source for each in plans for source in _sources(kernels_of(problem, spec, each))}
    return found | (prepared_sources(case, spec) if every else set())


def prepared_sources(case: Case, spec: DeviceSpec) -> set[KernelSource]:
    """Return the sources that `prepare` compiles for the operands of `case`, a product, aligned as fresh arrays are; of
    `auto` also for partners of other sizes, with which products may take planes.
    """
    found: set[KernelSource] = set()
    shapes = case.shapes()
    modes = (case.compute, "3xfp16") if case.compute == "auto" else (case.compute,)
    for (side, trans), mode in itertools.product((("a", case.trans_a), ("b", case.trans_b)), modes):
        recorder = LaunchRecorder(spec, MAX_GRID, 0)
        operand = argument(recorder, Operand.contiguous(shapes[side], case.stored_dtype))
        # It looks at the data in the end, and there are none.
        with suppress(AttributeError):
            prepare_on(recorder, operand, side, mode, trans=trans, layout=case.layout)
        found |= _sources(launches(recorder))
    return found


def check_sources(case: Case, spec: DeviceSpec) -> set[KernelSource]:
    """Return the sources that a check of a product (`freivalds`) compiles, operands and result aligned as fresh arrays
    are.
    """
    problem = case.problem()
    return _sources(check_kernels_of(problem, spec)) if isinstance(problem, GemmProblem) else set()


def _sources(steps: Iterable[RecordedLaunch]) -> set[KernelSource]:
    return {step.source for step in steps}
