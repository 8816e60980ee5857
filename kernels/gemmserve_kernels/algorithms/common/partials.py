"""Reductions of a product's rows or columns: the partials that its tiles leave, and how they are combined.

Whichever kernel multiplies, every tile leaves one partial for each output (see cuda/epilogue/reductions.cuh), `length`
of them in the order of what is reduced. combine.cu folds them in that order, so that results are the same bits
from run to run.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, flag
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import CombineParams, PartialParams
from gemmserve_kernels.problem.operand import real_dtype
from gemmserve_kernels.problem.vocabulary import PARTIAL_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.problem.problem import GemmReduceProblem

_GROUP: Final = 32
"""Partials that one thread folds; pulled out of the air between latency and the number of levels."""
_BLOCK: Final = 256
"""Threads of the combining kernels, as in cuda/epilogue/combine.cu."""
_SUMS: Final = ("sum", "sumsq")


def kinds(problem: GemmReduceProblem) -> list[int]:
    """Partials to keep, as positions in PARTIAL_KINDS; the mean is a sum."""
    names = {"sum" if name == "mean" else name for name in problem.reductions}
    return [kind for kind, name in enumerate(PARTIAL_KINDS) if name in names]


def _value_dtype(problem: GemmReduceProblem) -> np.dtype[Any]:
    """Return the dtype that is reduced, after pre_op, in the accumulator's width."""
    return real_dtype(problem.accumulate) if problem.pre_op == "abs" else problem.accumulate


def _partial_dtype(problem: GemmReduceProblem, kind: int) -> np.dtype[Any]:
    """Return the dtype of a tile's partial: sums run in double, extremes stay as they are."""
    value = _value_dtype(problem)
    if PARTIAL_KINDS[kind] in _SUMS:
        return np.dtype(np.complex128 if PARTIAL_KINDS[kind] == "sum" and value.kind == "c" else np.float64)
    return real_dtype(value)


def local_bytes(problem: GemmReduceProblem) -> int:
    """Shared memory of one thread's partial, the largest over the kinds."""
    value = _value_dtype(problem)
    real = real_dtype(value).itemsize
    sizes = {"sum": value.itemsize, "argmax": 2 * real, "argmin": 2 * real}
    return max(sizes.get(PARTIAL_KINDS[kind], real) for kind in kinds(problem))


def epilogue_defines(problem: GemmReduceProblem) -> dict[str, str]:
    """Return the defines of a kernel that leaves partials."""
    return {
        "REDUCTIONS": f"{sum(1 << kind for kind in kinds(problem))}u",
        "PRE_OP": problem.pre_op.upper(),
        "ATOMIC": flag(not problem.reproducible),
        "RETURN_C": flag(problem.return_c),
    }


def sum_dtype(problem: GemmReduceProblem) -> np.dtype[Any]:
    """Return the dtype of the sums and means that kernels write."""
    if problem.partial:
        return np.dtype(np.complex128 if problem.value_dtype.kind == "c" else np.float64)
    summed = np.dtype(np.float32) if problem.dtype == np.float16 else problem.dtype
    return real_dtype(summed) if problem.value_dtype.kind == "f" else summed


def combine_source(problem: GemmReduceProblem, some: bool = False) -> KernelSource:
    """The kernels that combine the partials of `problem`, or of some of its outputs, which the device knows."""
    summed = sum_dtype(problem)
    defines = {
        "REDUCTIONS": epilogue_defines(problem)["REDUCTIONS"],
        "TYPE_VALUE": TYPES[_value_dtype(problem).name],
        "TYPE_SUM": TYPES[summed.name],
        "TYPE_SUMSQ": TYPES[real_dtype(summed).name],
        "TYPE_REAL": TYPES[real_dtype(problem.accumulate if problem.partial else problem.dtype).name],
    }
    if some:
        defines["SCREENED"] = "1"
    return KernelSource("combine", tuple(defines.items()))


def outputs_of(problem: GemmReduceProblem) -> int:
    """Results of each reduction."""
    return math.prod(problem.outputs_shape)


@dataclass(frozen=True)
class Partials:
    """Workspace: for each kind `length` x outputs partials, arguments with their indices. Where atomics add (the caller
    asked for no order), sums have one slot for each output, which is 0 before.
    """

    outputs: int
    length: int
    sums_length: int
    values: dict[int, Any]
    indices: dict[int, Any]

    @classmethod
    def allocate(cls, launcher: Launcher, problem: GemmReduceProblem, length: int, sums_length: int = 0) -> Partials:
        """For `length` partials of each output. Everything but what atomics add into is written before it is read."""
        sums_length = sums_length or (length if problem.reproducible else 1)
        outputs = outputs_of(problem)
        values, indices = {}, {}
        for kind in kinds(problem):
            sums = PARTIAL_KINDS[kind] in _SUMS
            count = (sums_length if sums else length) * outputs
            create = launcher.empty if problem.reproducible or not sums else launcher.zeros
            values[kind] = create((count,), _partial_dtype(problem, kind))
            if PARTIAL_KINDS[kind].startswith("arg"):
                indices[kind] = launcher.empty((count,), np.dtype(np.int64))
        return cls(outputs, length, sums_length, values, indices)

    def params(self, launcher: Launcher) -> PartialParams:
        """The kernel's form."""
        params = PartialParams()
        for kind, array in self.values.items():
            params.values[kind] = launcher.pointer(array)
        for kind, array in self.indices.items():
            params.indices[kind - PARTIAL_KINDS.index("argmax")] = launcher.pointer(array)
        return params

    def place(self, launcher: Launcher, params: Any, first_matrix: int) -> None:
        """Sets the addresses in a structure that has `partial`, `outputs` and `first_batch`, of matrices from
        `first_matrix` on.
        """
        params.partial, params.outputs = self.params(launcher), self.outputs
        params.first_batch += first_matrix


