"""Taking turns: who is timed how often, and what the figures are."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import pytest
from benchmark_scripts import FOLDER, load

(timing,) = load("timing")


class Clock:
    """Every call of contender i takes its seconds on the device, and `host` more on the wall."""

    def __init__(self, seconds, host=0.0):
        self.seconds, self.extra, self.order = seconds, host, []

    def device(self, run, first, calls):
        who = run(first)
        self.order.append((who, first, calls))
        return self.seconds[who]

    def host(self, function, calls):
        return self.seconds[function()] + self.extra

    def host_of_many(self, run, calls):
        return self.seconds[run(0)] + self.extra


def runs(*names):
    return {name: lambda _, name=name: name for name in names}


def test_short_products_are_timed_many_at_once():
    plan = timing.plan_of(1e-5, 1e-5, rounds=15, budget=1)
    assert (plan.rounds, plan.calls) == (15, timing.MOST_CALLS)
    assert timing.plan_of(1e-4, 1e-4, rounds=15, budget=1).calls == 3
    assert timing.plan_of(0.5, 0.5, rounds=15, budget=0.3) == timing.Plan(3, 1)


def test_the_hopeless_run_once():
    assert timing.plan_of(5.0, 1.0, rounds=15, budget=100).rounds == 1
    assert timing.plan_of(3.9, 1.0, rounds=15, budget=100).rounds == 15


def test_contenders_take_turns_in_another_order_each_round():
    clock = Clock({"a": 0.010, "b": 0.011})
    found = timing.in_turns(clock, runs("a", "b"), rounds=4, budget=1)
    timed = [who for who, *_ in clock.order][2:]  # the probes come first
    assert timed == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert found["a"].seconds == pytest.approx(0.010)
    assert (found["a"].rounds, found["a"].calls, found["a"].wall) == (4, 1, None)


@pytest.mark.parametrize("count", range(1, 12))
def test_each_comes_as_often_behind_every_other_one(count):
    rows = timing.orders(count)
    assert all(sorted(row) == list(range(count)) for row in rows)
    for places in zip(*rows, strict=True):
        assert {places.count(who) for who in range(count)} == {len(rows) // count}
    behind = Counter(pair for row in rows for pair in itertools.pairwise(row))
    assert len(behind) == count * (count - 1)
    assert len(set(behind.values())) <= 1


def test_the_first_rounds_already_have_each_behind_several():
    for count in range(4, 16):
        behind = {pair for row in timing.orders(count)[:3] for pair in itertools.pairwise(row)}
        assert min(Counter(second for _, second in behind).values()) >= 2


def test_who_is_timed_no_more_leaves_the_others_balanced():
    clock = Clock({"a": 0.010, "b": 0.011, "c": 0.012, "slow": 1.0})
    timing.in_turns(clock, runs("a", "slow", "b", "c"), rounds=7, budget=1)
    timed = [who for who, *_ in clock.order][4:]
    later = [timed[i : i + 3] for i in range(4, len(timed), 3)]
    assert sorted(timed[:4]) == ["a", "b", "c", "slow"]
    assert all(sorted(each) == ["a", "b", "c"] for each in later)
    assert set(Counter(pair for each in later for pair in itertools.pairwise(each)).values()) == {2}


def test_short_ones_have_a_time_on_the_wall_too():
    found = timing.in_turns(Clock({"a": 1e-5, "b": 4e-6}, host=7e-5), runs("a", "b"), rounds=3)
    assert found["a"].wall == pytest.approx(8e-5)
    assert found["b"].seconds == pytest.approx(4e-6)


def test_the_sets_rotate_from_round_to_round():
    clock = Clock({"a": 1e-4})
    timing.in_turns(clock, runs("a"), rounds=3, budget=1)
    assert [first for _, first, _ in clock.order][-3:] == [0, 3, 6]


def test_the_spread_is_between_the_quartiles():
    found = timing.summarized([1.0, 2.0, 3.0, 4.0, 5.0], timing.Plan(5, 1), None)
    assert (found.seconds, found.fastest, found.spread) == (3.0, 1.0, pytest.approx(1.0))


def test_the_cpu_clock_counts_calls():
    calls = []
    clock = timing.CpuClock()
    assert clock.device(calls.append, 2, 3) >= 0
    assert calls == [2, 3, 4]


def test_the_watchdog_ends_a_process_that_hangs():
    code = f"import sys; sys.path.append({str(FOLDER)!r}); import threading, timing\n"
    code += "with timing.watchdog({}):\n    {}\nprint('alive')"
    for seconds, body, status in ((0.2, "threading.Event().wait()", 1), (250, "pass", 0)):
        command = [sys.executable, "-c", code.format(seconds, body)]
        assert subprocess.run(command, capture_output=True, check=False, timeout=250).returncode == status
