"""The pre-pass of the tensor-core products: operands of any strides become scaled planes (see `common.splits`).

Every vector along k (a row of op(A), a column of op(B)) is scaled by the power of two that puts its largest magnitude
into [2**14, 2**15), and cut into a float16 and the float16 nearest to what that leaves. Both operands take one launch.
Beside the planes the kernel counts what `common.verdict` decides by, the deficit of each vector, and keeps the largest
of every group. For the wide way (`splits.gemm`) it makes three bfloat16 of an element, scaled into [2**30, 2**31), and
flags vectors that spread over more than 92 binades, and such as have few elements near their largest
(`common.verdict.UNFIT`). Infinities have a place in the last of the three.

How it is done (cuda/splits; the shapes are in `geometry`). Of short vectors (up to 1024 steps of k on Hopper, 256
elsewhere) a block holds some neighbouring ones whole, whole lines of memory of those that lie across it, the next ones
on their way; a warp has each to itself, and asks no other. Of longer ones a vector's scale is known only when all of it
has been seen, so the blocks, or clusters of blocks that see each other's shared memory, hold whole vectors there:
everything is read once and written once. Each warp fetches and converts the same steps of k of one vector after
another. So it needs no other warp but for the maxima and counts of a vector, and it fetches the next ones as soon as
it has converted those before them. As many blocks as the device holds share the work; which does what is settled as
they go, and changes no result. What a vector loses is counted only where an element lies below 2**-18 of the vector's
largest magnitude: others lose nothing (cuda/splits/element.cuh).

Source of the split: H. Ootomo, R. Yokota, IJHPCA 36 (2022), section III, with the scale of a vector in the place of the
constant one; of three bfloat16: G. Henry, P. T. P. Tang, A. Heinecke, ARITH 2019.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import flag
from gemmserve_kernels.algorithms.common.splits import DEPTHS, PITCH, PLANES, Planes, is_wide
from gemmserve_kernels.algorithms.splits.geometry import Geometry, geometry_of
from gemmserve_kernels.algorithms.splits.work_split import deal
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    BATCH_DIMS,
    MatrixView,
    StoredArray,
    dense_strides,
    launches,
    matrix_view,
    own_extents,
)
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.algorithms.common.splits import Scheme
    from gemmserve_kernels.algorithms.common.verdict import Deficits
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

DEPENDENT: Final = True
"""The kernel waits for the one ahead of it (cuda/common/dependent.cuh)."""
_CLEARING: Final = 256
"""Threads of a block that zeroes words."""
_HEAVY_THREADS: Final = 512
"""Threads of a multiprocessor that have the registers to make three planes of vectors that they hold whole."""
_HALF: Final = np.dtype(np.float16)
_INT: Final = np.dtype(np.int32)


@device_struct("splits/params.cuh")
class SplitOperandParams(ctypes.Structure):
    """One operand of SplitParams."""


@device_struct("splits/params.cuh")
class ClearParams(ctypes.Structure):
    """Arguments of split_clear."""


@device_struct("splits/params.cuh")
class SplitParams(ctypes.Structure):
    """Arguments of split."""


@dataclass(frozen=True)
class SplitSide:
    """One operand as vectors along k: a view whose rows are the rows of op(A) or the columns of op(B).

    `batch_shape` is the product's batch with 1 where the operand does not change; the view's strides go with it.
    """

    view: MatrixView
    conjugate: bool
    planar: bool
    batch_shape: tuple[int, ...]

    @classmethod
    def of(cls, array: StoredArray, batch_shape: tuple[int, ...], trans: str, *, left: bool, planar: bool) -> SplitSide:
        """Return the side of an array that is op(A) (`left`) or op(B) after `trans`, in a product of that batch."""
        view = matrix_view(array, (*batch_shape, *array.shape[-2:]), planar=planar)
        if (trans in {"T", "C"}) == left:
            view = view.transposed()
        own = own_extents(batch_shape, view.batch_strides)
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
        return dense_strides(self.batch_shape, 1)

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


def sides(problem: GemmProblem | GemmReduceProblem, a: StoredArray, b: StoredArray) -> tuple[SplitSide, SplitSide]:
    """Both operands of a product."""
    shape = problem.batch_shape
    return (
        SplitSide.of(a, shape, problem.trans_a, left=True, planar=problem.planar),
        SplitSide.of(b, shape, problem.trans_b, left=False, planar=problem.planar),
    )


@dataclass(frozen=True)
class SplitOperand:
    """One operand after the pre-pass. Float16 planes have `deficits`, bfloat16 ones `flags`, int32 (matrices, rows)."""

    arithmetics: ClassVar = frozenset({"3xfp16", "3xfp16-3m", "1xfp16"})
    """Arithmetics that take it in the place of the array."""

    side: SplitSide
    planes: Planes
    deficits: Deficits | None
    flags: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All that it holds."""
        judged = self.flags if self.deficits is None else self.deficits.words
        return self.planes.data, self.planes.exponents, judged

    def with_arrays(self, source: Any, arrays: Sequence[Any]) -> SplitOperand:
        """The same with other arrays, made of `source`."""
        del source  # the planes are all there is to know of it
        data, exponents, judged = arrays
        planes = replace(self.planes, data=data, exponents=exponents)
        if self.deficits is None:
            return replace(self, planes=planes, flags=judged)
        return replace(self, planes=planes, deficits=replace(self.deficits, words=judged))

    def deficits_at(self, launcher: Launcher) -> int:
        """The address of the deficits; 0 where there are none."""
        found = self.deficits
        return 0 if found is None else launcher.pointer(found.words) + _INT.itemsize * found.first


