"""Tiles of the mma.sync kernel: what a caller may ask for, what a device can run, which one suits a product. Pure."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.common.verdict import GROUP
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.vocabulary import ROUNDINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.device.spec import DeviceSpec

_FIELDS: Final = (
    "block_m", "block_n", "block_k", "warp_m", "warp_n", "instruction_k", "stages", "split_k", "promote", "raster",
    "rounding_big", "rounding_small",
)  # fmt: skip
_MAX_THREADS: Final = 1024
_SPLIT_UNIT: Final = 64
"""Steps of k of a split are a multiple of this, whatever the tile: its bits depend on the product alone."""
_MIN_SPLIT: Final = 128
"""Steps of k below which a split costs more than it gains (measured on one H200)."""
_MAX_SPLITS: Final = 16


@dataclass(frozen=True)
class Arithmetic:
    """`parts` of a number, `products` of them; `planes`, or TF32; steps of k of an instruction, and of the smallest
    fragment.
    """

    parts: int
    products: int
    planes: bool
    instruction_k: tuple[int, ...]
    group_k: int


ARITHMETIC: Final = {
    "3xtf32": Arithmetic(2, 3, False, (8, 4), 8),
    "1xtf32": Arithmetic(1, 1, False, (8, 4), 8),
    "3xfp16": Arithmetic(2, 3, True, (16,), 32),
    "1xfp16": Arithmetic(1, 1, True, (16,), 32),
    "3xbf16": Arithmetic(2, 3, True, (16,), 32),
    "6xbf16": Arithmetic(3, 6, True, (16,), 32),
    "9xbf16": Arithmetic(3, 9, True, (16,), 32),
}


@dataclass(frozen=True)
class MmaTile:
    """A tile of the kernel with every choice made.

    `promote`: steps of k between promotions. `min_blocks`: the compiler's occupancy target.
    """

    block_m: int
    block_n: int
    block_k: int
    warp_m: int
    warp_n: int
    stages: int
    promote: int
    instruction_k: int = 8
    split_k: int = 1
    raster: int = 8
    min_blocks: int = 1
    rounding_big: str = "toward_zero"
    rounding_small: str = "half_ulp_truncate"

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n) * 32

    def shared_bytes(self, arithmetic: str, *, is_complex: bool) -> int:
        """Shared memory of one block: all stages."""
        shape = ARITHMETIC[arithmetic]
        element = (2 * shape.parts if shape.planes else 4) * (2 if is_complex else 1)
        return (self.block_m + self.block_n) * self.block_k * element * self.stages

    def k_part(self, k: int) -> int:
        """Steps of k of one split."""
        return math.ceil(math.ceil(k / self.split_k) / _SPLIT_UNIT) * _SPLIT_UNIT if self.split_k > 1 else max(1, k)

    def broken_limit(self, arithmetic: str, *, is_complex: bool, spec: DeviceSpec) -> str | None:
        """One line that names the first limit this tile breaks on `spec`, or None."""
        shape = ARITHMETIC[arithmetic]
        for axis in ("m", "n"):
            block, warp = getattr(self, f"block_{axis}"), getattr(self, f"warp_{axis}")
            if warp % 16 or block % warp:
                return (
                    f"divisibility: block_{axis}={block} must be a multiple of warp_{axis}={warp}, and that one of 16"
                )
            if block % 32:
                return f"divisibility: block_{axis}={block} must be a multiple of 32"
            if shape.planes and GROUP % block:
                return f"block_{axis}: with planes it divides {GROUP}, the extent of a tile that is judged; not {block}"
        if self.instruction_k not in shape.instruction_k:
            known = " or ".join(map(str, shape.instruction_k))
            return f"instruction_k: {arithmetic} has {known}, not {self.instruction_k}"
        if self.block_k % shape.group_k or (self.block_k & (self.block_k - 1)):
            return f"block_k: a power of two from {shape.group_k} on, not {self.block_k}"
        if self.promote < 1 or self.promote % shape.group_k or self.block_k % self.promote:
            return f"promote: a multiple of {shape.group_k} that divides block_k={self.block_k}, not {self.promote}"
        if self.stages < 2:
            return f"stages: at least 2, not {self.stages}"
        for name in ("rounding_big", "rounding_small"):
            if getattr(self, name) not in ROUNDINGS:
                return f"{name}: one of {', '.join(ROUNDINGS)}, not {getattr(self, name)!r}"
        if self.threads > _MAX_THREADS:
            return f"threads: the tile needs {self.threads} a block, the limit is {_MAX_THREADS}"
        shared = self.shared_bytes(arithmetic, is_complex=is_complex)
        if shared > spec.shared_per_block:
            return f"shared memory: the tile needs {shared} bytes a block, {spec.name} has {spec.shared_per_block}"
        registers = self.registers(arithmetic, is_complex=is_complex)
        if registers > 255:
            return f"registers: the tile needs about {registers} a thread, the limit is 255"
        if registers * self.threads > spec.registers_per_sm:
            return f"registers: about {registers} x {self.threads} threads, {spec.name} has {spec.registers_per_sm}"
        return None

    def registers(self, arithmetic: str, *, is_complex: bool) -> int:
        """Estimated registers of one thread: sums, partial sums, fragments of a step, addresses."""
        components = 2 if is_complex else 1
        width = self.promote // (8 if ARITHMETIC[arithmetic].planes else 4)
        sums = self.warp_m * self.warp_n // 32 * components
        partial = self.warp_n // 2 * components
        right = self.warp_n // 8 * width * ARITHMETIC[arithmetic].parts * components
        return sums + partial + right + _OTHER_REGISTERS


_OTHER_REGISTERS: Final = 40
"""Addresses, counters, one step's instructions: what ptxas needs beside the arrays, fitted to its reports."""


