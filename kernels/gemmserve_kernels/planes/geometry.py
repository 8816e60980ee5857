"""How the pre-pass cuts vectors of length k into the shares of threads, warps and blocks (cuda/split). Pure.

What is summed in which order depends on it, and flags depend on sums: so it follows from k and the architecture alone,
never from what else a launch does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_kernels.device import DeviceSpec

RUN: Final = 8
"""Steps of k that a thread converts at once."""
_PATCH: Final = 64
"""Steps of k of a strip that a warp holds at once (cuda/split/across.cuh)."""
_WARP: Final = 32
_PIECE_BYTES: Final = 16


@dataclass(frozen=True)
class Geometry:
    """The shape of a block and of a cluster.

    `blocks`: that are to run together on a multiprocessor. For vectors along memory: `held` runs a thread, `ranks`
    blocks that share a vector, `stages` vectors on their way. For those across: `strip` bytes at each step of k,
    `patches` of a warp, `cluster` blocks that share a strip. `stream`: what is read gives way to planes in L2;
    `prefetch`: bytes that a miss brings there at once, 0 for the device's choice. Neither changes any result.
    """

    threads: int
    blocks: int
    held: int
    strip: int
    patches: int
    cluster: int
    ranks: int = 1
    stages: int = 2
    stream: bool = False
    prefetch: int = 0

    @property
    def along_k(self) -> int:
        """Steps of k of a vector along memory that are held."""
        return self.ranks * self.threads * self.held * RUN

    @property
    def across_k(self) -> int:
        """Steps of k of a strip that are held."""
        return self.cluster * self.threads // _WARP * self.patches * _PATCH

    def team(self, k: int) -> int:
        """Threads that share a vector along memory."""
        team = _WARP
        while team < self.threads and team * self.held * RUN < k:
            team *= 2
        return team

    def columns(self, *, complex_data: bool) -> int:
        """Vectors of a strip."""
        return self.strip // (8 if complex_data else 4)

    def shared_bytes(self, k: int, *, complex_data: bool, along: bool) -> int:
        """At least sizeof(along::Shared) or sizeof(across::Shared) of cuda/split; whole pieces."""
        warps, parts = self.threads // _WARP, 2 if complex_data else 1
        if along:
            stages = self.stages if k <= self.along_k else 1
            run = RUN * 4 * parts
            return _whole_pieces(stages * self.threads * self.held * run + 2 * warps * parts * 12 + 8)
        columns = self.columns(complex_data=complex_data)
        tallies = warps * (self.strip + columns * parts * 8) + 2 * columns * parts * 16 + columns * 8
        return _whole_pieces(warps * self.patches * _PATCH * self.strip + tallies + 8)


def _whole_pieces(size: int) -> int:
    return -(-size // _PIECE_BYTES) * _PIECE_BYTES


def geometry_of(k: int, spec: DeviceSpec) -> Geometry:
    """For vectors of length k. Clusters of Hopper's hold a strip of up to 16384 steps of k, so that it is read once."""
    if k <= 2 * _PATCH:
        return Geometry(threads=64, blocks=8, held=1, strip=128, patches=1, cluster=1)
    if k <= 4 * _PATCH:
        return Geometry(threads=128, blocks=6, held=1, strip=64, patches=1, cluster=1)
    if k <= 8 * _PATCH:
        return Geometry(threads=256, blocks=3, held=1, strip=32, patches=1, cluster=1)
    if k <= 16 * _PATCH:
        if spec.arch == "sm_90a":
            return Geometry(threads=256, blocks=2, held=1, strip=64, patches=1, cluster=2)
        return Geometry(threads=512, blocks=2, held=1, strip=32, patches=1, cluster=1)
    if spec.arch != "sm_90a":
        return Geometry(threads=256, blocks=2, held=2, strip=64, patches=2, cluster=1)
    if k <= 2048:
        return Geometry(threads=256, blocks=2, held=1, strip=128, patches=1, cluster=4)
    if k <= 4096:
        return Geometry(threads=256, blocks=2, held=2, strip=128, patches=1, cluster=8)
    if k <= 8192:
        return Geometry(threads=256, blocks=2, held=2, strip=64, patches=2, cluster=8, ranks=2)
    ranks = 2 if k <= 16384 else 4 if k <= 32768 else 8
    return Geometry(threads=512, blocks=1, held=2, strip=64, patches=2, cluster=8, ranks=ranks)
