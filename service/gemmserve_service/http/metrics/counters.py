"""Counters and histograms for Prometheus that only one thread feeds: a dictionary and no locks.

prometheus_client's own take a lock for each number, several for an observation, which is a tenth of a small request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import CollectorRegistry


class Tally(Collector):
    """A counter by the values of its labels; without labels it begins at 0."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: dict[tuple[object, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def add(self, *labels: object, by: float = 1.0) -> None:
        """Counts."""
        self._counts[labels] = self._counts.get(labels, 0.0) + by

    @property
    def total(self) -> float:
        """The counts of all labels together."""
        return sum(self._counts.values())

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with the counts so far."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.copy().items():
            family.add_metric([str(label) for label in labels], count)
        yield family


class Distribution(Collector):
    """A histogram by the values of its labels; `bounds` grow, and each belongs to the bucket that it ends."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = tuple(map(float, bounds))
        self._series: dict[tuple[object, ...], tuple[list[int], list[float]]] = {}
        self._exemplars: dict[tuple[object, ...], dict[int, Exemplar]] = {}
        """The last one of each bucket, by series and bucket."""
        if not labels:
            self._begin(())
        registry.register(self)

    def observe_each(self, values: Iterable[float], series: Iterable[tuple[object, ...]], trace: str = "") -> None:
        """`observe` for several series, by the values of their labels; most values of a job's phases are 0."""
        lowest = self._bounds[0]
        for value, labels in zip(values, series, strict=True):
            if trace or value > lowest:
                self.observe(value, *labels, trace=trace)
                continue
            counts, total = self._series.get(labels) or self._begin(labels)
            counts[0] += 1
            total[0] += value

    def observe(self, value: float, *labels: object, trace: str = "") -> None:
        """Count a value. `trace`: traceparent of the span that it comes from, which becomes its bucket's exemplar."""
        counts, total = self._series.get(labels) or self._begin(labels)
        bucket = bisect_left(self._bounds, value)
        counts[bucket] += 1
        total[0] += value
        if trace:
            _, trace_id, span_id, _ = trace.split("-")
            exemplar = Exemplar({"trace_id": trace_id, "span_id": span_id}, value, time.time())
            self._exemplars.setdefault(labels, {})[bucket] = exemplar

    @property
    def total(self) -> float:
        """Sum of the values of all labels together."""
        return sum(total for _, (total,) in self._series.values())

    def _begin(self, labels: tuple[object, ...]) -> tuple[list[int], list[float]]:
        series = self._series[labels] = [0] * (len(self._bounds) + 1), [0.0]
        return series

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with the observations so far."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, (counts, (total,)) in self._series.copy().items():
            buckets: list[Any] = list(zip(names, map(float, accumulate(counts)), strict=True))
            for bucket, exemplar in self._exemplars.get(labels, {}).items():  # shown by OpenMetrics alone
                buckets[bucket] += (exemplar,)
            family.add_metric([str(label) for label in labels], buckets, total)
        yield family
