"""Batches of small products, at the speed of memory: m, n and k at most 32, any dtype, any strides.

Plain multiply-adds in the accumulator's width. With compute 3xtf32, products of complex64 of extents up to 64 run on
TF32 tensor cores (cuda/small/tensor.cuh).

One launch computes a whole batch (of up to four axes that do not merge). Persistent blocks walk over groups of
consecutive products: a group's operands come into shared memory while the group before it is multiplied.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, flag
from gemmserve_kernels.algorithms.small.layout import (
    OperandLayout,
    Reads,
    Stored,
    is_dense,
    operand_layout,
    power_of_two,
    shared_bytes,
)
from gemmserve_kernels.algorithms.small.tile import LIMIT, SmallTile, choose_tile
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    MatrixView,
    StoredArray,
    coalesce,
    launches,
    matrix_view,
    place,
    set_factors,
    stored_operands,
)
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem

__all__ = ["LIMIT", "TENSOR_LIMIT", "SmallTile", "resolve", "run_gemm", "supports"]

TENSOR_LIMIT: Final = 64
"""Rows, columns and steps of k at most of complex64 products on TF32 tensor cores; others have `LIMIT`."""
_TENSOR_COMPUTE: Final = "3xtf32"
_COMPUTE: Final = ("auto", "fp32", "fp64", _TENSOR_COMPUTE)
_UNROLLED: Final = 768
"""Words that one turn of the loop over k multiplies at most: more of them outgrow the instruction caches."""
_UNROLLED_FLOAT32: Final = 256
"""The same for float32, four steps at a time: ptxas for sm_80 and sm_120 moves all reads to the front."""


@device_struct("small/params.cuh")
class SmallParams(ctypes.Structure):
    """Arguments of small_gemm."""


def supports(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Return why this algorithm cannot run `problem` on `spec`, in one line; None where it can."""
    if spec.kind == "cpu":
        return "small: needs a CUDA or ROCm device"
    limit = TENSOR_LIMIT if _has_tensor(problem, spec) else LIMIT
    for name in ("m", "n", "k"):
        extent = getattr(problem, name)
        if not 1 <= extent <= limit:
            return f"small: {name} must be 1 to {limit}, not {extent}"
    if problem.compute not in _COMPUTE:
        return f"small: the arithmetic is one of {', '.join(_COMPUTE)}, not {problem.compute}"
    if problem.compute == _TENSOR_COMPUTE and not _has_tensor(problem, spec):
        return f"small: {_TENSOR_COMPUTE} is for complex64 on CUDA devices from sm_80 on"
    return None


def _has_tensor(problem: GemmProblem, spec: DeviceSpec) -> bool:
    """Whether TF32 tensor cores may multiply: complex64 on both sides."""
    stored = "float32" if problem.planar else "complex64"
    return (
        spec.has_mma
        and problem.compute == _TENSOR_COMPUTE
        and problem.dtype.name == "complex64"
        and {problem.a.dtype.name, problem.b.dtype.name} == {stored}
    )


def resolve(config: GemmConfig | SmallTile | None, problem: GemmProblem, spec: DeviceSpec) -> SmallTile:
    """The tile for contiguous operands of `problem`: overrides of `config`, the rest chosen for `spec`.

    Raises ConfigInfeasible, naming the limit, where nothing fits.
    """
    sizes = (problem.m, problem.n, problem.k)
    layouts = tuple(
        _plain_layout(operand.dtype, rows, columns, trans, k_is_row=k_is_row, planar=problem.planar)
        for operand, rows, columns, trans, k_is_row in (
            (problem.a, problem.m, problem.k, problem.trans_a, False),
            (problem.b, problem.k, problem.n, problem.trans_b, True),
        )
    )
    parts = 2 if problem.planar else 1
    staged = problem.m * problem.n * parts * problem.result_dtype.itemsize
    return choose_tile(config, sizes, problem.accumulate.itemsize, layouts, staged, spec, _has_tensor(problem, spec))


