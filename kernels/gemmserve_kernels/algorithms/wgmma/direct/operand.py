"""Layout of a float16 operand for the copy engine: which way round, and where its matrices are. Pure.

The engine wants an axis whose elements are next to each other, an aligned address, and all other strides multiples of
16 bytes (CUDA driver API, cuTensorMapEncodeTiled). Nor may a box begin off such a multiple: an H200 then raises
"illegal instruction", so an operand that begins elsewhere cannot be mapped from the aligned address before it. A batch
of any strides is one axis of the map, whose step divides them all: matrices are found by their number of steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from gemmserve_kernels.device.struct_params import VECTOR_BYTES, MatrixView
from gemmserve_kernels.device.tensor_map import MAX_STRIDE, Box

if TYPE_CHECKING:
    from collections.abc import Sequence

_ITEM: Final = 2
_STEP: Final = VECTOR_BYTES // _ITEM
"""Elements that strides are multiples of."""
_COLUMN: Final = 64
"""Neighbours across k that one box fetches: 128 bytes, the span of the swizzle."""
_MAX_EXTENT: Final = (1 << 31) - _COLUMN
"""Coordinates of a box are 32-bit numbers."""


class DirectSide(NamedTuple):
    """An operand as it lies in memory, as `wgmma.plan.WgmmaSide`.

    `offset`: bytes from the array's aligned base to the address that is mapped. `pitch`: bytes from one row along
    memory to the next. `step`: bytes of one step between matrices; `matrices`: steps that there are. `first`: the step
    of the batch's first matrix, `batch_strides`: steps along every axis of the batch.
    """

    rows: int
    k: int
    across: bool
    offset: int
    pitch: int
    step: int
    matrices: int
    first: int
    batch_strides: tuple[int, ...]

    @property
    def complex(self) -> bool:
        """See WgmmaSide."""
        return False

    def view(self) -> MatrixView:
        """See WgmmaSide."""
        return MatrixView(self.first, self.first, np.dtype(np.uint8), self.rows, self.k, 0, 0, self.batch_strides)

    def box(self, block_k: int, rows: int, planes: int) -> Box:
        """See WgmmaSide. Across k a box is one column of 64 rows."""
        del planes
        fast, slow = (self.rows, self.k) if self.across else (self.k, self.rows)
        box = (_COLUMN, block_k) if self.across else (block_k, rows)
        strides = (self.pitch, self.pitch * slow if self.pitch * slow < MAX_STRIDE else self.pitch, self.step)
        return Box((fast, slow, 1, self.matrices), (*box, 1, 1), strides)


def unfit(view: MatrixView, batch_shape: Sequence[int]) -> str | None:
    """Return why the copy engine cannot read `view`, rows by k, or None; its `re` counts bytes from an aligned base."""
    if _across(view) is None:
        return (
            f"a matrix of {view.rows} x {view.columns} with strides of {_ITEM * view.row_stride} and "
            f"{_ITEM * view.column_stride} bytes: one must be {_ITEM}, the other a multiple of {VECTOR_BYTES}"
        )
    steps = [stride for extent, stride in zip(batch_shape, view.batch_strides, strict=True) if extent > 1]
    if odd := next((stride for stride in steps if stride % _STEP), None):
        return f"matrices {_ITEM * odd} bytes apart: no multiple of {VECTOR_BYTES}"
    side = direct_side(view, batch_shape)
    if side.offset % VECTOR_BYTES:
        return f"begins {side.offset % VECTOR_BYTES} bytes past a multiple of {VECTOR_BYTES}"
    slow = max(abs(stride) for stride in (view.row_stride, view.column_stride, 0, *steps))
    if _ITEM * slow >= MAX_STRIDE:
        return f"strides of {_ITEM * slow} bytes: a tensor map has fewer than 2^40"
    largest = max(view.rows, view.columns, side.matrices)
    return "an extent is too large for a tensor map" if largest >= _MAX_EXTENT else None


def direct_side(view: MatrixView, batch_shape: Sequence[int]) -> DirectSide:
    """The side that `view` is, rows by k; its `re` counts bytes from an aligned base."""
    across = bool(_across(view))
    fast, slow = (view.rows, view.columns) if across else (view.columns, view.rows)
    strides = [0 if extent == 1 else stride for extent, stride in zip(batch_shape, view.batch_strides, strict=True)]
    low = sum((extent - 1) * min(0, stride) for extent, stride in zip(batch_shape, strides, strict=True))
    natural = -(-_ITEM * fast // VECTOR_BYTES) * VECTOR_BYTES
    pitch = _ITEM * (view.column_stride if across else view.row_stride) if slow > 1 else natural
    common = math.gcd(*strides)
    each = common or 1
    return DirectSide(
        view.rows,
        view.columns,
        across,
        view.re + _ITEM * low,
        pitch,
        _ITEM * common or pitch,
        1 + sum((extent - 1) * abs(stride) for extent, stride in zip(batch_shape, strides, strict=True)) // each,
        -low // each,
        tuple(stride // each for stride in strides),
    )


def _across(view: MatrixView) -> bool | None:
    """Whether the rows are what lies along memory; None where neither they nor k do as the engine wants it."""
    if _lies(view.columns, view.column_stride, view.rows, view.row_stride):
        return False
    return True if _lies(view.rows, view.row_stride, view.columns, view.column_stride) else None


def _lies(fast: int, fast_stride: int, slow: int, slow_stride: int) -> bool:
    neighbours = fast == 1 or fast_stride == 1
    return neighbours and (slow == 1 or (slow_stride > 0 and slow_stride % _STEP == 0))
