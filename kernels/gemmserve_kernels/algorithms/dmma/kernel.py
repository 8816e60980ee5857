"""Defines and launches of the kernels of `dmma`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.operands import TYPES, flag
from gemmserve_kernels.algorithms.dmma.engine import Source
from gemmserve_kernels.algorithms.dmma.tile import DmmaTile, run_of
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import VECTOR_BYTES, GemmParams, choose_access, gemm_params
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.struct_params import MatrixView
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

_PRODUCERS: Final = 128
"""Threads that ask the copy engine for tiles: a warpgroup, whose registers the others get."""
_FEW: Final = 40
"""Registers that are left to each of them."""
_PIECE: Final = 2
"""Neighbours in a row of the result that a thread has."""


@dataclass(frozen=True)
class Kernel:
    """A compiled form of the kernel, common to its entries. `sources`: what the copy engine fetches, None where threads
    copy.
    """

    tile: DmmaTile
    batch_shape: tuple[int, ...]
    sources: tuple[Source, Source] | None
    defines: dict[str, str]

    @classmethod
    def of(
        cls,
        spec: DeviceSpec,
        problem: GemmProblem | GemmReduceProblem,
        tile: DmmaTile,
        views: Sequence[MatrixView],
        conjugates: tuple[bool, bool],
        batch_shape: tuple[int, ...],
        extra: dict[str, str] | None = None,
    ) -> Kernel:
        """Return the kernel for the views A, B, C and D in `tile`; the kind of the tile is that of the problem.
        `extra`: defines.
        """
        a, b, _, d = views
        is_complex = problem.dtype.kind == "c"
        access_a = choose_access(a, k_is_row=False, block=tile.block_m, block_k=tile.block_k)
        access_b = choose_access(b, k_is_row=True, block=tile.block_n, block_k=tile.block_k)
        sources = None
        if spec.has_wgmma and tile.kind != "planar" and problem.k > 0:
            sides = [
                Source.of(
                    view, batch_shape, along_k=access.along_k, block=block, block_k=tile.block_k, planar=problem.planar
                )
                for view, access, block in ((a, access_a, tile.block_m), (b.transposed(), access_b, tile.block_n))
            ]
            if sides[0] is not None and sides[1] is not None:
                sources = sides[0], sides[1]
        itemsize = a.dtype.itemsize
        piece = min(_PIECE, VECTOR_BYTES // itemsize)
        defines = {
            "TYPE_ACC": TYPES["complex128" if is_complex else "float64"],
            "TYPE_STORED": TYPES[real_dtype(a.dtype).name],
            "PLANAR": flag(problem.planar),
            "CONJUGATE_A": flag(is_complex and conjugates[0]),
            "CONJUGATE_B": flag(is_complex and conjugates[1]),
            "A_ALONG_K": flag(access_a.along_k),
            "B_ALONG_K": flag(access_b.along_k),
            "UNIT_A": str(itemsize * access_a.vector),
            "UNIT_B": str(itemsize * access_b.vector),
            "VECTOR_D": flag(d.column_stride == 1 and d.aligned(piece, d.row_stride)),
            "BLOCK_M": str(tile.block_m),
            "BLOCK_N": str(tile.block_n),
            "BLOCK_K": str(tile.block_k),
            "WARP_M": str(tile.warp_m),
            "WARP_N": str(tile.warp_n),
            "STAGES": str(tile.stages),
            "GROUP": str(tile.raster),
            "RUN": str(0 if tile.kept == "nowhere" else run_of(problem)),
            "KEEP_SHARED": flag(tile.kept == "shared"),
            "ENGINE": flag(sources is not None),
            "MIN_BLOCKS": str(tile.min_blocks),
            "SHARED_BYTES": str(tile.shared_bytes),
            "FEW": str(_FEW),
            **(extra or {}),
        }
        return cls(tile, batch_shape, sources, defines)

    def params(
        self, problem: GemmProblem | GemmReduceProblem, views: Sequence[MatrixView], shape: tuple[int, int]
    ) -> GemmParams:
        """Arguments of an m x n product; batch strides count the maps' matrices where there are maps."""
        if self.sources is not None:
            a, b, *rest = views
            strides = [source.batch_strides for source in self.sources]
            views = [replace(a, batch_strides=strides[0]), replace(b, batch_strides=strides[1]), *rest]
        return gemm_params(problem, views, shape, (self.tile.block_m, self.tile.block_n), self.batch_shape)[0]

    def launch(
        self,
        launcher: Launcher,
        name: str,
        params: Any,
        tiles: int,
        bases: tuple[int, int] = (0, 0),
        *,
        dependent: bool = False,
    ) -> None:
        """Launches kernel `name`, whose parameters begin with two maps, on as many blocks as the device holds at once.

        `bases`: what A's and B's addresses count from.
        """
        threads = 32 * self.tile.warps
        if self.sources is not None:
            threads += _PRODUCERS
            params.map_a, params.map_b = (
                launcher.tensor_map(source.box, source.address + base)
                for source, base in zip(self.sources, bases, strict=True)
            )
        launcher.launch(
            KernelSource(name, tuple(self.defines.items())),
            name,
            grid=min(tiles, launcher.max_grid, launcher.spec.sm_count * self.tile.min_blocks),
            block=threads,
            shared=self.tile.shared_bytes,
            params=params,
            dependent=dependent,
        )
