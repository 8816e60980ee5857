"""Programs after their check: the steps that run, what they make, and how long each value is needed. Pure.

Values are named as steps refer to them: an array by its id, the result of a step by `$step`, one of a gemm_reduce by
`$step.name`. Each step is planned where it runs; here only whether a device has what it needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

from gemmserve_kernels import GemmProblem, GemmReduceProblem, Operand, ParameterInvalid, Plan, plan
from gemmserve_kernels.dispatch.routes import available
from gemmserve_kernels.operations.operation import Operation
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_kernels.problem.view import operand_of_view
from gemmserve_service import products
from gemmserve_service.errors import ProgramTooLarge, StepInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np

    from gemmserve_kernels import DeviceSpec
    from gemmserve_kernels.problem.vocabulary import AlgorithmName
    from gemmserve_service.products import Computation, Product
    from gemmserve_service.schemas import AnyStep, ProgramParams, View

_PLAIN_MODES: Final = ("auto", "fp32", "fp64")  # without a configuration nothing but the mode itself can be missing


@dataclass(frozen=True, slots=True)
class Value:
    """An array that a step makes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def operands_of(step: AnyStep) -> dict[str, str]:
    """Return the names of the values that a step refers to, by operand."""
    return {field: given if isinstance(given, str) else given.id for field, given in _given(step)}


def views_of(step: AnyStep) -> dict[str, View]:
    """Return the views that a step takes of the values that it refers to, by operand."""
    return {field: given for field, given in _given(step) if not isinstance(given, str)}


def _given(step: AnyStep) -> Iterator[tuple[str, str | View]]:
    for operand in step.operands:
        given = getattr(step, operand)
        if given is not None:
            yield operand, given


def described_operands(step: AnyStep, values: Mapping[str, Operand]) -> dict[str, Operand]:
    """Return the operands of a step, as its views show the values, which lie contiguously; by name. Conjugates, which
    are made before the step runs, lie in C order.

    Raises ParameterInvalid for a view that does not fit, whose `parameter` names operand and field, ShapeMismatch.
    """
    found = {operand: values[name] for operand, name in operands_of(step).items()}
    for operand, view in views_of(step).items():
        try:
            seen = operand_of_view(found[operand], view)
        except ParameterInvalid as error:
            raise ParameterInvalid(f"{operand}: {error}", f"{operand}.{error.parameter}") from error
        found[operand] = Operand.contiguous(seen.shape, seen.dtype) if view.conj else seen
    return found


def value_name(step: AnyStep, result: str) -> str:
    """Return the name by which other steps refer to that result; without the $, it is the job's name for it."""
    return f"${step.id}.{result}" if step.several else f"${step.id}"


def products_of(computation: Computation) -> tuple[Product, ...]:
    """Return the products that a step is, or is made of."""
    return computation.products if isinstance(computation, Operation) else (computation,)


def last_uses(steps: Sequence[AnyStep]) -> dict[str, int]:
    """Return the number of the last step that needs each value, by its name: after that one it may go."""
    return {name: number for number, step in enumerate(steps) for name in operands_of(step).values()}


