"""float16 operands that the copy engine cannot read as they lie, copied first: host side of cuda/wgmma/wgmma_pack.cu.

What runs along memory still does, in rows of whole pieces of 16 bytes; matrices that the batch repeats are copied once.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import MatrixView, dense_strides, launches, own_extents
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device.launch import Launcher

PIECE: Final = 8
"""Elements that one thread copies."""
MAX_BYTES: Final = 256 << 20
"""Bytes of the copy of one operand; a larger one is not made."""
_THREADS: Final = 256


@device_struct("wgmma/wgmma_pack.cu")
class PackParams(ctypes.Structure):
    """Arguments of wgmma_pack."""


SOURCE: Final = KernelSource("wgmma_pack", (("PARAMS_BYTES", str(ctypes.sizeof(PackParams))),))
"""cuda/wgmma/wgmma_pack.cu, which has no variants."""


@dataclass(frozen=True)
class Packing:
    """A copy that is to be made: `view` as it will lie, its addresses counting from the copy's, and its `elements`."""

    view: MatrixView
    elements: int
    pieces: tuple[PackParams, ...]

    @classmethod
    def of(cls, view: MatrixView, batch_shape: Sequence[int]) -> Packing:
        """Return the packing of `view`, rows by k; its addresses count from the array's base."""
        turned = view.rows > 1 and (view.columns == 1 or abs(view.row_stride) < abs(view.column_stride))
        source = view.transposed() if turned else view
        pitch = -(-source.columns // PIECE) * PIECE
        own, matrix = own_extents(batch_shape, source.batch_strides), source.rows * pitch
        steps = dense_strides(own, matrix)
        target = MatrixView(0, 0, source.dtype, source.rows, source.columns, pitch, 1, steps)
        pieces = []
        for _, inner, (here, there) in launches(own, [source, target]):
            params = PackParams(
                from_=here.params(), to=there.params(), rows=source.rows, columns=source.columns,
                pieces=pitch // PIECE, total=math.prod(inner) * source.rows * (pitch // PIECE),
            )  # fmt: skip
            params.batch_shape[:] = inner
            pieces.append(params)
        return cls(target.transposed() if turned else target, math.prod(own) * matrix, tuple(pieces))

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self.elements * np.dtype(np.float16).itemsize

    def run(self, launcher: Launcher, base: int, target: int) -> None:
        """Copies the array at `base` to `target`."""
        for piece in self.pieces:
            params = PackParams.from_buffer_copy(piece)
            params.from_.re += base
            params.to.re += target
            blocks = -(-piece.total // _THREADS)
            for first in range(0, blocks, launcher.max_grid):
                params.first = first * _THREADS
                grid = min(blocks - first, launcher.max_grid)
                launcher.launch(
                    SOURCE, "wgmma_pack", grid=grid, block=_THREADS, shared=0, params=params, dependent=True
                )
