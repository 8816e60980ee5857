"""History of the last hour in memory: rates from the counters that `/metrics` has, times from a sample of jobs."""

from __future__ import annotations

import json
import math
import time
from array import array
from typing import TYPE_CHECKING, Final

from gemmserve_service.http.overview.schemas import Point, PointSeries
from gemmserve_service.runtime import clock
from gemmserve_service.scheduling.estimates import device_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_service.executor.port import Worker
    from gemmserve_service.http.overview.recent import Recent
    from gemmserve_service.schemas import Timings

STEP_S: Final = 5
"""Seconds from one point to the next: workers read their sensors as often."""
POINTS: Final = 3600 // STEP_S
_DIGITS: Final = 6
_PHASES: Final = ("queued", "computing", "total")
_NOTHING: Final = math.nan


class History:
    """Rings of numbers, eight bytes each: what is kept does not depend on what the server does."""

    def __init__(
        self, counts: Callable[[], dict[str, float]], recent: Recent, workers: Callable[[], Sequence[Worker]]
    ) -> None:
        """`counts()`: totals since the start by the names of the series that are rates. `workers()`: all that there are
        now.
        """
        self._counts = counts
        self._recent = recent
        self._workers = workers
        self._before = counts()
        self._before_at = time.monotonic()
        names = [*self._before, *(f"{phase}_{rank}" for phase in _PHASES for rank in ("p50", "p99"))]
        self._rings = {name: array("d", [_NOTHING]) * POINTS for name in names}
        self._utilisation = {each: array("d", [_NOTHING]) * POINTS for each in workers()}
        """Rings of the workers that there were at the last point, in their order; before the first, that there are."""
        self._made = 0
        """Points so far."""
        self._end = clock.time()
        self._rendered: bytes | None = None

    def advance(self) -> Point:
        """Make the next point, of the time since the last one: every `STEP_S`. Where the process stood still for
        longer, the points that it missed are empty.
        """
        now, counts = time.monotonic(), self._counts()
        elapsed_s = max(now - self._before_at, 1e-3)
        for _ in range(min(round(elapsed_s / STEP_S) - 1, POINTS)):
            self._put({}, ())
        values = {name: (count - self._before[name]) / elapsed_s for name, count in counts.items()}
        values |= _percentiles(self._recent.take_sample())
        workers = self._workers()
        use = [worker.health.utilisation if worker.ready else None for worker in workers]
        self._before, self._before_at, self._end = counts, now, clock.time()
        self._put(values, workers)
        series = {name: _known(ring[(self._made - 1) % POINTS]) for name, ring in self._rings.items()}
        return Point(time=self._end, series=PointSeries.model_validate({**series, "utilisation": use}))

    def render(self) -> bytes:
        """Return the JSON of `schemas.History`; made once a point, whoever asks."""
        if self._rendered is None:
            series: dict[str, object] = {name: self._read(ring) for name, ring in self._rings.items()}
            series["utilisation"] = [self._read(ring) for ring in self._utilisation.values()]
            document = {"step": STEP_S, "end": self._end, "series": series}
            self._rendered = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        return self._rendered

    def _put(self, values: dict[str, float], workers: Sequence[Worker]) -> None:
        place = self._made % POINTS
        for name, ring in self._rings.items():
            ring[place] = float(f"{values.get(name, _NOTHING):.{_DIGITS}g}")
        if workers:
            rings, nothing = self._utilisation, array("d", [_NOTHING])
            self._utilisation = {each: rings.get(each) or nothing * POINTS for each in workers}
        for worker, ring in self._utilisation.items():
            known = worker.health.utilisation if workers and worker.ready else None
            ring[place] = _NOTHING if known is None else round(known, 4)
        self._made += 1
        self._rendered = None

    def _read(self, ring: array[float]) -> list[float | None]:
        place = self._made % POINTS
        oldest_first = ring[place:] + ring[:place] if self._made >= POINTS else ring[:place]
        return [_known(value) for value in oldest_first]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _percentiles(sample: Sequence[Timings]) -> dict[str, float]:
    """Return median and 99th percentile (nearest rank) of each phase; nothing where no job ended."""
    if not sample:
        return {}
    busy = [device_seconds(timings) for timings in sample]
    queued = [timings.queue_s for timings in sample]
    total = [timings.queue_s + timings.compile_s + busy_s for timings, busy_s in zip(sample, busy, strict=True)]
    found = {}
    for phase, seconds in zip(_PHASES, (queued, busy, total), strict=True):
        seconds.sort()
        for percent in (50, 99):
            found[f"{phase}_p{percent}"] = seconds[math.ceil(len(seconds) * percent / 100) - 1]
    return found
