"""Tiles of the matrix units' kernels: what an architecture multiplies, what a device can run, what suits a product.

Pure. Rates and register counts of real devices have not been measured: the choice is by what a tile must read.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

_FIELDS: Final = ("block_m", "block_n", "block_k", "warp_m", "warp_n", "stages", "raster")
_PIECE_BYTES: Final = 16
"""Bytes that a lane reads from shared memory at once."""
_MAX_THREADS: Final = 1024
_MAX_REGISTERS: Final = {64: 512, 32: 256}
"""32-bit registers of one lane by the lanes of a wave: CDNA 2 to 4, accumulation registers among them; RDNA 3."""
_OTHER_REGISTERS: Final = 48
"""Addresses and counters: an allowance, about what the compiler's reports leave beside the arrays."""


@dataclass(frozen=True)
class Instruction:
    """A matrix instruction (cuda/mfma/instructions.cuh): its name there and in assembler, and its shape.

    `tile` rows and columns; `groups` groups of lanes along k, `per` neighbours in k a lane; `element` bytes of one;
    `wave` lanes, whose groups of `tile` hold different rows of the sums.
    """

    name: str
    mnemonic: str
    tile: int
    groups: int
    per: int
    element: int
    wave: int = 64

    @property
    def pack(self) -> int:
        """Neighbours in k of one piece."""
        return _PIECE_BYTES // self.element

    @property
    def held(self) -> int:
        """Neighbours in k that a lane holds at once: whole pieces, and what whole instructions take."""
        return max(self.pack, self.per)

    @property
    def depth(self) -> int:
        """Steps of k that all lanes hold at once."""
        return self.held * self.groups


F32: Final = Instruction("MfmaF32", "v_mfma_f32_32x32x2", 32, 2, 1, 4)
XF32: Final = Instruction("MfmaXf32", "v_mfma_f32_32x32x4_xf32", 32, 2, 2, 4)
F64: Final = Instruction("MfmaF64", "v_mfma_f64_16x16x4", 16, 4, 1, 8)
F16: Final = Instruction("MfmaF16", "v_mfma_f32_32x32x8_f16", 32, 2, 4, 2)
LONG_F16: Final = Instruction("MfmaLongF16", "v_mfma_f32_32x32x16_f16", 32, 2, 8, 2)
WMMA_F16: Final = Instruction("WmmaF16", "v_wmma_f32_16x16x16_f16", 16, 1, 16, 2, wave=32)


@dataclass(frozen=True)
class Arithmetic:
    """`parts` of a number; float16 `planes`, or operands as they are stored; how elements are rounded on their way."""

    instruction: Instruction
    parts: int = 1
    planes: bool = False
    rounding: str = "EXACT"


SCHEMES: Final = ("3xfp16", "1xfp16")
"""Schemes of float16 planes."""


def _half(instruction: Instruction) -> dict[str, Arithmetic]:
    planes = {scheme: Arithmetic(instruction, 2 if scheme == "3xfp16" else 1, planes=True) for scheme in SCHEMES}
    return {"fp16": Arithmetic(instruction), **planes}


_PLAIN: Final = {"fp32": Arithmetic(F32), "fp64": Arithmetic(F64)}
ARCHITECTURES: Final = {
    "gfx90a": _PLAIN,
    "gfx942": {**_PLAIN, "xf32": Arithmetic(XF32, rounding="TF32"), **_half(F16)},
    "gfx950": {**_PLAIN, **_half(LONG_F16)},
    "gfx1100": _half(WMMA_F16),
}
"""Arithmetic by architecture and name. MI200's matrix units take subnormal float16 numbers for zero (AMD, MIOpen: MI200
MFMA behavior specifics), which both float16 data and low parts have: there float16 data are multiplied as float32, and
there are no planes. XF32 is CDNA 3's alone. RDNA 3's units multiply nothing wider than 16 bits; whether they keep
subnormal numbers is the MODE register's say (RDNA 3 ISA, 7.9), and our code objects set it so (tools/amd looks)."""


