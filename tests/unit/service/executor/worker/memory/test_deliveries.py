"""Arrays of a device that go straight to clients' memory: what is registered, for how long, and what fails."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from live_server import until
from memory_peer import NEEDS_MEMFD, WRITE, memory, without_pages
from real_device import cupy_with_device

from gemmserve_service.executor.protocol import Deliver
from gemmserve_service.executor.worker.cuda.copies import DeviceCopies
from gemmserve_service.executor.worker.cuda.pinned_ring import CupyLink
from gemmserve_service.executor.worker.memory import deliveries as module
from gemmserve_service.executor.worker.memory.deliveries import Deliveries

pytestmark = NEEDS_MEMFD

WAIT_S = 60
SIZE = 1 << 14


class Value:
    """An array of the "device"."""

    def __init__(self, number, nbytes=SIZE):
        self.content = np.random.default_rng(number).integers(1, 256, nbytes, np.uint8)
        self.nbytes = nbytes


class Device:
    """Copies when somebody waits for it, if it may; and its driver."""

    def __init__(self):
        self.go = threading.Event()
        self.go.set()
        self.waits = threading.Semaphore(0)
        self.registered = {}
        self.calls = []
        self.refuses = set()
        self.broken = False
        self.begins = 0
        """Copies that it begins before it is found broken."""
        self.forgets = False
        """Whether it holds no array that it copies, as a device does not."""
        self._begun = []

    def start_store(self, array, target, start):
        if self.broken == "start" and len(self._begun) == self.begins:
            raise RuntimeError("the device is broken")
        if not self.forgets:
            self._begun.append((array, target, start))

    def mark(self):
        begun, self._begun = self._begun, []
        return begun

    def wait(self, mark):
        self.waits.release()
        assert self.go.wait(WAIT_S)
        if self.broken:
            raise RuntimeError("the device is broken")
        for array, target, start in mark:
            address = target.ctypes.data
            assert any(low <= address and address + target.size <= low + size for low, size in self.registered.items())
            target[:] = array.content[start : start + target.size]

    def register(self, address, nbytes):
        self.calls.append(("register", nbytes))
        if nbytes in self.refuses:
            raise RuntimeError("not these pages")
        self.registered[address] = nbytes

    def unregister(self, address):
        if "unregister" in self.refuses:
            raise RuntimeError("they stay")
        self.calls.append(("unregister", self.registered.pop(address)))


class Bench:
    """Deliveries of a device with arrays "1" to "9", and their front."""

    def __init__(self, arrays=None, *driver):
        """`driver`: copies, link and what a thread calls first, of a real device that has those arrays."""
        self.device = Device()
        self.arrays = {str(number): Value(number) for number in range(1, 10)} if arrays is None else arrays
        self.delivered, self.refused, self.checks = [], [], 0
        self.changed = threading.Condition()
        self.deliveries = Deliveries(self.arrays.get, *(driver or (self.device, self.device)))
        self.deliveries.begin(self.tell, self.check)
        self.fds = {}

    def tell(self, delivered, refused):
        with self.changed:
            self.delivered += delivered
            self.refused += refused
            self.changed.notify_all()

    def check(self):
        self.checks += 1

    def memory(self, name, nbytes=SIZE):
        self.fds[name] = memory(nbytes=nbytes)

    def order(self, number, array, name, *, nbytes=SIZE, path=None, capacity=None):
        fd = self.fds[name]
        status = os.fstat(fd)
        order = Deliver(
            number=number,
            array=array,
            nbytes=nbytes,
            memory=f"{status.st_dev}:{status.st_ino}",
            path=path or f"/proc/self/fd/{fd}",
            capacity=capacity or status.st_size,
        )
        self.deliveries.put(order)

    def together(self):
        """Orders that are given within come together."""
        return self.deliveries._changed

    def until(self, answers):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.delivered) + len(self.refused) >= answers, WAIT_S)

    def bytes_in(self, name, nbytes=SIZE):
        return np.frombuffer(os.pread(self.fds[name], nbytes, 0), np.uint8)

    def has(self, name, array):
        return np.array_equal(self.bytes_in(name), self.arrays[array].content)

    def close(self):
        self.device.go.set()
        self.deliveries.abandon()
        for fd in self.fds.values():
            os.close(fd)


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def test_memory_is_registered_once(bench):
    bench.memory("x", 2 * SIZE)
    for number in range(1, 5):
        bench.order(number, str(number), "x")
        bench.until(number)
        assert bench.has("x", str(number))
    assert bench.delivered == [1, 2, 3, 4]
    assert bench.device.calls == [("register", 2 * SIZE)]
    assert bench.deliveries.nbytes == 2 * SIZE
    assert not bench.bytes_in("x", 2 * SIZE)[SIZE:].any()


@pytest.mark.parametrize("nbytes", [SIZE // 2, SIZE, SIZE + 4096, 3 * SIZE])
def test_large_memory_is_registered_in_pieces(bench, nbytes, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", SIZE)
    bench.memory("x", 3 * SIZE - 4096 if nbytes < 3 * SIZE else nbytes)
    capacity = os.fstat(bench.fds["x"]).st_size
    bench.arrays["1"] = Value(1, nbytes)
    for number in (1, 2):
        bench.order(number, "1", "x", nbytes=nbytes)
        bench.until(number)
    assert bench.delivered == [1, 2]
    assert np.array_equal(bench.bytes_in("x", nbytes), bench.arrays["1"].content)
    assert not bench.bytes_in("x", capacity)[nbytes:].any()
    assert bench.device.calls == [("register", size) for size in (SIZE, SIZE, capacity - 2 * SIZE)]
    assert bench.deliveries.nbytes == capacity


def test_memory_that_grew_is_as_large_as_it_was_registered(bench):
    bench.memory("x")
    bench.order(1, "1", "x")
    bench.until(1)
    os.pwrite(bench.fds["x"], bytes(SIZE), SIZE)
    bench.arrays["2"] = Value(2, 2 * SIZE)
    bench.order(2, "2", "x", nbytes=2 * SIZE)
    bench.until(2)
    assert (bench.delivered, bench.refused, bench.checks) == ([1], [2], 0)


def test_what_was_registered_is_let_go_where_a_piece_cannot_be(bench, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", SIZE)
    bench.memory("x", 2 * SIZE + 4096)
    bench.device.refuses.add(4096)
    bench.arrays["1"] = Value(1, 2 * SIZE)
    bench.order(1, "1", "x", nbytes=2 * SIZE)
    bench.until(1)
    assert (bench.refused, bench.checks) == ([1], 0)
    assert (bench.device.registered, bench.deliveries.nbytes) == ({}, 0)
    assert bench.device.calls[-2:] == [("unregister", SIZE)] * 2


def test_an_array_lives_until_it_is_there(bench):
    bench.memory("x")
    bench.device.go.clear()
    bench.device.forgets = True
    bench.order(1, "1", "x")
    assert bench.device.waits.acquire(timeout=WAIT_S)
    found = weakref.ref(bench.arrays.pop("1"))
    assert found() is not None
    bench.device.go.set()
    bench.until(1)
    until(lambda: found() is None)


def test_an_array_that_was_delivered_is_not_held(bench):
    bench.memory("x")
    for number in (1, 2):
        bench.order(number, str(number), "x")
        bench.until(number)
    found = weakref.ref(bench.arrays.pop("2"))
    until(lambda: found() is None)


def test_the_next_copy_is_begun_before_the_one_before_is_over(bench):
    for name in "xyz":
        bench.memory(name)
        bench.order(0, "9", name)
        bench.until(1)
        bench.delivered.clear()
        assert bench.device.waits.acquire(timeout=WAIT_S)
    bench.device.go.clear()
    begun = []
    start = bench.device.start_store
    bench.device.start_store = lambda *args: (begun.append(args), start(*args))
    with bench.together():
        for number, name in enumerate("xyz", 1):
            bench.order(number, str(number), name)
    assert bench.device.waits.acquire(timeout=WAIT_S)
    assert len(begun) == 2
    assert not bench.delivered
    bench.device.go.set()
    bench.until(3)
    assert bench.delivered == [1, 2, 3]
    assert all(bench.has(name, str(number)) for number, name in enumerate("xyz", 1))


@pytest.mark.parametrize("what", ["unknown", "of another size", "larger than its memory"])
def test_what_is_not_there_is_refused(bench, what):
    bench.memory("x")
    if what == "larger than its memory":
        bench.arrays["1"] = Value(1, 2 * SIZE)
    bench.order(7, "none" if what == "unknown" else "1", "x", nbytes=SIZE + 1 if "size" in what else 2 * SIZE)
    bench.until(1)
    assert (bench.delivered, bench.refused, bench.checks) == ([], [7], 0)
    assert not bench.bytes_in("x").any()


@pytest.mark.parametrize("what", ["gone", "another file", "sealed", "shorter", "holes", "not registered"])
def test_memory_that_cannot_be_used_is_refused_and_other_memory_serves(bench, what):
    bench.memory("x")
    bench.memory("y", 2 * SIZE)
    path = None
    if what == "gone":
        path = "/proc/self/fd/99999"
    if what == "another file":  # the front has closed the descriptor, and its number is another's
        path = f"/proc/self/fd/{bench.fds['y']}"
    if what == "sealed":
        fcntl.fcntl(bench.fds["x"], 1033, WRITE)
    if what == "holes":
        without_pages(bench.fds["x"], SIZE)
    if what == "not registered":
        bench.device.refuses.add(SIZE)
    if what == "shorter":
        os.ftruncate(bench.fds["x"], SIZE // 2)
    bench.order(1, "1", "x", path=path, capacity=SIZE)
    bench.until(1)
    assert (bench.refused, bench.checks, bench.deliveries.nbytes) == ([1], 0, 0)
    bench.order(2, "2", "y")
    bench.until(2)
    assert bench.delivered == [2]
    assert bench.has("y", "2")


def test_the_longest_unused_memory_goes_for_other(bench, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 2 * SIZE)
    for name in "xyz":
        bench.memory(name)
    for number, name in enumerate("xyxz", 1):
        bench.order(number, "1", name)
        bench.until(number)
    assert bench.device.calls == [*[("register", SIZE)] * 2, ("unregister", SIZE), ("register", SIZE)]
    assert bench.deliveries.nbytes == 2 * SIZE
    bench.order(5, "2", "x")  # it was y that went
    bench.until(5)
    assert len(bench.device.calls) == 4
    bench.memory("large", 3 * SIZE)
    bench.order(6, "2", "large")
    bench.until(6)
    assert bench.refused == [6]
    assert len(bench.device.calls) == 4, "for what is too large nothing goes"


def test_memory_that_is_written_to_goes_when_that_is_over(bench, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", SIZE)
    bench.memory("x")
    bench.memory("y")
    with bench.together():
        bench.order(1, "1", "x")
        bench.order(2, "2", "y")
    bench.until(2)
    assert bench.delivered == [1, 2]
    assert bench.has("x", "1")
    assert bench.has("y", "2")


def test_memory_that_is_not_used_is_let_go(bench, monkeypatch):
    monkeypatch.setattr(module, "KEPT_S", 0.01)
    bench.memory("x")
    bench.order(1, "1", "x")
    bench.until(1)
    until(lambda: bench.device.calls[-1] == ("unregister", SIZE))
    assert (bench.device.registered, bench.deliveries.nbytes) == ({}, 0)
    bench.order(2, "2", "x")
    bench.until(2)
    assert bench.has("x", "2")


@pytest.fixture
def clock(monkeypatch):
    """What time the deliveries think it is."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_memory_stays_for_a_while_after_each_use(bench, clock):
    bench.memory("x")
    bench.memory("y")
    for number in (1, 2, 3):
        bench.order(number, str(number), "x")
        bench.until(number)
        clock.now += module.KEPT_S - 1
    bench.order(4, "4", "y")  # for new memory what is not used goes
    bench.until(4)
    assert bench.device.calls == [("register", SIZE)] * 2


