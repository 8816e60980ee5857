"""Tiles of the fused kernel, and how k is cut among blocks. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.common.time_model import is_skinny, skinny_parts
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig

CHUNK: Final = 64
"""Steps of k at most that are scaled, split and judged at once: Config::CHUNK in cuda/fused/config.cuh."""
BLOCK: Final = 64
"""Columns of a tile, and its rows unless it is tall."""
TALL: Final = 128
"""Rows of a tile of cuda/fused/fused_tall.cu."""
COLUMN_THREADS: Final = 128
"""Threads of a block that makes planes of a tall tile's columns."""
CLUSTER: Final = 2
"""Blocks of a cluster of cuda/fused/fused_cluster.cu. Alone they took an H200 a sixth longer, four together nearly
twice as long."""
_CLUSTER_STAGES: Final = (2, 3)
"""Stages of a cluster's block, of half a chunk each."""
_PAIR_ROUND: Final = 1.56
"""Time of a 128 x 128 tile of a cluster of two over that of a 64 x 64 tile of one block: 1.54 to 1.56 with batches of
128 to 512 on an H200."""
_PAIR_LEAST: Final = 128
"""Extents from which on clusters were measured."""
_CONSUMERS: Final = 256
"""Threads that multiply: complex numbers, of real ones half as many."""
_SLOT_BYTES: Final = _CONSUMERS // 32 * 16 * (CHUNK * 8 + 32)
_FEW_BYTES: Final = _CONSUMERS // 32 * 4 * BLOCK * 8
_TASK: Final = 8
"""Vectors that a warp of a cluster's producers splits at once."""
_RECORD_BYTES: Final = 64
_FEW_STEPS: Final = 8
_ALIGNMENT: Final = 1024
_STATIC: Final = 256
"""Bytes of shared memory for barriers, at most."""
_RESERVED: Final = 1024
"""Bytes of shared memory that the system keeps of each block (CUDA C++ programming guide)."""
_FIELDS: Final = ("block_m", "split_k", "raster", "promote", "stages", "cluster")
_MOST_SPLITS: Final = 132
_FEW: Final = 4
"""Splits that one block adds up without another step between."""
_SHORT: Final = 512
"""Up to this k sums leave the tensor core every 16 steps where a BLAS may cut k, else every 32: see
wgmma.candidates.promotion."""
_SHORT_REAL: Final = 1024
"""The same of real numbers."""
_CUT_TILES: Final = 4
"""Multiprocessors for each 128 x 128 tile of a batch from which on a BLAS may cut k: see
wgmma.candidates.has_few_tiles. Where it does not, it rounds so often, one term after the other, that what truncation
takes from 32 steps is less of data of one sign: the worst elements of 128 x 128 x 128, of positive data, are off by
7.0 u with 32 steps, by 4.8 u with 16, by 18.4 u in cuBLAS (an H100)."""


