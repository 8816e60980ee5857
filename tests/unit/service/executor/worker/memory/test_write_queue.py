"""Results that wait to be written: which is next, what is never written, what happens when memory is wanted."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from gemmserve_service.executor.worker.memory import write_queue as module
from gemmserve_service.executor.worker.memory.residency import Residency
from gemmserve_service.executor.worker.memory.write_queue import Outcome, Result, WriteQueue

WAIT_S = 60
SIZE = 1 << 10


class Copies:
    """Writes when it may; a result's value is its bytes."""

    def __init__(self, budget):
        self.resident = Residency(budget)
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Semaphore(0)
        self.written = []

    def store(self, value, out):
        self.begun.release()
        assert self.go.wait(WAIT_S)
        if isinstance(value, Exception):
            raise value
        out[:] = value
        self.written.append(int(value[0]))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "_MIN_BYTES", SIZE)


class Bench:
    def __init__(self, *, room=16, delay_s=3600.0):
        self.copies = Copies(4 * room * SIZE)
        self.told = []
        self.changed = threading.Condition()
        self.write_queue = WriteQueue(self.copies, lambda: None, delay_s=delay_s)
        self.write_queue.begin(self.tell)

    def tell(self, outcome):
        with self.changed:
            self.told.append(outcome)
            self.changed.notify_all()

    def add(self, number, value=None, *, start=True):
        out = np.zeros(SIZE, np.uint8)
        value = np.full(SIZE, number, np.uint8) if value is None else value
        taken = self.write_queue.reserve(f"t{number}", [Result(f"a{number}", value, out)])
        if taken and start:
            self.write_queue.start(f"t{number}")
        return taken

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.told) >= count, WAIT_S), self.told
        return [outcome.task for outcome in self.told]


@pytest.fixture
def bench():
    benches = []

    def make(**fields):
        benches.append(Bench(**fields))
        return benches[-1]

    yield make
    for each in benches:
        each.copies.go.set()
        each.write_queue.abandon()


def test_nothing_is_written_before_its_time_unless_it_is_asked_for(bench):
    it = bench()
    for number in (1, 2, 3):
        assert it.add(number)
    assert it.write_queue.nbytes == 3 * SIZE
    it.write_queue.reorder(first=["t2", "unknown"])
    assert it.wait(1) == ["t2"]
    assert it.copies.written == [2]
    assert it.copies.resident.holds("a2")


def test_what_lingered_is_written_in_its_order(bench):
    it = bench(delay_s=0.01)
    for number in (1, 2, 3):
        it.add(number)
    assert it.wait(3) == ["t1", "t2", "t3"]
    assert it.write_queue.nbytes == 0


def test_what_nobody_needs_is_answered_and_not_written(bench):
    it = bench()
    it.add(1)
    it.write_queue.reorder(drop=["t1"])
    assert it.wait(1) == ["t1"]
    assert it.copies.written == []


def test_what_is_being_written_when_nobody_needs_it_any_more_is_answered_when_that_is_over(bench):
    it = bench()
    it.copies.go.clear()
    it.add(1)
    it.write_queue.reorder(first=["t1"])
    assert it.copies.begun.acquire(timeout=WAIT_S)
    it.write_queue.reorder(drop=["t1"])
    assert it.told == []
    it.copies.go.set()
    assert it.wait(1) == ["t1"]


def test_what_nobody_can_see_goes_after_the_others_and_only_under_pressure(bench):
    it = bench(room=4)
    it.add(1)
    it.write_queue.reorder(last=["t1"])
    it.add(2)
    it.add(3)
    assert it.wait(1) == ["t2"], "more than half of the room is taken"
    it.write_queue.reorder(last=["t3"])
    it.add(4, start=False)
    it.add(5, start=False)
    it.write_queue.reorder(last=["t4", "t5"])
    assert it.wait(2)[:2] == ["t2", "t1"]


