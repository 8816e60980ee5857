"""A tile of the Hopper tensor-core kernel and the limits it keeps. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from gemmserve_kernels.algorithms.common.splits import DEPTHS, Scheme

if TYPE_CHECKING:
    from gemmserve_kernels.device.spec import DeviceSpec

Arithmetic = Scheme | Literal["fp16"]
"""Operands that are multiplied: planes of a scheme, or float16 operands as they are."""

ALIGNMENT: Final = 1024
"""Bytes, of a stage: the pattern of a 128-byte swizzle begins there."""
MAX_STAGES: Final = 12
"""Buffers of shared memory of one block."""
STATIC_SHARED: Final = 64 * (MAX_STAGES + 1)
"""Barriers and `Work` of the stages, in bytes."""
_MAX_REGISTERS: Final = 192
"""32-bit registers of sums in one thread: of 232, what is left is for addresses (ptxas for sm_90a, no spills)."""


@dataclass(frozen=True)
class WgmmaTile:
    """A tile with every choice made: block_m x block_n of the result, stages of block_k columns of k.

    `cluster` blocks side by side along m share the right operand by multicast. `split` blocks of a cluster share k and
    exchange sums through shared memory; `parts` grids share k through a workspace. `promote`: 0 where the tensor core
    accumulates alone. `raster`: rows of tiles (of clusters) walked together.
    """

    scheme: Arithmetic
    complex: bool
    block_m: int
    block_n: int
    block_k: int
    stages: int
    cluster: int = 1
    split: int = 1
    parts: int = 1
    raster: int = 16
    promote: int = 32

    @property
    def components(self) -> int:
        """Sums of one element: real and imaginary part."""
        return 2 if self.complex else 1

    @property
    def stage_planes(self) -> int:
        """Planes of an operand in one stage."""
        return DEPTHS.get(self.scheme, 1) * (self.components if self.scheme != "3xfp16-3m" else 1)

    @property
    def instruction_n(self) -> int:
        """Columns of one matrix instruction: what lets the sums stay in registers."""
        return min(self.block_n, 256 if self.promote == 0 and not self.complex else 128)

    @property
    def threads(self) -> int:
        """Threads of a block: a warpgroup for 64 rows, and one that fetches."""
        return 2 * self.block_m + 128

    @property
    def quartered(self) -> bool:
        """Whether a stage is the real or the imaginary part of one operand: four whole ones would be too large."""
        block_k = {"3xfp16": 64, "6xbf16": 32, "9xbf16": 32}.get(self.scheme)
        return self.complex and (self.block_m, self.block_n, self.block_k, self.cluster) == (128, 128, block_k, 1)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        if self.quartered:
            return DEPTHS[self.scheme] * self.block_m * self.block_k * 2
        return self.stage_planes * (self.block_m + self.block_n) * self.block_k * 2

    @property
    def exchange_bytes(self) -> int:
        """Shared memory that the sums take where a cluster splits k; the stages' memory is used again."""
        return self.components * self.block_m * self.block_n * 4 if self.split > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return max(self.stages * self.stage_bytes, self.exchange_bytes) + ALIGNMENT

    @property
    def registers(self) -> int:
        """32-bit registers of a thread that hold sums."""
        temporary = self.instruction_n // 2 if self.promote else 0
        return self.components * self.block_n // 2 + temporary

    def broken_limit(self, spec: DeviceSpec) -> str | None:
        """One line that names the first limit this tile breaks, or None."""
        if self.block_m not in {64, 128}:
            return f"block_m: the wgmma kernel has 64 and 128, not {self.block_m}"
        if self.block_n not in {64, 128, 256}:
            return f"block_n: the wgmma kernel has 64, 128 and 256, not {self.block_n}"
        if self.block_k not in {16, 32, 64}:
            return f"block_k: the wgmma kernel has 16, 32 and 64, not {self.block_k}"
        if self.scheme == "1xfp16" and self.promote:
            return "promote: 1xfp16 leaves its sums to the tensor core"
        unpromoted = self.scheme == "1xfp16" or (self.scheme == "fp16" and not self.promote)
        if not unpromoted and (self.promote % 16 or not self.promote or self.block_k % self.promote):
            return f"promote: must divide block_k={self.block_k} and be a multiple of 16, not {self.promote}"
        if self.quartered and self.promote != self.block_k:
            return f"promote: must be block_k={self.block_k} in this tile, not {self.promote}"
        if self.cluster not in {1, 2}:
            return f"cluster: the wgmma kernel has 1 and 2, not {self.cluster}"
        if self.stage_planes > 1 and self.stage_planes % self.cluster:
            return f"cluster: {self.cluster} blocks do not share {self.stage_planes} planes evenly"
        if self.scheme == "fp16" and self.block_n < 64 * self.cluster:
            return f"cluster: each of {self.cluster} blocks fetches 64 of block_n={self.block_n} columns at least"
        if self.split not in {1, 2, 4}:
            return f"split_k: a cluster has 1, 2 or 4 parts of k, not {self.split}"
        if self.split > 1 and self.cluster > 1:
            return "cluster: blocks share operands or split k, not both"
        if self.registers > _MAX_REGISTERS:
            return f"registers: the sums of the tile take {self.registers} a thread, the limit is {_MAX_REGISTERS}"
        shared = self.shared_bytes + STATIC_SHARED
        least = 5 if self.quartered else 2
        if self.stages < least:
            return f"stages: the tile needs {least} at least, not {self.stages}"
        if self.stages > MAX_STAGES:
            return f"stages: the wgmma kernel has {MAX_STAGES} at most, not {self.stages}"
        if shared > spec.shared_per_block:
            return f"shared memory: the tile needs {shared} bytes a block, {spec.name} has {spec.shared_per_block}"
        return None
