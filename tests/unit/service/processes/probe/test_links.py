"""Rates of links: which device counts, copies at once, failures."""

from __future__ import annotations

import threading

import pytest

from gemmserve_service.processes.probe.links import link_rates, rate_of, rates_for


class Slow:
    """A device whose copies meet all others' before they end, where several are under way."""

    def __init__(self, barrier=None) -> None:
        self.copies = 0
        self.closed = 0
        self.barrier = barrier

    def copy(self) -> int:
        self.copies += 1
        return 1000

    pinned_up = pinned_down = pinned_both = copy

    def ring(self, threads):
        assert threads in {1, 4}
        return self.copy, self.copy, self.close

    def close(self) -> None:
        self.closed += 1


def test_every_way_is_measured_alone_and_together() -> None:
    devices = [Slow(), Slow()]
    found = link_rates(devices, (1, 4))
    assert set(found) == {"pinned_up", "pinned_down", "pinned_both", "ring_up", "ring_down"}
    assert set(found["ring_up"]) == set(found["ring_down"]) == {"1", "4"}
    for each in (found["pinned_both"], found["ring_up"]["4"]):
        assert each["alone"] > 0
        assert each["together"] > 0
    assert [device.closed for device in devices] == [2, 2]
    assert devices[0].copies == devices[1].copies == 7 * 2 * 4  # seven ways, alone and together, once and three times


def test_one_device_is_all_devices() -> None:
    found = link_rates([Slow()], (1,))
    assert found["pinned_up"]["alone"] == found["pinned_up"]["together"]


def test_rates_of_copies_that_run_at_once_are_those_of_each() -> None:
    meeting = threading.Barrier(2)
    ends = threading.Event()

    def slow() -> int:
        if not ends.is_set():
            meeting.wait(60)  # broken unless both are under way
        return 10

    def fast() -> int:
        if not ends.is_set():
            meeting.wait(60)
            ends.set()
        return 1000

    up, down = rates_for([slow, fast], 0.01)
    assert 0 < up < down


def test_a_copy_that_fails_ends_the_others() -> None:
    def fail() -> int:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        rates_for([fail, lambda: 1], 0.01)


def test_copies_run_at_once() -> None:
    meeting = threading.Barrier(3)

    def copy() -> int:
        meeting.wait(60)  # broken unless all three are under way
        return 1

    assert rate_of([copy] * 3) > 0


def test_a_failure_is_raised_and_nobody_waits() -> None:
    def broken() -> int:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        rate_of([lambda: 1, broken])


def test_a_failure_later_is_raised() -> None:
    calls = []

    def breaks() -> int:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("lost later")
        return 1

    with pytest.raises(RuntimeError, match="lost later"):
        rate_of([breaks, lambda: 1])


def test_rings_are_ended_where_a_copy_fails() -> None:
    device = Slow()
    device.copy = lambda: 1 / 0

    with pytest.raises(ZeroDivisionError):
        link_rates([device], (1,))
    assert device.closed == 1
