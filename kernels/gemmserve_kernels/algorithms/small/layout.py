"""Layout of small products in memory, global and shared, and the reads of threads. Pure.

The kernel (cuda/small/small_gemm.cu) has all extents compiled in, so everything here ends as a define.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.device.struct_params import VECTOR_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.algorithms.small.tile import SmallTile
    from gemmserve_kernels.device.struct_params import MatrixView

WARP: Final = 32
"""Lanes of a warp of a CUDA device."""
_BANKS: Final = 32
"""Banks of shared memory, of 4 bytes each (CUDA C++ programming guide; the same on CDNA)."""
_WIDEST_PIECE: Final = 4
"""Elements that a thread reads or writes at once."""


@dataclass(frozen=True)
class OperandLayout:
    """An operand in global and in shared memory: OperandLayout of cuda/small/copy.cuh, where the words are explained.

    `read`: neighbours along a line that one thread reads at once; `piece`: of those, rows or columns (1 along k).
    """

    along_k: bool
    slow: int
    fast: int
    leading: int
    matrix: int
    vector: int
    packed: bool
    image: bool
    broadcast: bool
    itemsize: int
    parts: int

    def bytes(self, group: int) -> int:
        """Shared memory of `group` matrices (of one, where all products share it)."""
        size = self.parts * (1 if self.broadcast else group) * self.matrix * self.itemsize
        return -(-size // VECTOR_BYTES) * VECTOR_BYTES


def power_of_two(limit: int, *multiples: int) -> int:
    """The largest power of two up to `limit` (at least 1) that divides every one of `multiples`."""
    width = 1
    while 2 * width <= limit and not any(multiple % (2 * width) for multiple in multiples):
        width *= 2
    return width


def is_dense(view: MatrixView) -> tuple[bool, bool]:
    """Whether the matrix lies without gaps with its columns next to each other, and with its rows so."""
    by_row = (view.column_stride == 1 or view.columns == 1) and (view.row_stride == view.columns or view.rows == 1)
    by_column = (view.row_stride == 1 or view.rows == 1) and (view.column_stride == view.rows or view.columns == 1)
    return by_row, by_column


def is_packed(view: MatrixView, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether matrices follow each other without gaps: `shape` and `strides` are the batch's, coalesced."""
    return len(shape) == 0 or (len(shape) == 1 and strides[0] == view.rows * view.columns)


