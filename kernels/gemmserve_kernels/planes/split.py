"""The pre-pass of the tensor-core products: operands of any strides become scaled float16 planes (see `planes`).

Every vector along k (a row of op(A), a column of op(B)) is scaled by the power of two that puts its largest magnitude
into [2**14, 2**15), and cut into a float16 and the float16 nearest to what that leaves. Both operands take one launch.
Beside the planes the kernel writes what `balance` and `fallback` decide by:

- `flags`: vectors that are not finite, or lose more than 2**-33 of the 1-norm of their real or their imaginary parts;
- `relative`, `absolute`: for each k, the bits of the largest scaled and of the largest unscaled magnitude.

Source of the split: H. Ootomo, R. Yokota, IJHPCA 36 (2022), section III, with the scale of a vector in the place of the
constant one.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.arguments import BATCH_DIMS, MatrixParams, MatrixView, StoredArray, launches, matrix_view
from gemmserve_kernels.compiler import KernelSource
from gemmserve_kernels.planes.layout import PITCH, PLANES, Planes
from gemmserve_kernels.tiling import flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.planes.layout import Scheme
    from gemmserve_kernels.problem import GemmProblem

_WARP: Final = 32
_STRIP_BYTES: Final = 128
_PIECE_BYTES: Final = 16
_STAGES: Final = 2
"""Chunks on their way (cuda/split/along.cuh)."""
_CHUNK: Final = 8
"""Elements of a chunk there for each step of k of a tile."""
_RESIDENT: Final = 1024
"""Threads of a multiprocessor: what shared memory lets run together at the largest tile."""
_PIECES: Final = 8
"""Pieces of 16 bytes in a strip (cuda/split/across.cuh)."""
_WAVES: Final = 1
"""Blocks for each multiprocessor that the vectors along memory are dealt to, so that the last ones end together."""

_FEWEST_ROWS: Final = 4
_MOST_ROWS: Final = 32
"""Vectors of one block, where they lie along memory: each block raises the statistics once."""
_HALF: Final = np.dtype(np.float16)
_INT: Final = np.dtype(np.int32)


class SplitOperandParams(ctypes.Structure):
    """Mirror of SplitOperand in cuda/split/params.cuh."""

    _fields_ = (
        ("source", MatrixParams),
        ("batch_shape", ctypes.c_int64 * BATCH_DIMS),
        ("planes", ctypes.c_int64),
        ("exponents", ctypes.c_int64),
        ("relative", ctypes.c_int64),
        ("absolute", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("pitch", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("matrices", ctypes.c_int64),
        ("conjugate", ctypes.c_int32),
        ("rows_per_block", ctypes.c_int32),
    )


class SplitParams(ctypes.Structure):
    """Mirror of SplitParams."""

    _fields_ = (
        ("a", SplitOperandParams),
        ("b", SplitOperandParams),
        ("status", ctypes.c_int64),
        ("first_group", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Side:
    """One operand as vectors along k: a view whose rows are the rows of op(A) or the columns of op(B).

    `batch_shape` is the product's batch with 1 where the operand does not change; the view's strides go with it.
    """

    view: MatrixView
    conjugate: bool
    planar: bool
    batch_shape: tuple[int, ...]

    @classmethod
    def of(cls, array: StoredArray, batch_shape: tuple[int, ...], trans: str, *, left: bool, planar: bool) -> Side:
        """Of an array that is op(A) (`left`) or op(B) after `trans`, in a product of that batch."""
        view = matrix_view(array, (*batch_shape, *array.shape[-2:]), planar=planar)
        if (trans in {"T", "C"}) == left:
            view = view.transposed()
        own = tuple(
            1 if stride == 0 else extent for extent, stride in zip(batch_shape, view.batch_strides, strict=True)
        )
        return cls(view, trans in {"C", "R"}, planar, own)

    @property
    def complex(self) -> bool:
        """Whether the elements are complex."""
        return self.planar or self.view.dtype.kind == "c"

    @property
    def rows(self) -> int:
        """Vectors of one matrix."""
        return self.view.rows

    @property
    def k(self) -> int:
        """Elements of a vector."""
        return self.view.columns

    @property
    def pitch(self) -> int:
        """Elements from one row of a plane to the next."""
        return -(-self.k // PITCH) * PITCH

    @property
    def matrices(self) -> int:
        """Different matrices of the operand."""
        return math.prod(self.batch_shape)

    @property
    def batch_strides(self) -> tuple[int, ...]:
        """Matrices to step for each axis of the product's batch; 0 where the operand does not change."""
        strides, step = [], 1
        for extent in reversed(self.batch_shape):
            strides.append(0 if extent == 1 else step)
            step *= extent
        return tuple(reversed(strides))

    @property
    def along_k(self) -> bool:
        """Whether neighbours along k are (nearer) neighbours in memory."""
        view = self.view
        if view.columns == 1 or view.rows == 1:
            return view.columns > 1
        return abs(view.column_stride) <= abs(view.row_stride)

    @property
    def vector(self) -> bool:
        """Whether pieces of 16 bytes (8 of each part, where planar) can be read at once."""
        view, width = self.view, 2 if self.complex else 4
        if self.along_k:
            return (view.column_stride == 1 or view.columns == 1) and view.aligned(width, view.row_stride)
        return (view.row_stride == 1 or view.rows == 1) and view.aligned(width, view.column_stride)


