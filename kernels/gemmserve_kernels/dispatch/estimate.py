"""How long an algorithm will take: a model of each, corrected by what was measured on this architecture. Pure.

The model is the larger of arithmetic and memory traffic, plus launches. `tables/<arch>.json`, which
`benchmarks/kernels/tune_dispatch.py` writes on the device, holds measured times; the ratio of measured to modelled
time varies slowly with the sizes, so it is interpolated between the nearest points (weights 1 / distance^4 in log2 of
m, n, k and batch; a point stands for its transpose too, a little further away) and the model is multiplied with it. At
a measured point the estimate is the measurement.

All of it is the device's time. A caller who enqueues small products one after another waits for the host instead, but
how long a route takes there says more of the machine than of the route: the same launches took 50 and 72 microseconds
on two machines with the same GPU. `tune_dispatch.py` notes it, and nothing is decided by it.

A device without a table has the model alone, its rates scaled by the number of multiprocessors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gemmserve_kernels.device.spec import DeviceSpec

    Point = tuple[int, int, int, int]
    Route = tuple[str, str, str]

_MEASURED_SMS: Final = 132
_BANDWIDTH: Final = 3.6e12
"""Bytes a second of a device-wide copy on an H200, reads and writes counted."""
_LAUNCH_S: Final = 3e-6
"""Seconds that one more kernel of a sequence costs on the device."""
_NEIGHBOURS: Final = 6
_EXACT: Final = 1e-9
_TRANSPOSED: Final = 0.5
"""What a transposed point is further away, in binary orders of magnitude."""
_SPLIT_K: Final = 512
"""Steps of k that one part of a split product has at least."""


@dataclass(frozen=True)
class _Model:
    """Operations a second of a full H200, launches, tile (extent of one block), passes over A and B beforehand, and the
    most parts that k is split into where there are fewer tiles than multiprocessors. `ends`: steps of k that the
    beginning and the end of a tile take as long as.
    """

    rate: float
    launches: int = 1
    tile: int = 128
    passes: float = 0.0
    parts: int = 1
    ends: int = 0


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
    ("ozaki", "ozaki", "float32"): _Model(6.0e13, 8, 256, 8.0),
    ("ozaki", "ozaki", "float64"): _Model(1.05e14, 7, 256, 7.0),
    ("ozaki", "ozaki", "complex64"): _Model(8.0e13, 8, 256, 8.0),
    ("ozaki", "ozaki", "complex128"): _Model(1.38e14, 7, 256, 7.0),
}
"""By algorithm, arithmetic and dtype; rates measured on an H200 (docs/benchmarks). Those of bfloat16 are shares of
`3xfp16`'s: half of six products, a third of nine. Those of `mfma` are not measured:
they say no more than that the vendor's BLAS goes first on AMD devices, and the portable kernels come last.
"""

TENSOR_SPEED: Final = {"sm_80": 0.55, "sm_90a": 1.0, "sm_100": 1.0}
"""Tensor-core algorithms per multiprocessor, relative to an H200's: data-sheet rates of dense FP16 (NVIDIA A100, H100);
of a B200 the same is assumed, for mma.sync does not have its new units. On other architectures `auto` stays with plain
arithmetic: theirs are too slow for three products to pay."""

DOUBLE_SPEED: Final = {"sm_80": 0.35, "sm_90a": 1.0, "sm_100": 0.5}
"""Double precision per multiprocessor, relative to an H200's, by the data sheets; elsewhere it is 32 or 64 times slower
than single and nothing is gained by it."""
_GRAM_RATE: Final = 3.5e13
"""Operations a second of Gram matrices on an H200's matrix units: two thirds of what cuBLAS reaches there in double,
for want of a measurement."""
_GRAM_LAUNCHES: Final = 5
_ITEMSIZE: Final = {"float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}


def estimate(
    spec: DeviceSpec, algorithm: str, arithmetic: str, dtype: str, shape: Point, *, written: bool = True
) -> float:
    """Seconds on the device of a product of `shape` = (batch, m, n, k), all at least 1; inf where nothing is known.

    `arithmetic`: "plain", or what the tensor cores multiply ("3xfp16", "1xfp16", "3xtf32", "ozaki" ...). `written`:
    whether the product goes to memory, rather than into a reduction.
    """
    return predicted(spec, table(spec.arch), (algorithm, arithmetic, dtype), shape, written=written)


def predicted(
    spec: DeviceSpec,
    measured: Table,
    route: Route,
    shape: Point,
    *,
    without: Point | None = None,
    written: bool = True,
) -> float:
    """`estimate` by a table, as if it lacked the point `without`."""
    ratio = correction(measured, *route, shape, without=without)
    return model_seconds(spec, *route, shape, written=written) * ratio


def model_seconds(
    spec: DeviceSpec, algorithm: str, arithmetic: str, dtype: str, shape: Point, *, written: bool = True
) -> float:
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
    if tiles < spec.sm_count:
        tiles *= max(1, min(model.parts, k // _SPLIT_K, spec.sm_count // tiles))
    filled = math.ceil(m / model.tile) * model.tile * math.ceil(n / model.tile) * model.tile * batch
    busy = min(1.0, tiles / spec.sm_count)
    complexity = 8 if dtype.startswith("complex") else 2
    arithmetic_s = complexity * filled * (k + model.ends) / (model.rate * scale * speed * busy)
    itemsize = _ITEMSIZE[dtype]
    operands, result = batch * (m * k + k * n), batch * m * n if written else 0
    memory_s = itemsize * (operands * (1 + model.passes) + result) / (_BANDWIDTH * scale)
    passes_s = itemsize * operands * model.passes / (_BANDWIDTH * scale)
    return model.launches * _LAUNCH_S + max(arithmetic_s + passes_s, memory_s)


def gram_seconds(spec: DeviceSpec, dtype: str, shape: Point, matrices: int, elements: float, parts: int) -> float:
    """Seconds of sums of squares over m of products of `shape` by way of Gram matrices; inf where nothing is known.

    `matrices`: different ones of A in the batch. `elements`: of each Gram matrix that are made. `parts`: blocks for
    each of them.
    """
    speed = DOUBLE_SPEED.get(spec.arch, 0.0)
    if speed == 0.0:
        return math.inf
    batch, m, n, k = shape
    scale = spec.sm_count / _MEASURED_SMS
    complexity, wide = (8, "complex128") if dtype.startswith("complex") else (2, "float64")
    made_s = complexity * matrices * m * elements / (_GRAM_RATE * scale * speed * _busy(spec, matrices * parts))
    # Half of each matrix is multiplied, and the squares on its diagonal.
    model = MODELS["simt", "plain", wide]
    rows, columns = (math.ceil(extent / model.tile) * model.tile for extent in (k, n))
    forms = complexity * batch * columns * rows * (rows + model.tile) / 2
    forms_s = forms / (model.rate * scale * speed * _busy(spec, batch * columns // model.tile))
    memory_s = _ITEMSIZE[dtype] * (matrices * m * k + batch * k * n) / (_BANDWIDTH * scale)
    return _GRAM_LAUNCHES * _LAUNCH_S + max(made_s + forms_s, memory_s)


def _busy(spec: DeviceSpec, blocks: int) -> float:
    return min(1.0, blocks / spec.sm_count)


def correction(
    measured: Table, algorithm: str, arithmetic: str, dtype: str, shape: Point, *, without: Point | None = None
) -> float:
    """Measured over modelled time near `shape`; 1 where nothing was measured.

    A route that was not measured has the ratios of the same algorithm's other arithmetic. `without`: a point to pass
    over.
    """
    points = measured.ratios.get((algorithm, arithmetic, dtype)) or measured.sibling(algorithm, dtype)
    here, gone = _place(shape), None if without is None else _place(without)
    distances = sorted((_distance(here, there), ratio) for there, ratio in points if there != gone)[:_NEIGHBOURS]
    if not distances:
        return 1.0
    if distances[0][0] < _EXACT:
        return math.exp(distances[0][1])
    weights = [distance**-4 for distance, _ in distances]
    mean = sum(weight * ratio for weight, (_, ratio) in zip(weights, distances, strict=True)) / sum(weights)
    return math.exp(mean)


def _place(shape: Point) -> tuple[float, ...]:
    return tuple(math.log2(extent) for extent in shape)


def _distance(here: tuple[float, ...], there: tuple[float, ...]) -> float:
    """Binary orders of magnitude to a point, or to its transpose and a little further."""
    batch, m, n, k = there
    return min(math.dist(here, there), math.hypot(math.dist(here, (batch, n, m, k)), _TRANSPOSED))


@dataclass(frozen=True)
class Table:
    """What was measured on an architecture: by algorithm, arithmetic and dtype (log2 of the shape, log of measured over
    modelled time).
    """

    ratios: dict[Route, tuple[tuple[tuple[float, ...], float], ...]]

    def sibling(self, algorithm: str, dtype: str) -> tuple[tuple[tuple[float, ...], float], ...]:
        """The ratios of the algorithm's first measured arithmetic on that dtype."""
        same = (points for key, points in self.ratios.items() if (key[0], key[2]) == (algorithm, dtype))
        return next(same, ())

    @classmethod
    def of(cls, document: dict[str, Any]) -> Table:
        """From the JSON of tune_dispatch.py. Raises KeyError, ValueError where it is none."""
        # The table is of the device that it was measured on: its own model is what the times are compared with.
        spec = measured_device(document)
        found: dict[Route, list[tuple[tuple[float, ...], float]]] = {}
        for point in document["points"]:
            shape = _shape(point)
            for who, seconds in point["seconds"].items():
                algorithm, arithmetic = who.split(":")
                modelled = model_seconds(spec, algorithm, arithmetic, point["dtype"], shape)
                if not 0 < modelled < math.inf:
                    continue
                entry = (_place(shape), math.log(seconds / modelled))
                found.setdefault((algorithm, arithmetic, point["dtype"]), []).append(entry)
        return cls({key: tuple(entries) for key, entries in found.items()})


