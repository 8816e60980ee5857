"""Model of an algorithm's time on a device: the larger of arithmetic and memory traffic, plus launches. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.device.spec import DOUBLE_SPEED, TENSOR_SPEED

if TYPE_CHECKING:
    from gemmserve_kernels.device.spec import DeviceSpec

    Point = tuple[int, int, int, int]

MEASURED_SMS: Final = 132
BANDWIDTH: Final = 3.6e12
"""Bytes a second of a device-wide copy on an H200, reads and writes counted."""
LAUNCH_S: Final = 3e-6
"""Seconds that one more kernel of a sequence costs on the device."""
_SPLIT_K: Final = 512
"""Steps of k that one part of a split product has at least."""
_LONG: Final = 1024
_FEW: Final = 128
"""Sides of a skinny product: the longer one at least, the shorter one at most."""
_SKINNY_TILE: Final = 128
"""Extent of a tile along the longer side."""
_SKINNY_ENDS: Final = 64
_SKINNY_SUMS: Final = 4
"""Steps of k that the ends of such a tile take as long as; launches that adding up tiles' sums takes as long as."""
_SKINNY_STEPS: Final = 64
"""Steps of k between two looks at such a tile: k is cut there."""
_SKINNY_PART: Final = 1.5
_SKINNY_GAIN: Final = 0.95
"""Such steps that a part takes as long as beyond its ends, where others add up the same sums; and how much shorter
further parts have to make a product."""
_SKINNY_ROUNDS: Final = 6
"""Parts at most of those that fill the device more than once: sums of each take memory, and are read again."""


@dataclass(frozen=True)
class _Model:
    """Operations a second of a full H200, launches, tile (extent of one block), passes over A and B beforehand, and the
    most parts that k is split into where there are fewer tiles than multiprocessors. `ends`: steps of k that the
    beginning and the end of a tile take as long as. `skinny`: the rate of skinny products, where those have tiles of
    their own: long ones, of which the device computes one for each multiprocessor at a time.
    """

    rate: float
    launches: int = 1
    tile: int = 128
    passes: float = 0.0
    parts: int = 1
    ends: int = 0
    skinny: float = 0.0


