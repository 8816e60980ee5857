"""A worker's side of the arena: what is registered ahead, how far, and what happens when that is refused."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from real_device import cupy_with_device

from gemmserve_service.executor.protocol import ArrayRef
from gemmserve_service.executor.worker.cuda.copies import DeviceCopies
from gemmserve_service.executor.worker.cuda.pinned_ring import CupyLink
from gemmserve_service.executor.worker.memory.host_arena import ArenaFile, HostArena
from gemmserve_service.executor.worker.memory.mappings import Mappings
from gemmserve_service.store.extents.memfd import create_arena, memory_extents_supported

WAIT_S = 60
SEGMENT = 1 << 16
pytestmark = pytest.mark.skipif(not memory_extents_supported(), reason="this system has no memfd")


class Driver:
    """Notes what is registered, and refuses what is not touched, or past a limit."""

    def __init__(self, limit=1 << 40):
        self.limit = limit
        self.calls = []
        self.refused = 0
        self.entered = None
        self.changed = threading.Condition()

    def enter(self):
        self.entered = threading.get_ident()

    def register(self, address, nbytes):
        assert threading.get_ident() == self.entered
        with self.changed:
            self.changed.notify_all()
            if sum(count for _, count in self.calls) + nbytes > self.limit:
                self.refused += 1
                raise RuntimeError("cudaErrorMemoryAllocation")
            self.calls.append((address, nbytes))

    def wait(self, nbytes):
        with self.changed:
            assert self.changed.wait_for(lambda: sum(count for _, count in self.calls) >= nbytes, WAIT_S), self.calls


@pytest.fixture
def file():
    fds = []

    def make(nbytes=16 * SEGMENT, ahead=2 * SEGMENT):
        fds.append(create_arena(nbytes))
        return ArenaFile(f"/proc/{os.getpid()}/fd/{fds[-1]}", nbytes, ahead)

    yield make
    for fd in fds:
        os.close(fd)


def opened(file, driver, *more):
    return HostArena(file, driver.register, driver.enter, *more, segment_bytes=SEGMENT)


def until_registered(arena, nbytes):
    for _ in range(WAIT_S * 1000):
        if arena.registered_bytes >= nbytes:
            return
        threading.Event().wait(0.001)
    raise AssertionError(arena.registered_bytes)


def test_a_little_is_registered_at_first_then_twice_of_what_is_used(file):
    driver = Driver()
    arena = opened(file(), driver)
    until_registered(arena, 2 * SEGMENT)
    address = arena.memory.ctypes.data
    assert driver.calls == [(address, SEGMENT), (address + SEGMENT, SEGMENT)]
    assert arena.registered(arena.memory[: 2 * SEGMENT])
    assert not arena.registered(arena.memory[2 * SEGMENT : 3 * SEGMENT]), "not yet"
    until_registered(arena, 6 * SEGMENT)
    assert arena.registered(arena.memory[2 * SEGMENT : 3 * SEGMENT])
    assert len(driver.calls) == 6


def test_all_of_it_is_registered_where_settings_say_so(file):
    driver = Driver()
    nbytes = 3 * SEGMENT + 4096
    arena = opened(file(nbytes, ahead=nbytes), driver)
    until_registered(arena, nbytes)
    assert [count for _, count in driver.calls] == [SEGMENT] * 3 + [4096]
    assert arena.registered(arena.memory)


def test_nothing_is_registered_ahead_where_settings_say_so(file):
    driver = Driver()
    arena = opened(file(ahead=0), driver)
    assert not arena.registered(arena.memory[:SEGMENT])
    until_registered(arena, 2 * SEGMENT)
    assert len(driver.calls) == 2


def test_what_is_registered_ahead_gives_way_to_tasks_and_what_results_need_does_not(file):
    driver, asked, idle = Driver(), threading.Event(), threading.Event()

    def give_way(unless):
        while not (unless() or idle.is_set()):
            asked.set()
            threading.Event().wait(0.001)

    arena = opened(file(), driver, give_way)
    assert asked.wait(WAIT_S)
    assert arena.registered_bytes == 0
    assert driver.calls == []
    assert not arena.registered(arena.memory[: SEGMENT // 2])  # a result
    until_registered(arena, SEGMENT)
    asked.clear()
    assert asked.wait(WAIT_S)
    assert arena.registered_bytes == SEGMENT, "twice of what is used, and no more of what is to be there ahead"
    idle.set()
    until_registered(arena, 2 * SEGMENT)


def test_a_driver_that_refuses_is_not_asked_again(file):
    driver = Driver(limit=SEGMENT)
    arena = opened(file(), driver)
    with driver.changed:
        assert driver.changed.wait_for(lambda: driver.refused, WAIT_S)
    assert not arena.registered(arena.memory)
    assert arena.registered_bytes == SEGMENT
    assert arena.registered(arena.memory[:SEGMENT])
    assert driver.refused == 1


def test_other_memory_is_not_registered(file):
    arena = opened(file(), Driver())
    until_registered(arena, SEGMENT)
    assert not arena.registered(np.zeros(SEGMENT, np.uint8))


def test_copies_end_where_another_call_registered_the_pages(file):
    arena = opened(file(), Driver())
    target = arena.memory[SEGMENT - 10 : 2 * SEGMENT + 5]
    pieces = list(arena.pieces(target))
    assert [(start, piece.size) for start, piece in pieces] == [(0, 10), (10, SEGMENT), (SEGMENT + 10, 5)]
    for start, piece in pieces:
        piece[:] = start % 251
    assert target[0] == 0
    assert target[10] == 10
    assert target[-1] == (SEGMENT + 10) % 251
    assert [(start, piece.size) for start, piece in arena.pieces(arena.memory[5:9])] == [(0, 4)]
    elsewhere = np.zeros(3 * SEGMENT, np.uint8)
    assert list(arena.cut(elsewhere.ctypes.data, elsewhere.size)) == [(0, elsewhere.size)]


def test_it_is_mapped_once_whoever_asks(file):
    shared = file()
    arena = opened(shared, Driver())
    mappings = Mappings(arena)
    ref = ArrayRef(
        extent=shared.path, path=shared.path, capacity=shared.nbytes, nbytes=16, dtype="float64", shape=(2,), order="C",
        offset=4096,
    )  # fmt: skip
    for _ in range(2):
        mappings.array(ref, writable=True)[:] = (1.0, 2.0)
        mappings.clear()  # as when a front goes
    assert arena.memory[4096:4112].view("f8").tolist() == [1.0, 2.0]
    assert mappings.of(shared.path, shared.path, shared.nbytes) is arena.memory


@pytest.mark.gpu
def test_on_a_device(file):
    """Copies to registered pages, to such as are not, and across both."""
    cupy = cupy_with_device()
    link = CupyLink(cupy, 0)
    shared = file(ahead=4 * SEGMENT)
    arena = HostArena(shared, link.register, link.enter, segment_bytes=SEGMENT)
    until_registered(arena, 4 * SEGMENT)
    copies = DeviceCopies(cupy, 0, None, 1 << 20, arena)
    content = np.random.default_rng(0).integers(0, 256, 3 * SEGMENT, np.uint8)
    value = cupy.asarray(content)
    cupy.cuda.Device().synchronize()
    for start in (5, 2 * SEGMENT, 8 * SEGMENT):
        target = arena.memory[start : start + content.size]
        assert arena.registered(target) == (start == 5)
        copies.write(value, 0, target[:77])
        copies.write(value, 77, target[77:])
        copies.wait(copies.mark())
        assert np.array_equal(target, content)
    assert np.array_equal(copies.fetch(value), content)


def test_an_arena_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        opened(ArenaFile(str(tmp_path / "gone"), SEGMENT, SEGMENT), Driver())
