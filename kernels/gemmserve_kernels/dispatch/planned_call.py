"""A product on a GPU, planned down to the launches: what `gemm` keeps of the calls that it has seen.

Everything that does not depend on addresses or data is worked out once for operands that lie alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand, source_of
from gemmserve_kernels.algorithms.vendor import gemm as vendor
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.device.replay import record
from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_kernels.device.struct_params import VECTOR_BYTES
from gemmserve_kernels.dispatch.routes import as_uniform, plan_gemm
from gemmserve_kernels.problem.arrays import ArrayKey, check_out, on_elements
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.algorithms.common.prepared_operand import Outline
    from gemmserve_kernels.device.launch import Launcher, Ready
    from gemmserve_kernels.device.replay import LaunchRecorder, Program
    from gemmserve_kernels.dispatch.routes import Plan

    Pair = tuple[Outline | None, Outline | None]

Key = tuple[ArrayKey, int]
"""Layout of an array in memory, and its address modulo VECTOR_BYTES."""
_OPTIONS: Final = ("alpha", "beta", "trans_a", "trans_b", "order", "layout", "compute", "config")
_SIDES: Final[tuple[Literal["a", "b"], ...]] = ("a", "b")
_ALLOCATED: Final = 0
"""Fresh arrays are aligned."""


def operand_key(array: Any) -> Key:
    """Return how a CuPy array lies in memory."""
    return ArrayKey.of(array), array.data.ptr % VECTOR_BYTES


def whole_elements(operand: Any) -> Any:
    """The operand, or a copy of an array whose elements do not lie at multiples of their size (see `on_elements`)."""
    source = source_of(operand)
    return operand if (copy := on_elements(source)) is source else copy


def operand_outline(operand: Any) -> Outline | None:
    """Return the outline of what was prepared of it."""
    return operand.outline if isinstance(operand, PreparedOperand) else None


def build_problem(a: ArrayKey, b: ArrayKey, c: ArrayKey | None, options: tuple[Any, ...]) -> GemmProblem:
    """The problem of `gemm`'s arguments, the options in the order of its signature."""
    named = dict(zip(_OPTIONS, options, strict=True))
    return GemmProblem.build(Operand.of(a), Operand.of(b), None if c is None else Operand.of(c), **named)


@dataclass(frozen=True, eq=False)
class Call:
    """Planned call of `problem`. `program` is None where the vendor's BLAS does it. `takes`: which operands' prepared
    forms it uses. Where `converted` is set, operands become those of that problem first.
    """

    problem: GemmProblem
    plan: Plan
    launcher: CupyLauncher
    program: Program | None
    takes: tuple[bool, bool]
    converted: GemmProblem | None

    def run(self, a: Any, b: Any, c: Any | None, into: Any) -> None:
        """Enqueues it on the current stream of the device that it was planned for, the current one. Arrays are CuPy's,
        `a` and `b` possibly prepared; `into` is of the result's shape and overlaps none of them. Raises DeviceError,
        OutOfDeviceMemory.
        """
        if c is not None and self.problem.beta == 0:
            c = None
        if self.program is None:
            self._blas_call.run(source_of(a), source_of(b), c, into)
            return
        if self.converted is not None:
            problem = self.converted
            a, b = source_of(a).astype(problem.a.dtype, order="C"), source_of(b).astype(problem.b.dtype, order="C")
            c = c if c is None or problem.c is None else c.astype(problem.c.dtype, order="C")
        arrays = [source_of(a), source_of(b), into] if c is None else [source_of(a), source_of(b), into, c]
        addresses = [array.data.ptr for array in arrays]
        self._ready.run((*addresses, *prepared_addresses(a, b, self.takes)))

    def enqueue(self, *, reads_c: bool) -> Callable[[tuple[int, ...]], None] | None:
        """Return the call for addresses instead of arrays, under the conditions of `run`: of A, B, the result, C where
        it is read, and of what was prepared of A and of B as far as it `takes` it. None where it takes arrays alone.
        """
        if self.program is None:
            return None if reads_c else self._blas_call.enqueue
        return self._ready.run if self.converted is None else None

    @cached_property
    def _ready(self) -> Ready:
        assert self.program is not None
        return self.launcher.ready(self.program)

    @cached_property
    def _blas_call(self) -> vendor.BlasCall:
        assert self.plan.blas is not None
        return vendor.BlasCall(self.problem, self.plan.blas)