@dataclass(frozen=True)
class FusedTile:
    """The part of a product that one block computes: 64 x 64 or 128 x 64 elements over some chunks of k.

    `cluster`: blocks that share rows of tiles of 128 x 64 (cuda/fused/fused_cluster.cu); 0: none do, and other kernels
    compute it.

    `block_m`: its rows. `split_k`: parts of k, each a number of whole chunks; `together`: those whose sums one block
    adds up, before one adds up theirs. `raster`: rows of tiles walked together. `promote`: steps of k between
    promotions, of tall tiles and of real numbers up to all of a chunk. `stages`: chunks in shared memory, halves of
    chunks in clusters. `parts`: 2 of complex numbers; 1 of real ones, whose tiles are 64 x 64 alone.
    """

    block_m: int = BLOCK
    split_k: int = 1
    together: int = 1
    raster: int = 8
    promote: int = 16
    stages: int = 2
    cluster: int = 0
    parts: int = 2

    @property
    def tall(self) -> bool:
        """Whether rows of op(A) go through registers."""
        return self.block_m == TALL and not self.cluster

    @property
    def kernel(self) -> str:
        """The kernel that computes it."""
        return "fused_cluster" if self.cluster else "fused_tall" if self.tall else "fused_gemm"

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, and those that bring what they multiply."""
        if self.parts == 1:
            return (_CONSUMERS + 512) // self.blocks + 128
        return _CONSUMERS + (256 if self.cluster else 128 if self.tall else 512 + 128)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: Config::SHARED_BYTES in cuda/fused/config.cuh, or cluster/config.cuh."""
        if self.cluster:
            stage = (2 * TALL + 3 * BLOCK) * CHUNK * 2
            known, few = 2 * (TALL + BLOCK) // _TASK * _RECORD_BYTES, 2 * 2 * _FEW_STEPS * BLOCK * 8
            slots = 8 * _TASK * CHUNK * 8
            return self.stages * stage + known + slots + few + _ALIGNMENT - 16
        numbers = 2 * BLOCK * CHUNK * 4 * self.parts  # a chunk of both operands as they are
        rest = self.stages * _SLOT_BYTES + _FEW_BYTES if self.tall else numbers
        return self.stages * self.stage_bytes + rest + _ALIGNMENT - 16

    @property
    def stage_bytes(self) -> int:
        """Planes of a chunk and what is known of its vectors; of tall tiles one image: Config::STAGE_BYTES."""
        sides, planes = (1, 4) if self.tall else (2, 4 + 6 if self.parts == 2 else 2 + 2)
        found = BLOCK * (planes * CHUNK * 2 + sides * (4 + 2)) + 16
        return -(-found // _ALIGNMENT) * _ALIGNMENT if self.tall else found

    @property
    def tile_bytes(self) -> int:
        """Sums of a block that are added up with those of others."""
        return self.block_m * BLOCK * 4 * self.parts

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor at a time: Config::BLOCKS in cuda/fused/config.cuh."""
        return 1 if self.parts == 2 else 2

    @property
    def piece(self) -> int:
        """Steps of k that chunks have a number of, so that 16 bytes are copied at once: Steps::PIECE."""
        return 2 if self.parts == 2 else 4

    def broken_limit(self, spec: DeviceSpec) -> bool:
        """Return whether a multiprocessor of `spec` lacks the shared memory of its blocks."""
        return self.blocks * (self.shared_bytes + _STATIC + _RESERVED) > spec.shared_per_sm

    @property
    def block_n(self) -> int:
        """Columns of what blocks take in turns: those of a cluster together."""
        return BLOCK * max(1, self.cluster)

    def resident(self, spec: DeviceSpec) -> int:
        """Return how many such are computed at a time at most, by a block or a cluster each."""
        return max(1, self.blocks * spec.sm_count // max(1, self.cluster))

    def tiles(self, m: int, n: int) -> int:
        """Tiles of a matrix of the product: a tall one lies along the longer side."""
        return -(-max(m, n) // self.block_m) * -(-min(m, n) // BLOCK)

    def chunks_part(self, k: int) -> int:
        """Chunks of one split."""
        return -(-chunks(k) // self.split_k)


def chunks(k: int) -> int:
    """Chunks that k is cut into, alike but for two steps, of real numbers four."""
    return -(-k // CHUNK)


def choose_tile(
    config: GemmConfig | None, shape: tuple[int, int, int, int], spec: DeviceSpec, *, parts: int = 2
) -> FusedTile:
    """The tile for `shape` = (batch, m, n, k): what `config` asks for, the rest chosen. Raises ConfigInfeasible.

    Skinny products have tall tiles, large batches clusters: those of complex numbers (`parts` 2; of real ones 1).
    """
    batch, m, n, k = shape
    tile = FusedTile(
        block_m=TALL if parts == 2 and is_skinny(m, n) else BLOCK, promote=_promotion(shape, spec, parts), parts=parts
    )
    asked = None
    if config is None or not config.tile_fields:
        pair = replace(tile, block_m=TALL, stages=_CLUSTER_STAGES[-1], cluster=CLUSTER)
        if parts == 2 and not tile.tall and _pays(pair, shape, spec):
            return pair
    if config is not None:
        config.only("fused", _FIELDS)
        if parts == 1 and config.cluster is not None:
            raise ConfigInfeasible(f"cluster: real numbers have none, not {config.cluster}")
        if config.cluster is not None:
            return _cluster_tile(config, tile, spec)
        asked = config.split_k
        found = {name: getattr(config, name) for name in ("block_m", "raster", "promote", "stages")}
        tile = replace(tile, **{name: value for name, value in found.items() if value is not None})
    if tile.block_m not in ({BLOCK, TALL} if parts == 2 else {BLOCK}):
        raise ConfigInfeasible(f"block_m: {BLOCK}, of complex numbers {TALL}, too, not {tile.block_m}")
    if tile.promote not in ({16, 32, CHUNK} if tile.tall or parts == 1 else {16, 32}):
        raise ConfigInfeasible(f"promote: 16 or 32, of tall tiles and of real numbers {CHUNK}, too, not {tile.promote}")
    if tile.broken_limit(spec):
        raise ConfigInfeasible(f"stages: {tile.stages} take {tile.shared_bytes} bytes, which {spec.name} lacks")
    tiles = tile.tiles(m, n) * batch
    most = chunks(k)
    if asked is not None and asked > min(most, _MOST_SPLITS):
        raise ConfigInfeasible(f"split_k: at most {min(most, _MOST_SPLITS)} for k = {k}, not {asked}")
    if asked is not None:
        splits = asked
    elif tile.tall:
        splits = skinny_parts(tiles, k, spec.sm_count, _MOST_SPLITS)
    else:
        splits = min(_MOST_SPLITS, most, max(1, tile.resident(spec) // tiles))
    splits = -(-most // -(-most // splits))  # as many as have chunks
    together = splits if splits <= _FEW else math.isqrt(splits - 1) + 1
    return replace(tile, split_k=splits, together=together)


def _pays(pair: FusedTile, shape: tuple[int, int, int, int], spec: DeviceSpec) -> bool:
    """Return whether clusters of two blocks take a product less time than tiles of their own: both keep the device busy
    for so many rounds, of which that of a cluster is the longer one.
    """
    batch, m, n, k = shape
    if min(m, n, k) < _PAIR_LEAST or pair.broken_limit(spec):
        return False
    pairs = batch * math.ceil(m / TALL) * math.ceil(n / pair.block_n)
    tiles = batch * math.ceil(m / BLOCK) * math.ceil(n / BLOCK)
    if tiles < spec.sm_count:
        return False
    rounds = math.ceil(tiles / spec.sm_count)
    return _PAIR_ROUND * math.ceil(pairs / pair.resident(spec)) < rounds


def _cluster_tile(config: GemmConfig, tile: FusedTile, spec: DeviceSpec) -> FusedTile:
    """Return the tile of a cluster's blocks, which never cut k. Raises ConfigInfeasible."""
    found = {name: getattr(config, name) for name in ("cluster", "raster", "promote", "stages")}
    found = {"stages": _CLUSTER_STAGES[-1], **{name: value for name, value in found.items() if value is not None}}
    tile = replace(tile, block_m=TALL, **found)
    for name, value, allowed in (
        ("cluster", tile.cluster, (CLUSTER,)),
        ("block_m", config.block_m, (None, TALL)),
        ("split_k", config.split_k, (None, 1)),
        ("promote", tile.promote, (16, 32)),
        ("stages", tile.stages, _CLUSTER_STAGES),
    ):
        if value not in allowed:
            some = " or ".join(str(each) for each in allowed if each is not None)
            raise ConfigInfeasible(f"{name}: {some} of clusters, not {value}")
    if tile.broken_limit(spec):
        raise ConfigInfeasible(f"cluster: its blocks take {tile.shared_bytes} bytes, which {spec.name} lacks")
    return tile


def _promotion(shape: tuple[int, int, int, int], spec: DeviceSpec, parts: int) -> int:
    """Steps of k between promotions: 32 where they are accurate enough, and none is multiplied in vain. Of real numbers
    twice as many: a sum of theirs has half of the products.
    """
    batch, m, n, k = shape
    cut = math.ceil(m / 128) * math.ceil(n / 128) * batch * _CUT_TILES <= spec.sm_count
    if parts == 1:
        return 32 if cut or (batch == 1 and k <= _SHORT_REAL) else CHUNK
    if k > _SHORT:
        return 32
    steps = 2 * -(-k // (2 * chunks(k)))
    return 16 if batch == 1 or cut or k < CHUNK or (steps - 1) % 32 < 16 else 32
