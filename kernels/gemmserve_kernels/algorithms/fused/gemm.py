"""Products of complex64 and float32 on Hopper's tensor cores, from operands as they lie.

The kernel (cuda/fused) reads operands of any strides, splits them into float16 planes on the way to shared memory and
multiplies those: no pre-pass writes planes to memory and reads them again. That is what batches of 33 to two hundred
rows, single products of some hundred, skinny products, and products of few rows and columns over a long k spend their
time on. float32 has half a block of the same source, of which a multiprocessor has two at a time. The rest of this
paragraph is of complex64 alone. Of skinny products the matrix that is large lies along the rows of tall tiles
(cuda/fused/fused_tall.cu): it is read once for every 64 columns and split in registers, from which it is multiplied.
The other one, which all tiles share, has its planes made by a launch before (cuda/fused/fused_columns.cu). In large
batches of 128 rows and more (and on request, `GemmConfig.cluster`) the blocks of a cluster make the planes of their
rows together (cuda/fused/fused_cluster.cu), with the same bits.

Parts of k that several blocks have are added up by the last of them to come, always in the same order, so that results
have the same bits on every run.

What keeps it as accurate as float32. k is cut into chunks of at most 64 steps, alike but for two (float32: four). Each
chunk of a vector (a row of op(A), a column of op(B)) has its own power of two, by which it is scaled to a largest part
in [2**14, 2**15), and each chunk of a tile of 64 x 64 elements, of tall tiles of 16 rows of it, is judged by the
theorem of `algorithms.common.verdict`, with the chunk's steps in the place of k. So what the losses of a chunk change
in a part of an element of D is less than 2**-24 of the chunk's own share of sum_k |x_k y_k|, and together less than
2**-24 of the whole sum. What counts as lost is more than there: every part that is not large, unless that part is zero
all through the vector's chunk. Vectors that are all zero in a chunk add nothing to any sum and lose nothing, so they do
not count. A chunk that is not served, or whose numbers are not finite or so large or small that products of scales
leave float32's range, is computed by multiply-adds in float32, for those elements: its sum of at most 64 terms is then
added to the others. Elements of such tiles (or rows) are counted (`device.element_counts`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, access_defines, flag, runs_along_rows, written
from gemmserve_kernels.algorithms.fused.tile import BLOCK, CHUNK, COLUMN_THREADS, FusedTile, choose_tile, chunks
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    StoredArray,
    choose_access,
    gemm_params,
    launches,
    place_all,
    stored_operands,
)
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmProblem

__all__ = ["FusedTile", "resolve", "run_gemm", "supports"]

_LEAST_K: Final = 32
"""Steps of k at least: of fewer, too few would be left that are large beside those that the theorem spares."""
_PARTS: Final = {"complex64": 2, "float32": 1}
"""Parts of a number, by dtype."""
_COMPUTE: Final = ("auto", "3xfp16")
_MOST_NUMBERS: Final = 1 << 23
"""Numbers of a matrix at most, unless the tile is tall or the algorithm is asked for by name: larger ones are split
once for every 64 rows that they are multiplied with, and `wgmma` splits them once."""
_WORKSPACE_BYTES: Final = 256 << 20
"""Sums of one launch at most, and planes of columns; a batch that needs more is launched in turns."""
_WORD: Final = 4


@device_struct("fused/params.cuh")
class FusedParams(ctypes.Structure):
    """Arguments of fused_gemm, fused_cluster, fused_tall and fused_columns."""


def supports(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Return why this algorithm cannot run `problem` on `spec`, in one line; None where it can."""
    if not spec.has_wgmma:
        return "fused: needs an NVIDIA device of compute capability 9.0"
    if problem.compute not in _COMPUTE:
        return f"fused: the arithmetic is one of {', '.join(_COMPUTE)}, not {problem.compute}"
    dtypes = {x.dtype.name for x in (problem.a, problem.b)} | {problem.dtype.name}
    if problem.planar or len(dtypes) > 1 or not dtypes <= _PARTS.keys():
        return "fused: multiplies interleaved complex64, and float32"
    if problem.k < _LEAST_K:
        return f"fused: k must be at least {_LEAST_K}, not {problem.k}"
    asked = problem.config is not None and problem.config.algorithm == "fused"
    return None if asked else _left_to_others(problem, spec)


