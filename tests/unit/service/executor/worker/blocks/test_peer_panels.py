"""Panels from other devices: what is copied, from whom nothing is, and when memory may go."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_kernels import DeviceSpec, GemmProblem, Operand
from gemmserve_kernels.blocks.grid import Grid
from gemmserve_kernels.blocks.memory_plan import plan_memory
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_service.executor.worker.blocks import peer_panels
from gemmserve_service.executor.worker.blocks.panel_slots import PanelSlots
from gemmserve_service.executor.worker.blocks.panel_table import Offer, PanelsFile, PanelTable
from gemmserve_service.executor.worker.blocks.panels_ahead import PanelsAhead
from gemmserve_service.executor.worker.blocks.peer_panels import PeerPanels
from gemmserve_service.store.extents.memfd import create_panel_table

NBYTES = 1 << 20
WAIT_S = 30


class Link:
    """Device whose memory is this process's, each allocation known by its address."""

    def __init__(self, number):
        self.bus_id = f"0000:0{number}:00.0"
        self.opened, self.closed, self.asked = [], [], []
        self.reached = True
        self.may_close = threading.Event()
        self.may_close.set()
        self.during = lambda: None
        """Called in the middle of every copy."""
        self.seconds = 0.0

    def offer(self, address, nbytes):
        return Offer(address.to_bytes(64, "little"), 0, nbytes)

    def reaches(self, bus_id):
        self.asked.append(bus_id)
        return self.reached

    def open(self, handle):
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, address):
        assert self.may_close.wait(WAIT_S)
        self.closed.append(address)

    def copy(self, target, source, nbytes):
        half = nbytes // 2
        ctypes.memmove(target, source, half)
        time.sleep(self.seconds)
        self.during()
        ctypes.memmove(target + half, source + half, nbytes - half)

    def enter(self):
        pass


class Memory:
    """Something that others may have mapped."""


class Array:
    """Array of a device."""

    def __init__(self, memory):
        self.memory, self.nbytes = memory, memory.nbytes
        self.data = SimpleNamespace(ptr=memory.ctypes.data)


@pytest.fixture
def path():
    fd = create_panel_table(3)
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


class Device:
    """A worker with two slots of the product."""

    def __init__(self, path, number):
        self.link = Link(number)
        self.peers = PeerPanels(PanelTable(PanelsFile(path, number), self.link.bus_id), self.link, always=True)
        self.memory = [np.full(NBYTES, 10 * number + slot, np.uint8) for slot in range(2)]
        self.slots = self.share()

    def share(self, parent="t"):
        return self.peers.share(parent, [(each.ctypes.data, each.nbytes) for each in self.memory])

    def has(self, slot, side="b", panel=5):
        assert self.slots.retract(slot)
        self.slots.coming(slot, side, panel)
        self.slots.ready(slot)

    def bring(self, side="b", panel=5):
        array = Array(np.full(NBYTES, 255, np.uint8))
        return int(array.memory[0]) if self.slots.bring(side, panel, array) and np.ptp(array.memory) == 0 else None


@pytest.fixture
def devices(path):
    made = [Device(path, number) for number in range(2)]
    yield made
    for device in made:
        device.slots.close([])
    until(lambda: not any(device.peers._mapped for device in made))
    for device in made:
        device.peers.table.close()


def until(true):
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_panel_that_another_device_has_comes_from_there(devices) -> None:
    one, other = devices
    assert other.bring() is None
    one.has(1)
    assert other.bring() == 1
    assert other.bring("a") is None
    assert other.bring("b", 4) is None
    assert other.peers.copied == 1
    assert other.link.opened == [one.memory[1].ctypes.data]
    one.has(0, "a", 0)
    assert (other.bring("a", 0), other.bring()) == (0, 1)
    assert len(other.link.opened) == 2, "what is mapped stays so"
    assert one.slots.retract(1), "nobody reads it any more"


def test_a_panel_that_is_under_way_to_another_device_is_waited_for(devices) -> None:
    one, other = devices
    assert one.slots.retract(1)
    one.slots.coming(1, "b", 5)
    brought = []
    waits = threading.Thread(target=lambda: brought.append(other.bring()))
    waits.start()
    time.sleep(0.05)
    assert not brought
    one.slots.ready(1)
    waits.join(WAIT_S)
    assert brought == [1]