def run_gemm(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | SmallTile | None,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    The arrays are those of `problem`, on the launcher's device; `c` may be `out`. Raises
    ConfigInfeasible, CompileError.
    """
    if 0 in problem.result_shape:
        return
    stored, bases = stored_operands(launcher, problem, a, b, c, out)
    plan = _plan(launcher.spec, problem, config, *stored)
    if plan.swapped:
        bases[:2] = bases[1::-1]
    for piece in plan.params:
        params = SmallParams.from_buffer_copy(piece)
        place((params.a, params.b, params.c, params.d), bases)
        launcher.launch(
            plan.source,
            "small_gemm",
            grid=min(plan.grid, launcher.max_grid),
            block=plan.threads,
            shared=plan.shared,
            params=params,
        )


@dataclass(frozen=True)
class _SmallPlan:
    """Launches of a batch; `swapped` where it is the transposed product, so that A and B change places."""

    source: KernelSource
    params: tuple[SmallParams, ...]
    grid: int
    threads: int
    shared: int
    swapped: bool


@lru_cache(maxsize=1024)
def _plan(
    spec: DeviceSpec,
    problem: GemmProblem,
    config: GemmConfig | SmallTile | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray,
    d: StoredArray,
) -> _SmallPlan:
    if reason := supports(problem, spec):
        raise ConfigInfeasible(reason)
    operands = Operands.of(problem, a, b)
    shape = (*problem.batch_shape, problem.m, problem.n)
    c_view, d_view = (matrix_view(array, shape, planar=problem.planar) for array in (c, d))
    # Neighbours in memory that are neighbours in a column of D: the transposed product is computed.
    by_row, by_column = is_dense(d_view)
    swapped = by_column if by_row != by_column else not by_row and abs(d_view.row_stride) < abs(d_view.column_stride)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        config = config.transposed() if isinstance(config, GemmConfig) else config
    m, n, k = operands.m, operands.n, operands.k
    parts = 2 if problem.planar else 1
    batch, strides = coalesce(
        problem.batch_shape, [view.batch_strides for view in (operands.a, operands.b, c_view, d_view)]
    )
    layout_a = operand_layout(operands.a, batch, strides[0], k_is_row=False, parts=parts)
    layout_b = operand_layout(operands.b, batch, strides[1], k_is_row=True, parts=parts)
    stored = Stored.of(c_view, d_view, batch, strides[2], strides[3])
    staged_each = m * n * parts * d_view.dtype.itemsize if stored.staged else 0
    accumulate = operands.accumulate.itemsize
    tensor = _has_tensor(problem, spec)
    tile = choose_tile(config, (m, n, k), accumulate, (layout_a, layout_b), staged_each, spec, tensor)
    reads = Reads.of(layout_a, layout_b, d_view.dtype.itemsize, tile, m, n, k)
    layout_a, layout_b = reads.padded(layout_a, layout_b, tile, m, n, spec.warp_size)
    shared = shared_bytes(tile, layout_a, layout_b, staged_each)
    work = tile.thread_m * tile.thread_n * reads.step * (accumulate // 4)
    packed_d = power_of_two(stored.vector, tile.group * m * n)
    source = KernelSource(
        "small_gemm",
        tuple(
            {
                "TYPE_A": TYPES[operands.a.dtype.name],
                "TYPE_B": TYPES[operands.b.dtype.name],
                "TYPE_C": TYPES[c.dtype.name],
                "TYPE_D": TYPES[d.dtype.name],
                "TYPE_ACC": TYPES[operands.accumulate.name],
                "PLANAR": flag(operands.planar),
                "M": str(m),
                "N": str(n),
                "K": str(k),
                "TENSOR": flag(tile.tensor),
                "THREADS": str(tile.threads),
                "MIN_BLOCKS": str(tile.min_blocks),
                "STAGES": str(tile.stages),
                "GROUP": str(tile.group),
                "ROUNDS": str(tile.rounds),
                "THREAD_M": str(tile.thread_m),
                "THREAD_N": str(tile.thread_n),
                **reads.defines(),
                "UNROLL": str(_unroll(-(-k // reads.step), work, operands.accumulate)),
                "CONJUGATE_A": flag(operands.conjugate_a),
                "CONJUGATE_B": flag(operands.conjugate_b),
                **_operand_defines("A", layout_a, tile),
                **_operand_defines("B", layout_b, tile),
                "STAGED_D": flag(stored.staged),
                # Measured: float32 results are written faster through computed addresses.
                "PACKED_D": flag(stored.packed and operands.accumulate.name != "float32"),
                "D_VECTOR": str(packed_d),
                "VECTOR_D": flag(stored.direct % reads.piece_n == 0),
                "VECTOR_C": flag(stored.read_c % reads.piece_n == 0),
                "SHARED_BYTES": str(shared),
            }.items()
        ),
    )
    views = [operands.a, operands.b, c_view, d_view]
    params = tuple(_params(problem, views))
    groups = -(-math.prod(params[0].batch_shape) // tile.group)
    return _SmallPlan(source, params, min(groups, tile.min_blocks * spec.sm_count), tile.threads, shared, swapped)


def _unroll(turns: int, work: int, accumulate: np.dtype[Any]) -> int:
    """Turns of the loop over k that are written out: all, or equal shares of `work` each that stay within bounds."""
    fitting = (_UNROLLED_FLOAT32 if accumulate.name == "float32" else _UNROLLED) // work
    return max(count for count in range(1, turns + 1) if turns % count == 0 and count <= max(1, fitting))


def _operand_defines(name: str, layout: OperandLayout, tile: SmallTile) -> dict[str, str]:
    group = 1 if layout.broadcast else tile.group
    vector = power_of_two(layout.vector, group * layout.slow * layout.fast) if layout.image else layout.vector
    return {
        f"{name}_ALONG_K": flag(layout.along_k),
        f"{name}_BROADCAST": flag(layout.broadcast),
        f"{name}_LEADING": str(layout.leading),
        f"{name}_MATRIX": str(layout.matrix),
        f"{name}_VECTOR": str(vector),
        f"{name}_PACKED": flag(layout.packed),
        f"{name}_IMAGE": flag(layout.image),
    }


def _plain_layout(
    dtype: np.dtype[Any], rows: int, columns: int, trans: str, *, k_is_row: bool, planar: bool
) -> OperandLayout:
    row_stride, column_stride = (1, rows) if trans in {"T", "C"} else (columns, 1)
    view = MatrixView(0, 0, dtype, rows, columns, row_stride, column_stride, ())
    return operand_layout(view, (), (), k_is_row=k_is_row, parts=2 if planar else 1)


def _params(problem: GemmProblem, views: list[MatrixView]) -> Iterator[SmallParams]:
    """One launch's arguments after the other; addresses count from the arrays' bases."""
    for _, inner, placed in launches(problem.batch_shape, views):
        params = SmallParams(batch=math.prod(inner), batch_axes=sum(extent != 1 for extent in inner))
        for name, view in zip("abcd", placed, strict=True):
            setattr(params, name, view.params())
        params.batch_shape[:] = inner
        set_factors(params, problem)
        yield params