def test_memory_that_is_not_used_goes_while_other_memory_is(bench, clock):
    for name in "xyz":
        bench.memory(name)
    bench.order(1, "1", "x")
    bench.until(1)
    for number in range(2, 30):
        clock.now += module.KEPT_S / 7
        bench.order(number, "2", "y")
        bench.until(number)
    assert bench.device.calls == [*[("register", SIZE)] * 2, ("unregister", SIZE)]


def test_what_is_there_is_told_before_other_memory_is_registered(bench):
    for name in "xy":
        bench.memory(name)
    told = []
    register = bench.device.register
    bench.device.register = lambda *args: (told.append(list(bench.delivered)), register(*args))
    with bench.together():
        bench.order(1, "1", "x")
        bench.order(2, "2", "x")
        bench.order(3, "3", "y")
    bench.until(3)
    assert told == [[], [1, 2]]


def test_memory_stays_while_it_is_written_to(bench, clock):
    for number, name in enumerate("xy", 1):
        bench.memory(name)
        bench.order(number, "9", name)
        bench.until(number)
    clock.now += 2 * module.KEPT_S
    with bench.together():
        bench.order(3, "3", "x")
        bench.order(4, "4", "y")  # has begun when the other is over, and nothing else was done with it for long
    bench.until(4)
    assert bench.delivered == [1, 2, 3, 4]
    assert bench.has("x", "3")
    assert bench.has("y", "4")


