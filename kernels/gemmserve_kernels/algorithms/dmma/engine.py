"""Layout of operands of `dmma` for Hopper's copy engine. Pure.

The engine moves words of two bytes here, as for all other kernels. It wants neighbours in memory along k or across it,
all other strides positive multiples of 16 bytes and an address that is one (CUDA driver API, cuTensorMapEncodeTiled).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.device.struct_params import VECTOR_BYTES
from gemmserve_kernels.device.tensor_map import MAX_STRIDE, Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device.struct_params import MatrixView

_WORD: Final = 2
_SPAN: Final = 128 // _WORD
_MAX_EXTENT: Final = (1 << 31) - (1 << 12)
"""Coordinates of a box are 32-bit numbers, also in a tile that reaches beyond the array."""


@dataclass(frozen=True)
class Source:
    """Description of an operand for the copy engine: the map of the array at `address`, and its batch strides in the
    map's matrices.
    """

    box: Box
    address: int
    batch_strides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        view: MatrixView,
        batch_shape: Sequence[int],
        *,
        along_k: bool,
        block: int,
        block_k: int,
        planar: bool = False,
    ) -> Source | None:
        """The source that is `view`, rows by k, whose neighbours in memory are neighbours along k or along the rows.
        None where the engine cannot fetch it.

        A batch of any strides is one axis, whose step divides them all. Where the view is `planar`, the map has two
        planes.
        """
        item = view.dtype.itemsize
        fast, slow = (view.columns, view.rows) if along_k else (view.rows, view.columns)
        fast_stride, slow_stride = (
            (view.column_stride, view.row_stride) if along_k else (view.row_stride, view.column_stride)
        )
        if slow == 1:
            slow_stride = -(-fast // 2) * 2
        padded = (0,) * (len(batch_shape) - len(view.batch_strides)) + view.batch_strides
        batch = [(extent, stride) for extent, stride in zip(batch_shape, padded, strict=True) if extent > 1 and stride]
        pitch, step = item * slow_stride, item * (math.gcd(*(stride for _, stride in batch)) or slow_stride)
        matrices = 1 + sum((extent - 1) * stride * item // step for extent, stride in batch)
        apart = view.im - view.re if planar else pitch
        strides = [pitch, step, apart, *(item * stride for _, stride in batch)]
        if (
            (fast > 1 and fast_stride != 1)
            or min(strides) <= 0
            or view.re % VECTOR_BYTES
            or any(stride % VECTOR_BYTES for stride in strides)
            or max(strides) >= MAX_STRIDE
            or max(fast * item // _WORD, slow, matrices) >= _MAX_EXTENT
        ):
            return None
        box = (_SPAN, block) if along_k else (_SPAN, block_k)
        return cls(
            Box((fast * item // _WORD, slow, 2 if planar else 1, matrices), (*box, 1, 1), (pitch, apart, step)),
            view.re,
            tuple(stride * item // step for stride in padded),
        )