@dataclass(frozen=True)
class _Candidate:
    """A tile that may be chosen, and its rate on a full device relative to the best of its kind."""

    tile: MmaTile
    rate: float


_CANDIDATES: Final[dict[tuple[str, bool], tuple[_Candidate, ...]]] = {
    ("3xtf32", True): (
        _Candidate(MmaTile(64, 64, 32, 64, 16, 3, 32, min_blocks=2), 1.0),
        _Candidate(MmaTile(64, 32, 32, 32, 16, 2, 32, min_blocks=2), 0.9),
    ),
    ("3xtf32", False): (
        _Candidate(MmaTile(128, 128, 32, 64, 32, 2, 32), 1.0),
        _Candidate(MmaTile(64, 64, 32, 32, 32, 3, 32, min_blocks=2), 0.9),
    ),
    ("1xtf32", True): (
        _Candidate(MmaTile(64, 64, 32, 64, 16, 3, 16, min_blocks=2), 1.0),
        _Candidate(MmaTile(64, 32, 32, 32, 16, 2, 16, min_blocks=2), 0.8),
    ),
    ("1xtf32", False): (
        _Candidate(MmaTile(128, 128, 32, 64, 32, 2, 32), 1.0),
        _Candidate(MmaTile(64, 64, 32, 32, 32, 3, 32, min_blocks=2), 0.8),
    ),
    **dict.fromkeys(
        (("3xfp16", True), ("3xbf16", True)),
        (
            _Candidate(MmaTile(64, 64, 32, 64, 16, 3, 32, 16, min_blocks=2), 1.0),
            _Candidate(MmaTile(64, 32, 32, 32, 16, 3, 32, 16, min_blocks=2), 0.8),
        ),
    ),
    **dict.fromkeys(
        (("6xbf16", True), ("9xbf16", True)),
        (
            _Candidate(MmaTile(64, 64, 32, 64, 16, 2, 32, 16, min_blocks=2), 1.0),
            _Candidate(MmaTile(64, 32, 32, 32, 16, 2, 32, 16, min_blocks=2), 0.8),
        ),
    ),
    **dict.fromkeys(
        (("3xfp16", False), ("1xfp16", True), ("3xbf16", False), ("6xbf16", False), ("9xbf16", False)),
        (
            _Candidate(MmaTile(128, 128, 32, 64, 32, 3, 32, 16), 1.0),
            _Candidate(MmaTile(64, 64, 32, 32, 32, 3, 32, 16, min_blocks=2), 0.8),
        ),
    ),
    ("1xfp16", False): (
        _Candidate(MmaTile(128, 128, 64, 64, 32, 3, 64, 16), 1.0),
        _Candidate(MmaTile(64, 64, 64, 32, 32, 3, 64, 16, min_blocks=2), 0.8),
    ),
}
"""By arithmetic and whether the data are complex; rates measured on one H200, of bfloat16 those of float16."""


