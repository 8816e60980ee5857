"""Overrides of the algorithm and its tile that a caller may ask for. Pure."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from collections.abc import Collection

    from gemmserve_kernels.problem.vocabulary import AlgorithmName


@dataclass(frozen=True)
class GemmConfig:
    """Overrides of what dispatch would choose; None leaves the choice to it.

    `algorithm`: an `AlgorithmName` ("sums", "gram" make sums, sums of squares of a product without it, "screen" finds
    extremes without most of it, "product" is whatever does not). `block_m`, `block_n`, `block_k`: the tile of the
    product that one block computes, and how many steps of k a stage holds. `warp_m`, `warp_n`: the part of that tile
    that one warp computes (`mma`, `mfma`). `thread_m`, `thread_n`: the part in one thread's registers (`simt`).
    `instruction_k`: steps of k of one matrix instruction (`mma`, `gram`). `stages`: buffers of shared memory.
    `split_k`: parts that k is cut into. `cluster`: blocks that share operands by multicast (`wgmma`, `ozaki`), or
    the float16 planes of their rows, each making a share of them (`fused`).
    `raster`: rows of tiles walked together for the cache's sake. `promote`: steps of k between promotions of the tensor
    core's partial sums. `rounding_big`, `rounding_small`: how parts become TF32, of `ROUNDINGS` (`mma`). `moduli`:
    residues (`ozaki`). `outliers`: elements of a row or column that are multiplied apart, at most; 0: none (`ozaki`).
    `strips`: parts that the result is cut into, across columns and then across rows too, of which one after the other
    has its planes made and multiplied (float16 and bfloat16 planes): less memory for planes, the same bits.

    An algorithm refuses a field that it does not have.
    """

    algorithm: AlgorithmName | None = None
    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    thread_m: int | None = None
    thread_n: int | None = None
    stages: int | None = None
    split_k: int | None = None
    warp_m: int | None = None
    warp_n: int | None = None
    instruction_k: int | None = None
    cluster: int | None = None
    raster: int | None = None
    promote: int | None = None
    moduli: int | None = None
    outliers: int | None = None
    rounding_big: str | None = None
    rounding_small: str | None = None
    strips: int | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, worked out once: every call looks its plan up by it."""
        return hash(astuple(self))

    def __getstate__(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name) for field in fields(self)
        }  # hashes of strings are a process's own

    @property
    def tile_fields(self) -> dict[str, int | str]:
        """The overrides that only a tiled kernel can honour, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "algorithm"}
        return {name: value for name, value in values.items() if value is not None}

    def transposed(self) -> GemmConfig:
        """The same overrides for the transposed product: m and n change places."""
        return replace(
            self,
            block_m=self.block_n,
            block_n=self.block_m,
            thread_m=self.thread_n,
            thread_n=self.thread_m,
            warp_m=self.warp_n,
            warp_n=self.warp_m,
        )

    def only(self, algorithm: str, allowed: Collection[str]) -> None:
        """Raises ConfigInfeasible where a field is set that `algorithm` does not have, or a number is below 1
        (`outliers`: below 0).
        """
        for name, value in self.tile_fields.items():
            if name not in allowed:
                raise ConfigInfeasible(f"{name}: the {algorithm} algorithm has no such setting")
            least = 0 if name == "outliers" else 1
            if isinstance(value, int) and value < least:
                raise ConfigInfeasible(f"{name}: must be at least {least}, not {value}")