@dataclass(frozen=True, eq=False)
class Program:
    """Steps in their order, each with what it computes; `results` are what the job gives, by name without the $."""

    params: ProgramParams
    computations: tuple[Computation, ...]
    values: tuple[Mapping[str, Value], ...]
    """Values that each step makes, by value name."""
    arrays: Mapping[str, int]
    """Bytes of the stored operands, by id."""
    results: Mapping[str, Value]
    places: tuple[int, ...]
    """Position of each step in the request: those that no result depends on are left out."""
    _verdicts: dict[DeviceSpec, KernelError | None] = field(default_factory=dict)

    def __len__(self) -> int:
        """Steps that run."""
        return len(self.computations)

    def nbytes(self) -> int:
        """Bytes that must move to and from a device: stored operands once, results once."""
        return sum(self.arrays.values()) + sum(value.nbytes for value in self.results.values())

    def step_nbytes(self) -> int:
        """Bytes that the steps read and write, whether they move or not."""
        return sum(each.nbytes() for each in self.computations)

    def flops(self) -> int:
        """Operations of all steps."""
        return sum(each.flops() for each in self.computations)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the step with most operations."""
        return max(self.computations, key=lambda each: each.flops()).dtype

    @cached_property
    def peaks(self) -> tuple[int, int]:
        """Most bytes alive at one time: of all values, and of those that are neither stored nor results."""
        steps = self.params.steps
        last = last_uses(steps)
        sizes: dict[str, int] = {}
        alive = scratch = peak = scratch_peak = 0
        for number, step in enumerate(steps):
            used = set(operands_of(step).values())
            for name in used - sizes.keys():  # a stored operand: it comes with its first use
                sizes[name] = self.arrays[name]
                alive += sizes[name]
            made = {name: value.nbytes for name, value in self.values[number].items()}
            sizes |= made
            alive += sum(made.values())
            scratch += sum(size for name, size in made.items() if self._temporary(name))
            computation = self.computations[number]
            own = computation.scratch_nbytes if isinstance(computation, Operation) else 0
            own += self._conjugates(number)
            peak, scratch_peak = max(peak, alive + own), max(scratch_peak, scratch + own)
            for name in {name for name in used if last[name] == number} | (made.keys() - last.keys()):
                alive -= sizes[name]
                scratch -= sizes[name] if self._temporary(name) else 0
        return peak, scratch_peak

    def plan(self, spec: DeviceSpec) -> Plan:
        """Return the plan of a program that the device can run; checked once. Raises StepInvalid, ProgramTooLarge."""
        self.warm(spec)
        reason = self._verdicts[spec]
        if reason is not None:
            raise reason
        return _PLANNED

    def warm(self, spec: DeviceSpec) -> None:
        """Check the program for a device, so that `plan` costs nothing: many different steps take seconds."""
        if spec not in self._verdicts:
            try:
                self._check(spec)
            except KernelError as error:
                self._verdicts[spec] = error
            else:
                self._verdicts[spec] = None

    def _check(self, spec: DeviceSpec) -> None:
        # Host memory holds stored arrays and results as mapped files, whose pages come and go.
        needed = self.peaks[1 if spec.kind == "cpu" else 0]
        if needed > spec.memory_bytes:
            raise ProgramTooLarge(
                f"{needed} bytes of values are needed at one time, and {spec.name} has {spec.memory_bytes} bytes of "
                "memory: split the program, or the arrays"
            )
        checked: set[Computation] = set()
        for place, step, computation in zip(self.places, self.params.steps, self.computations, strict=True):
            if computation in checked:
                continue
            checked.add(computation)
            for product in products_of(computation):
                plain = getattr(step, "config", None) is None and product.compute in _PLAIN_MODES
                if not plain or product.compute not in available(product.dtype, spec):
                    _plan_step(place, step, product, spec)

    def _conjugates(self, number: int) -> int:
        """Bytes of the conjugates that a step has made of its operands before it runs."""
        views, computation = views_of(self.params.steps[number]), self.computations[number]
        return sum(getattr(computation, operand).nbytes for operand, view in views.items() if view.conj)

    def _temporary(self, name: str) -> bool:
        return name.startswith("$") and name[1:] not in self.results


def _plan_step(place: int, step: AnyStep, product: Product, spec: DeviceSpec) -> None:
    try:
        plan(product, spec)
    except KernelError as error:
        raise StepInvalid(step.id, f"/steps/{place}", error) from error


_PLANNED: Final = Plan(cast("AlgorithmName", "program"))
"""Stands for the plans of the steps, which the worker makes."""


Problem = GemmProblem | GemmReduceProblem | Program


def plan_problem(problem: Problem, spec: DeviceSpec) -> Plan:
    """Return how the device runs a product or a program. Raises KernelError."""
    return problem.plan(spec) if isinstance(problem, Program) else plan(problem, spec)


def outputs(problem: Problem) -> dict[str, tuple[tuple[int, ...], np.dtype[Any], str]]:
    """Return shape, dtype and memory order of every result of a product or a program, by name."""
    if isinstance(problem, Program):
        return {name: (value.shape, value.dtype, value.order) for name, value in problem.results.items()}
    return products.outputs(problem)
