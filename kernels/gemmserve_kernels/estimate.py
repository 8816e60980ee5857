"""How long an algorithm will take: a model of each, corrected by what was measured on this architecture. Pure.

The model is the larger of arithmetic and memory traffic, plus launches. `tables/<arch>.json`, which
`benchmarks/kernels/tune_dispatch.py` writes on the device, holds measured times; the ratio of measured to modelled
time varies slowly with the sizes, so it is interpolated between the nearest points (weights 1 / distance^4 in log2 of
m, n, k and batch) and the model is multiplied with it. At a measured point the estimate is the measurement. A device
without a table has the model alone, its rates scaled by the number of multiprocessors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gemmserve_kernels.device import DeviceSpec

    Point = tuple[int, int, int, int]

_MEASURED_SMS: Final = 132
_BANDWIDTH: Final = 3.6e12
"""Bytes a second of a device-wide copy on an H200, reads and writes counted."""
_LAUNCH_S: Final = 3e-6
"""Seconds that one more kernel of a sequence costs on the device."""
_NEIGHBOURS: Final = 6
_EXACT: Final = 1e-9


@dataclass(frozen=True)
class _Model:
    """Operations a second of a full H200, launches, tile (extent of one block), passes over A and B beforehand."""

    rate: float
    launches: int = 1
    tile: int = 128
    passes: float = 0.0


MODELS: Final[dict[tuple[str, str, str], _Model]] = {
    ("vendor", "plain", "float16"): _Model(7.0e14, tile=64),
    ("vendor", "plain", "float32"): _Model(5.1e13, tile=64),
    ("vendor", "plain", "float64"): _Model(6.0e13, tile=32),
    ("vendor", "plain", "complex64"): _Model(5.4e13, tile=64),
    ("vendor", "plain", "complex128"): _Model(5.2e13, tile=32),
    ("vendor", "tf32", "float32"): _Model(2.4e14),
    ("vendor", "tf32", "complex64"): _Model(1.65e14),
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
    ("wgmma", "3xfp16", "float32"): _Model(2.3e14, 5, 128, 1.5),
    ("wgmma", "3xfp16", "complex64"): _Model(2.5e14, 5, 64, 1.5),
    ("wgmma", "3xfp16-3m", "complex64"): _Model(3.1e14, 5, 64, 2.0),
    ("wgmma", "1xfp16", "float32"): _Model(5.5e14, 5, 128, 1.0),
    ("wgmma", "1xfp16", "complex64"): _Model(6.8e14, 5, 64, 1.0),
    ("mma", "3xfp16", "float32"): _Model(9.6e13, 5, 128, 1.5),
    ("mma", "3xfp16", "complex64"): _Model(1.2e14, 5, 64, 1.5),
    ("mma", "1xfp16", "float32"): _Model(1.9e14, 5, 128, 1.0),
    ("mma", "1xfp16", "complex64"): _Model(2.3e14, 5, 128, 1.0),
    ("mma", "3xtf32", "float32"): _Model(6.0e13, tile=128),
    ("mma", "3xtf32", "complex64"): _Model(6.6e13, tile=64),
    ("mma", "1xtf32", "float32"): _Model(1.1e14, tile=128),
    ("mma", "1xtf32", "complex64"): _Model(1.1e14, tile=64),
    ("ozaki", "ozaki", "float32"): _Model(6.0e13, 8, 256, 8.0),
    ("ozaki", "ozaki", "float64"): _Model(1.05e14, 7, 256, 7.0),
    ("ozaki", "ozaki", "complex64"): _Model(8.0e13, 8, 256, 8.0),
    ("ozaki", "ozaki", "complex128"): _Model(1.38e14, 7, 256, 7.0),
}
"""By algorithm, arithmetic and dtype; rates measured on an H200 (docs/benchmarks)."""

TENSOR_SPEED: Final = {"sm_80": 0.55, "sm_90a": 1.0, "sm_100a": 1.5}
"""Tensor-core algorithms per multiprocessor, relative to an H200's: data-sheet rates of dense FP16 (NVIDIA A100, H100
and B200). On other architectures `auto` stays with plain arithmetic: theirs are too slow for three products to pay."""


def estimate(spec: DeviceSpec, algorithm: str, arithmetic: str, dtype: str, shape: Point) -> float:
    """Seconds of a product of `shape` = (batch, m, n, k), all at least 1; inf where nothing is known of it.

    `arithmetic`: "plain", or what the tensor cores multiply ("3xfp16", "1xfp16", "3xtf32", "ozaki" ...).
    """
    modelled = model_seconds(spec, algorithm, arithmetic, dtype, shape)
    return modelled * correction(table(spec.arch), algorithm, arithmetic, dtype, shape)


def model_seconds(spec: DeviceSpec, algorithm: str, arithmetic: str, dtype: str, shape: Point) -> float:
    """What the model alone says."""
    model = MODELS.get((algorithm, arithmetic, dtype))
    if model is None:
        return math.inf
    batch, m, n, k = shape
    scale = spec.sm_count / _MEASURED_SMS
    tensor = arithmetic != "plain" and algorithm in {"wgmma", "mma", "ozaki"}
    speed = TENSOR_SPEED.get(spec.arch, 0.0) if tensor else 1.0
    if speed == 0.0:
        return math.inf
    tiles = math.ceil(m / model.tile) * math.ceil(n / model.tile) * batch
    filled = math.ceil(m / model.tile) * model.tile * math.ceil(n / model.tile) * model.tile * batch
    busy = min(1.0, tiles / spec.sm_count)
    complexity = 8 if dtype.startswith("complex") else 2
    arithmetic_s = complexity * filled * k / (model.rate * scale * speed * busy)
    itemsize = {"float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}[dtype]
    operands, result = batch * (m * k + k * n), batch * m * n
    memory_s = itemsize * (operands * (1 + model.passes) + result) / (_BANDWIDTH * scale)
    passes_s = itemsize * operands * model.passes / (_BANDWIDTH * scale)
    return model.launches * _LAUNCH_S + max(arithmetic_s + passes_s, memory_s)


def correction(measured: Table, algorithm: str, arithmetic: str, dtype: str, shape: Point) -> float:
    """Measured over modelled time near `shape`; 1 where nothing was measured."""
    points = measured.ratios.get((algorithm, arithmetic, dtype), ())
    if not points:
        return 1.0
    here = tuple(math.log2(extent) for extent in shape)
    nearest = sorted((math.dist(here, there), ratio) for there, ratio in points)[:_NEIGHBOURS]
    if nearest[0][0] < _EXACT:
        return math.exp(nearest[0][1])
    weights = [distance**-4 for distance, _ in nearest]
    mean = sum(weight * ratio for weight, (_, ratio) in zip(weights, nearest, strict=True)) / sum(weights)
    return math.exp(mean)


@dataclass(frozen=True)
class Table:
    """By algorithm, arithmetic and dtype: (log2 of the shape, log of measured over modelled time)."""

    ratios: dict[tuple[str, str, str], tuple[tuple[tuple[float, ...], float], ...]]

    @classmethod
    def of(cls, document: dict[str, Any]) -> Table:
        """From the JSON of tune_dispatch.py. Raises KeyError, ValueError where it is none."""
        # The table is of the device that it was measured on: its own model is what the times are compared with.
        spec = _measured_device(document)
        found: dict[tuple[str, str, str], list[tuple[tuple[float, ...], float]]] = {}
        for point in document["points"]:
            shape = (point["batch"], point["m"], point["n"], point["k"])
            for who, seconds in point["seconds"].items():
                algorithm, arithmetic = who.split(":")
                modelled = model_seconds(spec, algorithm, arithmetic, point["dtype"], shape)
                entry = (tuple(math.log2(extent) for extent in shape), math.log(seconds / modelled))
                found.setdefault((algorithm, arithmetic, point["dtype"]), []).append(entry)
        return cls({key: tuple(entries) for key, entries in found.items()})


def _measured_device(document: dict[str, Any]) -> DeviceSpec:
    from gemmserve_kernels.device import KNOWN

    return next(spec for spec in KNOWN.values() if spec.name == document["environment"]["device"])


@cache
def table(arch: str) -> Table:
    """What was measured on that architecture; empty where nothing was."""
    path = resources.files("gemmserve_kernels") / "tables" / f"{arch}.json"
    if not path.is_file():
        return Table({})
    return Table.of(json.loads(path.read_text(encoding="utf-8")))
