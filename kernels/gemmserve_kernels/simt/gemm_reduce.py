"""Host side of gemm_reduce: the product's tiles leave partials, which are combined in order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.arguments import (
    KINDS,
    MEAN,
    CombineParams,
    GemmReduceParams,
    PartialParams,
    StoredArray,
    matrix_view,
)
from gemmserve_kernels.config import resolve_simt
from gemmserve_kernels.problem import real_dtype
from gemmserve_kernels.tiling import TYPES, Operands, Piece, TiledKernel, flag, pieces

if TYPE_CHECKING:
    from gemmserve_kernels.config import GemmConfig, SimtTile
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.problem import GemmReduceProblem

_COMBINE_GROUP: Final = 32
"""Partials that one thread folds; pulled out of the air between latency and the number of levels."""
_COMBINE_BLOCK: Final = 256
"""Threads of the combining kernels, as in cuda/gemm_reduce.cu."""


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | SimtTile | None,
    a: Any,
    b: Any,
    out: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The reductions of alpha op(a) op(b), and the product itself as "c" where the problem returns it.

    `out` has arrays for some or all of `problem.results`, of any strides; the rest is allocated. Raises
    ConfigInfeasible, CompileError.
    """
    results = dict(out or {})
    for name, (shape, dtype) in problem.results.items():
        if name not in results:
            results[name] = launcher.empty(shape, dtype)
    if problem.extent == 0:
        for name in problem.reductions:
            results[name][...] = 0  # sums alone come here: problem.py refuses the others
    elif 0 not in problem.outputs_shape:
        _Run(launcher, problem).execute(config, a, b, results)
    return {name: results[name] for name in problem.results}


@dataclass(frozen=True)
class _Plan:
    """What is launched for the product, turned so that rows are reduced; `length` partials per result."""

    kernel: TiledKernel
    pieces: tuple[Piece, ...]
    swapped: bool
    length: int


