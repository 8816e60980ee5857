"""Tiles for small products: what a thread or a warp computes, what a block holds, what a device can run. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.small.layout import WARP, OperandLayout, shared_bytes
from gemmserve_kernels.device.struct_params import VECTOR_BYTES
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.device.spec import DeviceSpec

LIMIT: Final = 32
"""Rows, columns and steps of k at most."""
_FIELDS: Final = ("thread_m", "thread_n", "warp_m", "warp_n", "stages")
_MAX_THREAD_TILE: Final = 16
_MAX_WARP_TILE: Final = 32
_MAX_STAGES: Final = 4
_MAX_REGISTERS: Final = 255
_GROUP_BYTES: Final = 16 * 1024
"""Bytes that the operands of one group should not exceed by much: several groups must be on their way per
multiprocessor.
"""
_THREADS: Final = (128, 96, 64, 32)
"""Threads of a block."""
_MAX_THREADS_PER_SM: Final = 2048
_MAX_BLOCKS_PER_SM: Final = 32
_RESERVED_SHARED: Final = 1024
"""Shared memory that the system keeps of every block (CUDA C++ programming guide, compute capability 8.0)."""
_ELEMENTS: Final = ((4, 2), (9, 3), (16, 2), (30, 5), (512, 8))
"""(elements of a result at most, elements of it in one thread's registers): what was fastest on an H200."""
_WORDS: Final = 16
"""4-byte words of a larger result in one thread's registers, or as many as 8 elements have."""
_OTHER_REGISTERS_TENSOR: Final = 112
RUN: Final = 8
"""Steps of k that a thread sums up one after another (cuda/small/product.cuh)."""
_OTHER_REGISTERS: Final = 48
"""Addresses, counters and one step's copies, beside a tile and its fragments."""


@dataclass(frozen=True)
class SmallTile:
    """A concrete launch shape: each thread computes `thread_m` x `thread_n` elements of one product at a time.

    A block of `threads` computes `group` products in `rounds` turns, with `stages` groups in shared memory.
    `min_blocks` blocks share a multiprocessor. With `tensor` the tile is a warp's, on TF32 tensor cores.
    """

    thread_m: int
    thread_n: int
    threads: int
    group: int
    rounds: int
    stages: int
    min_blocks: int
    tensor: bool = False

    def threads_each(self, m: int, n: int) -> int:
        """Threads of one m x n product."""
        return -(-m // self.thread_m) * -(-n // self.thread_n) * (WARP if self.tensor else 1)

    def registers(self, k: int, step: int, itemsize: int) -> int:
        """Estimated 32-bit registers of one thread, with `step` steps of k at a time and accumulators of `itemsize`."""
        if self.tensor:  # a lane's results, its fragments of A in two parts, those of B
            return min(_MAX_REGISTERS, self.thread_m * self.thread_n // 16 + self.thread_m + _OTHER_REGISTERS_TENSOR)
        words = itemsize // 4
        sums = (2 if k > RUN else 1) * self.thread_m * self.thread_n  # of all of k, and of a run
        return min(255, (sums + step * (self.thread_m + self.thread_n)) * words + _OTHER_REGISTERS)


@lru_cache(maxsize=1024)
def choose_tile(
    config: GemmConfig | SmallTile | None,
    sizes: tuple[int, int, int],
    accumulate: int,
    layouts: tuple[OperandLayout, ...],
    staged_each: int,
    spec: DeviceSpec,
    tensor: bool,
) -> SmallTile:
    """The tile for products of `sizes` in accumulators of `accumulate` bytes; `staged_each` bytes a staged result."""
    reason = "no tile fits"
    step = 2 if any(layout.along_k for layout in layouts) else 1
    for tile in _candidates(config, sizes, accumulate, layouts, staged_each, spec, step, tensor):
        broken = _broken_limit(tile, sizes, accumulate, layouts, staged_each, spec, step, tensor)
        if broken is None:
            return tile
        reason = broken if reason == "no tile fits" else reason
    raise ConfigInfeasible(reason)


def _candidates(
    config: GemmConfig | SmallTile | None,
    sizes: tuple[int, int, int],
    accumulate: int,
    layouts: tuple[OperandLayout, ...],
    staged_each: int,
    spec: DeviceSpec,
    step: int,
    tensor: bool,
) -> Iterator[SmallTile]:
    """Tiles that honour `config`, the most promising first."""
    if isinstance(config, SmallTile):
        yield config
        return
    m, n, k = sizes
    config = config or GemmConfig()
    config.only("small", _FIELDS)
    warps = config.warp_m is not None or config.warp_n is not None
    threads = config.thread_m is not None or config.thread_n is not None
    if warps and threads:
        raise ConfigInfeasible("warp_m: a tile is a warp's or a thread's, not both")
    use_tensor = warps or (tensor and not threads)
    if use_tensor:
        tiles = warp_tiles(m, n, config.warp_m, config.warp_n)
    elif threads:
        tiles = [
            (min(row, m), min(column, n))
            for row in ([config.thread_m] if config.thread_m else [4, 2, 1])
            for column in ([config.thread_n] if config.thread_n else [4, 2, 1])
        ]
    else:
        tiles = thread_tiles(m, n, k, accumulate)
    each = sum(0 if layout.broadcast else layout.bytes(1) for layout in layouts)
    for rows, columns in tiles:
        threads_each = SmallTile(rows, columns, 0, 1, 1, 1, 1, use_tensor).threads_each(m, n)
        shapes = [(threads_each, 1)] if use_tensor else group_shapes(threads_each, each, spec.warp_size)
        for block, group in shapes:
            for stages in [config.stages] if config.stages else [2, 1]:
                tile = SmallTile(rows, columns, block, group, 1, stages, 1, use_tensor)
                shared = 33 * (stages * each + staged_each) * group // 32
                blocks = blocks_per_sm(shared, block, tile.registers(k, step, accumulate), spec)
                if blocks >= 2 or stages == (config.stages or 1):
                    yield replace(tile, min_blocks=max(1, blocks))


def _broken_limit(
    tile: SmallTile,
    sizes: tuple[int, int, int],
    accumulate: int,
    layouts: tuple[OperandLayout, ...],
    staged_each: int,
    spec: DeviceSpec,
    step: int,
    tensor: bool,
) -> str | None:
    """One line that names the first limit this tile breaks on `spec`, or None."""
    m, n, k = sizes
    if tensor and not tile.tensor:
        return "thread_m: tiles of a thread are for plain arithmetic"
    if tile.tensor and not tensor:
        return "warp_m: TF32 tensor cores multiply complex64 with compute 3xtf32, on CUDA devices from sm_80 on"
    if tile.tensor and (tile.thread_m % 16 or tile.thread_n % 8):
        return f"warp_m: a warp's tile is a multiple of 16 x 8, not {tile.thread_m} x {tile.thread_n}"
    most_rows, axis = (_MAX_WARP_TILE, "warp") if tile.tensor else (_MAX_THREAD_TILE, "thread")
    for name, value, most in (
        (f"{axis}_m", tile.thread_m, most_rows),
        (f"{axis}_n", tile.thread_n, most_rows),
        ("stages", tile.stages, _MAX_STAGES),
    ):
        if not 1 <= value <= most:
            return f"{name}: the small kernel takes 1 to {most}, not {value}"
    needed = tile.threads_each(m, n) * (tile.group // max(1, tile.rounds))
    if tile.group % tile.rounds or needed > tile.threads:
        return (
            f"threads: {tile.group} products in {tile.rounds} rounds need {needed} a block, the tile has {tile.threads}"
        )
    used = tile.registers(k, step, accumulate)
    if used >= _MAX_REGISTERS or used * tile.threads > spec.registers_per_sm:
        return f"registers: the tile needs about {used} a thread, the limit is {_MAX_REGISTERS}"
    shared = shared_bytes(tile, layouts[0], layouts[1], staged_each) * 5 // 4
    if shared > spec.shared_per_block:
        return f"shared memory: the tile needs about {shared} bytes a block, {spec.name} has {spec.shared_per_block}"
    return None


def thread_tiles(m: int, n: int, k: int, itemsize: int) -> list[tuple[int, int]]:
    """Register tiles for an m x n x k product in accumulators of `itemsize`, the most promising first.

    The tile grows with the product, so that a product keeps a few to a few dozen threads; of tiles near that size the
    one of the least arithmetic (rows past the edge count) and fewest reads of shared memory comes first.
    """
    words = itemsize // 4
    wanted = next((tile for limit, tile in _ELEMENTS if m * n <= limit), max(8, _WORDS // words))
    if wanted * words < _ELEMENTS[0][1] * 2:
        wanted *= 2

    def cost(tile: tuple[int, int]) -> tuple[float, int]:
        rows, columns = tile
        threads = -(-m // rows) * -(-n // columns)
        work = threads * rows * columns * k * words
        reads = threads * (rows + columns) * k * words
        # Neighbouring threads then store neighbouring 16 bytes: whole lines of memory at once.
        best = n * itemsize % VECTOR_BYTES or columns * itemsize == max(VECTOR_BYTES, 2 * itemsize * (words > 2))
        busy = max((even(block // threads) * threads / block for block in _THREADS if block >= threads), default=1.0)
        return (work + 0.5 * reads + 32 * threads) * (1 if best else 2) / busy, abs(rows - columns)

    sides = range(1, 9)
    tiles = [
        (rows, columns)
        for rows, columns in itertools.product(sides, sides)
        if rows <= m and columns <= n and rows * columns <= 1.25 * wanted
    ]
    return sorted(tiles, key=cost)


def warp_tiles(m: int, n: int, warp_m: int | None, warp_n: int | None) -> list[tuple[int, int]]:
    """Tiles of a warp on tensor cores for an m x n product, the most promising first.

    Rows and columns past the edge count; so does that every warp splits its own operands.
    """

    def cost(tile: tuple[int, int]) -> float:
        rows, columns = tile
        return -(-m // rows) * -(-n // columns) * rows * columns * (1 + 8 / rows + 8 / columns)

    rows, columns = ([warp_m] if warp_m else [32, 16]), ([warp_n] if warp_n else [32, 24, 16, 8])
    return sorted(itertools.product(rows, columns), key=cost)


def group_shapes(threads_each: int, bytes_each: int, warp: int) -> Iterator[tuple[int, int]]:
    """(threads, group) of a block, the most promising first: few idle threads, then many, groups of reasonable size."""
    if threads_each > _THREADS[0]:
        yield -(-threads_each // warp) * warp, 1
        return

    def shape(threads: int) -> tuple[int, int]:
        return threads, even(threads // threads_each)

    shapes = [shape(threads) for threads in _THREADS if threads % warp == 0 and threads >= threads_each]
    yield from sorted(
        shapes,
        key=lambda found: (
            found[1] > 1 and found[1] * bytes_each > _GROUP_BYTES,
            -(8 * found[1] * threads_each // found[0]),
            -found[0],
        ),
    )


def even(count: int) -> int:
    """`count` rounded down to a multiple of a power of two not much smaller, so that groups end with vectors."""
    unit = 8 if count >= 16 else 4 if count >= 8 else 2 if count >= 4 else 1
    return count // unit * unit


def blocks_per_sm(shared: int, threads: int, registers: int, spec: DeviceSpec) -> int:
    """Blocks that fit one multiprocessor; 0 where not even one does."""
    if shared > spec.shared_per_block:
        return 0
    return min(
        _MAX_BLOCKS_PER_SM,
        _MAX_THREADS_PER_SM // threads,
        spec.shared_per_sm // (shared + (_RESERVED_SHARED if spec.kind == "cuda" else 0)),
        spec.registers_per_sm // (threads * registers),
    )
