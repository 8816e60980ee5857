"""Ways in which rows of a load test ask a server, and the figure that they make of it."""

from __future__ import annotations

import threading

from benchmarks.load.stage import PATIENCE_S
from benchmarks.service import histogram

OPEN_CONNECTIONS = 32


class Skipped(Exception):  # noqa: N818 (no error)
    """A row that cannot be measured here; the text says why."""


def figure(case, unit, achieved, bound, bound_is, *, better="more", gauges=None, **more):
    """Return one figure: `ratio` is achieved over bound, good where it is large ("more") or small ("less")."""
    return {
        "case": case, "unit": unit, "achieved": achieved, "bound": bound, "bound_is": bound_is, "better": better,
        "ratio": achieved / bound, **(gauges.document() if gauges else {}), **more,
    }  # fmt: skip


def distribution(durations_ns):
    """Return (summary, text) of an HDR histogram of durations."""
    found = histogram.empty()
    for duration in durations_ns:
        found.record_value(duration)
    return histogram.summary(found), histogram.encoded(found)


def jobs(stage, url, operands, *, clients=None, **command):
    """Run jobs by client processes at one time (`clients`; all of them by default), counts divided among them.

    Return {count, seconds, nbytes, ids (of each client), client_cpu (processors)}.
    """
    used = clients or stage.clients
    count = command.pop("count", None)
    shares = [None if count is None else count // len(used) + (i < count % len(used)) for i in range(len(used))]
    commands = [{"work": "jobs", "pairs": operands, "count": share, **command} for share in shares]
    answers = stage.all_clients(url, commands, used)
    began, ended = min(each["began"] for each in answers), max(each["ended"] for each in answers)
    return {
        "count": sum(each["count"] for each in answers), "began": began, "seconds": ended - began,
        "nbytes": sum(each["nbytes"] for each in answers), "ids": [each["ids"] for each in answers],
        "client_cpu": sum(each["client_cpu"] for each in answers),
    }  # fmt: skip


def small(stage, server, loop, **more):
    """Run small one-shots on one connection, or at `open_rate`; return the generator's answer with its `latency`."""
    sizes = stage.sizes
    how = {"clients": 1} if loop == "closed" else {"clients": OPEN_CONNECTIONS, "rate": sizes.open_rate}
    work = {"protocol": "gemmserve", "operation": "product", "n": sizes.small, "seconds": sizes.turn_s}
    answer = stage.generators[0].ask(PATIENCE_S, address=server.address, **work, **how, **more)
    return {**answer, "latency": histogram.summary(histogram.merged([answer["histogram"]]))}


def together(calls):
    """Make the calls at one time, each in a thread. Raises what the first that failed raised."""
    failed = []

    def guarded(call):
        try:
            call()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
