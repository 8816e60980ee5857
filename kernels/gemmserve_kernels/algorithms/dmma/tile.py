"""Tiles of the kernels in double precision on tensor cores. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from gemmserve_kernels.algorithms.common.runs import is_cut, is_medium
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

Kind = Literal["float64", "complex128", "planar", "float32", "complex64", "planar float32"]
"""Elements of the operands; planar: complex numbers as two planes, of float64 if nothing else is said."""

_BYTES: Final[dict[Kind, int]] = {
    "float64": 8,
    "complex128": 16,
    "planar": 8,
    "float32": 4,
    "complex64": 8,
    "planar float32": 4,
}
"""Bytes of an element, in one plane."""

_SHORTEST_RUN: Final = 16
_SHORT_RUN: Final = 64
"""Runs of products whose k a BLAS cuts (`runs`), of a k up to twice their square: longer sums have longer runs."""
_RUN: Final = 256
_LONG_RUN: Final = 512
_LARGE: Final = 3072**2
"""Elements of a product from which on runs are longer. A BLAS cuts k where there are few tiles for a device or for its
last wave, too: for normal float64 data cuBLAS 13 on an H200 is off by 0.22 (root of the mean
square of |D - R| / (|A| |B|), in units of 2^-53) at 1536 x 1536 x 2048, where runs of 256 have 0.16, but by 0.51 at
4096^3, where they have 0.12, those of 512 0.17. There runs cost: those of 256 2 % of the rate of those of 1024,
those of 512 0.7 %. The first run is half as long as the others: what is dense in blocks of k has two of them."""

_SPAN: Final = 128
"""Bytes of shared memory that a row or column takes in one stage."""
_ALIGNMENT: Final = 1024
_BARRIERS: Final = 16
"""Bytes of a stage's barriers."""


@dataclass(frozen=True)
class DmmaTile:
    """`kept`: where the sums of runs that are over are kept; "nowhere": all of k is one run. `raster`: rows of tiles
    walked down together. `rate`: of a full device, where the first tile of its kind has 1.
    """

    kind: Kind
    block_m: int
    block_n: int
    warp_m: int
    warp_n: int
    stages: int
    kept: Literal["registers", "shared", "nowhere"] = "registers"
    min_blocks: int = 1
    raster: int = 8
    rate: float = 1.0

    @property
    def warps(self) -> int:
        """Warps of one block that multiply."""
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n)

    @property
    def block_k(self) -> int:
        """Steps of k of one stage."""
        return _SPAN // _BYTES[self.kind]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block."""
        stage = (self.block_m + self.block_n) * _SPAN * (2 if self.kind.startswith("planar") else 1)
        kept = self.block_m * self.block_n * (8 if self.kind == "float64" else 16) if self.kept == "shared" else 0
        return _ALIGNMENT + kept + self.stages * (stage + _BARRIERS)


TILES: Final[dict[Kind, tuple[DmmaTile, ...]]] = {
    "float64": (
        DmmaTile("float64", 128, 128, 64, 32, 3, "shared", raster=12),
        DmmaTile("float64", 128, 64, 32, 32, 4, rate=0.96),
        DmmaTile("float64", 64, 64, 32, 32, 4, min_blocks=2, rate=0.92),
    ),
    "complex128": (
        DmmaTile("complex128", 128, 64, 32, 32, 4, "shared"),
        DmmaTile("complex128", 64, 64, 32, 16, 5, rate=0.94),
        DmmaTile("complex128", 32, 64, 16, 32, 5, min_blocks=2, rate=0.92),
    ),
    "planar": (DmmaTile("planar", 64, 64, 32, 16, 4), DmmaTile("planar", 32, 64, 16, 16, 3, rate=0.8)),
}
"""Tiles of double precision, from the largest to the smallest. The last ones fit every device of compute capability
8.0 or more. Rates: an H200, 4096^3. Of 132 tiles that run together, twelve rows have eleven columns: worth 2 to 3 % at
8192^3."""

SINGLE_TILES: Final[dict[Kind, tuple[DmmaTile, ...]]] = {
    "float32": (
        DmmaTile("float32", 128, 64, 32, 32, 5, "nowhere"),
        DmmaTile("float32", 64, 64, 32, 32, 4, "nowhere", min_blocks=2, rate=0.9),
    ),
    "complex64": (
        DmmaTile("complex64", 128, 64, 32, 32, 4, "nowhere"),
        DmmaTile("complex64", 64, 64, 32, 16, 4, "nowhere", rate=0.94),
    ),
    "planar float32": (DmmaTile("planar float32", 128, 64, 32, 32, 3, "nowhere"),),
}
"""Tiles of single precision, on Hopper, for the copy engine. Sums in double need no runs: their roundings are none of a
float's. Warps of float32 are small because the loop that skips pieces takes registers, too; of planar operands, where
they cannot be, it is left out."""
COPIED_TILES: Final[dict[Kind, DmmaTile]] = {
    "float32": SINGLE_TILES["float32"][0],
    "complex64": SINGLE_TILES["complex64"][0],
}
"""The same where threads copy. Of planar operands they would take too many registers."""


def run_of(problem: GemmProblem | GemmReduceProblem) -> int:
    """Steps of k that are summed up one after another before ordinary units add up the sums."""
    if problem.k <= _SHORTEST_RUN**2 * 2 and is_medium(problem):
        return _SHORTEST_RUN
    if problem.k <= _SHORT_RUN**2 * 2 and is_cut(problem):
        return _SHORT_RUN
    return _LONG_RUN if problem.m * problem.n >= _LARGE else _RUN


def kind_of(problem: GemmProblem | GemmReduceProblem) -> Kind:
    """The kind of a problem's operands."""
    single = real_dtype(problem.dtype).itemsize == 4
    if problem.planar:
        return "planar float32" if single else "planar"
    if problem.dtype.kind == "c":
        return "complex64" if single else "complex128"
    return "float32" if single else "float64"


def choose(
    m: int, n: int, spec: DeviceSpec, kind: Kind, batch: int = 1, *, block: tuple[int | None, int | None] = (None, None)
) -> DmmaTile:
    """The tile that keeps the multiprocessors busy for the shortest time, of those that the device has the memory for
    and whose blocks are `block` rows and columns (None: any). Raises ConfigInfeasible where there is none.

    It shows in no bit of a product.
    """
    fitting = [
        tile
        for tile in (TILES.get(kind) or SINGLE_TILES[kind])
        if tile.shared_bytes <= spec.shared_per_block
        and block[0] in {None, tile.block_m}
        and block[1] in {None, tile.block_n}
    ]
    if not fitting:
        blocks = ", ".join(f"{tile.block_m} x {tile.block_n}" for tile in TILES.get(kind) or SINGLE_TILES[kind])
        raise ConfigInfeasible(f"block_m, block_n: dmma has blocks of {blocks}, where {spec.name} has the memory")

    def time(tile: DmmaTile) -> float:
        tiles = -(-m // tile.block_m) * -(-n // tile.block_n) * batch
        return -(-tiles // spec.sm_count) * tile.block_m * tile.block_n / tile.rate

    return min(fitting, key=time)


def resolve_tile(
    config: GemmConfig | None, shape: tuple[int, int], problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec
) -> DmmaTile:
    """The tile for products of that many rows and columns: the one that `config` asks for, or `choose`'s. Raises
    ConfigInfeasible.
    """
    config = config or GemmConfig()
    config.only("dmma", ("block_m", "block_n"))
    return choose(*shape, spec, kind_of(problem), problem.batch, block=(config.block_m, config.block_n))