def operand_layout(
    view: MatrixView, shape: Sequence[int], strides: Sequence[int], *, k_is_row: bool, parts: int
) -> OperandLayout:
    """Return how `view`, one of op(A) (m x k) and op(B) (k x n), is read; unpadded. `shape`, `strides`: coalesced
    batch.
    """
    along_row, along_column = is_dense(view)
    dense = along_row or along_column
    if not dense:
        along_row = view.rows == 1 or (view.columns > 1 and abs(view.column_stride) <= abs(view.row_stride))
    fast, slow = (view.columns, view.rows) if along_row else (view.rows, view.columns)
    fast_stride, slow_stride = (
        (view.column_stride, view.row_stride) if along_row else (view.row_stride, view.column_stride)
    )
    itemsize = view.dtype.itemsize
    widest = max(1, VECTOR_BYTES // itemsize)
    broadcast = len(shape) > 0 and not any(strides)
    packed = dense and is_packed(view, shape, strides)
    starts = math.gcd(view.re, view.im, VECTOR_BYTES) // itemsize
    vector = power_of_two(widest, starts or 1) if dense or fast_stride == 1 or fast == 1 else 1
    image = False
    if packed and fast % vector:
        image = True
    elif packed:
        vector = power_of_two(vector, fast)
    else:
        vector = power_of_two(vector, fast, *strides, *([slow_stride] if slow > 1 else []))
    return OperandLayout(
        along_k=along_row != k_is_row,
        slow=slow,
        fast=fast,
        leading=fast,
        matrix=slow * fast,
        vector=vector,
        packed=packed,
        image=image,
        broadcast=broadcast,
        itemsize=itemsize,
        parts=parts,
    )


def padded(layout: OperandLayout, read: int, places: Sequence[tuple[int, int, int]]) -> OperandLayout:
    """`layout` with the gaps between lines and matrices that let a warp's reads fall into different banks.

    `places`: for each lane (matrix, line, element) of what it reads at once, `read` elements. Packed images stay as
    they are. Of equally good gaps the smallest are taken.
    """
    unit = max(layout.vector, read)
    if layout.image:
        return layout
    lines = -(-layout.fast // unit) * unit
    choices = []
    for line_gap, matrix_gap in itertools.product(range(5), range(9)):
        leading = lines + line_gap * unit
        matrix = layout.slow * leading + matrix_gap * unit
        if layout.broadcast and matrix_gap:
            continue
        waves = _wavefronts(
            [((0 if layout.broadcast else i) * matrix + j * leading + e) * layout.itemsize for i, j, e in places],
            read * layout.itemsize,
        )
        choices.append((waves, matrix, replace(layout, leading=leading, matrix=matrix)))
    return min(choices, key=lambda choice: choice[:2])[2]


def _wavefronts(addresses: Sequence[int], width: int) -> int:
    """Turns that shared memory takes for one read of `width` bytes by each lane: distinct words of the busiest bank."""
    words = {(address + byte) // 4 for address in addresses for byte in range(0, width, 4)}
    banks = [0] * _BANKS
    for word in words:
        banks[word % _BANKS] += 1
    return max(banks)


@dataclass(frozen=True)
class Stored:
    """How C is read and D is written: elements at once, 1 where rows are not contiguous.

    `packed`: results follow each other without gaps. `staged`: through shared memory, `vector` elements at once.
    """

    read_c: int
    direct: int
    packed: bool
    staged: bool
    vector: int

    @classmethod
    def of(
        cls,
        c: MatrixView,
        d: MatrixView,
        batch: tuple[int, ...],
        strides_c: tuple[int, ...],
        strides_d: tuple[int, ...],
    ) -> Stored:
        widest = max(1, VECTOR_BYTES // d.dtype.itemsize)
        direct = _along_rows(d, strides_d)
        packed = is_dense(d)[0] and is_packed(d, batch, strides_d)
        starts = power_of_two(widest, math.gcd(d.re, d.im, VECTOR_BYTES) // d.dtype.itemsize)
        return cls(_along_rows(c, strides_c), direct, packed, packed and direct < min(widest, _WIDEST_PIECE), starts)


def _along_rows(view: MatrixView, strides: tuple[int, ...]) -> int:
    """Neighbours of a row that every row of every matrix lets one access take."""
    if view.column_stride != 1 and view.columns > 1:
        return 1
    itemsize = view.dtype.itemsize
    rows = [view.row_stride] if view.rows > 1 else []
    starts = math.gcd(view.re, view.im, VECTOR_BYTES) // itemsize
    return power_of_two(max(1, VECTOR_BYTES // itemsize), starts, view.columns, *rows, *strides)


@dataclass(frozen=True)
class Reads:
    """Elements that a thread takes from shared memory at once, and the steps of k of one turn of its loop."""

    piece_m: int
    piece_n: int
    read_a: int
    read_b: int
    step: int

    @classmethod
    def of(cls, a: OperandLayout, b: OperandLayout, itemsize_d: int, tile: SmallTile, m: int, n: int, k: int) -> Reads:
        def widest(*itemsizes: int) -> int:
            return min(_WIDEST_PIECE, max(1, VECTOR_BYTES // max(itemsizes)))

        if tile.tensor:  # pairs along k, pairs of columns
            pair_a, pair_b = (power_of_two(2, k) if x.along_k else 1 for x in (a, b))
            pair_d = power_of_two(min(2, widest(itemsize_d)), n)
            return cls(1, pair_d, pair_a, pair_b, 8)
        piece_m = 1 if a.along_k else power_of_two(widest(a.itemsize), m, tile.thread_m)
        piece_n = power_of_two(widest(itemsize_d, *([] if b.along_k else [b.itemsize])), n, tile.thread_n)
        read_a = power_of_two(widest(a.itemsize), k) if a.along_k else 1
        read_b = power_of_two(widest(b.itemsize), k) if b.along_k else 1
        return cls(piece_m, piece_n, read_a, read_b, max(read_a, read_b))

    def defines(self) -> dict[str, str]:
        return {
            "PIECE_M": str(self.piece_m),
            "PIECE_N": str(self.piece_n),
            "READ_A": str(self.read_a),
            "READ_B": str(self.read_b),
            "STEP": str(self.step),
        }

    def padded(
        self, a: OperandLayout, b: OperandLayout, tile: SmallTile, m: int, n: int, warp: int
    ) -> tuple[OperandLayout, OperandLayout]:
        """Both layouts with the gaps that suit the first reads of the first warp."""

        def place(layout: OperandLayout, matrix: int, first: int, step: int) -> tuple[int, int, int]:
            return (matrix, first, step) if layout.along_k else (matrix, step, first)

        if tile.tensor:
            pairs = [(lane // 4, 2 * (lane % 4)) for lane in range(WARP)]
            return (
                padded(a, self.read_a, [place(a, 0, row, step) for row, step in pairs]),
                padded(b, self.read_b, [place(b, 0, column, step) for column, step in pairs]),
            )
        across = -(-n // tile.thread_n)
        each = tile.threads_each(m, n)
        lanes = [(lane // each, lane % each // across, lane % across) for lane in range(min(warp, 32))]
        lanes = [lane for lane in lanes if lane[0] < tile.group // tile.rounds]

        places_a = [place(a, matrix, row * self.piece_m, 0) for matrix, row, _ in lanes]
        places_b = [place(b, matrix, column * self.piece_n, 0) for matrix, _, column in lanes]
        read_a = self.read_a if a.along_k else self.piece_m
        read_b = self.read_b if b.along_k else self.piece_n
        return padded(a, read_a, places_a), padded(b, read_b, places_b)


def shared_bytes(tile: SmallTile, a: OperandLayout, b: OperandLayout, staged_each: int) -> int:
    """Config::SHARED_BYTES of cuda/small/product.cuh."""
    return (
        sum(layout.bytes(tile.group) * (1 if layout.broadcast else tile.stages) for layout in (a, b))
        + tile.group * staged_each
    )