@pytest.mark.parametrize("when", ["start", "start of the second piece", "wait"])
def test_an_error_of_the_device_is_looked_into_before_the_answer(bench, when, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", SIZE // 2)
    bench.memory("x")
    bench.device.broken = when.partition(" ")[0]
    bench.device.begins = len(when.split()) // 5
    seen = []

    def check():
        seen.append((list(bench.refused), sum(bench.device.registered.values())))
        bench.device.mark()  # what had begun is over

    bench.deliveries.begin(bench.tell, check)
    bench.order(1, "1", "x")
    bench.until(1)
    assert bench.refused == [1]
    assert seen == [([], SIZE)], "and its memory is let go afterwards"
    assert bench.device.registered == ({} if "start" in when else {**bench.device.registered})
    bench.device.broken = False
    bench.order(2, "2", "x")
    bench.until(2)
    assert bench.has("x", "2")


def test_mappings_that_the_driver_keeps_stay(bench, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", SIZE)
    monkeypatch.setattr(module, "_MAX_STUCK", 2)
    bench.device.refuses.add("unregister")
    for number, name in enumerate("vwxyz", 1):
        bench.memory(name)
        bench.order(number, "1", name)
        bench.until(number)
    assert bench.delivered == [1, 2, 3]
    assert bench.refused == [4, 5]


def test_memory_of_which_pieces_stay_counts_once(bench, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 4 * SIZE)
    monkeypatch.setattr(module, "PIECE_BYTES", SIZE)
    monkeypatch.setattr(module, "_MAX_STUCK", 2)
    bench.device.refuses.add("unregister")
    for number, name in enumerate("wxyz", 1):
        bench.memory(name, 4 * SIZE)
        bench.order(number, "1", name)
        bench.until(number)
    assert bench.delivered == [1, 2, 3]
    assert bench.refused == [4]
    assert bench.deliveries.nbytes == 4 * SIZE, "that of the third"


def test_abandoned_orders_are_not_answered(bench):
    bench.memory("x")
    bench.memory("y")
    bench.device.go.clear()
    bench.order(1, "1", "x")
    assert bench.device.waits.acquire(timeout=WAIT_S)
    over = threading.Event()
    thread = threading.Thread(target=lambda: (bench.deliveries.abandon(), over.set()))
    thread.start()
    assert not over.wait(0.05), "something is still written to a client"
    bench.device.go.set()
    thread.join(WAIT_S)
    assert bench.has("x", "1")
    assert (bench.delivered, bench.refused) == ([], [])
    bench.deliveries.begin(bench.tell, bench.check)  # the next front
    bench.order(2, "2", "y")
    bench.until(1)
    assert bench.delivered == [2]


@pytest.mark.gpu
def test_on_a_device(monkeypatch):
    """With memory whose owner breaks its promise, too: that harms nobody else."""
    cupy = cupy_with_device()
    monkeypatch.setattr(module, "KEPT_S", 5.0)
    nbytes = 8 << 20
    content = {str(number): np.random.default_rng(number).integers(1, 256, nbytes, np.uint8) for number in range(4)}
    link = CupyLink(cupy, 0)
    arrays = {name: cupy.asarray(each) for name, each in content.items()}
    cupy.cuda.Device().synchronize()
    bench = Bench(arrays, DeviceCopies(cupy, 0, None, 1 << 20), link, link.enter)
    for name in "xy":
        bench.memory(name, nbytes)
    for number in range(1, 9):
        bench.order(number, str(number % 4), "xy"[number % 2], nbytes=nbytes)
        bench.until(number)
        assert np.array_equal(bench.bytes_in("xy"[number % 2], nbytes), content[str(number % 4)])
    assert bench.deliveries.nbytes == 2 * nbytes
    with pytest.raises(OSError, match="busy"):
        fcntl.fcntl(bench.fds["x"], 1033, WRITE)
    os.ftruncate(bench.fds["x"], 0)
    os.ftruncate(bench.fds["x"], nbytes)
    bench.order(9, "1", "x", nbytes=nbytes)
    bench.order(10, "2", "y", nbytes=nbytes)
    bench.until(10)
    assert bench.delivered == list(range(1, 11))
    assert bench.checks == 0
    assert not bench.bytes_in("x", nbytes).any(), "these pages are its owner's alone"
    assert np.array_equal(bench.bytes_in("y", nbytes), content["2"])
    until(lambda: bench.deliveries.nbytes == 0)
    fcntl.fcntl(bench.fds["y"], 1033, WRITE)
    bench.order(11, "1", "y", nbytes=nbytes)
    bench.until(11)
    assert bench.refused == [11], "it is sealed"
    bench.close()
