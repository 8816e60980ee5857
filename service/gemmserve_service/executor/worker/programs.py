"""A program on a device: step after step, each value let go after its last use.

What a step computes, and how, is what the same product would as a job of its own: the same operands lying in memory the
same way, through the same call. So its bits are the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gemmserve_kernels import Operand, plan
from gemmserve_kernels.operations.operation import Operation
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_service.errors import StepInvalid
from gemmserve_service.products import build_step, outputs
from gemmserve_service.programs import Value, last_uses, operands_of, value_name, views_of
from gemmserve_service.schemas import StepInfo, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from gemmserve_kernels import DeviceSpec
    from gemmserve_service.executor.worker.backend import HostArray, Values
    from gemmserve_service.products import Computation
    from gemmserve_service.schemas import AnyStep, ProgramParams


@dataclass
class Outcome:
    """Outcome of a program."""

    timings: Timings
    steps: list[StepInfo]
    replaced: bool = False
    """Whether plain arithmetic took the place of some step's first result."""

    @property
    def algorithm(self) -> str:
        """Algorithms of all steps."""
        return ", ".join(dict.fromkeys(step.algorithm for step in self.steps))

    @property
    def residual(self) -> float | None:
        """Largest residual of the steps."""
        return max((step.residual for step in self.steps if step.residual is not None), default=None)

    @property
    def mismatch(self) -> float | None:
        """Largest mismatch of the steps."""
        return max((step.mismatch for step in self.steps if step.mismatch is not None), default=None)


def run_program(
    params: ProgramParams,
    operands: Mapping[str, HostArray],
    results: Mapping[str, np.ndarray[Any, Any]],
    values: Values,
    spec: DeviceSpec,
    *,
    verify: bool = False,
    left: dict[str, Any] | None = None,
    done: Callable[[float], object] = lambda _: None,
) -> Outcome:
    """Runs every step in `values` of a device; `results`, by name without the $, are full when it returns.

    `left`: names of results that are not brought to their place, with what `values` has of them; None where that is
    the place itself. `done(share)` is called after each step with the share of the steps that are over, 0 to 1.

    Raises what the steps raise.
    """
    if left is not None:
        left.update(dict.fromkeys(left))
    run = _Run(operands, results, values, spec, last_uses(params.steps), verify, left if values.away else None)
    for number, step in enumerate(params.steps):
        run.step(step)
        for name in operands_of(step).values():
            if run.last[name] == number:
                run.alive.pop(name, None)
        done(max(number + 1 - values.under_way, 0) / len(params.steps))
    return run.outcome()


@dataclass
class _Run:
    operands: Mapping[str, HostArray]
    results: Mapping[str, np.ndarray[Any, Any]]
    values: Values
    spec: DeviceSpec
    last: Mapping[str, int]
    verify: bool
    left: dict[str, Any] | None
    alive: dict[str, Any] = field(default_factory=dict)
    """Values that later steps need; nothing else holds on to a value between two steps."""
    done: list[tuple[StepInfo, Computation, Callable[[], float]]] = field(default_factory=list)
    verify_s: float = 0.0
    replaced: bool = False

    def step(self, step: AnyStep) -> None:
        values = self.values
        given: dict[str, Any] = {}
        views = views_of(step)
        for operand, name in operands_of(step).items():
            if name not in self.alive:
                self.alive[name] = values.load(self.operands[name])
            view = views.get(operand)
            given[operand] = self.alive[name] if view is None else values.view(self.alive[name], view)
        computation = build_step(step, {operand: Operand.of(array) for operand, array in given.items()})
        made: dict[str, Any] = {}
        for result, (shape, dtype, order) in outputs(computation).items():
            out = self._out(step, result)
            made[result] = values.empty(Value(shape, dtype, order)) if out is None else values.result(out)
        info = StepInfo(id=step.id, algorithm="")  # to be worked out when the device has its work
        try:
            seconds = values.run(step, given, made)
        except KernelError as error:  # of its data: everything else was checked before
            raise StepInvalid(step.id, "", error) from error
        self.done.append((info, computation, seconds))
        if self.verify:
            self._check(info, step, given, made)
        for result, array in made.items():
            name = value_name(step, result)
            if self.left is not None and name[1:] in self.left:
                self.left[name[1:]] = array
            elif (out := self._out(step, result)) is not None:
                values.deliver(array, out)
            if name in self.last:
                self.alive[name] = array

    def outcome(self) -> Outcome:
        for info, computation, _ in self.done:
            info.algorithm = _algorithm(computation, self.spec)
        timings = self.values.finish()
        for info, _, seconds in self.done:
            info.kernel_s = seconds()
        timings = replace(timings, verify_s=self.verify_s)
        return Outcome(timings, [info for info, *_ in self.done], self.replaced)

    def _out(self, step: AnyStep, result: str) -> np.ndarray[Any, Any] | None:
        """Return the place of a result of the step that is a result of the program."""
        return self.results.get(value_name(step, result)[1:])

    def _check(self, info: StepInfo, step: AnyStep, given: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Check a step's results before any other step uses them, so that a wrong value goes no further."""
        began = time.perf_counter()
        found = self.values.check(step, given, made, f"step {info.id}")
        info.residual, info.mismatch = found.residual, found.mismatch
        self.replaced = self.replaced or found.replaced
        self.verify_s += time.perf_counter() - began


@lru_cache(4096)
def _algorithm(computation: Computation, spec: DeviceSpec) -> str:
    return computation.algorithm if isinstance(computation, Operation) else plan(computation, spec).algorithm
