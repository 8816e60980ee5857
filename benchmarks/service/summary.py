"""What the rows say together: ratios between those who took turns, beside what was aimed at. Pure."""

from __future__ import annotations

import statistics

MIB = 1 << 20
PRODUCTS = 1000
"""Products of a batch, as in exchanges.py."""


def find(rows, case, server, operation=None, via="wire"):
    """The row, or None."""
    for row in rows:
        same = row["case"] == case and row.get("server") == server and row["via"] == via
        if same and operation in {None, row["operation"]} and row["latency"]["count"]:
            return row
    return None


def of_rounds(one, other, field):
    """The median over the rounds of one's figure over the other's of the same round, or None."""
    if one is None or other is None:
        return None
    pairs = [(x, y) for x, y in zip(one[field], other[field], strict=False) if x and y]
    return statistics.median(x / y for x, y in pairs) if pairs else None


def time_ratio(one, other):
    """Median latencies."""
    return of_rounds(one, other, "medians_ms")


def rate_ratio(one, other):
    """Answers a second."""
    return of_rounds(one, other, "rates")


def p99_ratio(one, other):
    """99th percentiles of all rounds together."""
    return one["latency"]["p99_ms"] / other["latency"]["p99_ms"] if one and other else None


def summary(rows):
    """[{name, unit, target, stretch, found, met}]: "<= x" is better below, "x" above. `found` is None where it is not
    measured."""
    every = [*_round_trip(rows), *_small(rows), *_batch(rows), *_memory(rows)]
    return [
        {
            "name": name,
            "unit": unit,
            "target": target,
            "stretch": stretch,
            "found": None if found is None else round(found, 4),
            "met": met(found, target, unit),
        }
        for name, unit, target, stretch, found in every
    ]


def met(found, target, unit):
    """Whether it is."""
    if found is None or target is None:
        return None
    return bool(found <= target) if unit.startswith("<=") else bool(found >= target)


def _round_trip(rows):
    ours = find(rows, "round trip", "gemmserve")
    for operation in ("axpy", "echo"):
        rival = find(rows, "round trip", "tritonserver", operation)
        yield f"96 MiB on the wire, over tritonserver's time ({operation})", "<= x", 0.7, None, time_ratio(ours, rival)
    for server, stretch in (("asgi", 1.2), ("asgi, malloc", None), ("recv_into, TCP", None)):
        found = time_ratio(ours, find(rows, "round trip", server))
        yield f"96 MiB on the wire, over the time of {server} (echo)", "<= x", None, stretch, found
    sdk = find(rows, "sdk", "gemmserve", via="sdk")
    for operation in ("axpy", "echo"):
        rival = find(rows, "sdk", "tritonserver", operation, "sdk")
        yield f"96 MiB, tritonclient's time ({operation}) over our client's", "x", 1.5, 2.0, time_ratio(rival, sdk)
    ceiling = find(rows, "upload", "recv_into, TCP")
    rate = time_ratio(ceiling, find(rows, "upload", "gemmserve"))
    yield "upload of 256 MiB, rate over a recv_into loop's", "x", 0.75, 0.9, rate
    rate = time_ratio(find(rows, "upload fresh", "recv_into, TCP"), find(rows, "upload fresh", "gemmserve"))
    yield "upload of 64 MiB to space never used, rate over a recv_into loop's", "x", None, None, rate
    for via, how in (("sdk shm", ""), ("sdk shm in place", " in place")):
        shared = find(rows, "shared memory", "gemmserve", via=via)
        for operation in ("axpy", "echo"):
            found = time_ratio(shared, find(rows, "shared memory", "tritonserver", operation, via))
            yield f"96 MiB by shared memory{how}, over tritonserver's time ({operation})", "<= x", 1.0, 0.5, found
    frozen = find(rows, "shared memory", "gemmserve", via="sdk shm frozen")
    found = time_ratio(frozen, find(rows, "shared memory", "tritonserver", "axpy", "sdk shm in place"))
    yield "96 MiB, frozen operands, over tritonserver's time in place (axpy)", "<= x", None, None, found


def _small(rows):
    for clients in (1, 16):
        case = f"small {clients}"
        ours, who = find(rows, case, "gemmserve"), f"64 x 64, {clients} client{'s' if clients > 1 else ''}"
        for server in ("litserve", "bentoml"):
            yield f"{who}, rate over {server}'s", "x", 3.0, None, rate_ratio(ours, find(rows, case, server))
        triton = find(rows, case, "tritonserver")
        yield f"{who}, rate over tritonserver's", "x", 0.6, 0.8, rate_ratio(ours, triton)
        yield f"{who}, p99 over tritonserver's", "<= x", 1.0, None, p99_ratio(ours, triton)


def _batch(rows):
    kinds = (("batch wire", "product", "batch", 8.0, 12.0), ("batch resident", "job", "batch resident", 50.0, 100.0))
    for case, single, many, target, stretch in kinds:
        ratio = time_ratio(find(rows, case, "gemmserve", single), find(rows, case, "gemmserve", many))
        found = None if ratio is None else PRODUCTS * ratio
        yield f"1,000 64 x 64 products, {case}, time one by one over", "x", target, stretch, found


def _memory(rows):
    row = next((row for row in rows if row["case"] == "memory"), None)
    for way in ("upload", "download"):
        found = row and row[way] / MIB
        yield f"anonymous memory of the front over idle, {way}", "<= MiB", 64, None, found