def plan_call(
    ordinal: int,
    operands: tuple[Key, Key, Key | None],
    outlines: Pair,
    out: ArrayKey | None,
    into: Key | None,
    options: tuple[Any, ...],
) -> Call:
    """The call for arrays A, B and C that lie like `operands` on the device of that number. `outlines`: of what was
    prepared of A and B. `out`: what the caller wants the result in. `into`: how that lies, None for a fresh array.

    Pure but for loading nothing: no launch is made. Raises what `gemm` raises for its arguments.
    """
    keys = [None if key is None else key[0] for key in operands]
    assert keys[0] is not None
    assert keys[1] is not None
    problem = build_problem(keys[0], keys[1], keys[2], options)
    spec = DeviceSpec.of(ordinal)
    chosen = plan_gemm(problem, spec, None if out is None or into is None else Operand.of(out))
    if out is not None:
        check_out("out", out, problem.result_shape, problem.result_dtype)
    launcher = CupyLauncher(spec)
    if chosen.blas is not None:
        return Call(problem, chosen, launcher, None, (False, False), None)
    converted = as_uniform(problem)[0] if chosen.uniform else None
    if into is None:
        into = fresh_key(Operand.contiguous(problem.result_shape, problem.result_dtype, problem.order))
    a, b, c = operands
    if converted is not None:
        a, b, c = (
            fresh_key(converted.a),
            fresh_key(converted.b),
            None if converted.c is None else fresh_key(converted.c),
        )
        outlines = (None, None)
    if problem.beta == 0:
        c = None
    taken, used = taken_of(chosen, outlines)
    program = program_of(launcher, converted or problem, chosen, (a, b, c, into), used)
    return Call(problem, chosen, launcher, program, taken, converted)


def program_of(
    launcher: Launcher,
    problem: GemmProblem,
    plan: Plan,
    keys: tuple[Key, Key, Key | None, Key],
    outlines: Pair = (None, None),
) -> Program:
    """The launches of `plan`. The program's arguments: A, B, the result, C where there is one, and then the arrays of
    what was prepared of A and of B.
    """

    def run(recorder: LaunchRecorder) -> int:
        a, b, into = (key_argument(recorder, key) for key in (keys[0], keys[1], keys[3]))
        c = None if keys[2] is None else key_argument(recorder, keys[2])
        a, b = prepared_arguments(recorder, (a, b), outlines)
        arguments = recorder.array_count
        plan.run_gemm(recorder, problem, a, b, c, into)
        return arguments

    return record(launcher.spec, launcher.max_grid, run)


def prepared_arguments(recorder: LaunchRecorder, operands: tuple[Any, Any], outlines: Pair) -> list[Any]:
    """A and B as they are, or with arguments for what was prepared of them."""
    found: list[Any] = []
    for source, side, outline in zip(operands, _SIDES, outlines, strict=True):
        if outline is None:
            found.append(source)
            continue
        arrays = [recorder.argument(x.shape, x.dtype, x.strides) for x in outline.payload.arrays]
        payload = outline.payload.with_arrays(source, arrays)
        found.append(PreparedOperand(source, side, "N", "interleaved", "auto", payload))
    return found


def prepared_addresses(a: Any, b: Any, takes: tuple[bool, bool]) -> tuple[int, ...]:
    """Return the last arguments of a program: where lies what was prepared of A and of B, if it is taken."""
    of_a: tuple[int, ...] = a.addresses if takes[0] else ()
    of_b: tuple[int, ...] = b.addresses if takes[1] else ()
    return of_a + of_b


def key_argument(recorder: LaunchRecorder, key: Key) -> Any:
    """An argument of the program that lies like `key`."""
    return recorder.argument(key[0].shape, key[0].dtype, key[0].strides, key[1])


def taken_of(plan: Plan, outlines: Pair) -> tuple[tuple[bool, bool], Pair]:
    """Whether the algorithm uses what was prepared of A and of B, and the outlines that it uses."""
    a, b = (
        outline
        if outline is not None and plan.takes_prepared and plan.arithmetic in outline.payload.arithmetics
        else None
        for outline in outlines
    )
    return (a is not None, b is not None), (a, b)


def fresh_key(operand: Operand) -> Key:
    """The key of an array that CuPy allocates."""
    itemsize = operand.dtype.itemsize
    return ArrayKey(operand.shape, operand.dtype, tuple(stride * itemsize for stride in operand.strides)), _ALLOCATED
