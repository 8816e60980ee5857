"""Host side of the portable kernels: from a problem and its arrays to argument structures and launches.

Runs on whatever `Launcher` it is given. Nothing here looks at the device except through it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.arguments import (
    KINDS,
    MEAN,
    Access,
    CombineParams,
    GemmParams,
    GemmReduceParams,
    MatrixView,
    PartialParams,
    choose_access,
    launches,
    matrix_view,
    piece_of,
)
from gemmserve_kernels.compiler import KernelSource
from gemmserve_kernels.config import SimtTile, resolve_simt
from gemmserve_kernels.problem import real_dtype

if TYPE_CHECKING:
    import ctypes

    from gemmserve_kernels.config import GemmConfig
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.problem import GemmProblem, GemmReduceProblem

_TYPES: Final = {
    "float16": "Half",
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}
_RASTER_GROUP: Final = 8
"""Rows of tiles that blocks walk down together; 8 as in Triton's tutorial."""
_COMBINE_GROUP: Final = 32
_COMBINE_BLOCK: Final = 256
"""Threads of the combining kernels, as in cuda/gemm_reduce.cu."""


def run_gemm(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | SimtTile | None,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    The arrays are those of `problem`, on the launcher's device. Raises ConfigInfeasible, CompileError.
    """
    operands = _Operands.of(launcher, problem, a, b)
    shape = (*problem.batch_shape, problem.m, problem.n)
    if 0 in shape:
        return
    d_view = matrix_view(launcher, out, shape, planar=operands.planar)
    beta = complex(problem.beta) if c is not None else 0j
    c_view = matrix_view(launcher, c, shape, planar=operands.planar) if c is not None and beta else d_view
    swap = _runs_along_rows(d_view)
    if swap:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        config = config.transposed() if config else None
    batch = problem.batch
    tile = resolve_simt(
        config, m=operands.m, n=operands.n, batch=batch, accumulate=operands.accumulate, spec=launcher.spec
    )
    kernel = _Kernel.build("gemm", operands, tile, c_view.dtype, d_view)
    views = [operands.a, operands.b, c_view, d_view]
    for _, inner, pieces in launches(problem.batch_shape, views):
        params = kernel.params(operands, inner, pieces, complex(problem.alpha), beta)
        _launch_tiles(launcher, kernel, "gemm", params, params)


def _runs_along_rows(d: MatrixView) -> bool:
    """Whether neighbours in memory are neighbours in a column of D: then the transposed product is computed."""
    if d.rows == 1 or d.columns == 1:
        return d.columns == 1 and d.rows > 1
    return abs(d.row_stride) < abs(d.column_stride)


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
    run = _ReduceRun.of(launcher, problem, a, b, results.get("c"))
    if problem.extent == 0:
        for name in problem.reductions:
            results[name][...] = 0  # sums alone come here: problem.py refuses the others
    elif run.outputs:
        run.execute(config, results)
    return {name: results[name] for name in problem.results}


@dataclass(frozen=True)
class _Operands:
    """op(A) as m x k, op(B) as k x n, and how they are multiplied."""

    a: MatrixView
    b: MatrixView
    conjugate_a: bool
    conjugate_b: bool
    accumulate: np.dtype
    planar: bool

    @classmethod
    def of(cls, launcher: Launcher, problem: GemmProblem | GemmReduceProblem, a: Any, b: Any) -> _Operands:
        def view(array: Any, trans: str) -> MatrixView:
            stored = matrix_view(launcher, array, (*problem.batch_shape, *array.shape[-2:]), planar=problem.planar)
            return stored.transposed() if trans in "TC" else stored

        return cls(
            view(a, problem.trans_a),
            view(b, problem.trans_b),
            problem.trans_a in "CR",
            problem.trans_b in "CR",
            problem.accumulate,
            problem.planar,
        )

    @property
    def m(self) -> int:
        return self.a.rows

    @property
    def n(self) -> int:
        return self.b.columns

    @property
    def k(self) -> int:
        return self.a.columns

    def transposed(self) -> _Operands:
        """(op(A) op(B))^T = op(B)^T op(A)^T."""
        return _Operands(
            self.b.transposed(),
            self.a.transposed(),
            self.conjugate_b,
            self.conjugate_a,
            self.accumulate,
            self.planar,
        )


@dataclass(frozen=True)
class _Kernel:
    """A kernel made concrete: its source, and the launch shape that goes with it."""

    source: KernelSource
    tile: SimtTile
    shared: int

    @classmethod
    def build(
        cls,
        name: str,
        operands: _Operands,
        tile: SimtTile,
        c_dtype: np.dtype,
        d: MatrixView | np.dtype,
        *,
        local_bytes: int = 0,
        extra: dict[str, str] | None = None,
    ) -> _Kernel:
        itemsize = operands.accumulate.itemsize
        a = choose_access(operands.a, k_is_row=False, block=tile.block_m, block_k=tile.block_k)
        b = choose_access(operands.b, k_is_row=True, block=tile.block_n, block_k=tile.block_k)
        shared = tile.shared_bytes(itemsize, pad_a=a.along_k, pad_b=b.along_k, local_bytes=local_bytes)
        piece = piece_of(itemsize, tile.thread_n)
        vector_d = isinstance(d, MatrixView) and d.column_stride == 1 and d.aligned(piece, d.row_stride)
        defines = {
            "TYPE_A": _TYPES[operands.a.dtype.name],
            "TYPE_B": _TYPES[operands.b.dtype.name],
            "TYPE_C": _TYPES[c_dtype.name],
            "TYPE_D": _TYPES[d.dtype.name if isinstance(d, MatrixView) else d.name],
            "TYPE_ACC": _TYPES[operands.accumulate.name],
            "PLANAR": _flag(operands.planar),
            "INDEX": _index_type(operands, tile),
            "BLOCK_M": str(tile.block_m),
            "BLOCK_N": str(tile.block_n),
            "BLOCK_K": str(tile.block_k),
            "THREAD_M": str(tile.thread_m),
            "THREAD_N": str(tile.thread_n),
            "STAGES": str(tile.stages),
            "MIN_BLOCKS": str(tile.min_blocks),
            "GROUP": str(_RASTER_GROUP),
            "THREADS": str(tile.threads),
            "SHARED_BYTES": str(shared),
            **_access("A", a),
            **_access("B", b),
            "VECTOR_D": _flag(vector_d),
            **(extra or {}),
        }
        return cls(KernelSource(name, tuple(defines.items())), tile, shared)

    def params(
        self,
        operands: _Operands,
        batch_shape: tuple[int, ...],
        views: list[MatrixView],
        alpha: complex,
        beta: complex = 0j,
    ) -> GemmParams:
        """The argument structure for one piece of the batch; `views` are A, B and, where there are, C and D."""
        params = GemmParams()
        for name, view in zip("abcd", views, strict=False):
            setattr(params, name, view.params())
        params.m, params.n, params.k = operands.m, operands.n, operands.k
        params.batch_shape[:] = batch_shape
        params.tiles_m = -(-operands.m // self.tile.block_m)
        params.tiles_n = -(-operands.n // self.tile.block_n)
        params.alpha[:] = alpha.real, alpha.imag
        params.beta[:] = beta.real, beta.imag
        params.conjugate_a, params.conjugate_b = operands.conjugate_a, operands.conjugate_b
        return params


def _flag(value: bool) -> str:
    return str(int(value))


def _access(operand: str, access: Access) -> dict[str, str]:
    return {f"{operand}_ALONG_K": _flag(access.along_k), f"VECTOR_{operand}": str(access.vector)}


def _index_type(operands: _Operands, tile: SimtTile) -> str:
    """Offsets inside one tile: 32 bits unless the strides ask for more. Tiles and matrices are always found in 64."""
    a, b = operands.a, operands.b
    reach = max(
        abs(a.row_stride) * tile.block_m + abs(a.column_stride) * tile.block_k,
        abs(b.column_stride) * tile.block_n + abs(b.row_stride) * tile.block_k,
    )
    return "int" if reach < 2**31 else "long long"


def _launch_tiles(
    launcher: Launcher, kernel: _Kernel, entry: str, params: ctypes.Structure, gemm: GemmParams
) -> None:
    """Launches every tile of `gemm`, which is `params` or a part of it, in as many grids as it takes."""
    tiles = gemm.tiles_m * gemm.tiles_n * int(np.prod(gemm.batch_shape[:], dtype=np.int64))
    for first in range(0, tiles, launcher.max_grid):
        gemm.first_tile = first
        grid = min(tiles - first, launcher.max_grid)
        launcher.launch(
            kernel.source, entry, grid=grid, block=kernel.tile.threads, shared=kernel.shared, params=params
        )


@dataclass(frozen=True)
class _ReduceRun:
    """One gemm_reduce, turned so that the rows are what is reduced."""

    launcher: Launcher
    problem: GemmReduceProblem
    operands: _Operands
    c: MatrixView | None

    @classmethod
    def of(cls, launcher: Launcher, problem: GemmReduceProblem, a: Any, b: Any, c: Any | None) -> _ReduceRun:
        operands = _Operands.of(launcher, problem, a, b)
        shape = (*problem.batch_shape, problem.m, problem.n)
        view = matrix_view(launcher, c, shape, planar=operands.planar) if problem.return_c else None
        if not problem.over_rows:
            operands, view = operands.transposed(), view.transposed() if view else None
        return cls(launcher, problem, operands, view)

    @property
    def outputs(self) -> int:
        """Results of each reduction."""
        return math.prod(self.problem.outputs_shape)

    @property
    def kinds(self) -> list[int]:
        """Partials to keep, as positions in KINDS; the mean is a sum."""
        names = {"sum" if name == "mean" else name for name in self.problem.reductions}
        return [kind for kind, name in enumerate(KINDS) if name in names]

    @property
    def value(self) -> np.dtype:
        """What is reduced, after pre_op, in the accumulator's width."""
        accumulate = self.operands.accumulate
        return real_dtype(accumulate) if self.problem.pre_op == "abs" else accumulate

    def partial_dtype(self, kind: int) -> np.dtype:
        """Of a tile's partial: sums run in double, extremes stay as they are."""
        if KINDS[kind] in {"sum", "sumsq"}:
            return np.dtype(np.complex128 if KINDS[kind] == "sum" and self.value.kind == "c" else np.float64)
        return real_dtype(self.value)

    def local_bytes(self) -> int:
        """Shared memory of one thread's partial, the largest over the kinds."""
        real = real_dtype(self.value).itemsize
        sizes = {"sum": self.value.itemsize, "argmax": 2 * real, "argmin": 2 * real}
        return max(sizes.get(KINDS[kind], real) for kind in self.kinds)

    def execute(self, config: GemmConfig | SimtTile | None, results: dict[str, Any]) -> None:
        """Launches the product's tiles, then combines their partials into the `results`."""
        problem, operands, launcher = self.problem, self.operands, self.launcher
        tile = resolve_simt(
            config.transposed() if config and not problem.over_rows else config,
            m=operands.m,
            n=operands.n,
            batch=problem.batch,
            accumulate=operands.accumulate,
            spec=launcher.spec,
            local_bytes=self.local_bytes(),
        )
        stored = problem.stored((), problem.dtype)[1]
        kernel = _Kernel.build(
            "gemm_reduce",
            operands,
            tile,
            stored,
            self.c or stored,
            local_bytes=self.local_bytes(),
            extra=self.defines(),
        )
        tiles_m = -(-operands.m // tile.block_m)
        length = tiles_m * (problem.batch if self.problem.over_batch else 1)
        sums_length = length if problem.reproducible else 1
        partials = _Partials.allocate(self, length, sums_length)
        views = [operands.a, operands.b, *([self.c] if self.c else [])]
        for first_matrix, inner, pieces in launches(problem.batch_shape, views):
            params = GemmReduceParams(outputs=self.outputs, first_batch=first_matrix)
            params.reduce_batch = self.problem.over_batch
            params.partial = partials.params(launcher)
            # Without C the epilogue's c and d stay null: the kernel is compiled without the store.
            both = [*pieces[:2], *pieces[2:], *pieces[2:]]
            params.gemm = kernel.params(operands, inner, both, complex(problem.alpha))
            _launch_tiles(launcher, kernel, "gemm_reduce", params, params.gemm)
        self.combine(kernel, partials, length, sums_length, results)

    def defines(self) -> dict[str, str]:
        """What gemm_reduce.cu needs beyond gemm.cu."""
        narrow = np.dtype(self.problem.dtype)
        summed = np.dtype(np.float32) if narrow == np.float16 else narrow
        mask = sum(1 << kind for kind in self.kinds)
        return {
            "REDUCTIONS": f"{mask}u",
            "PRE_OP": self.problem.pre_op.upper(),
            "ATOMIC": _flag(not self.problem.reproducible),
            "RETURN_C": _flag(self.c is not None),
            "TYPE_SUM": _TYPES[(real_dtype(summed) if self.value.kind == "f" else summed).name],
            "TYPE_SUMSQ": _TYPES[real_dtype(summed).name],
            "TYPE_REAL": _TYPES[real_dtype(narrow).name],
        }

    def combine(
        self, kernel: _Kernel, partials: _Partials, length: int, sums_length: int, results: dict[str, Any]
    ) -> None:
        """Folds the partials by groups, level by level, then writes the results."""
        launcher = self.launcher
        params = CombineParams(outputs=self.outputs, group=_COMBINE_GROUP, count=self.problem.extent)
        while length > _COMBINE_GROUP:
            groups = -(-length // _COMBINE_GROUP)
            sums_groups = -(-sums_length // _COMBINE_GROUP)
            folded = _Partials.allocate(self, groups, sums_groups)
            params.source, params.target = partials.params(launcher), folded.params(launcher)
            params.length, params.sums_length = length, sums_length
            self._launch_threads(kernel, "gemm_reduce_combine", groups * self.outputs, params)
            partials, length, sums_length = folded, groups, sums_groups
        params.source = partials.params(launcher)
        params.length, params.sums_length = length, sums_length
        targets = {name: self._target(name, results[name]) for name in self.problem.reductions}
        for name, target in targets.items():
            params.result[MEAN if name == "mean" else KINDS.index(name)] = launcher.pointer(target)
        self._launch_threads(kernel, "gemm_reduce_finish", self.outputs, params)
        for name, target in targets.items():
            self._deliver(target, results[name])

    def _launch_threads(self, kernel: _Kernel, entry: str, threads: int, params: CombineParams) -> None:
        grid = -(-threads // _COMBINE_BLOCK)
        self.launcher.launch(kernel.source, entry, grid=grid, block=_COMBINE_BLOCK, shared=0, params=params)

    def _target(self, name: str, result: Any) -> Any:
        """Where the kernel writes: the result itself where it is contiguous and not planar, else an array between."""
        shape = (self.outputs,)
        if self._splits(name):
            return self.launcher.empty(shape, np.dtype(self.problem.dtype))
        if result.flags.c_contiguous:
            return result
        return self.launcher.empty(shape, np.dtype(result.dtype))

    def _splits(self, name: str) -> bool:
        """Whether the result is planar."""
        return self.operands.planar and name in {"sum", "mean"} and self.value.kind == "c"

    def _deliver(self, target: Any, result: Any) -> None:
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
    def allocate(cls, run: _ReduceRun, length: int, sums_length: int) -> _Partials:
        """Sums that atomics add into begin at 0; everything else is written before it is read."""
        values, indices = {}, {}
        for kind in run.kinds:
            sums = KINDS[kind] in {"sum", "sumsq"}
            count = (sums_length if sums else length) * run.outputs
            create = run.launcher.empty if run.problem.reproducible or not sums else run.launcher.zeros
            values[kind] = create((count,), run.partial_dtype(kind))
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