def test_there_is_no_more_room_than_a_quarter_of_the_budget_nor_for_what_is_small(bench):
    it = bench(room=2)
    it.copies.go.clear()
    assert [it.add(number) for number in (1, 2, 3)] == [True, True, False]
    assert not it.write_queue.reserve("tiny", [Result("tiny", None, np.zeros(SIZE - 1, np.uint8))])


def test_a_copy_that_is_nowhere_else_does_not_go(bench):
    it = bench(room=1)
    it.add(1)
    resident = it.copies.resident
    assert resident.put("big", object(), 3 * SIZE)
    assert resident.put("bigger", object(), 3 * SIZE)
    assert not resident.put("too big", object(), 4 * SIZE)
    resident.get("another", 4 * SIZE, object)
    resident.clear()
    assert resident.holds("a1")
    assert resident.used == SIZE
    it.write_queue.reorder(first=["t1"])
    it.wait(1)
    resident.clear()
    assert (resident.holds("a1"), resident.used) == (False, 0)


def test_who_wants_memory_writes_them_itself_and_waits_for_what_is_being_written(bench):
    it = bench()
    it.copies.go.clear()
    for number in (1, 2, 3):
        it.add(number)
    it.write_queue.reorder(first=["t1"])
    assert it.copies.begun.acquire(timeout=WAIT_S)
    flushing = threading.Thread(target=it.write_queue.flush)
    flushing.start()
    assert it.copies.begun.acquire(timeout=WAIT_S)  # it is at another one
    assert flushing.is_alive()
    it.copies.go.set()
    flushing.join(WAIT_S)
    assert not flushing.is_alive()
    assert sorted(it.copies.written) == [1, 2, 3]
    assert sorted(it.wait(3)) == ["t1", "t2", "t3"]


def test_only_some_arrays_are_flushed(bench):
    it = bench()
    for number in (1, 2):
        it.add(number)
    it.write_queue.flush(["a2", None, "unknown"])
    assert it.copies.written == [2]


def test_nothing_is_told_before_the_front_knows_of_it(bench):
    it = bench(delay_s=0.0)
    it.add(1, start=False)
    it.write_queue.reorder(first=["t1"])
    flushing = threading.Thread(target=it.write_queue.flush)
    flushing.start()
    flushing.join(WAIT_S)
    assert not flushing.is_alive(), "who wants memory does not wait for the front"
    assert (it.copies.written, it.told) == ([1], [])
    it.write_queue.start("t1")
    assert it.wait(1) == ["t1"]
    it.add(2, start=False)
    it.write_queue.reorder(first=["t2"])
    it.add(3)
    it.write_queue.reorder(first=["t3"])
    assert it.wait(2) == ["t1", "t3"]
    it.write_queue.start("t2")
    assert it.wait(3) == ["t1", "t3", "t2"]


def test_an_error_loses_one_and_no_other(bench):
    it = bench()
    it.add(1, RuntimeError("no"))
    it.add(2)
    it.write_queue.reorder(first=["t1", "t2"])
    it.wait(2)
    assert it.told == [Outcome("t1", lost=True), Outcome("t2")]


def test_a_front_that_is_gone_hears_nothing_and_nothing_is_written_for_it(bench):
    it = bench()
    it.copies.go.clear()
    for number in (1, 2):
        it.add(number)
    it.write_queue.reorder(first=["t1"])
    assert it.copies.begun.acquire(timeout=WAIT_S)

    def go_on():
        while it.write_queue.nbytes > SIZE:  # the other one goes as soon as it is abandoned
            time.sleep(0.001)
        it.copies.go.set()

    going_on = threading.Thread(target=go_on)
    going_on.start()
    it.write_queue.abandon()
    going_on.join(WAIT_S)
    assert it.copies.written == [1], "it has returned when nothing is being written any more"
    assert it.told == []
    assert it.write_queue.nbytes == 0
    it.write_queue.begin(it.tell)
    it.add(3)
    it.write_queue.reorder(first=["t3"])
    assert it.wait(1) == ["t3"]
