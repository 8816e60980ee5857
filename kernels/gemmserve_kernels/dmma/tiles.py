"""Tiles of the kernels in double precision on tensor cores. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from gemmserve_kernels.device import DeviceSpec

Kind = Literal["float64", "complex128", "planar"]
"""What operands are made of; planar: complex128 as two planes of float64."""

RUN: Final = 256
"""Steps of k that are summed up one after another before ordinary units add up the sums."""

_SPAN: Final = 128
"""Bytes of shared memory that a row or column takes in one stage."""
_ALIGNMENT: Final = 1024
_BARRIERS: Final = 16
"""Bytes of a stage's barriers."""


@dataclass(frozen=True)
class DmmaTile:
    """`kept`: where the sums of runs that are over are kept. `raster`: rows of tiles walked down together."""

    kind: Kind
    block_m: int
    block_n: int
    warp_m: int
    warp_n: int
    stages: int
    kept: Literal["registers", "shared"] = "registers"
    min_blocks: int = 1
    raster: int = 8

    @property
    def warps(self) -> int:
        """Warps of one block that multiply."""
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n)

    @property
    def block_k(self) -> int:
        """Steps of k of one stage."""
        return _SPAN // (16 if self.kind == "complex128" else 8)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block."""
        stage = (self.block_m + self.block_n) * _SPAN * (2 if self.kind == "planar" else 1)
        kept = self.block_m * self.block_n * (8 if self.kind == "float64" else 16) if self.kept == "shared" else 0
        return _ALIGNMENT + kept + self.stages * (stage + _BARRIERS)


TILES: Final[dict[Kind, tuple[DmmaTile, ...]]] = {
    "float64": (
        DmmaTile("float64", 128, 128, 64, 32, 3, "shared"),
        DmmaTile("float64", 128, 64, 32, 32, 4),
        DmmaTile("float64", 64, 64, 32, 32, 4, min_blocks=2),
    ),
    "complex128": (
        DmmaTile("complex128", 128, 64, 32, 32, 4, "shared"),
        DmmaTile("complex128", 64, 64, 32, 16, 5),
        DmmaTile("complex128", 32, 64, 16, 32, 5, min_blocks=2),
    ),
    "planar": (
        DmmaTile("planar", 64, 64, 32, 16, 4),
        DmmaTile("planar", 32, 64, 16, 16, 3),
    ),
}
"""From the largest to the smallest."""


def choose(m: int, n: int, spec: DeviceSpec, kind: Kind) -> DmmaTile:
    """The tile for an m x n product: the largest of which there is one for each multiprocessor, and the device has the
    shared memory; else the smallest, in as many stages as fit.

    The same for a batch of them: it has the bits of its products.
    """
    for tile in TILES[kind]:
        tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
        if tiles >= spec.sm_count and tile.shared_bytes <= spec.shared_per_block:
            return tile
    tile = TILES[kind][-1]
    while tile.shared_bytes > spec.shared_per_block:
        tile = replace(tile, stages=tile.stages - 1)
    return tile
