"""Times of several ways to do the same thing on a GPU, taken in turns.

Two times of each, which are not the same for small products:

`seconds`  the device's share: events around calls that were enqueued while the device was kept busy with something
           else, so that it never waits for the host;
`wall`     the caller's: the clock around many calls one after another and the wait for the last, over their number.
           Where the host needs longer to enqueue a call than the device to run it, this is the larger one.

The contenders take turns, in another order every round: a device that throttles under one slows all of them, each as
often as the others over a full set of rounds (`orders`). Operands rotate, see `targets.GpuTarget.sets`.
"""

from __future__ import annotations

import faulthandler
import math
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass

LEAST_S = 3e-4
"""Length of one measurement: the calls between two events take that long together, or are MOST_CALLS."""
MOST_CALLS = 24
"""Enqueued at once: a stream takes about a thousand launches before the host has to wait."""
WALL_S = 2e-3
WALL_CALLS = 200
WALL_BELOW = 2e-3
"""Products longer than that on the device take the same time on the wall."""
LONG_S = 5e-3
"""From there on one probe is enough."""
HOPELESS = 4.0
"""A contender that takes so many times the best one's time is timed in one round only."""


@dataclass(frozen=True)
class Plan:
    """How often: `rounds` of turns of `calls` each."""

    rounds: int
    calls: int


@dataclass(frozen=True)
class Times:
    """Seconds a call. `spread` is the distance between the quartiles over the median."""

    seconds: float
    fastest: float
    spread: float
    wall: float | None
    rounds: int
    calls: int


def plan_of(seconds, best, *, rounds, budget):
    """For a contender of about `seconds` beside one of `best`; `budget` seconds of device time a contender."""
    calls = min(MOST_CALLS, max(1, math.ceil(LEAST_S / max(seconds, 1e-7))))
    if seconds > HOPELESS * best:
        return Plan(1, calls)
    return Plan(max(3, min(rounds, int(budget / (calls * max(seconds, 1e-7))))), calls)


def in_turns(clock, contenders, *, rounds=15, budget=0.4):
    """Times by name. `contenders`: name -> run(i), where i counts the sets of operands."""
    probes = {}
    for name, run in contenders.items():
        clock.host(lambda run=run: run(0), 1)  # loads, compiles, chooses
        probes[name] = clock.device(run, 1, 1)
        if probes[name] < LONG_S:
            probes[name] = min(probes[name], clock.device(run, 2, 1))
    best = min(probes.values())
    plans = {name: plan_of(probe, best, rounds=rounds, budget=budget) for name, probe in probes.items()}
    found = {name: [] for name in contenders}
    for turn in range(max(plan.rounds for plan in plans.values())):
        names = [name for name, plan in plans.items() if turn < plan.rounds]
        rows = orders(len(names))
        for name in (names[i] for i in rows[turn % len(rows)]):
            found[name].append(clock.device(contenders[name], turn * plans[name].calls, plans[name].calls))
    return {
        name: summarized(times, plans[name], _wall(clock, contenders[name], statistics.median(times)))
        for name, times in found.items()
    }


def orders(count):
    """Orders of `count` contenders in which each comes as often behind every other one: the rows of a Latin square that
    is balanced for carry-over, of two such squares for an odd number (E. J. Williams, Australian Journal of Scientific
    Research A 2, 1949).
    """
    first = [(i + 1) // 2 if i % 2 else -(i // 2) % count for i in range(count)]
    rows = [[(who + row) % count for who in first] for row in range(count)]
    return [each for row in rows for each in ((row, row[::-1]) if count % 2 else (row,))]


def _wall(clock, run, seconds):
    if seconds > WALL_BELOW:
        return None
    once = clock.host(lambda: run(0), 3)
    calls = max(3, min(WALL_CALLS, math.ceil(WALL_S / once)))
    return min(clock.host_of_many(run, calls) for _ in range(3))


def summarized(times, plan, wall):
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 2 else [median] * 3
    return Times(median, min(times), (quartiles[2] - quartiles[0]) / median, wall, plan.rounds, plan.calls)


@contextmanager
def watchdog(seconds):
    """Ends the process, with a traceback, where the body takes longer: a kernel that hangs cannot be interrupted. 0: no
    limit."""
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class CpuClock:
    """For functions that return when they are done."""

    def alive(self):
        """Always."""
        return True

    def device(self, run, first, calls):
        """Seconds of one call of `calls`."""
        start = time.perf_counter()
        for i in range(first, first + calls):
            run(i)
        return (time.perf_counter() - start) / calls

    def host(self, function, calls):
        """Seconds until one call returns, at best."""
        return min(_clocked(function) for _ in range(calls))

    def host_of_many(self, run, calls):
        """Seconds a call, one after another, the wait for the last included."""
        return self.device(run, 0, calls)


class GpuClock:
    """For functions that enqueue work on CuPy's current stream."""

    FILL_BYTES = 1 << 30
    FILL_RATE = 5e12
    """Bytes a second, not less than any device writes."""
    MOST_FILLS = 400

    def __init__(self, cupy, fill_bytes=FILL_BYTES):
        self._cuda = cupy.cuda
        self._fill = cupy.empty(fill_bytes, cupy.uint8)
        self._enqueue = {}

    def device(self, run, first, calls):
        """Seconds of one call of `calls`, enqueued behind writes that last until all of them are."""
        start, stop = self._cuda.Event(), self._cuda.Event()
        fills = math.ceil(2 * calls * self._host_seconds(run) * self.FILL_RATE / self._fill.nbytes)
        for _ in range(min(fills, self.MOST_FILLS)):
            self._fill.fill(0)
        start.record()
        began = time.perf_counter()
        for i in range(first, first + calls):
            run(i)
        self._enqueue[run] = (time.perf_counter() - began) / calls
        stop.record()
        stop.synchronize()
        return self._cuda.get_elapsed_time(start, stop) / 1e3 / calls

    def _host_seconds(self, run):
        if run not in self._enqueue:
            self.synchronize()
            self._enqueue[run] = _clocked(lambda: run(0))
        # A call that waits for the device itself would be followed by as long a wait every time.
        return min(self._enqueue[run], 2e-3)

    def host(self, function, calls):
        """Seconds until the host and the device are done with one call, at best."""
        return min(_clocked(lambda: (function(), self.synchronize())) for _ in range(calls))

    def host_of_many(self, run, calls):
        """Seconds a call, one after another, the wait for the last included."""
        self.synchronize()

        def all_of_them():
            for i in range(calls):
                run(i)
            self.synchronize()

        return _clocked(all_of_them) / calls

    def synchronize(self):
        self._cuda.Device().synchronize()

    def alive(self):
        """Whether the device still does what it is told: after a fault in a kernel, nothing in the process will."""
        try:
            self._fill[:1].fill(0)
            self.synchronize()
        except Exception:
            return False
        return True


def _clocked(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
