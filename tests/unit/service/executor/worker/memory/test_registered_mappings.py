"""Requests' memory that the driver knows: from its second use on, until its mapping goes."""

from __future__ import annotations

import gc
import os
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_service.executor.worker.cuda.copies import DeviceCopies
from gemmserve_service.executor.worker.memory.mappings import Mappings
from gemmserve_service.executor.worker.memory.registered_mappings import RegisteredMappings
from gemmserve_service.store.extents.extents import ExtentPool
from gemmserve_service.store.extents.memfd import memory_extents_supported

pytestmark = pytest.mark.skipif(not memory_extents_supported(), reason="this system has no memfd")
MIB = 1 << 20


class Driver:
    """Registered ranges by address; refuses past a limit."""

    def __init__(self):
        self.ranges = {}
        self.limit = 1 << 40

    def register(self, address, nbytes):
        if sum(self.ranges.values()) + nbytes > self.limit:
            raise RuntimeError("cudaErrorMemoryAllocation")
        assert address not in self.ranges, "registered twice"
        self.ranges[address] = nbytes

    def unregister(self, address):
        del self.ranges[address]


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def registered(driver):
    return RegisteredMappings(driver.register, driver.unregister)


@pytest.fixture
def mappings(registered):
    return Mappings(registered=registered)


@pytest.fixture
def pool():
    pool = ExtentPool(None, keep_bytes=0)
    held = []

    def take(nbytes):
        held.append(pool.take(nbytes))
        return held[-1]

    yield take
    for extent in held:
        os.close(extent.fd)


def use(mappings, extent):
    name, nbytes = extent.file
    return mappings.of(name, extent.path, nbytes)


def test_memory_that_is_used_again_is_registered_once_and_until_it_is_forgotten(mappings, registered, driver, pool):
    extent, other = pool(2 * MIB), pool(2 * MIB)
    memory = use(mappings, extent)
    assert not registered.covers(memory)
    for _ in range(3):
        memory = use(mappings, extent)
    assert driver.ranges == {memory.ctypes.data: memory.size}
    assert registered.covers(memory)
    assert registered.covers(memory[5:-7])
    assert not registered.covers(use(mappings, other))
    mappings.forget([extent.name, "unknown"])
    assert not driver.ranges
    assert not registered.covers(memory)
    use(mappings, extent)
    assert not driver.ranges, "its uses are counted anew"


def test_ranges_beside_each_other_are_not_taken_for_one(registered, driver):
    memory = np.zeros(8 * MIB, np.uint8)
    parts = [memory[start * MIB : (start + 2) * MIB] for start in (4, 0, 2)]
    for name, part in enumerate(parts):
        for _ in range(2):
            registered.used(str(name), part)
    assert len(driver.ranges) == 3
    assert all(registered.covers(part) for part in parts)
    assert not registered.covers(memory[MIB : 3 * MIB])
    assert not registered.covers(memory[5 * MIB : 7 * MIB])


@pytest.mark.parametrize("nbytes", [MIB // 2, 257 * MIB])
def test_neither_small_nor_huge_memory_is_registered(mappings, driver, pool, nbytes):
    extent = pool(nbytes)
    for _ in range(3):
        use(mappings, extent)
    assert not driver.ranges


def test_no_file_is_registered(mappings, driver, tmp_path):
    extent = ExtentPool(tmp_path, keep_bytes=0).take(2 * MIB)
    for _ in range(3):
        use(mappings, extent)
    assert not driver.ranges


def test_a_driver_that_refuses_is_not_asked_again(mappings, registered, driver, pool):
    driver.limit = 3 * MIB
    first, second = pool(2 * MIB), pool(2 * MIB)
    for extent in (first, first, second, second):
        use(mappings, extent)
    driver.limit = 1 << 40
    use(mappings, second)
    assert list(driver.ranges.values()) == [2 * MIB]
    assert registered.covers(use(mappings, first))


def test_everything_is_unregistered_for_the_next_front(mappings, driver, pool):
    for _ in range(3):
        extent = pool(MIB)
        use(mappings, extent)
        use(mappings, extent)
    assert len(driver.ranges) == 3
    mappings.clear()
    assert not driver.ranges


def test_the_least_recently_used_mapping_that_goes_is_unregistered(mappings, driver, pool, monkeypatch):
    monkeypatch.setattr("gemmserve_service.executor.worker.memory.mappings._MAX_MAPPINGS", 1)
    first, second = pool(MIB), pool(MIB)
    use(mappings, first)
    use(mappings, first)
    assert driver.ranges
    use(mappings, second)
    assert not driver.ranges


class Stream:
    """Notes that it was waited for."""

    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


def test_copies_go_straight_from_and_to_registered_memory(registered, monkeypatch):
    moved = []
    stream = Stream()
    cuda = SimpleNamespace(get_current_stream=lambda: stream, runtime=SimpleNamespace(is_hip=True))

    def empty(shape, dtype, order):
        array = np.empty(shape, dtype, order)
        return SimpleNamespace(
            data=SimpleNamespace(ptr=array.ctypes.data), dtype=array.dtype, strides=array.strides, flags=array.flags
        )

    copies = DeviceCopies(SimpleNamespace(cuda=cuda, empty=empty), 0, None, 0, registered=registered)
    monkeypatch.setattr(copies, "_link", SimpleNamespace(
        upload=lambda *call: moved.append(("up", *call)), download=lambda *call: moved.append(("down", *call))
    ))  # fmt: skip
    monkeypatch.setattr(copies, "_staging", SimpleNamespace(
        to_device=lambda *call: moved.append(("ring up", *call)),
        to_host=lambda *call: moved.append(("ring down", *call)),
    ))  # fmt: skip
    memory = np.zeros(4 * MIB, np.uint8)
    for _ in range(2):
        registered.used("x", memory)
    inside, outside = memory[: 2 * MIB].view("c8"), np.zeros(2 * MIB, np.uint8).view("c8")
    for host, waits in ((inside, 1), (outside, 0)):
        before = stream.waits
        array = copies.fresh(host)
        assert stream.waits - before == waits, "the host array has been read"
        copies.store(array, host)
        assert stream.waits - before == 2 * waits
    assert [call[0] for call in moved] == ["up", "down", "ring up", "ring down"]
    assert moved[0][2].ctypes.data == memory.ctypes.data


def test_what_the_driver_does_not_let_go_of_stays_mapped(mappings, registered, driver, pool, monkeypatch):
    def broken(address):
        raise RuntimeError("cudaErrorUnknown")

    extent = pool(2 * MIB)
    use(mappings, extent)
    memory = use(mappings, extent)
    monkeypatch.setattr(registered, "_unregister", broken)
    mapped = weakref.ref(memory)
    mappings.forget([extent.file[0]])
    del memory
    gc.collect()
    assert mapped() is not None, "other memory at its address would be taken for this"
    assert not registered.covers(mapped())
