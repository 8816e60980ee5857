"""Results that wait to be written: where and when the front says, in turns, and what happens when memory is wanted."""

from __future__ import annotations

import random
import threading
import weakref

import numpy as np
import pytest
from live_server import until

from gemmserve_service.errors import JobCancelled
from gemmserve_service.executor.worker.memory import write_queue as module
from gemmserve_service.executor.worker.memory.residency import Residency
from gemmserve_service.executor.worker.memory.write_queue import Result, WriteQueue

WAIT_S = 60
SIZE = 1 << 10
TURN = SIZE // 4


class Value:
    """An array of the "device"."""

    def __init__(self, number, nbytes=SIZE):
        self.content = np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)
        self.nbytes = nbytes
        self.number = number


class Copies:
    """Copies what it was given when somebody waits for it, if it may."""

    def __init__(self, budget):
        self.resident = Residency(budget)
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Semaphore(0)
        self.turns = []
        self.broken = set()
        self.poor = False
        self._given = {}

    def write(self, array, start, target):
        if array.number in self.broken:
            raise RuntimeError("the device is broken")
        self._given.setdefault(threading.get_ident(), []).append((array, start, target))

    def mark(self):
        return self._given.pop(threading.get_ident(), [])

    def wait(self, mark):
        self.begun.release()
        assert self.go.wait(WAIT_S)
        self.turns.append([array.number for array, _, _ in mark])
        for array, start, target in mark:
            target[:] = array.content[start : start + target.size]

    def fetch(self, array):
        if self.poor:
            raise MemoryError("no memory on the host either")
        return array.content.copy()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Short turns, and short waits for room."""
    monkeypatch.setattr(module, "_TURN_BYTES", TURN)
    monkeypatch.setattr(module, "_LOOK_S", 0.001)


class Bench:
    """A queue with room for `room` results, and its front."""

    def __init__(self, room=16):
        self.copies = Copies(-(-room * SIZE * 4 // 3))
        self.settled, self.lost = [], []
        self.places = {}
        self.changed = threading.Condition()
        self.queue = WriteQueue(self.copies, lambda: None)
        self.begin()

    def begin(self):
        self.queue.begin(self.tell, lambda row: self.places[row[0]])

    def tell(self, settled, lost):
        with self.changed:
            self.settled += settled
            self.lost += lost
            self.changed.notify_all()

    def add(self, number, value=None, checkpoint=lambda: None):
        value = Value(number) if value is None else value
        self.queue.reserve(f"t{number}", [Result(f"a{number}", value)], checkpoint)
        return value

    def write(self, number, nbytes=SIZE, *, urgent=False):
        self.places.setdefault(f"p{number}", np.zeros(nbytes, np.uint8))
        self.queue.write(f"t{number}", {f"a{number}": (f"p{number}", "path", 0, 0, None)}, urgent=urgent)

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.settled) + len(self.lost) >= count, WAIT_S), self.settled

    def written(self, number):
        return np.array_equal(self.places[f"p{number}"], Value(number).content)


@pytest.fixture
def bench():
    benches = []

    def make(**fields):
        benches.append(Bench(**fields))
        return benches[-1]

    yield make
    for each in benches:
        each.copies.go.set()
        each.queue.abandon()


def test_results_are_written_where_and_when_they_are_told_to_be(bench):
    it = bench()
    for number in (1, 2, 3):
        it.add(number)
    assert it.queue.nbytes == 3 * SIZE
    it.write(2)
    it.write(1)
    it.wait(2)
    assert it.settled == ["t2", "t1"]
    assert it.written(2)
    assert it.written(1)
    assert it.queue.nbytes == SIZE
    assert it.copies.resident.holds("a2"), "as a copy like others"
    it.write(2)  # of what is over nothing is done
    it.write(4)
    assert it.queue.nbytes == SIZE


def test_room_is_kept_for_results_that_are_expected(bench):
    it = bench(room=2)
    assert it.queue.expect(100 * SIZE), "there is room for any one"
    assert not it.queue.expect(1), "which is no reason for more"
    it.queue.release(100 * SIZE)
    it.add(1)
    assert not it.queue.expect(SIZE + 1)
    assert it.queue.expect(SIZE)
    assert not it.queue.expect(1)
    it.add(2)  # no wait for what may be behind it
    it.queue.release(SIZE)
    assert not it.queue.expect(1)
    it.queue.take("t3", [Result("a3", Value(3))])
    assert it.queue.nbytes == 3 * SIZE
    assert it.copies.resident.holds("a3")
    it.write(3)
    it.wait(1)
    assert it.settled == ["t3"]
    assert it.written(3)


def test_what_somebody_waits_for_overtakes_between_two_turns(bench):
    it = bench()
    it.copies.go.clear()
    for number in (1, 2, 3):
        it.add(number)
    it.write(1)
    assert it.copies.begun.acquire(timeout=WAIT_S)
    it.write(2)
    it.write(3)
    it.write(3, urgent=True)
    it.copies.go.set()
    it.wait(3)
    assert it.settled == ["t3", "t1", "t2"]
    assert it.copies.turns == [*[[1]] * 2, *[[3]] * 4, *[[1]] * 2, *[[2]] * 4], "two are under way at a time"
    assert all(it.written(number) for number in (1, 2, 3))


def test_small_results_share_a_turn(bench, monkeypatch):
    monkeypatch.setattr(module, "_TURN_BYTES", 3 * SIZE)
    it = bench()
    it.copies.go.clear()
    for number in range(7):
        it.add(number)
        it.write(number)
        if not number:
            assert it.copies.begun.acquire(timeout=WAIT_S)
    it.copies.go.set()
    it.wait(7)
    assert it.copies.turns == [[0], [1, 2, 3], [4, 5, 6]]
    assert it.settled == [f"t{number}" for number in range(7)]


def test_what_nobody_needs_is_answered_and_not_written(bench):
    it = bench()
    for number in (1, 2):
        it.add(number)
    it.queue.drop(["t1", "unknown", "t2"])
    assert it.settled == ["t1", "t2"], "at once"
    assert (it.copies.turns, it.queue.nbytes) == ([], 0)
    assert not it.copies.resident.holds("a1")


def test_what_is_being_written_when_it_is_dropped_is_answered_when_that_turn_is_over(bench):
    it = bench()
    it.copies.go.clear()
    it.add(1)
    it.write(1)
    assert it.copies.begun.acquire(timeout=WAIT_S)
    it.queue.drop(["t1"])
    assert it.settled == []
    it.copies.go.set()
    it.wait(1)
    assert it.copies.turns == [[1]] * 2
    assert not it.written(1)


def test_a_task_waits_for_room_and_can_be_cancelled_meanwhile(bench):
    it = bench(room=4)
    assert it.queue.limit == 4 * SIZE
    assert it.queue.offered * 3 // 2 <= it.queue.limit, "half of it, and one more result, find room"
    for number in range(4):
        it.add(number)
    looks = []

    def cancelled():
        looks.append(it.queue.nbytes)
        if len(looks) == 3:
            raise JobCancelled("no")

    with pytest.raises(JobCancelled):
        it.add(9, checkpoint=cancelled)
    assert looks == [4 * SIZE] * 3
    waiting = threading.Thread(target=it.add, args=(5,))
    waiting.start()
    it.write(0)
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert it.settled == ["t0"]
    assert it.queue.nbytes == 4 * SIZE


def test_what_is_larger_than_the_room_has_it_alone(bench):
    it = bench(room=4)
    it.add(1, Value(1, 6 * SIZE))
    assert it.copies.resident.holds("a1")
    it.write(1, 6 * SIZE)
    it.wait(1)
    assert np.array_equal(it.places["p1"], Value(1, 6 * SIZE).content)


def test_a_copy_that_is_nowhere_else_does_not_go(bench):
    it = bench(room=3)
    resident = it.copies.resident
    assert resident.put("old", object(), 4 * SIZE)
    it.add(1)
    assert not resident.holds("old"), "results go before copies of what is stored"
    assert resident.put("big", object(), 3 * SIZE)
    assert resident.put("bigger", object(), 3 * SIZE)
    assert not resident.put("too big", object(), 4 * SIZE)
    resident.get("another", 4 * SIZE, object)
    resident.clear()
    assert resident.holds("a1")
    assert resident.used == SIZE
    it.write(1)
    it.wait(1)
    resident.clear()
    assert (resident.holds("a1"), resident.used) == (False, 0)


def test_results_that_are_on_the_host_already_are_written_from_there(bench):
    it = bench()
    array = np.asfortranarray(np.arange(SIZE // 8, dtype="f8").reshape(2, -1))
    it.add(1, array)
    assert not it.copies.resident.holds("a1")
    assert np.array_equal(it.queue.read("a1").view("f8"), array.ravel(order="K"))
    it.write(1)
    it.wait(1)
    assert np.array_equal(it.places["p1"].view("f8"), array.ravel(order="K"))


def test_several_results_of_one_task(bench):
    it = bench()
    values = [Value(1), Value(2, 10), Value(3, TURN + 1)]
    it.queue.reserve("t", [Result(f"r{value.number}", value) for value in values], lambda: None)
    for value in values:
        it.places[f"p{value.number}"] = np.zeros(value.nbytes + 5, np.uint8)
    it.queue.write("t", {f"r{value.number}": (f"p{value.number}", "", 0, 0, None) for value in values}, urgent=False)
    it.wait(1)
    for value in values:
        place = it.places[f"p{value.number}"]
        assert np.array_equal(place[: value.nbytes], value.content)
        assert not place[value.nbytes :].any()


def test_the_bytes_of_an_array_are_found_wherever_they_are(bench):
    it = bench()
    it.add(1)
    assert np.array_equal(it.queue.read("a1"), Value(1).content)
    it.write(1)
    it.wait(1)
    assert it.queue.read("a1") is it.places["p1"], "a task that was sent before the front knew of it looks there"
    it.queue.forget("a1")
    with pytest.raises(FileNotFoundError, match="neither on the device nor in the store"):
        it.queue.read("a1")


def test_the_devices_copy_of_an_array_is_found_while_there_is_one(bench):
    it = bench()
    value = it.add(1)
    assert it.queue.on_device("a1") is value
    it.write(1)
    it.wait(1)
    assert it.queue.on_device("a1") is value, "as a copy like others"
    it.queue.resident.forget("a1")
    assert it.queue.on_device("a1") is None
    it.add(2, np.zeros(SIZE, np.uint8))
    assert it.queue.on_device("a2") is None, "it is on the host"
    assert it.queue.on_device("unknown") is None


def test_a_result_that_was_written_and_is_gone_is_not_held(bench):
    it = bench()
    for number in (1, 2):
        it.add(number)
        it.write(number)
        it.wait(number)
    it.copies.turns.clear()
    found = weakref.ref(it.queue.on_device("a2"))
    it.queue.resident.forget("a2")
    until(lambda: found() is None)


def test_who_wants_memory_has_results_taken_from_the_device(bench):
    it = bench()
    assert not it.queue.vacate()
    it.copies.go.clear()
    for number in (1, 2, 3):
        it.add(number)
    it.write(1)
    assert it.copies.begun.acquire(timeout=WAIT_S)
    made = []
    vacating = threading.Thread(target=lambda: made.append(it.queue.vacate()))
    vacating.start()
    it.copies.go.set()
    vacating.join(WAIT_S)
    assert made == [True]
    it.wait(1)
    assert it.written(1), "what has a place goes there"
    it.copies.resident.clear()
    assert it.copies.resident.used == 0
    assert it.queue.nbytes == 2 * SIZE, "the front is yet to say where they go"
    assert np.array_equal(it.queue.read("a3"), Value(3).content)
    it.queue.drop(["t2"])
    it.write(3)
    it.wait(3)
    assert it.written(3)


def test_nothing_is_lost_where_the_host_has_no_memory_either(bench):
    it = bench()
    it.add(1)
    it.copies.poor = True
    with pytest.raises(MemoryError):
        it.queue.vacate()
    assert it.copies.resident.holds("a1")
    it.write(1)
    it.wait(1)
    assert it.written(1)


def test_a_place_that_is_gone_loses_one_and_no_other(bench):
    it = bench()
    for number in (1, 2, 3):
        it.add(number)
    it.places["p3"] = np.zeros(SIZE - 1, np.uint8)
    it.queue.write("t1", {"a1": ("nowhere", "", 0, 0, None)}, urgent=False)
    it.write(3)
    it.write(2)
    it.wait(3)
    assert (sorted(it.lost), it.settled) == (["t1", "t3"], ["t2"])
    assert it.written(2)


def test_an_error_of_the_device_loses_what_was_being_written(bench):
    it = bench()
    for number in (1, 2):
        it.add(number)
    it.copies.broken = {1}
    it.write(1)
    it.write(2)
    it.wait(2)
    assert (it.lost, it.settled) == (["t1"], ["t2"])
    assert not it.copies.resident.holds("a1")


def test_a_front_that_is_gone_hears_nothing_and_nothing_is_written_for_it(bench):
    it = bench()
    it.copies.go.clear()
    for number in (1, 2):
        it.add(number)
    it.write(1)
    assert it.copies.begun.acquire(timeout=WAIT_S)
    leaving = threading.Thread(target=it.queue.abandon)
    leaving.start()
    leaving.join(0.05)
    assert leaving.is_alive(), "something is being written"
    it.copies.go.set()
    leaving.join(WAIT_S)
    assert not leaving.is_alive()
    assert it.copies.turns == [[1]] * 2
    assert (it.settled, it.lost, it.queue.nbytes) == ([], [], 0)
    assert not it.copies.resident.holds("a2"), "the next front has it computed again"
    it.begin()
    it.add(3)
    it.write(3)
    it.wait(1)
    assert it.settled == ["t3"]


class Front:
    """A worker and its front in threads of their own: tasks end and wait for room, memory is wanted, results are
    ordered, some urgently, and dropped, in any order.
    """

    COUNT = 60

    def __init__(self, it, seed, leaves=None):
        """`leaves`: after so many tasks the front is gone."""
        self.it, self.rng = it, random.Random(seed)
        self.numbers = range(1000 * seed, 1000 * seed + self.COUNT)
        self.leaves = self.COUNT if leaves is None else leaves
        self.gone = threading.Event()
        self.failures = []
        self.ended = []
        """Tasks that the front was told of, and has done nothing about."""
        self.dropped = set()
        self.handled = 0

    def compute(self):
        def check():
            if self.gone.is_set():
                raise JobCancelled("the front is gone")

        try:
            for number in self.numbers:
                self.it.add(number, checkpoint=check)
                with self.it.changed:
                    self.ended.append(number)
                    self.it.changed.notify_all()
        except JobCancelled:
            assert self.leaves < self.COUNT

    def starve(self):
        while not self.gone.wait(0.002):
            try:
                self.it.queue.vacate()
            except Exception as error:
                self.failures.append(error)

    def next(self, stay):
        """Any of the tasks that ended, once there are more than `stay` of them, or there will be no more."""
        with self.it.changed:
            assert self.it.changed.wait_for(
                lambda: len(self.ended) > stay or (self.ended and self.handled + len(self.ended) == self.COUNT), WAIT_S
            )
            return self.ended.pop(self.rng.randrange(len(self.ended)))

    def decide(self):
        """As a front does: some results stay on the device, but never so many that one waits for ever."""
        it, rng = self.it, self.rng
        while self.handled < self.leaves:
            number = self.next(0 if rng.random() < 0.3 else 2)
            self.handled += 1
            fate = rng.choice(["write", "urgent", "hasten", "drop", "drop later"])
            if fate != "drop":
                it.write(number, urgent=fate == "urgent")
            if fate == "hasten":
                it.write(number, urgent=True)
            if fate.startswith("drop"):
                self.dropped.add(number)
                it.queue.drop([f"t{number}"])

    def run(self):
        threads = [threading.Thread(target=self.compute), threading.Thread(target=self.starve)]
        for thread in threads:
            thread.start()
        try:
            self.decide()
            if self.leaves == self.COUNT:
                self.it.wait(self.COUNT)
        finally:
            self.gone.set()
            for thread in threads:
                thread.join(WAIT_S)
            self.it.queue.abandon()
        assert not any(thread.is_alive() for thread in threads)


def test_random_orders_drops_and_shortages_end_and_lose_nothing(bench):
    it = bench(room=6)
    for seed in range(1, 7):
        front = Front(it, seed, leaves=30 if seed % 3 == 2 else None)
        front.run()
        assert front.failures == []
        assert it.queue.nbytes == 0
        assert it.lost == []
        if front.leaves == front.COUNT:
            assert sorted(it.settled) == sorted(f"t{number}" for number in front.numbers)
            assert all(it.written(number) for number in front.numbers if number not in front.dropped)
        it.settled.clear()
        it.begin()