MODELS: Final[dict[tuple[str, str, str], _Model]] = {
    ("vendor", "plain", "float16"): _Model(7.0e14, tile=64, parts=16),
    ("vendor", "plain", "float32"): _Model(5.1e13, tile=64, parts=16),
    ("vendor", "plain", "float64"): _Model(6.0e13, tile=32, parts=16),
    ("vendor", "plain", "complex64"): _Model(5.4e13, tile=64, parts=16),
    ("vendor", "plain", "complex128"): _Model(5.2e13, tile=32, parts=16),
    ("vendor", "tf32", "float32"): _Model(2.4e14, parts=16),
    ("vendor", "tf32", "complex64"): _Model(1.65e14, parts=16),
    ("simt", "plain", "float16"): _Model(4.0e13, tile=64),
    ("simt", "plain", "float32"): _Model(3.7e13, tile=64),
    ("simt", "plain", "float64"): _Model(1.9e13, tile=64),
    ("simt", "plain", "complex64"): _Model(4.7e13, tile=64),
    ("simt", "plain", "complex128"): _Model(1.95e13, tile=32),
    ("small", "plain", "float16"): _Model(1.5e13, tile=4),
    ("small", "plain", "float32"): _Model(2.0e13, tile=4),
    ("small", "plain", "float64"): _Model(1.2e13, tile=4),
    ("small", "plain", "complex64"): _Model(2.5e13, tile=4),
    ("small", "plain", "complex128"): _Model(1.5e13, tile=4),
    ("small", "3xtf32", "complex64"): _Model(4.5e13, tile=16),
    ("wgmma", "3xfp16", "float32"): _Model(2.3e14, 5, 128, 1.5, parts=16),
    ("wgmma", "3xfp16", "complex64"): _Model(2.5e14, 5, 64, 1.5, parts=16),
    ("fused", "3xfp16", "float32"): _Model(5.8e13, 1, 64, parts=132, ends=40),
    ("fused", "3xfp16", "complex64"): _Model(1.0e14, 1, 64, parts=132, ends=40, skinny=1.5e14),
    ("wgmma", "3xfp16-3m", "complex64"): _Model(3.1e14, 5, 64, 2.0, parts=16),
    ("wgmma", "6xbf16", "float32"): _Model(1.1e14, 5, 128, 2.0, parts=16),
    ("wgmma", "6xbf16", "complex64"): _Model(1.15e14, 5, 64, 2.0, parts=16),
    ("wgmma", "9xbf16", "float32"): _Model(7.5e13, 5, 128, 2.0, parts=16),
    ("wgmma", "9xbf16", "complex64"): _Model(7.8e13, 5, 64, 2.0, parts=16),
    ("wgmma", "fp16", "float16"): _Model(6.8e14, parts=16, ends=128),
    ("wgmma", "1xfp16", "float32"): _Model(5.5e14, 5, 128, 1.0, parts=16),
    ("wgmma", "1xfp16", "complex64"): _Model(6.8e14, 5, 64, 1.0, parts=16),
    ("mma", "3xfp16", "float32"): _Model(9.6e13, 5, 128, 1.5, parts=8),
    ("mma", "3xfp16", "complex64"): _Model(1.2e14, 5, 64, 1.5, parts=8),
    ("mma", "1xfp16", "float32"): _Model(1.9e14, 5, 128, 1.0, parts=8),
    ("mma", "1xfp16", "complex64"): _Model(2.3e14, 5, 128, 1.0, parts=8),
    ("mma", "6xbf16", "float32"): _Model(4.8e13, 5, 128, 2.0, parts=8),
    ("mma", "6xbf16", "complex64"): _Model(6.0e13, 5, 64, 2.0, parts=8),
    ("mma", "9xbf16", "float32"): _Model(3.2e13, 5, 128, 2.0, parts=8),
    ("mma", "9xbf16", "complex64"): _Model(4.0e13, 5, 64, 2.0, parts=8),
    ("mma", "3xtf32", "float32"): _Model(6.0e13, tile=128, parts=8),
    ("mma", "3xtf32", "complex64"): _Model(6.6e13, tile=64, parts=8),
    ("mma", "1xtf32", "float32"): _Model(1.1e14, tile=128, parts=8),
    ("mma", "1xtf32", "complex64"): _Model(1.1e14, tile=64, parts=8),
    ("mfma", "plain", "float16"): _Model(3.5e14),
    ("mfma", "plain", "float32"): _Model(4.4e13),
    ("mfma", "plain", "float64"): _Model(4.0e13),
    ("mfma", "plain", "complex64"): _Model(5.0e13),
    ("mfma", "plain", "complex128"): _Model(4.0e13, tile=64),
    ("mfma", "xf32", "float32"): _Model(1.5e14),
    ("mfma", "xf32", "complex64"): _Model(1.5e14),
    ("mfma", "3xfp16", "float32"): _Model(9.0e13, 5, 128, 1.5),
    ("mfma", "3xfp16", "complex64"): _Model(1.0e14, 5, 64, 1.5),
    ("mfma", "1xfp16", "float32"): _Model(1.4e14, 5, 128, 1.0),
    ("mfma", "1xfp16", "complex64"): _Model(1.4e14, 5, 128, 1.0),
    ("dmma", "plain", "float64"): _Model(5.8e13, tile=64),
    ("dmma", "plain", "complex128"): _Model(5.6e13, tile=64),
    ("ozaki", "ozaki", "float32"): _Model(6.0e13, 8, 256, 8.0),
    ("ozaki", "ozaki", "float64"): _Model(1.05e14, 7, 256, 7.0),
    ("ozaki", "ozaki", "complex64"): _Model(3.35e14, 10, 256, 6.3, parts=16),
    ("ozaki", "ozaki", "complex128"): _Model(1.8e14, 7, 256, 5.5),
}
"""By algorithm, arithmetic and dtype; rates measured on an H200 (docs/benchmarks). Those of bfloat16 are shares of
`3xfp16`'s: half of six products, a third of nine. Those of `mfma` are not
measured: they say no more than that the vendor's BLAS goes first on AMD devices, and the portable kernels come last.
"""

