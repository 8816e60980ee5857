"""Sums and means of a product's rows or columns without the product: 1^T (A B) = (1^T A) B, and (A B) 1 = A (B 1).

Two passes bound by memory, in double throughout, so no less accurate than sums over a rounded product; two launches
where either pass has few partials, of which the second may begin before the first has ended. The order of every sum
depends on the shape of one product and on how the operands lie, not on the batch.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, flag
from gemmserve_kernels.algorithms.common.partials import Partials, added_up, combine, outputs_of, sum_dtype, targets
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    VECTOR_BYTES,
    MatrixView,
    StoredArray,
    dense_strides,
    launches,
    own_extents,
    place,
)
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.problem.vocabulary import PARTIAL_KINDS

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmReduceProblem

_THREADS: Final = 256
_WARP: Final = 32
_LINES: Final = {True: 256, False: 2048}
"""Rows of one block, across and along memory: enough to pay for the partials, few enough to fill a device."""
_FEWEST: Final = 4
"""Threads side by side in a row at least."""
_COLUMNS: Final = 32
"""Columns of one block where it walks along them."""
_MAX_PARTS: Final = 4
"""Parts of weights that every block of the second pass adds up: 8 KiB beside the 128 KiB that it reads."""


@device_struct("sums/sums.cu")
class SumsParams(ctypes.Structure):
    """Arguments of sums."""


def supports(problem: GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem`, or None: sums and means of the product as it is are all it knows."""
    if spec.warp_size != _WARP:
        return "sums are written for warps of 32"
    if set(problem.reductions) - {"sum", "mean"} or problem.pre_op != "identity" or problem.return_c:
        return "without the product there are sums and means of it alone"
    return None


def resolve(config: GemmConfig | None, problem: GemmReduceProblem, spec: DeviceSpec) -> None:
    """Check that nothing is asked for: there is nothing to choose. Raises ConfigInfeasible where `config` does."""
    del problem, spec
    if config is not None:
        config.only("sums", ())


@dataclass(frozen=True)
class _Pass:
    """Sums of the rows of one operand, a matrix of the batch after the other; addresses count from its base."""

    source: KernelSource
    pieces: tuple[tuple[SumsParams, int], ...]
    parts: int