def test_nobody_waits_for_long(devices, monkeypatch) -> None:
    """Past a few times what the host would take it comes from there; and whoever is not wanted any more ends."""
    one, other = devices
    assert one.slots.retract(1)
    one.slots.coming(1, "b", 5)
    other.slots.came(NBYTES, 0.02)
    began = time.monotonic()
    assert other.bring() is None
    assert 0.05 < time.monotonic() - began < 1.0

    def stop():
        raise InterruptedError

    monkeypatch.setattr(peer_panels, "_LONGEST_S", 1000.0)
    other.peers.host_rate = 0.0
    with interruptible(stop), pytest.raises(InterruptedError):
        other.bring()
    one.slots.close([])
    assert other.bring() is None


def test_nothing_comes_from_where_there_is_no_way(devices) -> None:
    """Decided once; nor does anybody wait for what is under way to there."""
    one, other = devices
    other.link.reached = False
    one.has(1)
    assert [other.bring(), other.bring()] == [None, None]
    assert other.link.asked == [one.link.bus_id]
    assert other.link.opened == []
    assert one.slots.retract(0)
    one.slots.coming(0, "b", 3)
    assert not other.slots.is_coming("b", 3)
    other.peers.host_rate = 0.0
    began = time.monotonic()
    assert other.bring("b", 3) is None
    assert time.monotonic() - began < peer_panels._LONGEST_S / 2


@pytest.mark.parametrize("fails", ["open", "copy"])
def test_nothing_comes_any_more_from_where_it_failed(devices, fails) -> None:
    one, other = devices
    one.has(1)

    def fail(*_):
        raise RuntimeError("cudaErrorMapBufferObjectFailed")

    setattr(other.link, fails, fail)
    assert other.bring() is None
    delattr(other.link, fails)
    assert other.bring() is None
    assert one.slots.retract(1), "nothing is left locked"
    if fails == "open":
        assert not one.peers.table.mapped(1)


def test_panels_that_cannot_be_offered_are_not_shared(devices) -> None:
    one, _ = devices

    def fail(*_):
        raise RuntimeError("cudaErrorNotSupported")

    one.link.offer = fail
    assert one.share() is None


def test_a_device_slower_than_the_hosts_memory_is_left(devices) -> None:
    """Twice in a row: the first copy makes the way ready. Of the next product it is tried again."""
    one, other = devices
    one.has(1)
    other.slots.came(NBYTES, 0.005)
    other.link.seconds = 0.02
    assert other.bring() == 1
    other.link.seconds = 0.0
    assert other.bring() == 1
    other.link.seconds = 0.02
    assert [other.bring() for _ in range(3)] == [1, 1, None]
    one.slots.close([])
    one.slots = one.share()
    one.has(1)
    assert [other.bring() for _ in range(3)] == [1, 1, None]


def test_a_panel_is_not_taken_whose_worker_went_meanwhile(devices, path) -> None:
    one, other = devices
    one.has(1)
    other.link.during = one.peers.table.close  # as the end of its process does
    assert other.bring() is None
    assert other.peers.copied == 0
    until(lambda: other.link.closed == other.link.opened)
    one.peers.table = PanelTable(PanelsFile(path, 0), one.link.bus_id)
    one.slots = one.share()
    one.has(1)
    other.link.during = lambda: None
    assert other.bring() == 1, "the next one's are"


def test_a_slot_is_not_filled_while_it_is_read(devices) -> None:
    one, other = devices
    one.has(1)
    found = []
    other.link.during = lambda: found.append(one.slots.retract(1))
    assert other.bring() == 1
    assert found == [False]
    assert one.slots.retract(1)


def test_a_slot_that_was_filled_all_the_same_is_noticed(devices) -> None:
    one, other = devices
    one.has(1)
    other.link.during = lambda: one.peers.table.coming(1, "b", 6)
    assert other.bring() is None


def test_memory_stays_while_another_device_has_it_mapped(devices) -> None:
    one, other = devices
    one.has(1)
    assert other.bring() == 1
    memory = Memory()
    gone = weakref.ref(memory)
    other.link.may_close.clear()
    other.slots.close([])
    one.slots.close([memory])
    del memory
    one.peers.sweep(0.05)
    assert gone() is not None
    other.link.may_close.set()
    until(lambda: gone() is None)
    assert other.link.closed == other.link.opened


def test_memory_that_nobody_has_mapped_goes_at_once(devices) -> None:
    one, _ = devices
    memory = Memory()
    gone = weakref.ref(memory)
    one.slots.close([memory])
    del memory
    assert gone() is None