ITEMSIZE: Final = {"float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}


def is_skinny(m: int, n: int) -> bool:
    """Whether a product has few rows or few columns, and many of the others."""
    return max(m, n) >= _LONG and min(m, n) <= _FEW


def skinny_parts(tiles: int, k: int, sms: int, most: int) -> int:
    """Parts that k of a skinny product of so many tiles is cut into, `most` at most: as many as fill the device once,
    or more where the last of several rounds of tiles would leave most multiprocessors idle.

    Measured on an H200: 64 x 17000 x 4096 of complex64, 133 tiles for 132 multiprocessors, takes 0.50 ms whole, and
    0.36 ms in four parts; 100 x 10000 x 3000 takes 0.36, 0.29, 0.27 and 0.29 ms in 1, 2, 3 and 5.
    """
    steps = -(-k // _SKINNY_STEPS)

    def cost(parts: int) -> float:
        rounds = -(-tiles * parts // sms)
        return rounds * (-(-steps // parts) + 1 + (_SKINNY_PART if parts > 1 else 0.0))

    most = min(most, steps)
    once = max(1, min(most, sms // tiles))
    best = min(range(once, min(most, max(once, _SKINNY_ROUNDS)) + 1), key=cost)
    return best if cost(best) < _SKINNY_GAIN * cost(once) else once


def model_seconds(
    spec: DeviceSpec, algorithm: str, arithmetic: str, dtype: str, shape: Point, *, written: bool = True
) -> float:
    """Return the seconds that the model alone estimates; inf where it knows nothing."""
    model = MODELS.get((algorithm, arithmetic, dtype))
    if model is None:
        return math.inf
    batch, m, n, k = shape
    scale = spec.sm_count / MEASURED_SMS
    tensor = arithmetic != "plain" and algorithm in {"wgmma", "fused", "mma", "ozaki"}
    speed = TENSOR_SPEED.get(spec.arch, 0.0) if tensor else 1.0
    if algorithm == "dmma":
        speed = DOUBLE_SPEED.get(spec.arch, 0.0)
    if speed == 0.0:
        return math.inf
    skinny = model.skinny > 0 and is_skinny(m, n)
    long, rate, ends, launches = model.tile, model.rate, model.ends, model.launches
    if skinny:
        long, rate, ends, launches = _SKINNY_TILE, model.skinny, _SKINNY_ENDS, launches + 1
    tiles = math.ceil(max(m, n) / long) * math.ceil(min(m, n) / model.tile) * batch
    if skinny:
        parts = skinny_parts(tiles, k, spec.sm_count, model.parts)
    else:
        parts = max(1, min(model.parts, k // _SPLIT_K, spec.sm_count // tiles))
    if skinny and parts > 1:
        ends, launches = ends * parts, launches + _SKINNY_SUMS
    filled = math.ceil(m / model.tile) * model.tile * math.ceil(n / model.tile) * model.tile * batch
    turns = tiles * parts / spec.sm_count
    busy = turns / math.ceil(turns) if skinny else min(1.0, turns)
    complexity = 8 if dtype.startswith("complex") else 2
    arithmetic_s = complexity * filled * (k + ends) / (rate * scale * speed * busy)
    itemsize = ITEMSIZE[dtype]
    operands, result = batch * (m * k + k * n), batch * m * n if written else 0
    memory_s = itemsize * (operands * (1 + model.passes) + result) / (BANDWIDTH * scale)
    passes_s = itemsize * operands * model.passes / (BANDWIDTH * scale)
    return launches * LAUNCH_S + max(arithmetic_s + passes_s, memory_s)


def occupancy(spec: DeviceSpec, blocks: int) -> float:
    """Return the share of multiprocessors that `blocks` keep busy, at most 1."""
    return min(1.0, blocks / spec.sm_count)
