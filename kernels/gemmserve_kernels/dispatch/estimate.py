"""Estimate of an algorithm's time: a model of each, corrected by what was measured on this architecture. Pure.

The model is the larger of arithmetic and memory traffic, plus launches. `tables/<arch>.json`, which
`benchmarks/kernels/tune_dispatch.py` writes on the device, holds measured times; the ratio of measured to modelled
time varies slowly with the sizes, so it is interpolated between the nearest points (weights 1 / distance^4 in log2 of
m, n, k and batch; a point stands for its transpose too, a little further away, and extents that are multiples of 8 lie
apart from others) and the model is multiplied with it. At
a measured point the estimate is the measurement.

All of it is the device's time. A caller who enqueues small products one after another waits for the host instead:
`call_seconds`, by algorithm alone. How long that is says more of the machine than of the route, but which algorithm's
is the shorter one does not change with the machine.

A device without a table has the model alone, its rates scaled by the number of multiprocessors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.time_model import model_seconds
from gemmserve_kernels.device.spec import KNOWN

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.time_model import Point
    from gemmserve_kernels.device.spec import DeviceSpec

    Route = tuple[str, str, str]

_NEIGHBOURS: Final = 6
_EXACT: Final = 1e-9
_TRANSPOSED: Final = 0.5
"""Further distance of a transposed point, in binary orders of magnitude."""
_ALIGNED: Final = 8
"""Elements that extents are multiples of where the vendor's BLAS has its fast kernels: 33^3 takes it 2.6 times as long
as 32^3."""
_UNALIGNED: Final = 1.0
"""Distance of extents that are such multiples from others, likewise."""
_CALL_S: Final = {
    "vendor": 25e-6,
    "simt": 11e-6,
    "small": 11e-6,
    "dmma": 11e-6,
    "fused": 14e-6,
    "mma": 13e-6,
    "wgmma": 14e-6,
    "ozaki": 14e-6,
    "sums": 13e-6,
    "gram": 14e-6,
    "screen": 14e-6,
}
"""Seconds of the host for one of many calls, the plan known, on a host of an H200: the mean of those of fresh results
that take turns between two places (`benchmarks/kernels/host_cost.py`) and of such as are in another place each time,
for which graphs are set anew. The vendor's library chooses its kernel anew in every call. Reductions have none of their
own: they take about as long as products. Those of `gram` and `screen` are assumed, and were not measured."""


def estimate(
    spec: DeviceSpec, algorithm: str, arithmetic: str, dtype: str, shape: Point, *, written: bool = True
) -> float:
    """Seconds on the device of a product of `shape` = (batch, m, n, k), all at least 1; inf where nothing is known.

    `arithmetic`: "plain", or what the tensor cores multiply ("3xfp16", "1xfp16", "3xtf32", "ozaki" ...). `written`:
    whether the product goes to memory, rather than into a reduction.
    """
    return predicted(spec, table(spec.arch), (algorithm, arithmetic, dtype), shape, written=written)


def call_seconds(spec: DeviceSpec, algorithm: str) -> float:
    """Seconds that a call costs the host, so that a device which is done sooner waits for the next one; 0 where nothing
    was measured on the architecture, and the model alone says too little of short products to compare them by it.
    """
    return _CALL_S[algorithm] if table(spec.arch).ratios else 0.0


def predicted(
    spec: DeviceSpec, measured: Table, route: Route, shape: Point, *, without: Point | None = None, written: bool = True
) -> float:
    """`estimate` by a table, as if it lacked the point `without`."""
    return model_seconds(spec, *route, shape, written=written) * correction(measured, *route, shape, without=without)


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
    """Return a shape as a point: binary logarithms, and what sets extents apart for which libraries have other
    kernels.
    """
    _, *extents = shape
    aligned = all(extent % _ALIGNED == 0 for extent in extents)
    return (*(math.log2(extent) for extent in shape), 0.0 if aligned else _UNALIGNED)


def _distance(here: tuple[float, ...], there: tuple[float, ...]) -> float:
    """Binary orders of magnitude to a point, or to its transpose and a little further."""
    batch, m, n, k, alignment = there
    return min(math.dist(here, there), math.hypot(math.dist(here, (batch, n, m, k, alignment)), _TRANSPOSED))


@dataclass(frozen=True)
class Table:
    """Measurements on an architecture: by algorithm, arithmetic and dtype (log2 of the shape, log of measured over
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
            shape = shape_of(point)
            for who, seconds in point["seconds"].items():
                algorithm, arithmetic = who.split(":")
                modelled = model_seconds(spec, algorithm, arithmetic, point["dtype"], shape)
                if not 0 < modelled < math.inf:
                    continue
                entry = (_place(shape), math.log(seconds / modelled))
                found.setdefault((algorithm, arithmetic, point["dtype"]), []).append(entry)
        return cls({key: tuple(entries) for key, entries in found.items()})


def shape_of(point: dict[str, Any]) -> Point:
    """Batch, m, n and k of a point of a table."""
    return point["batch"], point["m"], point["n"], point["k"]


def measured_device(document: dict[str, Any]) -> DeviceSpec:
    """As much of the device that a table was measured on as the models need. Raises ValueError for an unknown one."""
    about = document["environment"]
    alike = [spec for spec in KNOWN.values() if spec.arch == about["arch"]]
    if not alike:
        raise ValueError(f"no model of {about['arch']}")
    found = next((spec for spec in alike if about["device"].startswith(spec.name)), alike[0])
    return replace(found, sm_count=about.get("sm_count", found.sm_count))


@cache
def table(arch: str) -> Table:
    """Return what was measured on that architecture; empty where nothing was."""
    path = resources.files("gemmserve_kernels.dispatch") / "tables" / f"{arch}.json"
    if not path.is_file():
        return Table({})
    return Table.of(json.loads(path.read_text(encoding="utf-8")))