def sides(problem: GemmProblem, a: StoredArray, b: StoredArray) -> tuple[Side, Side]:
    """Both operands of a product."""
    shape = problem.batch_shape
    return (
        Side.of(a, shape, problem.trans_a, left=True, planar=problem.planar),
        Side.of(b, shape, problem.trans_b, left=False, planar=problem.planar),
    )


@dataclass(frozen=True)
class Geometry:
    """Threads of a block, steps of k it holds, blocks of a cluster: by k alone, and so is the order of every sum."""

    threads: int
    tile_k: int
    cluster: int

    @classmethod
    def of(cls, k: int, spec: DeviceSpec) -> Geometry:
        """Eight blocks hold a strip of 4096 steps of k in their shared memory; without clusters one block walks it."""
        if spec.arch == "sm_90a":
            cluster = 8 if k > 256 else 4 if k > 128 else 2 if k > 64 else 1
            tile_k = next((t for t in (64, 128, 256) if t * cluster >= k), 512)
            return cls(tile_k, tile_k, cluster)
        tile_k = next((t for t in (64, 128) if t >= k), 256)
        return cls(tile_k, tile_k, 1)

    def shared_bytes(self, *, complex_data: bool, along: bool) -> int:
        """At least sizeof(AlongShared) or sizeof(AcrossShared) of cuda/split."""
        warps, parts, strip = self.threads // _WARP, 2 if complex_data else 1, 16 if complex_data else 32
        tally = 12 * parts
        if along:
            return _STAGES * 8 * self.tile_k * (8 if complex_data else 4) + 2 * warps * (4 + tally) + _PIECE_BYTES
        slices = max(1, self.threads // _PIECES // _WARP)
        fixed = strip * (4 * warps + tally * slices + 8 + tally + 8)
        return self.tile_k * (_STRIP_BYTES + 8) + fixed + _PIECE_BYTES


def _source(
    scheme: Scheme, geometry: Geometry, *, complex_data: bool, planar: bool, a: Side | None, b: Side | None
) -> tuple[KernelSource, int]:
    """The kernel for operands that lie this way, and its shared memory; a missing one is compiled as the other."""
    a, b = a or b, b or a
    assert a is not None
    assert b is not None
    kinds = {a.along_k, b.along_k}
    shared = max(geometry.shared_bytes(complex_data=complex_data, along=along) for along in kinds)
    defines = {
        "COMPLEX": flag(complex_data),
        "PLANAR": flag(planar),
        "LOW": flag(scheme != "1xfp16"),
        "GAUSS": flag(scheme == "3xfp16-3m"),
        "THREADS": str(geometry.threads),
        "TILE_K": str(geometry.tile_k),
        "CLUSTER": str(geometry.cluster),
        "WHOLE": flag(a.pitch <= _CHUNK * geometry.tile_k),
        "MIN_BLOCKS": str(max(1, _RESIDENT // geometry.threads)),
        "SHARED_BYTES": str(shared),
        "A_ALONG_K": flag(a.along_k),
        "B_ALONG_K": flag(b.along_k),
        "VECTOR_A": flag(a.vector),
        "VECTOR_B": flag(b.vector),
    }
    return KernelSource("split", tuple(defines.items())), shared


@dataclass(frozen=True)
class Statistics:
    """Where the pre-pass writes what it learns of one operand: in `words`, int32 and zero before it, the relative ones
    (matrices, k) from number `first` on, behind them the absolute ones.
    """

    words: Any
    first: int


@dataclass(frozen=True)
class SplitOperand:
    """One operand after the pre-pass. `flags`: int32 (matrices, rows)."""

    side: Side
    planes: Planes
    flags: Any
    statistics: Statistics

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All that it holds."""
        return self.planes.data, self.planes.exponents, self.flags, self.statistics.words

    def with_arrays(self, source: Any, arrays: Sequence[Any]) -> SplitOperand:
        """The same with other arrays, made of `source`."""
        del source  # the planes are all there is to know of it
        data, exponents, flags, words = arrays
        planes = replace(self.planes, data=data, exponents=exponents)
        return replace(self, planes=planes, flags=flags, statistics=replace(self.statistics, words=words))


@dataclass(frozen=True)
class SplitPlan:
    """The pre-pass of one or both operands: kernel and arguments, addresses still relative."""

    source: KernelSource
    geometry: Geometry
    shared: int
    params: SplitParams
    groups: int


def operand_params(side: Side, blocks: int = 1, cluster: int = 1) -> SplitOperandParams:
    """Arguments for one operand, of BATCH_DIMS batch axes at most; addresses count from its arrays' beginnings."""
    ((first, inner, (view,)), *more) = launches(side.batch_shape, [side.view])
    if more or first:
        raise ValueError(f"a batch of more than {BATCH_DIMS} axes")
    per_block = max(_FEWEST_ROWS, min(_MOST_ROWS, side.rows * side.matrices // max(1, blocks)))
    strip = _STRIP_BYTES // (8 if side.complex else 4)
    params = SplitOperandParams(
        source=view.params(),
        rows=side.rows,
        k=side.k,
        pitch=side.pitch,
        groups=-(-side.rows // (per_block * cluster)) if side.along_k else -(-side.rows // strip),
        matrices=side.matrices,
        conjugate=side.conjugate,
        rows_per_block=per_block,
    )
    params.batch_shape[:] = inner
    return params


@lru_cache(maxsize=1024)
def plan(spec: DeviceSpec, scheme: Scheme, a: Side | None, b: Side | None) -> SplitPlan:
    """How to split `a`, `b` or both (of the same k, dtype and layout) on `spec`. Pure."""
    side = a or b
    assert side is not None
    geometry = Geometry.of(side.k, spec)
    source, shared = _source(scheme, geometry, complex_data=side.complex, planar=side.planar, a=a, b=b)
    blocks = spec.sm_count * _WAVES * _RESIDENT // geometry.threads
    both = [SplitOperandParams() if one is None else operand_params(one, blocks, geometry.cluster) for one in (a, b)]
    groups = sum(one.groups * one.matrices for one in both)
    return SplitPlan(source, geometry, shared, SplitParams(a=both[0], b=both[1]), groups)


def allocate(launcher: Launcher, scheme: Scheme, side: Side, name: str, statistics: Statistics) -> SplitOperand:
    """Memory for one operand's planes. `name` is "a" or "b"."""
    count = len(PLANES[scheme, side.complex, name])
    data = launcher.empty((side.matrices, count, side.rows, side.pitch), _HALF)
    vectors = (side.matrices, side.rows)
    planes = Planes(
        scheme=scheme,
        complex=side.complex,
        side="a" if name == "a" else "b",
        data=data,
        exponents=launcher.empty(vectors, _INT),
        matrices=side.matrices,
        rows=side.rows,
        k=side.k,
        pitch=side.pitch,
        batch_strides=side.batch_strides,
    )
    return SplitOperand(side, planes, launcher.empty(vectors, _INT), statistics)


def place(launcher: Launcher, params: SplitOperandParams, operand: SplitOperand, base: int) -> None:
    """Adds the addresses to the arguments of `operand_params`."""
    params.source.re += base
    params.source.im += base
    params.planes = launcher.pointer(operand.planes.data)
    params.exponents = launcher.pointer(operand.planes.exponents)
    params.flags = launcher.pointer(operand.flags)
    statistics, side = operand.statistics, operand.side
    params.relative = launcher.pointer(statistics.words) + _INT.itemsize * statistics.first
    params.absolute = params.relative + _INT.itemsize * side.matrices * side.k


def run(
    launcher: Launcher, a: SplitOperand | None, b: SplitOperand | None, base_a: int, base_b: int, status: int
) -> None:
    """Fills the planes of one or both operands. `base_*`: what the views' addresses count from; `status`: the address
    of an int32, 0 before, not 0 after where a vector is flagged.
    """
    one = a or b
    if one is None:
        return
    how = plan(launcher.spec, one.planes.scheme, a and a.side, b and b.side)
    cluster = how.geometry.cluster
    most = max(1, launcher.max_grid // cluster)
    params = SplitParams.from_buffer_copy(how.params)
    if a is not None:
        place(launcher, params.a, a, base_a)
    if b is not None:
        place(launcher, params.b, b, base_b)
    params.status = status
    for first in range(0, how.groups, most):
        params.first_group = first
        grid = min(most, how.groups - first) * cluster
        launcher.launch(how.source, "split", grid=grid, block=how.geometry.threads, shared=how.shared, params=params)


def is_flat(relative: Any, absolute: Any, scheme: Scheme) -> bool:
    """Whether the statistics of all matrices of an operand, as uint32, say that it needs no balancing along k."""
    top = 13 if scheme == "3xfp16-3m" else 14
    threshold = (top - 4 + 127) << 23
    return bool(np.all((absolute == 0) | (relative >= threshold)))