@lru_cache(maxsize=1024)
def _plan(
    spec: DeviceSpec,
    problem: GemmReduceProblem,
    config: GemmConfig | SimtTile | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray | None,
) -> _Plan:
    operands = Operands.of(problem, a, b)
    shape = (*problem.batch_shape, problem.m, problem.n)
    view = matrix_view(c, shape, planar=problem.planar) if c else None
    swapped = not problem.over_rows
    if swapped:
        operands, view = operands.transposed(), view.transposed() if view else None
        config = config.transposed() if config else None
    local_bytes = _local_bytes(problem)
    tile = resolve_simt(
        config,
        m=operands.m,
        n=operands.n,
        batch=problem.batch,
        accumulate=operands.accumulate,
        spec=spec,
        local_bytes=local_bytes,
    )
    stored = problem.stored((), problem.dtype)[1]
    extra = _defines(problem)
    kernel = TiledKernel.build(
        "gemm_reduce", operands, tile, c_dtype=stored, d_dtype=stored, d=view, local_bytes=local_bytes, extra=extra
    )
    # Where C is returned the epilogue reads none and writes D; without it the kernel is compiled without the store.
    written = [view, view] if view else []
    parts = tuple(pieces(kernel, operands, problem.batch_shape, written, complex(problem.alpha)))
    length = -(-operands.m // tile.block_m) * (problem.batch if problem.over_batch else 1)
    return _Plan(kernel, parts, swapped, length)


def _kinds(problem: GemmReduceProblem) -> list[int]:
    """Partials to keep, as positions in KINDS; the mean is a sum."""
    names = {"sum" if name == "mean" else name for name in problem.reductions}
    return [kind for kind, name in enumerate(KINDS) if name in names]


def _value_dtype(problem: GemmReduceProblem) -> np.dtype[Any]:
    """What is reduced, after pre_op, in the accumulator's width."""
    return real_dtype(problem.accumulate) if problem.pre_op == "abs" else problem.accumulate


def _partial_dtype(problem: GemmReduceProblem, kind: int) -> np.dtype[Any]:
    """Of a tile's partial: sums run in double, extremes stay as they are."""
    value = _value_dtype(problem)
    if KINDS[kind] in {"sum", "sumsq"}:
        return np.dtype(np.complex128 if KINDS[kind] == "sum" and value.kind == "c" else np.float64)
    return real_dtype(value)


def _local_bytes(problem: GemmReduceProblem) -> int:
    """Shared memory of one thread's partial, the largest over the kinds."""
    value = _value_dtype(problem)
    real = real_dtype(value).itemsize
    sizes = {"sum": value.itemsize, "argmax": 2 * real, "argmin": 2 * real}
    return max(sizes.get(KINDS[kind], real) for kind in _kinds(problem))


def _defines(problem: GemmReduceProblem) -> dict[str, str]:
    """What gemm_reduce.cu needs beyond gemm.cu."""
    narrow = problem.dtype
    summed = np.dtype(np.float32) if narrow == np.float16 else narrow
    mask = sum(1 << kind for kind in _kinds(problem))
    return {
        "REDUCTIONS": f"{mask}u",
        "PRE_OP": problem.pre_op.upper(),
        "ATOMIC": flag(not problem.reproducible),
        "RETURN_C": flag(problem.return_c),
        "TYPE_SUM": TYPES[(real_dtype(summed) if problem.value_dtype.kind == "f" else summed).name],
        "TYPE_SUMSQ": TYPES[real_dtype(summed).name],
        "TYPE_REAL": TYPES[real_dtype(narrow).name],
    }


@dataclass(frozen=True)
class _Run:
    """One gemm_reduce with something to compute."""

    launcher: Launcher
    problem: GemmReduceProblem

    @property
    def outputs(self) -> int:
        """Results of each reduction."""
        return math.prod(self.problem.outputs_shape)

    def execute(self, config: GemmConfig | SimtTile | None, a: Any, b: Any, results: dict[str, Any]) -> None:
        """Launches the product's tiles, then combines their partials into the `results`."""
        problem, launcher = self.problem, self.launcher
        arrays = [a, b, *([results["c"]] if problem.return_c else [])]
        found = [StoredArray.of(launcher, array) for array in arrays]
        stored = [*(key for key, _ in found), None][:3]
        plan = _plan(launcher.spec, problem, config, *stored)
        bases = [base for _, base in found]
        if plan.swapped:
            bases[:2] = bases[1::-1]
        sums_length = plan.length if problem.reproducible else 1
        partials = _Partials.allocate(self, plan.length, sums_length)
        params = GemmReduceParams(outputs=self.outputs, partial=partials.params(launcher))
        params.reduce_batch = problem.over_batch
        for piece in plan.pieces:
            params.first_batch = piece.first_matrix
            params.gemm = piece.placed([*bases, *bases[2:]])
            plan.kernel.launch(launcher, "gemm_reduce", params, params.gemm, piece.tiles)
        self.combine(plan, partials, sums_length, results)

    def combine(self, plan: _Plan, partials: _Partials, sums_length: int, results: dict[str, Any]) -> None:
        """Folds the partials by groups, level by level, then writes the results."""
        launcher, length = self.launcher, plan.length
        params = CombineParams(outputs=self.outputs, group=_COMBINE_GROUP, count=self.problem.extent)
        while length > _COMBINE_GROUP:
            groups = -(-length // _COMBINE_GROUP)
            sums_groups = -(-sums_length // _COMBINE_GROUP)
            folded = _Partials.allocate(self, groups, sums_groups)
            params.source, params.target = partials.params(launcher), folded.params(launcher)
            params.length, params.sums_length = length, sums_length
            self._launch_threads(plan, "gemm_reduce_combine", groups * self.outputs, params)
            partials, length, sums_length = folded, groups, sums_groups
        params.source = partials.params(launcher)
        params.length, params.sums_length = length, sums_length
        targets = {name: self._target(name, results[name]) for name in self.problem.reductions}
        for name, target in targets.items():
            params.result[MEAN if name == "mean" else KINDS.index(name)] = launcher.pointer(target)
        self._launch_threads(plan, "gemm_reduce_finish", self.outputs, params)
        for name, target in targets.items():
            _deliver(target, results[name])

    def _launch_threads(self, plan: _Plan, entry: str, threads: int, params: CombineParams) -> None:
        grid = -(-threads // _COMBINE_BLOCK)
        self.launcher.launch(plan.kernel.source, entry, grid=grid, block=_COMBINE_BLOCK, shared=0, params=params)

    def _target(self, name: str, result: Any) -> Any:
        """Where the kernel writes: the result itself where it is contiguous and not planar, else an array between."""
        planar = self.problem.planar and name in {"sum", "mean"} and self.problem.value_dtype.kind == "c"
        if result.flags.c_contiguous and not planar:
            return result
        return self.launcher.empty((self.outputs,), self.problem.dtype if planar else result.dtype)


def _deliver(target: Any, result: Any) -> None:
    if target is result:
        return
    if target.dtype.kind == "c" and result.dtype.kind == "f":
        result[0] = target.real.reshape(result.shape[1:])
        result[1] = target.imag.reshape(result.shape[1:])
    else:
        result[...] = target.reshape(result.shape)


@dataclass(frozen=True)
class _Partials:
    """Workspace: for each kind `length` x outputs partials, sums perhaps fewer, arguments with their indices."""

    values: dict[int, Any]
    indices: dict[int, Any]

    @classmethod
    def allocate(cls, run: _Run, length: int, sums_length: int) -> _Partials:
        """Sums that atomics add into begin at 0; everything else is written before it is read."""
        values, indices = {}, {}
        for kind in _kinds(run.problem):
            sums = KINDS[kind] in {"sum", "sumsq"}
            count = (sums_length if sums else length) * run.outputs
            create = run.launcher.empty if run.problem.reproducible or not sums else run.launcher.zeros
            values[kind] = create((count,), _partial_dtype(run.problem, kind))
            if KINDS[kind].startswith("arg"):
                indices[kind] = run.launcher.empty((count,), np.dtype(np.int64))
        return cls(values, indices)

    def params(self, launcher: Launcher) -> PartialParams:
        """The kernel's form."""
        params = PartialParams()
        for kind, array in self.values.items():
            params.values[kind] = launcher.pointer(array)
        for kind, array in self.indices.items():
            params.indices[kind - KINDS.index("argmax")] = launcher.pointer(array)
        return params