def _left_to_others(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Return why a product that nobody asked this algorithm for goes another way; None where it does not."""
    tile = resolve(None, problem, spec)
    if not tile.tall and max(problem.m, problem.n) * problem.k > _MOST_NUMBERS:
        return "fused: matrices as large as that are worth preparing, which this algorithm has no use for"
    return None


def resolve(config: GemmConfig | None, problem: GemmProblem, spec: DeviceSpec) -> FusedTile:
    """The tile: what `config` asks for, the rest chosen. Raises ConfigInfeasible naming the limit."""
    shape = (problem.batch, problem.m, problem.n, problem.k)
    return choose_tile(config, shape, spec, parts=_PARTS[problem.dtype.name])


def run_gemm(
    launcher: Launcher, problem: GemmProblem, config: GemmConfig | None, a: Any, b: Any, c: Any | None, out: Any
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    The arrays are those of `problem`, on the launcher's device; `c` may be `out`. Raises ConfigInfeasible,
    CompileError.
    """
    if 0 in problem.result_shape:
        return
    stored, bases = stored_operands(launcher, problem, a, b, c, out)
    plan = _plan(launcher.spec, problem, config, *stored)
    if plan.swapped:
        bases[:2] = bases[1::-1]
    tile, counters = plan.tile, launcher.counters(problem.batch * problem.m * problem.n)
    most = plan.most
    sums = _Sums.of(launcher, plan)
    images = launcher.empty((most // plan.tiles * plan.columns_bytes,), np.dtype(np.uint8)) if tile.tall else None
    blocks = max(1, tile.cluster)
    resident = min(launcher.max_grid // blocks, tile.resident(launcher.spec))
    done = 0
    for piece, tiles in plan.pieces:
        params = FusedParams.from_buffer_copy(piece)
        place_all(params.gemm, bases)
        params.counters = counters
        for first in range(0, tiles, most):
            params.gemm.first_tile = first
            params.items = min(most, tiles - first) * tile.split_k
            takers = min(params.items, resident)
            params.step_matrices, params.step_tiles = divmod(takers, plan.tiles)
            if sums is not None:
                params.partial, params.grouped, params.arrivals = sums.places(launcher, done + first)
            if plan.columns is not None:
                params.columns = launcher.pointer(images)
                params.first_matrix = first // plan.tiles
                matrices = min(most, tiles - first) // plan.tiles if params.own_columns else 1
                params.images = matrices * params.gemm.tiles_n * params.chunks
                params.arrivals_count = 0 if sums is None else min(most, tiles - first) * sums.words_tile
                launcher.launch(
                    plan.columns,
                    plan.columns.name,
                    grid=min(params.images, launcher.max_grid),
                    block=COLUMN_THREADS,
                    shared=0,
                    params=params,
                    dependent=True,
                )
            launcher.launch(
                plan.source,
                plan.source.name,
                grid=takers * blocks,
                block=tile.threads,
                shared=tile.shared_bytes,
                params=params,
                dependent=tile.tall,
            )
        done += tiles


@dataclass(frozen=True)
class _Sums:
    """Memory for the sums of blocks that have a part of k each.

    `words_tile`: words by which those of a tile tell that they have arrived. `zeroed`: launches set theirs to zero.
    """

    partial: Any
    grouped: Any
    arrivals: Any
    words_tile: int
    zeroed: bool

    @classmethod
    def of(cls, launcher: Launcher, plan: _FusedPlan) -> _Sums | None:
        """For one launch; the words for all of them, zero at the start, unless `fused_columns` sets them to zero."""
        tile = plan.tile
        if tile.split_k == 1:
            return None
        groups = -(-tile.split_k // tile.together)
        words = plan.most * tile.tile_bytes // _WORD
        zeroed = plan.columns is not None
        arrivals = (plan.most if zeroed else sum(tiles for _, tiles in plan.pieces)) * (groups + 1)
        return cls(
            launcher.empty((words * tile.split_k,), np.dtype(np.float32)),
            launcher.empty((words * groups if groups > 1 else 1,), np.dtype(np.float32)),
            (launcher.empty if zeroed else launcher.zeros)((arrivals,), np.dtype(np.uint32)),
            words_tile=groups + 1,
            zeroed=zeroed,
        )

    def places(self, launcher: Launcher, tile: int) -> tuple[int, int, int]:
        """Addresses for the launch that begins with that tile of all."""
        partial, grouped, arrivals = map(launcher.pointer, (self.partial, self.grouped, self.arrivals))
        return partial, grouped, arrivals + (0 if self.zeroed else _WORD * self.words_tile * tile)


@dataclass(frozen=True)
class _FusedPlan:
    """Launches of a product; `swapped` where it is the transposed one, so that A and B change places.

    `columns`: what makes the columns' planes of tall tiles.
    """

    source: KernelSource
    columns: KernelSource | None
    tile: FusedTile
    pieces: tuple[tuple[FusedParams, int], ...]
    swapped: bool

    @property
    def tiles(self) -> int:
        """Tiles of a matrix."""
        gemm = self.pieces[0][0].gemm
        return int(gemm.tiles_m * gemm.tiles_n)

    @property
    def columns_bytes(self) -> int:
        """Bytes of the planes of a matrix's columns."""
        params = self.pieces[0][0]
        return int(params.gemm.tiles_n * params.chunks * self.tile.stage_bytes)

    @property
    def most(self) -> int:
        """Tiles of one launch at most: of whole matrices, where planes of their columns are made."""
        found = max(tiles for _, tiles in self.pieces)
        if self.tile.split_k > 1:
            found = max(1, min(found, _WORKSPACE_BYTES // (self.tile.tile_bytes * self.tile.split_k)))
        if self.columns is None:
            return found
        return max(1, min(found // self.tiles, _WORKSPACE_BYTES // self.columns_bytes)) * self.tiles


@lru_cache(maxsize=1024)
def _plan(
    spec: DeviceSpec,
    problem: GemmProblem,
    config: GemmConfig | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray,
    d: StoredArray,
) -> _FusedPlan:
    operands = Operands.of(problem, a, b)
    c_view, d_view = written(problem, c, d)
    tile = resolve(config, problem, spec)
    swapped = runs_along_rows(d_view)
    if tile.tall and operands.m != operands.n:
        swapped = operands.m < operands.n
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
    m, n, k = operands.m, operands.n, operands.k
    access_a = choose_access(operands.a, k_is_row=False, block=tile.block_m, block_k=CHUNK)
    access_b = choose_access(operands.b, k_is_row=True, block=BLOCK, block_k=CHUNK)
    vector_d = d_view.column_stride == 1 and d_view.aligned(2, d_view.row_stride)
    shape = {
        "PARTS": str(tile.parts),
        "BLOCK_M": str(tile.block_m),
        "RASTER": str(tile.raster),
        "PROMOTE": str(tile.promote),
        "STAGES": str(tile.stages),
    }
    if tile.cluster:
        shape["CLUSTER"] = str(tile.cluster)
    access = {
        "CONJUGATE_A": flag(operands.conjugate_a and tile.parts == 2),
        "CONJUGATE_B": flag(operands.conjugate_b and tile.parts == 2),
        **access_defines(access_a, access_b),
    }
    columns = None
    if tile.tall:
        own = {name: access[name] for name in ("CONJUGATE_B", "B_ALONG_K", "VECTOR_B")}
        columns = KernelSource("fused_columns", tuple({**shape, **own, "THREADS": str(COLUMN_THREADS)}.items()))
        del access["VECTOR_B"]
    source = KernelSource(
        tile.kernel,
        tuple(
            {
                "TYPE_C": TYPES[c.dtype.name],
                "TYPE_D": TYPES[d.dtype.name],
                **shape,
                "THREADS": str(tile.threads),
                "SHARED_BYTES": str(tile.shared_bytes),
                **access,
                "VECTOR_D": flag(vector_d),
            }.items()
        ),
    )
    steps = -(-k // tile.piece)
    pieces = []
    for _, inner, views in launches(problem.batch_shape, [operands.a, operands.b, c_view, d_view]):
        gemm, tiles = gemm_params(problem, views, (m, n), (tile.block_m, tile.block_n), inner)
        params = FusedParams(
            gemm=gemm,
            own_columns=any(gemm.b.batch_stride),
            chunks=chunks(k),
            pieces=steps // chunks(k),
            longer=steps % chunks(k),
            chunks_part=tile.chunks_part(k),
            splits=tile.split_k,
            together=tile.together,
        )
        pieces.append((params, tiles))
    return _FusedPlan(source, columns, tile, tuple(pieces), swapped)