def test_who_is_through_with_a_product_unmaps(devices) -> None:
    one, other = devices
    one.has(1)
    assert other.bring() == 1
    other.slots.close([])
    until(lambda: other.link.closed == other.link.opened)
    assert not one.peers.table.mapped(1)
    assert other.bring() is None


def test_fewer_slots_are_another_generation(devices) -> None:
    """Memory of those that went is free when the others have mapped anew what is left."""
    one, other = devices
    one.has(0, "a", 3)
    one.has(1)
    assert (other.bring(), other.bring("a", 3)) == (1, 0)
    memory = Memory()
    gone = weakref.ref(memory)
    assert one.slots.retract(1)
    one.slots.drop([memory])
    del memory
    until(lambda: gone() is None)
    assert other.bring() is None
    assert other.bring("a", 3) == 0
    assert len(other.link.opened) == 3


# -- slots of panels ------------------------------------------------------------------------------------------------

SIDE = 16
PANEL = SIDE * 4 * SIDE * 8
SQUARE = Operand.contiguous((4 * SIDE, 4 * SIDE), np.dtype("f8"))
GRID = Grid.with_sides(GemmProblem.build(SQUARE, SQUARE), (SIDE, SIDE, 1))


class Pool:
    """Memory of a device, given again as soon as nobody has it, with something else in it."""

    def __init__(self):
        self.free = []

    def allocate(self, nbytes):
        return Pooled(self, self.free.pop() if self.free else np.empty(PANEL, np.uint8))


class Pooled:
    def __init__(self, pool, array):
        self.pool, self.array = pool, array

    def __del__(self):
        self.array.fill(255)
        self.pool.free.append(self.array)


class View:
    """Panel in a slot."""

    def __init__(self, memory, layout):
        self.memory, self.nbytes = memory, layout.nbytes
        self.data = SimpleNamespace(ptr=memory.array.ctypes.data)

    def fill(self, value):
        self.memory.array.fill(value)


def sharing(device, more, *, pool=None):
    """Slots of the grid that are shared, with memory for so many panels beside a pair."""
    plan = plan_memory(GRID, DeviceSpec.cpu(), plan_memory(GRID, DeviceSpec.cpu(), 0).needed_bytes + more * PANEL)
    pool = pool or Pool()

    def share(memory):
        return device.peers.share("t", [(each.array.ctypes.data, nbytes) for each, nbytes in memory])

    return PanelSlots(GRID, plan, pool.allocate, View, share=share)


def value(side, panel):
    return 10 * (1 + (side == "b")) + panel


def taken(slots, side, index):
    """Use a panel, brought by filling it if it comes from the host."""
    pin = slots.take(side, index, lambda array: array.fill(value(side, GRID.panel(side, index))), waits=True)
    assert (pin.array.memory.array == value(side, GRID.panel(side, index))).all()
    pin.release()


def test_what_a_device_has_is_not_brought_from_the_host_again(devices) -> None:
    one, other = (sharing(device, 6) for device in devices)
    for index in (0, 1):
        taken(one, "a", index)
        taken(one, "b", index)
    for index in (0, 1, 2):
        taken(other, "a", index)
        taken(other, "b", index)
    assert (one.uploads, one.copies) == (3, 0)
    assert (other.uploads, other.copies, other.uploaded_bytes, other.copied_bytes) == (1, 3, PANEL, 3 * PANEL)
    for slots in (one, other):
        slots.close()


def test_what_is_to_be_computed_meanwhile_decides(devices) -> None:
    """From the host, unless it takes longer than the blocks before that one and those with the panel; so it is while
    nothing is known of blocks of that grid.
    """
    one, other = (sharing(device, 6) for device in devices)
    peers = devices[1].peers
    peers.always = False
    for index in range(4):
        taken(one, "b", index)
    peers.host_rate = PANEL / 0.010
    taken(other, "b", 0)
    other_grid = Grid.with_sides(GemmProblem.build(SQUARE, SQUARE), (2 * SIDE, SIDE, 1))
    peers.block = other_grid, 0.001
    taken(other, "b", 1)
    assert (other.uploads, other.copies) == (2, 0)
    other.computed(0.009)
    taken(other, "b", 2)
    assert other.copies == 1, "alone it opens one block"
    for host_s, brought in ((0.026, "host"), (0.028, "device")):
        peers.host_rate = PANEL / host_s
        other.expect([0, 3, 7], lambda *_: None)  # one before, two with it
        found = other._others("b", 3)
        assert (found is None) == (brought == "host")
    for slots in (one, other):
        slots.close()


