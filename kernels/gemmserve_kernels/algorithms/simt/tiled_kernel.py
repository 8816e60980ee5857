"""Plans of the portable kernels: a source made concrete, argument structures.

A plan depends on shapes, strides, dtypes and the alignment of addresses, not on the addresses: the same product on
other arrays of the same kind finds its plan in a cache, and only adds where its arrays lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, flag
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    Access,
    GemmParams,
    MatrixView,
    choose_access,
    launches,
    piece_of,
)

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator, Sequence

    import numpy as np

    from gemmserve_kernels.algorithms.simt.tile import SimtTile
    from gemmserve_kernels.device.launch import Launcher

_RASTER_GROUP: Final = 8
"""Rows of tiles that blocks walk down together; 8 as in Triton's tutorial."""


@dataclass(frozen=True)
class TiledKernel:
    """A kernel made concrete: its source, and the launch shape that goes with it."""

    source: KernelSource
    tile: SimtTile
    shared: int

    @classmethod
    def build(
        cls,
        name: str,
        operands: Operands,
        tile: SimtTile,
        *,
        c_dtype: np.dtype[Any],
        d_dtype: np.dtype[Any],
        d: MatrixView | None,
        local_bytes: int = 0,
        extra: dict[str, str] | None = None,
    ) -> TiledKernel:
        """The defines for `operands` in `tile`; `d` is the matrix that is written, None where none is."""
        itemsize = operands.accumulate.itemsize
        a = choose_access(operands.a, k_is_row=False, block=tile.block_m, block_k=tile.block_k)
        b = choose_access(operands.b, k_is_row=True, block=tile.block_n, block_k=tile.block_k)
        shared = tile.shared_bytes(itemsize, pad_a=a.along_k, pad_b=b.along_k, local_bytes=local_bytes)
        piece = piece_of(itemsize, tile.thread_n)
        vector_d = d is not None and d.column_stride == 1 and d.aligned(piece, d.row_stride)
        defines = {
            "TYPE_A": TYPES[operands.a.dtype.name],
            "TYPE_B": TYPES[operands.b.dtype.name],
            "TYPE_C": TYPES[c_dtype.name],
            "TYPE_D": TYPES[d_dtype.name],
            "TYPE_ACC": TYPES[operands.accumulate.name],
            "PLANAR": flag(operands.planar),
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
            "VECTOR_D": flag(vector_d),
            **(extra or {}),
        }
        return cls(KernelSource(name, tuple(defines.items())), tile, shared)

    def launch(self, launcher: Launcher, entry: str, params: ctypes.Structure, gemm: GemmParams, tiles: int) -> None:
        """Launches all `tiles` of `gemm`, which is `params` or a part of it, in as many grids as it takes."""
        for first in range(0, tiles, launcher.max_grid):
            gemm.first_tile = first
            grid = min(tiles - first, launcher.max_grid)
            launcher.launch(self.source, entry, grid=grid, block=self.tile.threads, shared=self.shared, params=params)


@dataclass(frozen=True)
class Piece:
    """One launch's share of the batch. The addresses in `params` count from the arrays' bases."""

    params: GemmParams
    first_matrix: int
    tiles: int

    def placed(self, bases: Sequence[int]) -> GemmParams:
        """A copy of the arguments with the arrays' bases added, in the order a, b, c, d."""
        params = GemmParams.from_buffer_copy(self.params)
        for matrix, base in zip((params.a, params.b, params.c, params.d), bases, strict=False):
            matrix.re += base
            matrix.im += base
        return params


def pieces(
    kernel: TiledKernel,
    operands: Operands,
    batch_shape: tuple[int, ...],
    written: Sequence[MatrixView],
    alpha: complex,
    beta: complex = 0j,
) -> Iterator[Piece]:
    """The launches of a batch; `written` are the views of C and D where there are any."""
    for first_matrix, inner, views in launches(batch_shape, [operands.a, operands.b, *written]):
        params, tiles = gemm_params(kernel, operands, inner, views, alpha, beta)
        yield Piece(params, first_matrix, tiles)


def gemm_params(
    kernel: TiledKernel,
    operands: Operands,
    inner: tuple[int, ...],
    views: Sequence[MatrixView],
    alpha: complex,
    beta: complex,
) -> tuple[GemmParams, int]:
    """Arguments of one launch over `inner` of the batch, `views` being A, B and what is written; and its tiles."""
    tiles_m = -(-operands.m // kernel.tile.block_m)
    tiles_n = -(-operands.n // kernel.tile.block_n)
    params = GemmParams(
        m=operands.m,
        n=operands.n,
        k=operands.k,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        conjugate_a=operands.conjugate_a,
        conjugate_b=operands.conjugate_b,
    )
    for name, view in zip("abcd", views, strict=False):
        setattr(params, name, view.params())
    params.batch_shape[:] = inner
    params.alpha[:] = alpha.real, alpha.imag
    params.beta[:] = beta.real, beta.imag
    return params, tiles_m * tiles_n * math.prod(inner)


def _access(operand: str, access: Access) -> dict[str, str]:
    return {f"{operand}_ALONG_K": flag(access.along_k), f"VECTOR_{operand}": str(access.vector)}


def _index_type(operands: Operands, tile: SimtTile) -> str:
    """Offsets inside one tile: 32 bits unless the strides ask for more. Tiles and matrices are always found in 64."""
    a, b = operands.a, operands.b
    reach = max(
        abs(a.row_stride) * tile.block_m + abs(a.column_stride) * tile.block_k,
        abs(b.column_stride) * tile.block_n + abs(b.row_stride) * tile.block_k,
    )
    return "int" if reach < 2**31 else "long long"