@dataclass(frozen=True)
class SplitPlan:
    """The pre-pass of one or both operands: kernel and arguments, addresses still relative."""

    source: KernelSource
    geometry: Geometry
    cluster: int
    shared: int
    params: SplitParams
    grid: int


def operand_params(side: SplitSide) -> SplitOperandParams:
    """Arguments for one operand, of BATCH_DIMS batch axes at most; addresses count from its arrays' beginnings."""
    ((first, inner, (view,)), *more) = launches(side.batch_shape, [side.view])
    if more or first:
        raise ValueError(f"a batch of more than {BATCH_DIMS} axes")
    params = SplitOperandParams(
        source=view.params(),
        rows=side.rows,
        k=side.k,
        pitch=side.pitch,
        matrices=side.matrices,
        conjugate=side.conjugate,
    )
    params.batch_shape[:] = inner
    return params


@lru_cache(maxsize=1024)
def plan(spec: DeviceSpec, scheme: Scheme, a: SplitSide | None, b: SplitSide | None) -> SplitPlan:
    """Plan how to split `a`, `b` or both (of the same k, dtype and layout) on `spec`. Pure."""
    sides = [side for side in (a, b) if side is not None]
    one = sides[0]
    geometry = geometry_of(one.k, spec)
    cluster = max(geometry.ranks if side.along_k else geometry.cluster for side in sides)
    shared = max(geometry.shared_bytes(one.k, complex_data=one.complex, along=side.along_k) for side in sides)
    if geometry.alone and (is_wide(scheme) or scheme == "3xfp16-3m"):
        geometry = replace(geometry, blocks=max(1, min(geometry.blocks, _HEAVY_THREADS // geometry.threads)))
    left, right = a or one, b or one  # a missing operand is compiled as the other
    defines = {
        "COMPLEX": flag(one.complex),
        "PLANAR": flag(one.planar),
        "BFLOAT": flag(is_wide(scheme)),
        "DEPTH": str(DEPTHS[scheme]),
        "GAUSS": flag(scheme == "3xfp16-3m"),
        "INFINITE_LAST": flag(is_wide(scheme) and scheme != "9xbf16"),
        "THREADS": str(geometry.threads),
        "MIN_BLOCKS": str(geometry.blocks),
        "SHARED_BYTES": str(shared),
        "STAGES": str(geometry.stages),
        "STRIP": str(geometry.strip),
        "ALONE": flag(geometry.alone > 0),
        **(_alone(geometry) if geometry.alone else _together(geometry, cluster, one.k)),
        "A_ALONG_K": flag(left.along_k),
        "B_ALONG_K": flag(right.along_k),
        "VECTOR_A": flag(left.vector),
        "VECTOR_B": flag(right.vector),
        "STREAM": flag(geometry.stream),
        "PREFETCH": str(geometry.prefetch),
    }
    both = [SplitOperandParams() if side is None else operand_params(side) for side in (a, b)]
    grid = deal(spec, geometry, cluster, (a, b), both)
    return SplitPlan(
        KernelSource("split", tuple(defines.items())),
        geometry,
        cluster,
        shared,
        SplitParams(a=both[0], b=both[1]),
        grid,
    )


def _alone(geometry: Geometry) -> dict[str, str]:
    return {"HELD_K": str(geometry.alone)}


def _together(geometry: Geometry, cluster: int, k: int) -> dict[str, str]:
    return {
        "CLUSTER": str(cluster),
        "HELD_ALONG": str(geometry.held),
        "RANKS": str(geometry.ranks),
        "TEAM": str(geometry.team(k)),
        "WHOLE_ALONG": flag(k <= geometry.along_k),
        "HELD_ACROSS": str(geometry.patches),
        "WHOLE_ACROSS": flag(k <= geometry.across_k),
    }


def allocate(
    launcher: Launcher, scheme: Scheme, side: SplitSide, name: str, deficits: Deficits | None, data: Any = None
) -> SplitOperand:
    """Memory for one operand's planes, the beginning of `data` where that is given. `name` is "a" or "b".

    `deficits` of float16 planes; bfloat16 ones get flags.
    """
    count = len(PLANES[scheme, side.complex, name])
    shape = (side.matrices, count, side.rows, side.pitch)
    vectors = (side.matrices, side.rows)
    planes = Planes(
        scheme=scheme,
        complex=side.complex,
        side="a" if name == "a" else "b",
        data=launcher.empty(shape, _HALF) if data is None else data[: math.prod(shape)],
        exponents=launcher.empty(vectors, _INT),
        matrices=side.matrices,
        rows=side.rows,
        k=side.k,
        pitch=side.pitch,
        batch_strides=side.batch_strides,
    )
    return SplitOperand(side, planes, deficits, launcher.empty(vectors, _INT) if deficits is None else None)


def place(launcher: Launcher, params: SplitOperandParams, operand: SplitOperand, base: int) -> None:
    """Adds the addresses to the arguments of `operand_params`."""
    params.source.re += base
    params.source.im += base
    params.planes = launcher.pointer(operand.planes.data)
    params.exponents = launcher.pointer(operand.planes.exponents)
    params.deficits = operand.deficits_at(launcher)
    params.flags = 0 if operand.flags is None else launcher.pointer(operand.flags)


def run(
    launcher: Launcher,
    a: SplitOperand | None,
    b: SplitOperand | None,
    base_a: int,
    base_b: int,
    status: int,
    gate: int = 0,
    clears: int = 0,
) -> None:
    """Fills the planes of one or both operands. `base_*`: what the views' addresses count from; `status`: the address
    of four int32, 0 before; the first is not 0 after where a vector is flagged, two more count what blocks have taken.
    `gate`: the address of a word; where it is 0 on the device, nothing is done. None: 0. `clears`: int32 from `status`
    on that are zeroed first.
    """
    one = a or b
    if one is None:
        return
    how = plan(launcher.spec, one.planes.scheme, a and a.side, b and b.side)
    params = SplitParams.from_buffer_copy(how.params)
    if a is not None:
        place(launcher, params.a, a, base_a)
    if b is not None:
        place(launcher, params.b, b, base_b)
    params.status = status
    params.gate = gate
    if clears:
        launcher.launch(
            how.source,
            "split_clear",
            grid=-(-clears // _CLEARING),
            block=_CLEARING,
            shared=0,
            params=ClearParams(words=status, count=clears),
            dependent=DEPENDENT,
        )
    launcher.launch(
        how.source,
        "split",
        grid=how.grid,
        block=how.geometry.threads,
        shared=how.shared,
        params=params,
        dependent=DEPENDENT,
    )
