"""Latencies in HDR histograms: three significant digits from 100 ns to an hour, mergeable, encoded as HDR V2 text."""

from __future__ import annotations

from hdrh.histogram import HdrHistogram

LOWEST_NS, HIGHEST_NS, DIGITS = 100, 3600 * 10**9, 3
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


def empty():
    """No latency yet."""
    return HdrHistogram(LOWEST_NS, HIGHEST_NS, DIGITS)


def encoded(histogram):
    """As text: what any HDR histogram library reads."""
    return histogram.encode().decode("ascii")


def merged(texts):
    """All of them as one."""
    whole = empty()
    for text in texts:
        whole.decode_and_add(text)
    return whole


def summary(histogram):
    """Milliseconds: {count, p50_ms, p90_ms, p99_ms, p99_9_ms, max_ms}; count alone where there is none."""
    count = histogram.get_total_count()
    if not count:
        return {"count": 0}
    values = {f"p{str(p).removesuffix('.0').replace('.', '_')}_ms": at(histogram, p) for p in PERCENTILES}
    largest = histogram.get_max_value() / 1e6
    return {"count": count, **values, "max_ms": largest}


def at(histogram, percentile):
    """Milliseconds at that percentile."""
    return histogram.get_value_at_percentile(percentile) / 1e6


def curve(histogram, points=60):
    """(1 / (1 - quantile), milliseconds), evenly spread over the logarithm of the first: the usual tail plot."""
    count = histogram.get_total_count()
    if not count:
        return []
    rarest = max(2.0, float(count))
    steps = [rarest ** (i / (points - 1)) for i in range(points)]
    return [(each, at(histogram, 100.0 * (1 - 1 / each))) for each in steps]