def combine(launcher: Launcher, problem: GemmReduceProblem, partials: Partials, results: dict[str, Any]) -> None:
    """Folds the partials by groups, level by level, and writes the results, arrays of any strides."""
    with targets(launcher, problem, results) as pointers:
        fold(launcher, problem, partials, pointers)


def fold(
    launcher: Launcher,
    problem: GemmReduceProblem,
    partials: Partials,
    pointers: dict[str, int],
    failing: tuple[int, int] | None = None,
) -> None:
    """The same into arrays of `targets`. `failing`: addresses of words, one for each output, written only where
    its word is not 0, and of one that is 0 where all are.
    """
    source, outputs = combine_source(problem, failing is not None), outputs_of(problem)
    params = CombineParams(outputs=outputs, group=_GROUP, count=problem.extent)
    params.failing, params.failing_any = failing or (0, 0)

    def launch(entry: str, threads: int) -> None:
        grid = -(-threads // _BLOCK)
        launcher.launch(source, entry, grid=grid, block=_BLOCK, shared=0, params=params, dependent=True)

    while partials.length > _GROUP:
        groups, sums_groups = -(-partials.length // _GROUP), -(-partials.sums_length // _GROUP)
        folded = Partials.allocate(launcher, problem, groups, sums_groups)
        params.in_, params.out = partials.params(launcher), folded.params(launcher)
        params.length, params.sums_length = partials.length, partials.sums_length
        launch("gemm_reduce_combine", groups * outputs)
        partials = folded
    params.in_ = partials.params(launcher)
    params.length, params.sums_length = partials.length, partials.sums_length
    for name, pointer in pointers.items():
        params.result[len(PARTIAL_KINDS) if name == "mean" else PARTIAL_KINDS.index(name)] = pointer
    launch("gemm_reduce_finish", outputs)


def added_up(launcher: Launcher, problem: GemmReduceProblem, values: Any, parts: int) -> Any:
    """Return the sums over `parts`, which follow each other in `values`, in their order: a fresh array."""
    outputs = values.shape[0] // parts
    folded = launcher.empty((outputs,), values.dtype)
    params = CombineParams(outputs=outputs, group=parts, length=parts, sums_length=parts)
    kind = PARTIAL_KINDS.index("sum")
    params.in_.values[kind], params.out.values[kind] = launcher.pointer(values), launcher.pointer(folded)
    source = combine_source(replace(problem, reductions=("sum",)))
    launcher.launch(source, "gemm_reduce_combine", grid=-(-outputs // _BLOCK), block=_BLOCK, shared=0, params=params)
    return folded


@contextmanager
def targets(launcher: Launcher, problem: GemmReduceProblem, results: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Arrays that a kernel writes each reduction to, in C order and complex where it is; then brought to `results`."""
    written = {name: _target(launcher, problem, name, results[name]) for name in problem.reductions}
    yield {name: launcher.pointer(target) for name, target in written.items()}
    for name, target in written.items():
        if target is not results[name]:
            _deliver(target, results[name])


def written_dtype(problem: GemmReduceProblem, name: str) -> np.dtype[Any]:
    """Return the dtype that the kernel writes as the result `name`: complex numbers where it is planar."""
    dtype = problem.results[name][1]
    planar = problem.planar and name in {"sum", "mean"} and problem.value_dtype.kind == "c"
    return sum_dtype(problem) if planar else dtype


def _target(launcher: Launcher, problem: GemmReduceProblem, name: str, result: Any) -> Any:
    """Return the array that the kernel writes: the result itself where it is contiguous and not planar, else an array
    between.
    """
    dtype = written_dtype(problem, name)
    if result.dtype == dtype and contiguous(result):
        return result
    return launcher.empty((outputs_of(problem),), dtype)


def contiguous(array: Any) -> bool:
    """Whether the elements follow each other in C order."""
    step = array.dtype.itemsize
    for extent, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def _deliver(target: Any, result: Any) -> None:
    if target.dtype.kind == "c" and result.dtype.kind == "f":
        result[0] = target.real.reshape(result.shape[1:])
        result[1] = target.imag.reshape(result.shape[1:])
    else:
        result[...] = target.reshape(result.shape)
