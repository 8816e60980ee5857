"""Counters and histograms: what prometheus_client's own would say."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from gemmserve_service.http.metrics.counters import Distribution, Tally

BOUNDS = (0.1, 1, 30)


def samples(registry):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_they_count_as_the_library_does():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    jobs = (
        Tally("jobs", "Jobs.", ["op", "status"], registry=ours),
        Counter("jobs", "Jobs.", ["op", "status"], registry=theirs),
    )
    sent = Tally("sent_bytes", "Bytes.", registry=ours), Counter("sent_bytes", "Bytes.", registry=theirs)
    size = (
        Distribution("size", "Sizes.", BOUNDS, registry=ours),
        Histogram("size", "Sizes.", buckets=BOUNDS, registry=theirs),
    )
    took = (
        Distribution("took", "Seconds.", BOUNDS, ["op"], registry=ours),
        Histogram("took", "Seconds.", ["op"], buckets=BOUNDS, registry=theirs),
    )
    assert samples(ours) == samples(theirs)
    for op, status, seconds in (("gemm", 200, 0.1), ("gemm", 200, 0.05), ("b", 404, 1e9), ("b", 404, 30)):
        jobs[0].add(op, status)
        jobs[1].labels(op, status).inc()
        sent[0].add(by=7)
        sent[1].inc(7)
        size[0].observe(seconds)
        size[1].observe(seconds)
        took[0].observe(seconds, op)
        took[1].labels(op).observe(seconds)
        assert samples(ours) == samples(theirs)
    assert samples(ours)["jobs_total", (("op", "gemm"), ("status", "200"))] == 2


def test_several_series_are_observed_as_one_by_one():
    registries = CollectorRegistry(), CollectorRegistry()
    one, each = (Distribution("size", "Sizes.", BOUNDS, ["op"], registry=registry) for registry in registries)
    for value in (0.0, 0.1, 0.1000001, 1, 31):
        one.observe(value, "a")
        one.observe(2 * value, "b")
        each.observe_each((value, 2 * value), [("a",), ("b",)])
    assert samples(registries[0]) == samples(registries[1])