def _pass(
    view: MatrixView,
    batch_shape: tuple[int, ...],
    weight_strides: tuple[int, ...] | None,
    problem: GemmReduceProblem,
    *,
    conjugate: bool,
) -> _Pass:
    """The rows of `view` are summed up; `weight_strides`: elements to the weights of the next matrix, None: all 1."""
    item = view.dtype.itemsize
    across = view.columns > 1 and (view.rows == 1 or abs(view.column_stride) <= abs(view.row_stride))
    fast, slow = (view.column_stride, view.row_stride) if across else (view.row_stride, view.column_stride)
    vector = VECTOR_BYTES // item
    while vector > 1 and not (fast == 1 and view.aligned(vector, slow)):
        vector //= 2
    columns = vector * _lanes(-(-view.columns // vector)) if across else _COLUMNS
    lines = _LINES[across]
    tiles, parts = -(-view.columns // columns), -(-view.rows // lines)
    wide = np.dtype(np.complex128 if problem.dtype.kind == "c" else np.float64)
    defines = {
        "TYPE_X": TYPES[view.dtype.name],
        "TYPE_ACC": TYPES[wide.name],
        "PLANAR": flag(problem.planar),
        "ACROSS": flag(across),
        "WEIGHTED": flag(weight_strides is not None),
        "VECTOR": str(vector),
        "LINES": str(lines),
        "COLUMNS": str(columns),
        "TYPE_SUM": TYPES[sum_dtype(problem).name],
    }
    weights = MatrixView(0, 0, wide, 1, 1, 0, 0, weight_strides or (0,) * len(batch_shape))
    alpha = complex(problem.alpha)
    pieces = []
    for first, inner, (x, w) in launches(batch_shape, [view, weights]):
        params = SumsParams(
            x=x.params(), rows=view.rows, columns=view.columns, first_batch=first, tiles=tiles, parts=parts,
            conjugate=conjugate,
        )  # fmt: skip
        params.batch_shape[:] = inner
        params.weights = w.re
        params.weight_stride[:] = w.params().batch_stride[:]
        params.alpha[:] = alpha.real, alpha.imag
        pieces.append((params, math.prod(inner) * tiles * parts))
    return _Pass(KernelSource("sums", tuple(defines.items())), tuple(pieces), parts)


def _lanes(pieces: int) -> int:
    """Threads that have a row of a tile: a warp's, fewer where so many pieces are too few for one."""
    lanes = _FEWEST
    while lanes < min(pieces, _WARP):
        lanes *= 2
    return lanes


@dataclass(frozen=True)
class _SumsPlan:
    """`first` sums the rows of op(A) for each of its matrices, `second` weighs those of op(B) with what comes out."""

    first: _Pass
    second: _Pass
    inner: int
    swapped: bool


@lru_cache(maxsize=1024)
def _plan(problem: GemmReduceProblem, a: StoredArray, b: StoredArray) -> _SumsPlan:
    operands = Operands.of(problem, a, b)
    swapped = not problem.over_rows
    if swapped:
        operands = operands.transposed()
    view = operands.a
    own = own_extents(problem.batch_shape, view.batch_strides)
    strides = dense_strides(own, operands.k)
    once = replace(view, batch_strides=tuple(0 if n == 1 else s for n, s in zip(own, view.batch_strides, strict=True)))
    return _SumsPlan(
        _pass(once, own, None, problem, conjugate=operands.conjugate_a),
        _pass(operands.b, problem.batch_shape, strides, problem, conjugate=operands.conjugate_b),
        math.prod(own) * operands.k,
        swapped,
    )


def run_gemm_reduce(
    launcher: Launcher, problem: GemmReduceProblem, config: GemmConfig | None, a: Any, b: Any, results: dict[str, Any]
) -> None:
    """Writes the sum and the mean of alpha op(a) op(b) over its rows or columns into `results`. Raises CompileError."""
    del config
    (stored_a, base_a), (stored_b, base_b) = (StoredArray.of(launcher, x) for x in (a, b))
    plan = _plan(problem, stored_a, stored_b)
    bases = (base_b, base_a) if plan.swapped else (base_a, base_b)
    wide = np.dtype(np.complex128 if problem.dtype.kind == "c" else np.float64)
    weights = launcher.empty((plan.first.parts * plan.inner,), wide)
    of_weights = SumsParams(out=launcher.pointer(weights), outputs=plan.inner)
    _launch(launcher, plan.first, bases[0], of_weights)
    parts = plan.first.parts
    if parts > _MAX_PARTS:
        weights, parts = added_up(launcher, problem, weights, parts), 1
    problem = replace(problem, reproducible=True)
    params = SumsParams(
        weights=launcher.pointer(weights), weights_apart=plan.inner, weight_parts=parts,
        reduce_batch=problem.over_batch, outputs=outputs_of(problem), count=problem.extent,
    )  # fmt: skip
    if plan.second.parts == 1 and not problem.over_batch:
        with targets(launcher, problem, results) as pointers:
            params.sum, params.mean = pointers.get("sum", 0), pointers.get("mean", 0)
            _launch(launcher, plan.second, bases[1], params)
        return
    partials = Partials.allocate(launcher, problem, plan.second.parts * (problem.batch if problem.over_batch else 1))
    params.out = launcher.pointer(partials.values[PARTIAL_KINDS.index("sum")])
    _launch(launcher, plan.second, bases[1], params)
    combine(launcher, problem, partials, results)


def _launch(launcher: Launcher, of: _Pass, base: int, given: SumsParams) -> None:
    """Every piece of a pass, with what `given` says of weights and results."""
    for piece, blocks in of.pieces:
        params = SumsParams.from_buffer_copy(piece)
        place([params.x], [base])
        params.weights += given.weights
        for name in ("weights_apart", "weight_parts", "out", "outputs", "sum", "mean", "count", "reduce_batch"):
            setattr(params, name, getattr(given, name))
        for first in range(0, blocks, launcher.max_grid):
            params.first_block = first
            grid = min(blocks - first, launcher.max_grid)
            launcher.launch(of.source, "sums", grid=grid, block=_THREADS, shared=0, params=params, dependent=True)