def _shape(point: dict[str, Any]) -> Point:
    return point["batch"], point["m"], point["n"], point["k"]


def measured_device(document: dict[str, Any]) -> DeviceSpec:
    """As much of the device that a table was measured on as the models need. Raises ValueError for an unknown one."""
    from gemmserve_kernels.device.spec import KNOWN

    about = document["environment"]
    alike = [spec for spec in KNOWN.values() if spec.arch == about["arch"]]
    if not alike:
        raise ValueError(f"no model of {about['arch']}")
    found = next((spec for spec in alike if about["device"].startswith(spec.name)), alike[0])
    return replace(found, sm_count=about.get("sm_count", found.sm_count))


# ---- how good a table is between its points


@dataclass(frozen=True)
class LeftOut:
    """A point, the route that the others would choose for it, the best one there, and the best one's time over it."""

    dtype: str
    mode: str
    shape: Point
    chosen: str
    best: str
    ratio: float


_MODES: Final[dict[str, tuple[str, ...]]] = {
    "auto": ("plain", "3xfp16", "fp16", "ozaki"),
    "tf32": ("tf32", "1xfp16", "1xtf32"),
}
"""The arithmetic that routes of a mode do."""


def left_out(measured: Table, document: dict[str, Any]) -> list[LeftOut]:
    """For every point of `document`, whose table is `measured`, what the table would choose without it."""
    spec = measured_device(document)
    found = []
    for point in document["points"]:
        shape, dtype = _shape(point), point["dtype"]
        for mode, arithmetics in _MODES.items():
            times = {who: s for who, s in point["seconds"].items() if who.split(":")[1] in arithmetics}
            if len(times) < 2:
                continue
            guesses = {who: _guess(spec, measured, who, dtype, shape) for who in times}
            chosen, best = min(guesses, key=lambda who: guesses[who]), min(times, key=lambda who: times[who])
            found.append(LeftOut(dtype, mode, shape, chosen, best, times[best] / times[chosen]))
    return found


def _guess(spec: DeviceSpec, measured: Table, who: str, dtype: str, shape: Point) -> float:
    algorithm, arithmetic = who.split(":")
    return predicted(spec, measured, (algorithm, arithmetic, dtype), shape, without=shape)


@cache
def table(arch: str) -> Table:
    """What was measured on that architecture; empty where nothing was."""
    path = resources.files("gemmserve_kernels.dispatch") / "tables" / f"{arch}.json"
    if not path.is_file():
        return Table({})
    return Table.of(json.loads(path.read_text(encoding="utf-8")))