@dataclass(frozen=True)
class MfmaTile:
    """A tile of the kernels with every choice made. `block_k`, `warp_m`, `warp_n`: whole instructions'."""

    block_m: int
    block_n: int
    block_k: int
    warp_m: int
    warp_n: int
    stages: int = 2
    raster: int = 8

    def threads(self, instruction: Instruction) -> int:
        """Threads of one block."""
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n) * instruction.wave

    def stage_bytes(self, arithmetic: Arithmetic, *, is_complex: bool) -> int:
        """Shared memory of one stage."""
        planes = arithmetic.parts * (2 if is_complex else 1)
        return (self.block_m + self.block_n) * self.block_k * arithmetic.instruction.element * planes

    def shared_bytes(self, arithmetic: Arithmetic, *, is_complex: bool, local_bytes: int = 0) -> int:
        """Shared memory of a block: the stages, or one reduction's partials of `local_bytes` each, which reuse it."""
        instruction = arithmetic.instruction
        partials = self.block_m // self.warp_m * (instruction.wave // instruction.tile) * self.block_n
        return max(self.stages * self.stage_bytes(arithmetic, is_complex=is_complex), partials * local_bytes)

    def registers(self, arithmetic: Arithmetic, *, is_complex: bool) -> int:
        """Estimated 32-bit registers of one lane: sums, twice where they are promoted, fragments, what is copied."""
        instruction, components = arithmetic.instruction, 2 if is_complex else 1
        words = max(1, instruction.element // 4)
        sums = self.warp_m * self.warp_n // instruction.wave * components * words * (2 if arithmetic.planes else 1)
        tiles = (self.warp_m + self.warp_n) // instruction.tile
        fragments = tiles * components * arithmetic.parts * instruction.held * instruction.element // 4
        copied = -(-self.stage_bytes(arithmetic, is_complex=is_complex) // (4 * self.threads(instruction)))
        return sums + fragments + copied + _OTHER_REGISTERS

    def broken_limit(
        self, arithmetic: Arithmetic, *, is_complex: bool, spec: DeviceSpec, local_bytes: int = 0
    ) -> str | None:
        """One line that names the first limit this tile breaks on `spec`, or None."""
        instruction = arithmetic.instruction
        for axis in ("m", "n"):
            block, warp = getattr(self, f"block_{axis}"), getattr(self, f"warp_{axis}")
            if warp % instruction.tile or block % warp:
                return (
                    f"divisibility: block_{axis}={block} must be a multiple of warp_{axis}={warp}, "
                    f"and that one of {instruction.tile}"
                )
        if self.block_k % instruction.depth or self.block_k & (self.block_k - 1):
            return f"block_k: a power of two from {instruction.depth} on, not {self.block_k}"
        if self.stages not in {1, 2}:
            return f"stages: mfma has 1 or 2, not {self.stages}"
        threads, most = self.threads(instruction), _MAX_REGISTERS[instruction.wave]
        if threads > _MAX_THREADS:
            return f"threads: the tile needs {threads} a block, the limit is {_MAX_THREADS}"
        shared = self.shared_bytes(arithmetic, is_complex=is_complex, local_bytes=local_bytes)
        if shared > spec.shared_per_block:
            return f"shared memory: the tile needs {shared} bytes a block, {spec.name} has {spec.shared_per_block}"
        registers = self.registers(arithmetic, is_complex=is_complex)
        if registers > most:
            return f"registers: the tile needs about {registers} a thread, the limit is {most}"
        if registers * threads > spec.registers_per_sm:
            return f"registers: about {registers} x {threads} threads, {spec.name} has {spec.registers_per_sm}"
        return None


CANDIDATES: Final[dict[tuple[str, bool], tuple[MfmaTile, ...]]] = {
    ("fp32", False): (MfmaTile(128, 128, 16, 64, 64), MfmaTile(64, 64, 16, 32, 32)),
    ("fp32", True): (MfmaTile(128, 128, 8, 64, 64), MfmaTile(64, 64, 8, 32, 32)),
    ("xf32", False): (MfmaTile(128, 128, 16, 64, 64), MfmaTile(64, 64, 16, 32, 32)),
    ("xf32", True): (MfmaTile(128, 128, 8, 64, 64), MfmaTile(64, 64, 8, 32, 32)),
    ("fp64", False): (MfmaTile(128, 64, 8, 64, 32), MfmaTile(64, 64, 8, 32, 32)),
    ("fp64", True): (MfmaTile(64, 64, 8, 32, 32), MfmaTile(32, 32, 8, 16, 16)),
    ("fp16", False): (MfmaTile(128, 128, 32, 64, 64), MfmaTile(64, 64, 32, 32, 32)),
    ("3xfp16", False): (MfmaTile(128, 128, 32, 64, 64), MfmaTile(64, 64, 32, 32, 32)),
    ("3xfp16", True): (MfmaTile(64, 64, 32, 32, 32), MfmaTile(64, 32, 32, 32, 32)),
    ("1xfp16", False): (MfmaTile(128, 128, 32, 64, 64), MfmaTile(64, 64, 32, 32, 32)),
    ("1xfp16", True): (MfmaTile(128, 64, 32, 64, 32), MfmaTile(64, 64, 32, 32, 32)),
}
"""By arithmetic and whether the data are complex; the first reads the least, the second fills more of a device."""
_NARROW: Final[dict[tuple[str, bool], tuple[MfmaTile, ...]]] = {
    ("fp16", False): (MfmaTile(128, 128, 32, 64, 32), MfmaTile(64, 64, 32, 32, 32)),
    ("3xfp16", False): (MfmaTile(128, 64, 32, 32, 32), MfmaTile(64, 64, 32, 32, 32)),
    ("3xfp16", True): (MfmaTile(64, 64, 32, 32, 16), MfmaTile(64, 32, 32, 32, 16)),
    ("1xfp16", False): (MfmaTile(128, 128, 32, 64, 32), MfmaTile(64, 64, 32, 32, 32)),
    ("1xfp16", True): (MfmaTile(64, 64, 32, 32, 16), MfmaTile(64, 32, 32, 32, 16)),
}
"""The same for waves of 32 lanes, each of which has twice the sums of a wave's part, and half the registers."""
_REDUCING: Final[dict[tuple[str, bool], tuple[MfmaTile, ...]]] = {
    ("fp32", True): (MfmaTile(128, 64, 8, 64, 32), MfmaTile(64, 64, 8, 32, 32)),
    ("xf32", True): (MfmaTile(128, 64, 8, 64, 32), MfmaTile(64, 64, 8, 32, 32)),
}
"""The same for reductions, where larger tiles do not fit the registers: the compiler keeps what several need."""
_SMALLER_RATE: Final = 0.7
"""Rate of the second candidate on a full device: by what it reads, for want of a measurement."""


def check_device(spec: DeviceSpec) -> str | None:
    """Return why no kernel for AMD's matrix units runs on `spec`, or None."""
    if spec.arch not in ARCHITECTURES:
        return f"mfma needs one of {', '.join(ARCHITECTURES)}, and {spec.name} is {spec.arch}"
    return None


def dense_arithmetic(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return what multiplies operands of `problem` as they are stored, None where nothing does."""
    known = ARCHITECTURES.get(spec.arch, {})
    if problem.compute == "tf32":
        found = "xf32" if problem.dtype.name in {"float32", "complex64"} else ""
    elif problem.compute not in {"auto", "fp32", "fp64"}:
        found = ""
    elif real_dtype(problem.accumulate) == np.float64:
        found = "fp64"
    else:
        found = "fp16" if problem.dtype == np.float16 and "fp16" in known else "fp32"
    return found if found in known else None


def candidates_of(arithmetic: str, arch: str, *, is_complex: bool, reducing: bool) -> tuple[MfmaTile, ...]:
    """The tiles that may be chosen."""
    key = arithmetic, is_complex
    if ARCHITECTURES[arch][arithmetic].instruction.wave == 32:
        return _NARROW[key]
    return _REDUCING.get(key, CANDIDATES[key]) if reducing else CANDIDATES[key]


@lru_cache(maxsize=1024)
def resolve_tile(
    config: GemmConfig | None,
    arithmetic: str,
    shape: tuple[int, int],
    batch: int,
    spec: DeviceSpec,
    *,
    is_complex: bool,
    local_bytes: int = 0,
) -> MfmaTile:
    """The tile for m x n products: the overrides of `config`, the rest chosen for `spec`.

    `local_bytes`: of one reduction's partial, 0 where nothing is reduced. Raises ConfigInfeasible naming the limit.
    """
    config = config or GemmConfig()
    config.only("mfma", _FIELDS)
    requested = config.tile_fields
    candidates = candidates_of(arithmetic, spec.arch, is_complex=is_complex, reducing=local_bytes > 0)
    how = ARCHITECTURES[spec.arch][arithmetic]
    ordered = sorted(candidates, key=lambda tile: _seconds(tile, candidates, shape, batch, spec))
    reason = None
    for candidate in ordered:
        for tile in _completions(candidate, requested, how.instruction):
            broken = tile.broken_limit(how, is_complex=is_complex, spec=spec, local_bytes=local_bytes)
            if broken is None:
                return tile
            reason = reason or broken
    raise ConfigInfeasible(reason or "no tile fits")


def _completions(base: MfmaTile, requested: dict[str, int | str], instruction: Instruction) -> Iterator[MfmaTile]:
    """`base` with the `requested` fields put in and, where they ask for it, the rest bent to fit; the nearest first."""
    changed = replace(base, **requested)  # type: ignore[arg-type]

    def options(name: str, *others: int) -> list[int]:
        return [getattr(changed, name)] if name in requested else [getattr(changed, name), *others]

    tile = instruction.tile
    return (
        replace(changed, block_m=block_m, block_n=block_n, warp_m=warp_m, warp_n=warp_n, block_k=block_k, stages=stages)
        for block_m, block_n, warp_m, warp_n, block_k, stages in itertools.product(
            options("block_m", changed.warp_m),
            options("block_n", changed.warp_n),
            options("warp_m", changed.block_m // 2, tile),
            options("warp_n", changed.block_n // 2, tile),
            options("block_k", instruction.depth),
            options("stages", 1),
        )
        if warp_m > 0 and warp_n > 0
    )


def _seconds(
    tile: MfmaTile, candidates: tuple[MfmaTile, ...], shape: tuple[int, int], batch: int, spec: DeviceSpec
) -> float:
    """Estimated time in arbitrary units: waves of blocks, each as long as its share of the arithmetic."""
    blocks = math.ceil(shape[0] / tile.block_m) * math.ceil(shape[1] / tile.block_n) * batch
    busiest = math.ceil(blocks / spec.sm_count)
    rate = 1.0 if tile is candidates[0] else _SMALLER_RATE
    return busiest * tile.block_m * tile.block_n / rate