@pytest.fixture
def half_way(devices):
    """The slots of another device, while the first is being brought a panel of A, which `end` lets come; `bring` brings
    panels there, and `brought` lists them.
    """
    one, other = (sharing(device, 6) for device in devices)
    begun, go_on = threading.Event(), threading.Event()

    def slowly(array):
        begun.set()
        assert go_on.wait(WAIT_S)
        array.fill(value("a", 0))

    slow = threading.Thread(target=lambda: one.take("a", 0, slowly, waits=True).release())
    slow.start()
    assert begun.wait(WAIT_S)
    brought = []

    def bring(side, index, array):
        brought.append((side, GRID.panel(side, index)))
        array.fill(value(side, GRID.panel(side, index)))

    def end():
        go_on.set()
        slow.join(WAIT_S)

    PanelsAhead(lambda: None).follow(other)
    yield SimpleNamespace(other=other, bring=bring, brought=brought, end=end)
    end()
    for slots in (one, other):
        slots.close()


def test_a_host_that_is_fast_enough_keeps_nobody_waiting(devices, half_way) -> None:
    """Panels under way to another device are brought at once, in their blocks' order."""
    devices[1].peers.always = False
    half_way.other.expect([0, 1], half_way.bring)
    until(lambda: len(half_way.brought) == 3)
    assert half_way.brought == [("a", 0), ("b", 0), ("b", 1)]


def test_a_slot_waits_for_the_device_that_reads_it(devices) -> None:
    """Who needs another panel there, now or ahead of its block; and what could not be brought is in none."""
    first, second = (sharing(device, 0) for device in devices)
    taken(first, "b", 0)
    reads, go_on = threading.Event(), threading.Event()
    devices[1].link.during = lambda: (reads.set(), go_on.wait(WAIT_S))
    reader = threading.Thread(target=taken, args=(second, "b", 0))
    reader.start()
    assert reads.wait(WAIT_S)
    PanelsAhead(lambda: None).follow(first)
    first.expect([1], lambda side, index, array: array.fill(value(side, GRID.panel(side, index))))
    until(lambda: first.uploads == 2)  # the panel of A
    waits = threading.Thread(target=taken, args=(first, "b", 1))
    waits.start()
    time.sleep(0.05)
    assert first.uploads == 2
    go_on.set()
    for thread in (reader, waits):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert (first.uploads, second.copies) == (3, 1)
    devices[1].link.during = lambda: None

    def fail(array):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        first.take("b", 2, fail, waits=True)
    taken(second, "b", 2)
    assert second.copies == 1
    for slots in (first, second):
        slots.close()


def test_what_comes_to_another_device_is_brought_last(half_way) -> None:
    """Ahead of their blocks the panels come that nobody else brings; the other is copied once it is there."""
    half_way.other.expect([0, 1, 4], half_way.bring)
    until(lambda: len(half_way.brought) == 3)
    half_way.end()
    until(lambda: half_way.other.copies == 1)
    assert half_way.brought == [("b", 0), ("b", 1), ("a", 1)]


@pytest.mark.parametrize("seed", range(10))
def test_what_a_block_reads_is_its_panel_whatever_others_do(devices, seed) -> None:
    """Two devices at once, each with little memory or much, in orders of their own, some of it let go meanwhile, and
    some panels that cannot be brought ahead; memory is given again at once when nobody has it.
    """
    chance = random.Random(seed)
    pool = Pool()
    mores = [chance.randrange(7) for _ in devices]
    made = [sharing(device, more, pool=pool) for device, more in zip(devices, mores, strict=True)]
    errors = []

    def bring(side, index, array):
        if chance.random() < 0.1:
            raise OSError("gone")
        time.sleep(chance.random() * 0.002)
        array.fill(value(side, GRID.panel(side, index)))

    def compute(slots, seed):
        mine = random.Random(seed)
        order = list(slots.plan.order)
        mine.shuffle(order)
        try:
            for place, index in enumerate(order):
                slots.expect(order[place : place + 4], bring)
                for side in ("a", "b"):
                    taken(slots, side, index)
                if mine.random() < 0.15:
                    slots.shrink(least=mine.random() < 0.5)
            slots.close()
        except BaseException as error:
            errors.append(error)
            raise

    for device, slots in zip(devices, made, strict=True):
        device.link.seconds = 0.001
        PanelsAhead(lambda: None).follow(slots)
    threads = [threading.Thread(target=compute, args=(slots, seed + 100 * at)) for at, slots in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not errors
    until(lambda: not any(device.peers._kept or device.peers._mapped for device in devices))
