"""Geometry of the pre-pass: vectors of length k cut into the shares of threads, warps and blocks (cuda/splits). Pure.

It follows from k and the architecture alone. What is counted of a vector are integers: no result depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_kernels.device.spec import DeviceSpec

RUN: Final = 8
"""Steps of k that a thread converts at once."""
_PATCH: Final = 64
"""Steps of k of a strip that a warp holds at once (cuda/splits/across.cuh)."""
_WARP: Final = 32
"""Lanes, as kernels see it."""
_PIECE_BYTES: Final = 16
_ALONE: Final = {True: 256, False: 64}
"""Threads of a block that holds whole vectors, by whether there is room."""
_MAX_ALONE: Final = {True: 3, False: 6}
"""Such blocks on a multiprocessor: with more, threads have too few registers."""
_STRIPS: Final = {True: {64: 256, 128: 256, 256: 128}, False: {64: 256, 128: 128, 256: 64}}
"""Bytes of their strips by the steps of k that they hold: whole lines of memory, as far as there is room. Where
there is little, several blocks of 16 KiB are on their way at a time."""
_LONG_STRIP: Final = 64
"""That of longer vectors."""
_STAGE: Final = 32 << 10
"""Bytes of a unit of which there is room for two stages."""
_ROOM: Final = 160 << 10
"""Shared memory of a multiprocessor from which on there is room."""
_RESERVED: Final = 1024
"""Shared memory that the system takes of each block."""


@dataclass(frozen=True)
class Geometry:
    """The shape of a block and of a cluster.

    `blocks`: that are to run together on a multiprocessor. For vectors along memory: `held` runs a thread, `ranks`
    blocks that share a vector, `stages` vectors on their way. For those across: `strip` bytes at each step of k,
    `patches` of a warp, `cluster` blocks that share a strip. `stream`: what is read gives way to planes in L2;
    `prefetch`: bytes that a miss brings there at once, 0 for the device's choice. Neither changes any result.

    `alone`: no vector is longer than so many steps of k, and a block has all of `strip` bytes of them at each,
    whichever way they lie, `stages` times; 0: blocks share vectors.
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
    alone: int = 0

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
        """At least sizeof(along::Shared) or sizeof(across::Shared) of cuda/splits; whole pieces."""
        warps, parts = self.threads // _WARP, 2 if complex_data else 1
        if self.alone:
            found = 2 * self.columns(complex_data=complex_data) * (2 * parts + 1) * 4
            return _whole_pieces(self.stages * self.alone * self.strip + found)
        if along:
            stages = self.stages if k <= self.along_k else 1
            run = RUN * 4 * parts
            return _whole_pieces(stages * self.threads * self.held * run + 2 * warps * (parts * 8 + 4) + 8)
        columns = self.columns(complex_data=complex_data)
        tallies = warps * (self.strip + columns * (parts + 1) * 4) + 2 * columns * (parts * 12 + 4) + columns * 12
        return _whole_pieces(warps * self.patches * _PATCH * self.strip + tallies + 8)


def _whole_pieces(size: int) -> int:
    return -(-size // _PIECE_BYTES) * _PIECE_BYTES


def geometry_of(k: int, spec: DeviceSpec) -> Geometry:
    """For vectors of length k. Clusters of Hopper's hold a strip of up to 16384 steps of k, so that it is read once."""
    if k <= 4 * _PATCH or (k <= 16 * _PATCH and spec.has_wgmma):
        return _alone(k, spec)
    if k <= 8 * _PATCH:
        return Geometry(threads=256, blocks=3, held=1, strip=32, patches=1, cluster=1)
    if k <= 16 * _PATCH:
        return Geometry(threads=512, blocks=2, held=1, strip=32, patches=1, cluster=1)
    if not spec.has_wgmma:
        return Geometry(threads=256, blocks=2, held=2, strip=64, patches=2, cluster=1)
    if k <= 2048:
        return Geometry(threads=256, blocks=2, held=1, strip=128, patches=1, cluster=4)
    if k <= 4096:
        return Geometry(threads=256, blocks=2, held=2, strip=128, patches=1, cluster=8)
    if k <= 8192:
        return Geometry(threads=256, blocks=2, held=2, strip=64, patches=2, cluster=8, ranks=2)
    ranks = 2 if k <= 16384 else 4 if k <= 32768 else 8
    return Geometry(threads=512, blocks=1, held=2, strip=64, patches=2, cluster=8, ranks=ranks)


def _alone(k: int, spec: DeviceSpec) -> Geometry:
    """For vectors of which a block holds some whole."""
    roomy = spec.shared_per_sm >= _ROOM
    whole = _WARP * RUN
    held = max(_PATCH, 1 << (k - 1).bit_length()) if k <= whole else -(-k // whole) * whole
    strip = _STRIPS[roomy].get(held, _LONG_STRIP)
    stages = 2 if roomy and held * strip <= _STAGE else 1
    geometry = Geometry(_ALONE[roomy], 1, 1, strip, 1, 1, stages=stages, alone=held)
    fitting = spec.shared_per_sm // (geometry.shared_bytes(k, complex_data=False, along=True) + _RESERVED)
    return replace(geometry, blocks=max(1, min(_MAX_ALONE[roomy], fitting)))
