"""A reduction of products on a GPU, planned down to the launches: `call` for gemm_reduce."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.partials import outputs_of, written_dtype
from gemmserve_kernels.algorithms.common.prepared_operand import source_of
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.device.replay import record
from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_kernels.dispatch.planned_call import (
    Key,
    fresh_key,
    key_argument,
    prepared_addresses,
    prepared_arguments,
    taken_of,
)
from gemmserve_kernels.dispatch.routes import plan_gemm_reduce, taken_problem
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmReduceProblem

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.device.launch import Launcher, Ready
    from gemmserve_kernels.device.replay import LaunchRecorder, Program
    from gemmserve_kernels.dispatch.planned_call import Pair
    from gemmserve_kernels.dispatch.routes import Plan
    from gemmserve_kernels.problem.arrays import ArrayKey

_OPTIONS: Final = (
    *("reduce", "axis", "pre_op", "alpha", "trans_a", "trans_b", "layout", "compute", "config"),
    *("return_c", "reproducible", "partial"),
)


def build_problem(a: ArrayKey, b: ArrayKey, options: tuple[Any, ...]) -> GemmReduceProblem:
    """The problem of `gemm_reduce`'s arguments, the options in the order of its signature."""
    return GemmReduceProblem.build(Operand.of(a), Operand.of(b), **dict(zip(_OPTIONS, options, strict=True)))


@dataclass(frozen=True, eq=False)
class ReduceCall:
    """Planned call of `problem` on the device of `launcher`. `written` says of every result, in order, what a kernel
    writes: shape and dtype of a contiguous array, complex where the result is planar; but "c" as it is returned, unless
    the vendor's BLAS makes it.

    `program` is None where there is nothing to compute: everything is 0, or there are no outputs. Where `converted` is
    set, operands become those of that problem first.
    """

    problem: GemmReduceProblem
    plan: Plan
    launcher: CupyLauncher
    program: Program | None
    takes: tuple[bool, bool]
    converted: GemmReduceProblem | None
    written: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]

    def run(self, a: Any, b: Any, targets: dict[str, Any]) -> None:
        """Enqueues it on the current stream of the device that it was planned for, the current one. `a` and `b` are
        CuPy arrays or prepared; `targets` are contiguous arrays as in `written`, of every result. Raises DeviceError,
        OutOfDeviceMemory.
        """
        if self.program is None:
            for target in targets.values():
                target.fill(0)
            return
        if self.converted is not None and self.plan.algorithm == "vendor":
            from gemmserve_kernels.algorithms.vendor.gemm_reduce import readable_arrays

            a, b = readable_arrays(self.problem, source_of(a), source_of(b))
        elif self.converted is not None:
            a = source_of(a).astype(self.converted.a.dtype, order="C")
            b = source_of(b).astype(self.converted.b.dtype, order="C")
        arrays = [source_of(a), source_of(b), *[targets[name] for name in self.written]]
        addresses = [array.data.ptr for array in arrays]
        self._ready.run((*addresses, *prepared_addresses(a, b, self.takes)))

    @cached_property
    def is_written_as_returned(self) -> bool:
        """Whether kernels write every result as it is returned."""
        return self.written == self.problem.results

    @cached_property
    def enqueue(self) -> Callable[[tuple[int, ...]], None] | None:
        """The call for addresses instead of arrays, under the conditions of `run`: of A, B, every result in the order
        of `written`, and of what was prepared of A and of B as far as it `takes` it. None where it takes arrays alone.
        """
        return None if self.program is None or self.converted is not None else self._ready.run

    @cached_property
    def _ready(self) -> Ready:
        assert self.program is not None
        return self.launcher.ready(self.program)


def written_of(problem: GemmReduceProblem) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype of what a kernel writes for each result, as `ReduceCall.written` has them."""
    written = {}
    for name, (shape, dtype) in problem.results.items():
        written[name] = (shape, dtype)
        if name != "c" and (kernel := written_dtype(problem, name)) != dtype:
            written[name] = (shape[1:], kernel)
    return written


def plan_reduce_call(ordinal: int, operands: tuple[Key, Key], outlines: Pair, options: tuple[Any, ...]) -> ReduceCall:
    """The call for arrays A and B that lie like `operands` on the device of that number. `outlines`: of what was
    prepared of them. No launch is made. Raises what `gemm_reduce` raises for its arguments.
    """
    problem = build_problem(operands[0][0], operands[1][0], options)
    spec = DeviceSpec.of(ordinal)
    chosen = plan_gemm_reduce(problem, spec)
    launcher = CupyLauncher(spec)
    if problem.vanishes or outputs_of(problem) == 0:
        return ReduceCall(problem, chosen, launcher, None, (False, False), None, written_of(problem))
    given = taken_problem(problem, chosen)
    keys = _taken_keys(problem, given, chosen, operands)
    converted = given if given != problem or keys != operands else None
    written = written_of(given)
    if converted is not None:
        outlines = (None, None)
    taken, used = taken_of(chosen, outlines)
    program = program_of(launcher, given, chosen, keys, written, used)
    return ReduceCall(problem, chosen, launcher, program, taken, converted, written)


def _taken_keys(
    problem: GemmReduceProblem, given: GemmReduceProblem, chosen: Plan, operands: tuple[Key, Key]
) -> tuple[Key, Key]:
    """How operands of `given` lie where those of `problem` lie like `operands`: these themselves, or fresh copies."""

    def key(own: Operand, before: Operand, lies: Key) -> Key:
        if chosen.uniform or own is not before:
            return fresh_key(own)
        # The vendor's BLAS reads float16 numbers at multiples of 16 bytes, which others are brought to.
        return fresh_key(own) if chosen.algorithm == "vendor" and own.dtype == np.float16 and lies[1] else lies

    return key(given.a, problem.a, operands[0]), key(given.b, problem.b, operands[1])


def program_of(
    launcher: Launcher,
    problem: GemmReduceProblem,
    plan: Plan,
    keys: tuple[Key, Key],
    written: dict[str, tuple[tuple[int, ...], np.dtype[Any]]],
    outlines: Pair = (None, None),
) -> Program:
    """The launches of `plan`. The program's arguments: A, B, a contiguous array for each of `written` in their order,
    and then the arrays of what was prepared of A and of B.
    """

    def run(recorder: LaunchRecorder) -> int:
        operands = key_argument(recorder, keys[0]), key_argument(recorder, keys[1])
        results = {}
        for name, (shape, dtype) in written.items():
            results[name] = key_argument(recorder, fresh_key(Operand.contiguous(shape, dtype)))
        a, b = prepared_arguments(recorder, operands, outlines)
        arguments = recorder.array_count
        plan.run_gemm_reduce(recorder, problem, a, b, results)
        return arguments

    return record(launcher.spec, launcher.max_grid, run)
