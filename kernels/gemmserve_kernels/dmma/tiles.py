"""Tiles of the kernels in double precision on tensor cores. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_kernels.device import DeviceSpec


@dataclass(frozen=True)
class DmmaTile:
    """`instruction_k`, `read_k`: steps of k of one matrix instruction, and of what a lane reads at once.

    `run`: steps that are summed up one after another before ordinary units add up the sums; 0: all. `raster`: rows of
    tiles walked down together.
    """

    block_m: int
    block_n: int
    block_k: int
    warp_m: int
    warp_n: int
    stages: int
    instruction_k: int
    read_k: int
    run: int = 0
    min_blocks: int = 1
    raster: int = 8

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n) * 32

    def shared_bytes(self, *, is_complex: bool) -> int:
        """Shared memory of one block: all stages."""
        return (self.block_m + self.block_n) * self.block_k * (16 if is_complex else 8) * self.stages


_RUN: Final = 256
LARGE: Final = {
    "float64": DmmaTile(128, 128, 32, 64, 32, 3, 8, 8),
    "complex128": DmmaTile(128, 64, 16, 32, 32, 4, 4, 4),
    "planar": DmmaTile(64, 64, 16, 32, 16, 4, 4, 8),
}
SMALL: Final = {
    "float64": DmmaTile(64, 64, 16, 32, 32, 4, 8, 8, _RUN, 2),
    "complex128": DmmaTile(32, 64, 8, 16, 32, 5, 4, 4, _RUN, 2),
    "planar": DmmaTile(32, 64, 16, 16, 16, 3, 4, 8, _RUN),
}
"""Where there are fewer large tiles than multiprocessors: a BLAS would cut k, which helps its accuracy, too."""


def choose(m: int, n: int, spec: DeviceSpec, *, is_complex: bool, planar: bool) -> DmmaTile:
    """The tile for an m x n product, in as many stages as the device's shared memory holds.

    The same for a batch of them: it has the bits of its products.
    """
    kind = "planar" if planar else "complex128" if is_complex else "float64"
    large = LARGE[kind]
    tiles = -(-m // large.block_m) * -(-n // large.block_n)
    tile = large if tiles >= spec.sm_count else SMALL[kind]
    while tile.shared_bytes(is_complex=is_complex) > spec.shared_per_block:
        tile = replace(tile, stages=tile.stages - 1)
    return tile
