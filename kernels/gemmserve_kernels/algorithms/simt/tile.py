"""Tiles of the portable kernels: what a device can run, and which tile suits which problem. Pure.

A tile that a device cannot run is refused with one line that names the limit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.device.spec import DeviceSpec

_MAX_THREADS: Final = 1024
"""Threads of one block, on every CUDA and ROCm device."""
_MAX_REGISTERS: Final = 255
"""32-bit registers of one thread (CUDA C++ programming guide, compute capabilities)."""
_OTHER_REGISTERS: Final = 28
"""Addresses, counters, predicates: what ptxas needs beside the arrays, fitted to its reports for sm_80 and sm_90a."""
_RUNS_REGISTERS: Final = 32
"""Registers beside those where there are runs, by the same reports."""
_DEFAULT_THREADS: Final = 256
_SIMT_FIELDS: Final = ("block_m", "block_n", "block_k", "thread_m", "thread_n", "stages", "split_k")


@dataclass(frozen=True)
class SimtTile:
    """A tile of the portable kernels, with every choice made. `min_blocks` is the compiler's occupancy target."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    stages: int = 2
    min_blocks: int = 1

    def transposed(self) -> SimtTile:
        """For the transposed product."""
        return replace(self, block_m=self.block_n, block_n=self.block_m, thread_m=self.thread_n, thread_n=self.thread_m)

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return (self.block_m // self.thread_m) * (self.block_n // self.thread_n)

    def stage_bytes(self, itemsize: int, *, pad_a: bool, pad_b: bool) -> int:
        """Shared memory of one stage; the padding is SharedTile's in cuda/common/memory/layout.cuh."""
        width = max(1, 16 // itemsize)

        def leading(extent: int, padded: bool) -> int:
            return -(-extent // width) * width + (width if padded else 0)

        return (leading(self.block_m, pad_a) + leading(self.block_n, pad_b)) * self.block_k * itemsize

    def shared_bytes(self, itemsize: int, *, pad_a: bool = True, pad_b: bool = True, local_bytes: int = 0) -> int:
        """Shared memory of a block: the stages, or one reduction's partials of `local_bytes` each, which reuse it."""
        stages = self.stages * self.stage_bytes(itemsize, pad_a=pad_a, pad_b=pad_b)
        return max(stages, local_bytes * (self.block_m // self.thread_m) * self.block_n)

    def registers(self, itemsize: int, *, runs: bool = False) -> int:
        """Estimated 32-bit registers of one thread: accumulators, one step's fragments, the tile on its way; of `runs`
        their sums, too, and what is lost as they are added.
        """
        words = itemsize // 4
        staged = -(-(self.block_m + self.block_n) * self.block_k // self.threads)
        kept = self.thread_m * self.thread_n * (3 if runs else 1) + self.thread_m + self.thread_n + staged
        return kept * words + _OTHER_REGISTERS + (_RUNS_REGISTERS if runs else 0)

    def with_runs(self, itemsize: int, spec: DeviceSpec) -> SimtTile | None:
        """The tile for sums of runs, with room for fewer blocks at a time; None where a thread lacks registers."""
        registers = self.registers(itemsize, runs=True)
        if registers > _MAX_REGISTERS or registers * self.threads > spec.registers_per_sm:
            return None
        return replace(self, min_blocks=min(self.min_blocks, spec.registers_per_sm // (registers * self.threads)))

    def broken_limit(self, itemsize: int, spec: DeviceSpec, *, local_bytes: int = 0) -> str | None:
        """One line that names the first limit this tile breaks on `spec`, or None."""
        for axis in ("m", "n"):
            block, thread = getattr(self, f"block_{axis}"), getattr(self, f"thread_{axis}")
            if block % thread:
                return f"divisibility: block_{axis}={block} is not a multiple of thread_{axis}={thread}"
        if self.stages not in {1, 2}:
            return f"stages: the portable kernel has 1 or 2, not {self.stages}"
        if self.threads > _MAX_THREADS:
            return f"threads: the tile needs {self.threads} a block, the limit is {_MAX_THREADS}"
        shared = self.shared_bytes(itemsize, local_bytes=local_bytes)
        if shared > spec.shared_per_block:
            return f"shared memory: the tile needs {shared} bytes a block, {spec.name} has {spec.shared_per_block}"
        registers = self.registers(itemsize)
        if registers > _MAX_REGISTERS:
            return f"registers: the tile needs about {registers} a thread, the limit is {_MAX_REGISTERS}"
        if registers * self.threads > spec.registers_per_sm:
            return (
                f"registers: the tile needs about {registers} x {self.threads} threads, "
                f"{spec.name} has {spec.registers_per_sm}"
            )
        return None


@dataclass(frozen=True)
class _Candidate:
    """A tile that dispatch may choose, and its rate on a full device relative to the best of its type."""

    tile: SimtTile
    rate: float


_CANDIDATES: Final[dict[str, tuple[_Candidate, ...]]] = {
    "float32": (
        _Candidate(SimtTile(64, 64, 16, 8, 8, min_blocks=4), 1.0),
        _Candidate(SimtTile(32, 64, 16, 4, 4, min_blocks=4), 0.82),
        _Candidate(SimtTile(32, 32, 16, 4, 4, min_blocks=8), 0.73),
    ),
    "float64": (
        _Candidate(SimtTile(64, 64, 8, 8, 4, min_blocks=2), 1.0),
        _Candidate(SimtTile(32, 64, 8, 4, 4, min_blocks=4), 0.8),
    ),
    "complex64": (
        _Candidate(SimtTile(64, 64, 8, 8, 4, min_blocks=3), 1.0),
        _Candidate(SimtTile(32, 64, 8, 4, 4, min_blocks=4), 0.88),
        _Candidate(SimtTile(32, 32, 8, 4, 2, min_blocks=4), 0.84),
    ),
    "complex128": (_Candidate(SimtTile(32, 32, 8, 4, 2, min_blocks=3), 1.0),),
}
"""By accumulator. The rates are measured on one H200 at 4096^3 (benchmarks/simt_tiles.py)."""


def resolve_simt(
    config: GemmConfig | SimtTile | None,
    *,
    m: int,
    n: int,
    batch: int,
    accumulate: np.dtype,
    spec: DeviceSpec,
    local_bytes: int = 0,
    runs: bool = False,
) -> SimtTile:
    """The tile that runs: the overrides of `config`, the rest chosen for m x n x batch on `spec`; `runs`: of those that
    have room for sums of runs.

    A `SimtTile` is taken as it is. `accumulate` is the accumulator's dtype; `local_bytes` what a reduction keeps per
    thread row and column (0: none). Raises ConfigInfeasible where the overrides leave nothing that `spec` can run.
    """
    itemsize = np.dtype(accumulate).itemsize
    if isinstance(config, SimtTile):
        if broken := config.broken_limit(itemsize, spec, local_bytes=local_bytes):
            raise ConfigInfeasible(broken)
        return config
    config = config or GemmConfig()
    config.only("simt", _SIMT_FIELDS)
    if config.split_k not in {None, 1}:
        raise ConfigInfeasible(f"split_k: the portable kernel does not split k; only 1, not {config.split_k}")
    default = _best_candidate(m, n, batch, np.dtype(accumulate), spec, local_bytes, runs=runs)
    if not set(config.tile_fields) - {"split_k"}:
        return default
    reason = "no tile fits"
    for tile in _completions(config, default, itemsize, spec):
        broken = tile.broken_limit(itemsize, spec, local_bytes=local_bytes)
        if broken is None:
            return tile
        reason = broken if reason == "no tile fits" else reason
    raise ConfigInfeasible(reason)


def _best_candidate(
    m: int, n: int, batch: int, accumulate: np.dtype, spec: DeviceSpec, local_bytes: int, *, runs: bool
) -> SimtTile:
    """The candidate of the least estimated time: blocks of the busiest multiprocessor times the work of each."""

    def time(candidate: _Candidate) -> float:
        tile = candidate.tile
        blocks = math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n) * batch
        busiest = math.ceil(blocks / spec.sm_count)
        # Blocks that share a multiprocessor hide each other's latencies: one alone leaves part of it idle.
        alone = 0.5 + 0.5 * min(1.0, busiest / tile.min_blocks)
        return busiest * tile.block_m * tile.block_n / (candidate.rate * alone)

    fitting = [
        candidate
        for candidate in _CANDIDATES[accumulate.name]
        if candidate.tile.broken_limit(accumulate.itemsize, spec, local_bytes=local_bytes) is None
        and not (runs and candidate.tile.with_runs(accumulate.itemsize, spec) is None)
    ]
    if not fitting:
        raise ConfigInfeasible(f"shared memory: {spec.name} is too small for every tile of the portable kernel")
    return min(fitting, key=time).tile


def _completions(config: GemmConfig, default: SimtTile, itemsize: int, spec: DeviceSpec) -> Iterator[SimtTile]:
    """Every way to fill what `config` leaves open, the most promising first."""
    block_m = config.block_m or default.block_m
    block_n = config.block_n or default.block_n

    def divisors(fixed: int | None, block: int) -> list[int]:
        return [fixed] if fixed else [d for d in range(min(16, block), 0, -1) if block % d == 0]

    def penalty(tile: SimtTile) -> tuple[float, ...]:
        if tile.block_m % tile.thread_m or tile.block_n % tile.thread_n:
            return (math.inf,)
        return (
            abs(math.log2(tile.threads / _DEFAULT_THREADS)),
            abs(math.log2(tile.thread_m / tile.thread_n)),
            -tile.stages,
            abs(math.log2(tile.block_k / default.block_k)),
        )

    tiles = [
        SimtTile(block_m, block_n, block_k, thread_m, thread_n, stages)
        for thread_m, thread_n, block_k, stages in itertools.product(
            divisors(config.thread_m, block_m),
            divisors(config.thread_n, block_n),
            [config.block_k] if config.block_k else [default.block_k, 4, 2, 1],
            [config.stages] if config.stages else [2, 1],
        )
    ]
    for tile in sorted(tiles, key=penalty):
        # Two blocks a multiprocessor hide each other's barriers, where the registers allow it.
        whole = penalty(tile) != (math.inf,)
        twice = whole and 2 * tile.threads * (tile.registers(itemsize) + 8) <= spec.registers_per_sm
        yield SimtTile(
            tile.block_m, tile.block_n, tile.block_k, tile.thread_m, tile.thread_n, tile.stages, 2 if twice else 1
        )
