"""Tiles of the Hopper tensor-core kernel: what it can run, and which tile suits which problem. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.common.runs import is_cut, is_medium, is_small
from gemmserve_kernels.algorithms.common.splits import PITCH, is_wide
from gemmserve_kernels.algorithms.wgmma.tile import ALIGNMENT, MAX_STAGES, STATIC_SHARED, WgmmaTile
from gemmserve_kernels.device.tensor_map import MAX_STRIDE
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.algorithms.wgmma.tile import Arithmetic
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem

_FIELDS: Final = ("block_m", "block_n", "block_k", "stages", "cluster", "raster", "split_k", "promote")
_MAX_SPLIT: Final = 4
"""Blocks of a cluster that splits k: larger ones leave too many multiprocessors without work."""


@dataclass(frozen=True)
class _Candidate:
    """A tile that may be chosen, and its rate on a full device relative to the first of its scheme."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    cluster: int
    promote: int
    rate: float

    def tile(self, scheme: Arithmetic, is_complex: bool) -> WgmmaTile:
        return WgmmaTile(
            scheme,
            is_complex,
            self.block_m,
            self.block_n,
            self.block_k,
            self.stages,
            self.cluster,
            promote=self.promote,
            raster=max(1, 16 // self.cluster),
        )


_PRODUCTS: Final = {
    ("3xfp16", True): 12,
    ("3xfp16-3m", True): 9,
    ("1xfp16", True): 4,
    ("3xfp16", False): 3,
    ("1xfp16", False): 1,
    ("fp16", False): 1,
    ("3xbf16", True): 12,
    ("3xbf16", False): 3,
    ("6xbf16", True): 24,
    ("6xbf16", False): 6,
    ("9xbf16", True): 36,
    ("9xbf16", False): 9,
}
"""Real float16 or bfloat16 products in one product of the data."""
_RATE: Final = 2048 * 0.8
"""Fused multiply-adds of float16 in one cycle of a multiprocessor (Hopper tuning guide), and what is reached of it."""
_UNIT_CYCLES: Final = 1500
_EXCHANGE_CYCLES: Final = 500
_EXCHANGE_BYTES: Final = 16
_COMBINE_CYCLES: Final = 4500
_COMBINE_BYTES: Final = 2000
"""Beginning and end of a tile; meeting in a cluster, and bytes a cycle read of another block's memory; another
kernel, and bytes a cycle of the workspace. Fitted to the same measurements."""
_RESIDENT: Final = {1: 1.0, 2: 1.0, 4: 0.9}
"""Share of the multiprocessors that clusters of a size can fill: they do not cross the borders of a GPC."""

_WIDE: Final = ("6xbf16", "9xbf16")

_CANDIDATES: Final[dict[tuple[Arithmetic, bool], tuple[_Candidate, ...]]] = {
    ("3xfp16", True): (
        _Candidate(128, 128, 32, 3, 1, 32, 1.0),
        _Candidate(128, 64, 32, 4, 1, 32, 0.95),
        _Candidate(64, 64, 32, 7, 1, 32, 0.76),
        _Candidate(128, 128, 64, 7, 1, 64, 1.0),
        _Candidate(128, 64, 64, 2, 1, 64, 0.96),
        _Candidate(64, 64, 64, 3, 1, 64, 0.78),
    ),
    ("3xfp16-3m", True): (
        _Candidate(128, 128, 64, 3, 1, 64, 1.0),
        _Candidate(128, 64, 64, 4, 1, 64, 0.85),
        _Candidate(64, 64, 64, 7, 1, 64, 0.65),
    ),
    ("1xfp16", True): (
        _Candidate(128, 128, 64, 3, 1, 0, 1.0),
        _Candidate(128, 64, 64, 4, 1, 0, 0.93),
        _Candidate(64, 64, 64, 7, 1, 0, 0.77),
    ),
    ("3xfp16", False): (
        _Candidate(128, 256, 64, 2, 1, 64, 1.0),
        _Candidate(128, 128, 64, 3, 1, 64, 0.97),
        _Candidate(128, 64, 64, 4, 1, 64, 0.85),
        _Candidate(64, 64, 64, 7, 1, 64, 0.65),
    ),
    ("1xfp16", False): (
        _Candidate(128, 256, 64, 4, 2, 0, 1.0),
        _Candidate(128, 128, 64, 7, 1, 0, 0.92),
        _Candidate(128, 64, 64, 9, 1, 0, 0.75),
        _Candidate(64, 64, 64, 12, 1, 0, 0.6),
    ),
    ("fp16", False): (
        _Candidate(128, 256, 64, 4, 2, 0, 1.0),
        _Candidate(128, 256, 64, 4, 1, 0, 0.95),
        _Candidate(128, 128, 64, 7, 1, 0, 0.92),
        _Candidate(128, 64, 64, 9, 1, 0, 0.75),
        _Candidate(64, 64, 64, 12, 1, 0, 0.6),
        _Candidate(128, 256, 64, 4, 2, 64, 0.85),
        _Candidate(128, 128, 64, 7, 1, 64, 0.8),
        _Candidate(128, 64, 64, 9, 1, 64, 0.65),
        _Candidate(64, 64, 64, 12, 1, 64, 0.5),
    ),
    **{
        (scheme, True): (
            _Candidate(128, 128, 32, 9, 1, 32, 1.0),
            _Candidate(128, 64, 32, 3, 1, 32, 0.95),
            _Candidate(64, 64, 32, 4, 1, 32, 0.78),
        )
        for scheme in _WIDE
    },
    **{
        (scheme, False): (
            _Candidate(128, 256, 32, 3, 1, 32, 1.0),
            _Candidate(128, 128, 32, 4, 1, 32, 0.97),
            _Candidate(128, 64, 32, 6, 1, 32, 0.85),
            _Candidate(64, 64, 32, 9, 1, 32, 0.65),
        )
        for scheme in _WIDE
    },
    ("3xbf16", True): (
        _Candidate(128, 128, 32, 3, 1, 32, 1.0),
        _Candidate(128, 64, 32, 4, 1, 32, 0.95),
        _Candidate(64, 64, 32, 7, 1, 32, 0.76),
    ),
    ("3xbf16", False): (
        _Candidate(128, 256, 32, 4, 1, 32, 1.0),
        _Candidate(128, 128, 32, 6, 1, 32, 0.97),
        _Candidate(128, 64, 32, 8, 1, 32, 0.85),
        _Candidate(64, 64, 32, 12, 1, 32, 0.65),
    ),
}
"""Measured on one H200 (benchmarks/kernels/tune_wgmma.py); of float16 operands as they are, and of bfloat16
planes, estimated from 1xfp16 and 3xfp16."""

_LONG: Final = 6144
"""From this k on, fewer promotions round less than what truncation takes in the longer sums between them (H200: 2.5e-7
either way at k = 4096, 3.2e-7 against 2.9e-7 at 8192)."""
_SHORT: Final = {True: 512, False: 1024}
"""Up to this k, of complex and of real data, few roundings meet few: what truncation takes from sums of one sign would
exceed the rounding of a BLAS that splits k (model: 1.0e-7 against 1.4e-7 at k = 512; cuBLAS 1.0e-7 on an H200)."""


_SMALL_LONG: Final = 4096
"""The same of complex data where a BLAS cuts a short k, too. In longer sums that one term dominates every promotion
rounds it (H200, exp(6 N(0, 1)), 192 x 974 x 15541, every 16 steps: 36 u, cuBLAS 12)."""

_CUT_TILES: Final = 4
"""Multiprocessors for each 128 x 128 tile of a product from which on a BLAS cuts k into many parts, and has few
roundings one after another: then every promotion counts, and so does every cut of k. H200, float32, 512 x 512 of one
sign, k = 4096 and 8192: promoted every 64 steps 1.5e-7 and 1.6e-7, every 32 1.0e-7 and 1.3e-7; cuBLAS 0.9e-7, 1.1e-7.
"""
_CUT_STEPS: Final = 1024
"""Steps of k of one part at most there, if there are multiprocessors for as many parts."""

_FLOAT16_LONG: Final = 4096
"""Up to this k truncation takes less than 2^-15 of a sum of one sign (model: 2.6e-5; 4e-6 of both signs), which adds
less than a hundredth to the error of rounding to float16, 2.1e-4."""


def promotion(
    scheme: Arithmetic,
    is_complex: bool,
    k: int,
    *,
    wide: bool = False,
    few: bool = False,
    small: bool = False,
    cut: bool = False,
) -> int:
    """Steps of k between promotions. Every tile has the same: only the split of k shows in the result's bits.

    `wide`: results of float16 operands that keep more than float16 does. `few`, `small`, `cut`: a BLAS would
    cut k (`has_few_tiles`, `is_small`, `is_cut`).
    """
    if scheme == "fp16":
        return 64 if wide or k > _FLOAT16_LONG else 0
    if scheme == "1xfp16":
        return 0
    if scheme == "3xfp16-3m":
        return 64
    if is_wide(scheme):
        return 32
    if k <= _SHORT[is_complex] or (is_complex and small and k <= _SMALL_LONG):
        return 16 if is_complex else 32
    return 32 if few or cut or (is_complex and k < _LONG) else 64


def has_few_tiles(problem: GemmProblem, spec: DeviceSpec) -> bool:
    """Whether a BLAS would cut k of the product into many parts."""
    tiles = -(-problem.m // 128) * -(-problem.n // 128) * problem.batch
    return tiles * _CUT_TILES <= spec.sm_count


def supports(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """None where the kernel can run `problem` on `spec`, else one line that says why not."""
    if not spec.has_wgmma:
        return f"wgmma: needs a Hopper GPU (sm_90a), and {spec.name} is none"
    if problem.dtype.name not in {"complex64", "float32"}:
        return f"wgmma: multiplies complex64 and float32, not {problem.dtype.name}"
    stored = real_dtype(problem.dtype) if problem.planar else problem.dtype
    if problem.a.dtype != stored or problem.b.dtype != stored:
        return f"wgmma: multiplies operands of one dtype, not {problem.a.dtype.name} and {problem.b.dtype.name}"
    if problem.c is not None and problem.beta != 0 and problem.c.dtype.name not in {"complex64", "float32", "float16"}:
        return f"wgmma: adds a c of complex64, float32 or float16, not {problem.c.dtype.name}"
    if 0 in {problem.m, problem.n, problem.k, problem.batch}:
        return "wgmma: an extent is 0"
    if max(problem.m, problem.n, problem.k, problem.batch) >= 1 << 30:
        return "wgmma: an extent is 2^30 or more"
    if 12 * max(problem.m, problem.n) * (problem.k + PITCH) >= MAX_STRIDE:
        return "wgmma: an operand's planes are too large for a tensor map"
    tiles = -(-problem.m // 64) * -(-problem.n // 64) * problem.batch
    return "wgmma: more than 2^27 tiles" if tiles >= 1 << 27 else None


@lru_cache(maxsize=1024)
def resolve(
    config: GemmConfig | WgmmaTile | None,
    problem: GemmProblem,
    spec: DeviceSpec,
    scheme: Arithmetic = "3xfp16",
    *,
    wide: bool = False,
) -> WgmmaTile:
    """The tile that runs: the overrides of `config`, the rest chosen for `problem` on `spec`. `wide` as in `promotion`.

    Raises ConfigInfeasible where the overrides leave nothing that can run.
    """
    if isinstance(config, WgmmaTile):
        if broken := config.broken_limit(spec):
            raise ConfigInfeasible(broken)
        return config
    config = config or GemmConfig()
    config.only("wgmma", _FIELDS)
    is_complex = problem.dtype.kind == "c"
    cut = scheme == "3xfp16" and (has_few_tiles(problem, spec) or is_medium(problem))
    most = _CUT_STEPS if cut else problem.k
    best = min(
        _completions(config, scheme, is_complex, problem, spec, wide=wide),
        key=lambda tile: (max(most, -(-problem.k // (tile.split * tile.parts))), _cycles(tile, problem, spec)),
        default=None,
    )
    if best is None:
        raise ConfigInfeasible(_first_reason(config, scheme, is_complex, problem, spec))
    return best


def _completions(
    config: GemmConfig, scheme: Arithmetic, is_complex: bool, problem: GemmProblem, spec: DeviceSpec, *, wide: bool
) -> Iterator[WgmmaTile]:
    """Every candidate with the overrides of `config` in place, and every way to split k, that `spec` can run."""
    few = has_few_tiles(problem, spec)
    promote = config.promote or promotion(
        scheme, is_complex, problem.k, wide=wide, few=few, small=is_small(problem), cut=is_cut(problem)
    )
    for candidate in _fitting(_CANDIDATES[scheme, is_complex], promote):
        base = _overridden(candidate.tile(scheme, is_complex), config, spec)
        for tile in _splits(base, config.split_k, problem, spec):
            if tile.broken_limit(spec) is None:
                yield tile


def _fitting(candidates: tuple[_Candidate, ...], promote: int) -> list[_Candidate]:
    """Return those that are as good with sums of `promote` steps, which must divide a stage; all where none are."""
    longer = [candidate.promote for candidate in candidates if candidate.promote >= promote]
    least = min(longer, default=0)
    fitting = [replace(candidate, promote=promote) for candidate in candidates if candidate.promote == least]
    return fitting or list(candidates)


def _overridden(tile: WgmmaTile, config: GemmConfig, spec: DeviceSpec) -> WgmmaTile:
    """`tile` with what `config` requests; stages as fit where it has none."""
    names = ("block_m", "block_n", "block_k", "stages", "cluster", "raster", "promote")
    requested = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if tile.promote and "block_k" in requested and "promote" not in requested:
        requested["promote"] = min(tile.promote, requested["block_k"])
    if tile.promote and "promote" in requested and "block_k" not in requested:
        requested["block_k"] = max(tile.block_k, requested["promote"])
    if not requested:
        return tile
    changed = replace(tile, **requested)
    if config.stages is None:
        room = spec.shared_per_block - ALIGNMENT - STATIC_SHARED
        changed = replace(changed, stages=min(MAX_STAGES, room // changed.stage_bytes))
    return changed


def _splits(tile: WgmmaTile, wanted: int | None, problem: GemmProblem, spec: DeviceSpec) -> Iterator[WgmmaTile]:
    """A cluster splits k into 2 or 4; grids split it further."""
    blocks = -(-problem.k // tile.block_k)
    idle = spec.sm_count // max(1, _tiles(tile, problem))
    counts = [wanted] if wanted else [1, 2, 4, 8, 16, 32, 64, 128]
    for count in counts:
        if not wanted and count > 1 and (tile.cluster > 1 or count > idle or blocks < count):
            continue
        split = math.gcd(count, _MAX_SPLIT) if tile.cluster == 1 else 1
        yield replace(tile, split=split, parts=count // split)


def _tiles(tile: WgmmaTile, problem: GemmProblem) -> int:
    """Blocks of the product, in whole clusters."""
    rows = -(-problem.m // (tile.block_m * tile.cluster)) * tile.cluster
    return rows * -(-problem.n // tile.block_n) * problem.batch


def _cycles(tile: WgmmaTile, problem: GemmProblem, spec: DeviceSpec) -> float:
    """Estimated time in cycles of a multiprocessor."""
    rates = {
        (candidate.block_m, candidate.block_n, bool(candidate.promote)): candidate.rate
        for candidate in sorted(_CANDIDATES[tile.scheme, tile.complex], key=lambda each: each.cluster == tile.cluster)
    }
    tiles = _tiles(tile, problem)
    split = tile.split * tile.parts
    resident = int(spec.sm_count * _RESIDENT[max(tile.cluster, tile.split)])
    waves = math.ceil(tiles * split / resident)
    blocks = math.ceil(math.ceil(problem.k / tile.block_k) / split)
    products = _PRODUCTS[tile.scheme, tile.complex]
    rate = rates.get((tile.block_m, tile.block_n, bool(tile.promote)), 0.5)
    total = blocks * tile.block_k * products * tile.block_m * tile.block_n / _RATE / rate + _UNIT_CYCLES
    if tile.split > 1:
        total += _EXCHANGE_CYCLES + tile.exchange_bytes * (tile.split - 1) / tile.split / _EXCHANGE_BYTES
    total *= waves
    if tile.parts > 1:
        bytes_moved = 8 * tile.components * tile.parts * problem.m * problem.n * problem.batch
        total += _COMBINE_CYCLES + bytes_moved / _COMBINE_BYTES
    return total


def _first_reason(
    config: GemmConfig, scheme: Arithmetic, is_complex: bool, problem: GemmProblem, spec: DeviceSpec
) -> str:
    for candidate in _CANDIDATES[scheme, is_complex]:
        for tile in _splits(
            _overridden(candidate.tile(scheme, is_complex), config, spec), config.split_k, problem, spec
        ):
            if broken := tile.broken_limit(spec):
                return broken
    return "no tile fits"