def check_device(spec: DeviceSpec) -> str | None:
    """Return why no kernel of mma.sync runs on `spec`, or None."""
    if spec.kind != "cuda":
        return f"mma needs an NVIDIA device, and {spec.name} is none"
    if not spec.has_mma:
        return f"mma needs compute capability 8.0, and {spec.name} is {spec.arch}"
    return None


@lru_cache(maxsize=1024)
def resolve_tile(
    config: GemmConfig | None, arithmetic: str, shape: tuple[int, int, int], spec: DeviceSpec, *, is_complex: bool
) -> MmaTile:
    """The tile for an m x n x k product: the overrides of `config`, the rest chosen for `spec`.

    k is split by m, n and k alone: a batch has the same bits as its products. Raises ConfigInfeasible naming the limit.
    """
    config = config or GemmConfig()
    config.only("mma", _FIELDS)
    requested = config.tile_fields
    candidates = sorted(
        _CANDIDATES[arithmetic, is_complex], key=lambda candidate: _seconds(candidate, shape, spec)
    )  # fmt: skip
    reason = None
    for candidate in candidates:
        for tile in _completions(candidate.tile, requested, ARITHMETIC[arithmetic].group_k):
            broken = tile.broken_limit(arithmetic, is_complex=is_complex, spec=spec)
            if broken is None:
                return tile if "split_k" in requested else replace(tile, split_k=_splits(tile, shape, spec))
            reason = reason or broken
    raise ConfigInfeasible(reason or "no tile fits")


def _completions(base: MmaTile, requested: dict[str, int | str], group_k: int) -> Iterator[MmaTile]:
    """`base` with the `requested` fields put in and, where they ask for it, the rest bent to fit; the nearest first."""
    changed = replace(base, **requested, min_blocks=1 if requested else base.min_blocks)  # type: ignore[arg-type]

    def options(name: str, *others: int) -> list[int]:
        return [getattr(changed, name)] if name in requested else [getattr(changed, name), *others]

    return (
        replace(
            changed, block_k=block_k, warp_m=warp_m, warp_n=warp_n, block_m=block_m, block_n=block_n, promote=promote,
            stages=stages,
        )
        for block_k, promote, block_m, block_n, warp_m, warp_n, stages in itertools.product(
            options("block_k", changed.block_k * 2, changed.block_k // 2),
            options("promote", 32, 16, group_k),
            options("block_m", changed.warp_m, 2 * changed.warp_m),
            options("block_n", changed.warp_n, 2 * changed.warp_n),
            options("warp_m", 32, 16),
            options("warp_n", 32, 16),
            options("stages", 2),
        )
    )  # fmt: skip


def _seconds(candidate: _Candidate, shape: tuple[int, int, int], spec: DeviceSpec) -> float:
    """Estimated time in arbitrary units: waves of blocks, each as long as its share of the arithmetic."""
    m, n, _ = shape
    tile = candidate.tile
    splits = _splits(tile, shape, spec)
    blocks = math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n) * splits
    busiest = math.ceil(blocks / spec.sm_count)
    alone = 0.6 + 0.4 * min(1.0, busiest / tile.min_blocks)
    return busiest * tile.block_m * tile.block_n / splits / (candidate.rate * alone)


def _splits(tile: MmaTile, shape: tuple[int, int, int], spec: DeviceSpec) -> int:
    """Parts of k that fill the device once, each of _MIN_SPLIT steps at least and none empty."""
    m, n, k = shape
    tiles = math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n)
    wanted = min(spec.sm_count * tile.min_blocks // max(1, tiles), k // _MIN_SPLIT, _MAX_SPLITS)
    if wanted < 2:
        return 1
    part = replace(tile, split_k=wanted).k_part(k)
    return math.ceil(k / part)
