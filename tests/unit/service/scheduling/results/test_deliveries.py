"""Arrays that a worker copies straight into a client's memory: which, who hears of it, and what is in doubt."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from memory_peer import GROW, NEEDS_MEMFD, SHRINK, memory

from gemmserve_service.executor.port import Worker
from gemmserve_service.executor.protocol import Delivered
from gemmserve_service.scheduling.results import deliveries as module
from gemmserve_service.scheduling.results.deliveries import Deliveries, DeliveryInDoubtError
from gemmserve_service.store.extents.shared_memory import Memory

pytestmark = NEEDS_MEMFD

NBYTES = 1 << 20
SOON_S = 0.01


class Front:
    """Deliveries of one worker, and what it was sent."""

    def __init__(self):
        self.worker = Worker("cuda:0", ready=True, delivers=True)
        self.holder = self.worker
        self.sent = []
        executor = SimpleNamespace(send=lambda worker, message: self.sent.append(message))
        self.deliveries = Deliveries(executor, lambda _: self.holder)
        self.fds = []

    def memory(self, nbytes=NBYTES, **fields):
        fd = memory(nbytes=nbytes, **fields)
        self.fds.append(os.dup(fd))
        return Memory.examine(fd, 0)

    def again(self, memory):
        """The same memory, passed once more."""
        return Memory.examine(memory.duplicate(), memory.offset)

    async def known(self, nbytes=NBYTES, **fields):
        """Memory that has come before."""
        first = self.memory(nbytes, **fields)
        assert not await self.deliver(first, nbytes)
        again = self.again(first)
        first.close()
        return again

    def deliver(self, memory, nbytes=NBYTES, timeout_s=60, *, owner="me", at_hand=False):
        pinned = SimpleNamespace(
            info=SimpleNamespace(id="arr_1", nbytes=nbytes), pending=None if at_hand else SimpleNamespace()
        )
        return self.deliveries.deliver(pinned, memory, owner, timeout_s)

    async def begun(self, memory, **fields):
        """A delivery that the worker has been sent."""
        count = len(self.sent)
        task = asyncio.ensure_future(self.deliver(memory, **fields))
        await asyncio.sleep(0)
        assert len(self.sent) == count + 1
        return task

    def answer(self, *, delivered=(), refused=()):
        self.deliveries.answered(self.worker, Delivered(numbers=list(delivered), refused=list(refused)))

    def opened(self, order):
        """Which file a worker opens."""
        return Path(order.path).stat().st_ino

    @property
    def open_descriptors(self):
        return sum(Path(order.path).exists() for order in self.sent)


@pytest.fixture
def front():
    front = Front()
    yield front
    for fd in front.fds:
        os.close(fd)


async def test_memory_that_comes_again_is_delivered_to(front):
    memory = await front.known()
    assert not front.sent
    task = await front.begun(memory)
    (order,) = front.sent
    assert (order.array, order.nbytes, order.capacity, order.memory) == ("arr_1", NBYTES, NBYTES, memory.name)
    assert front.opened(order) == os.fstat(front.fds[0]).st_ino
    assert front.worker.delivering is not None
    front.answer(delivered=[order.number])
    assert await task
    assert front.deliveries.delivered_bytes == NBYTES
    assert front.worker.delivering is None
    assert front.open_descriptors == 0
    memory.close()


async def test_what_a_worker_refuses_may_go_another_way(front):
    memory = await front.known()
    task = await front.begun(memory)
    front.answer(refused=[front.sent[0].number])
    assert not await task
    assert front.deliveries.delivered_bytes == 0
    assert memory.takes(NBYTES), "it is still the caller's"
    memory.close()


@pytest.mark.parametrize(
    "what",
    [
        *("nobody", "lost", "joined", "old", "small", "too small", "too large", "read-only", "offset", "holes"),
        *("no descriptor", "stopping"),
    ],
)
async def test_what_is_not_delivered(front, what, monkeypatch):
    memory, nbytes = await front.known(), NBYTES
    if what == "nobody":
        front.holder = None
    if what == "lost":
        front.worker.ready = False
    if what == "joined":
        front.worker.link = SimpleNamespace()
    if what == "old":
        front.worker.delivers = False
    if what == "small":
        nbytes = NBYTES - 1
    if what == "too small":
        nbytes = NBYTES + 1
    if what == "read-only":
        reader = os.open(f"/proc/self/fd/{front.fds[0]}", os.O_RDONLY)
        memory.close()
        memory = Memory.examine(reader, 0)
    if what == "offset":
        memory.offset = 4096
    if what == "holes":  # beyond the array: its pages would be registered, too
        os.ftruncate(front.fds[0], 4 * NBYTES)
    if what == "too large":
        os.ftruncate(front.fds[0], 0)
        os.pwrite(front.fds[0], bytes(5 * NBYTES), 0)
    if what == "no descriptor":
        monkeypatch.setattr(memory, "duplicate", too_many)
    if what == "stopping":
        front.deliveries.stop()
    assert not await front.deliver(memory, nbytes)
    assert not front.sent
    memory.close()


def too_many():
    raise OSError(errno.EMFILE, "too many open files")


async def test_sealed_in_its_size_it_serves(front):
    memory = await front.known(seals=SHRINK | GROW)
    task = await front.begun(memory)
    front.answer(delivered=[front.sent[0].number])
    assert await task
    memory.close()


async def test_there_is_no_answer_while_the_worker_may_still_write(front):
    memory = await front.known()
    with pytest.raises(DeliveryInDoubtError):
        await front.deliver(memory, timeout_s=SOON_S)
    assert front.open_descriptors == 1, "the worker may not have opened it yet"
    assert front.worker.delivering is not None, "the watchdog looks at it"
    front.answer(delivered=[front.sent[0].number])
    assert front.open_descriptors == 0
    memory.close()


async def test_a_client_that_hangs_up_leaves_nothing_behind(front):
    memory = await front.known()
    task = await front.begun(memory)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    memory.close()
    assert front.open_descriptors == 1
    front.answer(delivered=[front.sent[0].number])
    assert front.open_descriptors == 0
    assert front.worker.delivering is None


async def test_a_lost_worker_leaves_it_in_doubt(front):
    memory = await front.known()
    task = await front.begun(memory)
    front.deliveries.worker_lost(Worker("cuda:1"))
    await asyncio.sleep(SOON_S)
    assert not task.done()
    front.deliveries.worker_lost(front.worker)  # its process is being killed: it may still write
    with pytest.raises(DeliveryInDoubtError):
        await task
    assert front.worker.delivering is None
    front.deliveries.worker_ready(Worker("cuda:1"))
    assert front.open_descriptors == 1
    front.deliveries.worker_ready(front.worker)
    assert front.open_descriptors == 0
    front.answer(delivered=[front.sent[0].number])  # of whom, if not of the next one
    memory.close()


async def test_what_could_go_by_way_of_the_store_does_not_wait_for_long(front, monkeypatch):
    monkeypatch.setattr(module, "_AT_HAND_S", SOON_S)
    for timeout_s in (60, None):
        memory = await front.known()
        with pytest.raises(DeliveryInDoubtError):
            await front.deliver(memory, timeout_s=timeout_s, at_hand=True)
        memory.close()
    memory = await front.known()
    task = await front.begun(memory)
    await asyncio.sleep(4 * SOON_S)
    assert not task.done(), "this could not"
    front.answer(delivered=[front.sent[-1].number])
    assert await task
    memory.close()


async def test_few_are_under_way_at_a_time_whether_anybody_waits_or_not(front):
    memories, tasks = [], []

    async def one_more(owner):
        memories.append(await front.known())
        count = len(front.sent)
        task = asyncio.ensure_future(front.deliver(memories[-1], owner=owner))
        await asyncio.sleep(0)
        if len(front.sent) == count:
            assert not await task
            return False
        tasks.append(task)
        return True

    assert [await one_more("me") for _ in range(9)] == [*[True] * 8, False]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not await one_more("me")
    assert [await one_more("other") for _ in range(8)] == [True] * 8
    assert not await one_more("third"), "of all owners of one worker"
    front.answer(delivered=[front.sent[0].number])
    assert await one_more("me")
    front.answer(refused=[order.number for order in front.sent[1:]])
    assert front.open_descriptors == 0
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in memories:
        each.close()


async def test_small_arrays_do_not_wait_for_large_ones(front):
    large = await front.known(9 * NBYTES)
    others = [await front.known() for _ in range(8)]
    tasks = [await front.begun(large, nbytes=9 * NBYTES)]
    tasks += [await front.begun(each, owner="other") for each in others]
    one_more = await front.known()
    assert not await front.deliver(one_more, owner="third"), "by way of the store it is sooner there"
    other, front.worker = front.worker, Worker("cuda:1", ready=True, delivers=True)
    front.holder = front.worker
    elsewhere = await front.begun(one_more, owner="third")
    front.answer(delivered=[front.sent[-1].number])
    assert await elsewhere
    front.worker = front.holder = other
    larger = await front.known(2 * NBYTES)
    tasks.append(await front.begun(larger, nbytes=2 * NBYTES, owner="third"))
    front.answer(delivered=[order.number for order in front.sent])
    assert all(await asyncio.gather(*tasks))
    for each in (large, *others, one_more, larger):
        each.close()


@pytest.mark.parametrize(("nbytes", "goes"), [(1 << 30, True), ((1 << 30) + 4096, False)])
async def test_the_largest(front, nbytes, goes):
    fd = os.memfd_create("test")
    front.fds.append(fd)
    memory = SimpleNamespace(
        nbytes=nbytes, writable=True, name="1:2", takes=lambda wanted: wanted <= nbytes, duplicate=lambda: os.dup(fd)
    )
    assert not await front.deliver(memory, nbytes)
    task = asyncio.ensure_future(front.deliver(memory, nbytes))
    await asyncio.sleep(0)
    front.answer(delivered=[order.number for order in front.sent])
    assert await task == goes


async def test_the_answer_of_another_worker_is_none(front):
    memory = await front.known()
    task = await front.begun(memory)
    number = front.sent[0].number
    front.deliveries.answered(Worker("cuda:1"), Delivered(numbers=[number]))
    front.answer(delivered=[number + 1])
    await asyncio.sleep(SOON_S)
    assert not task.done()
    front.answer(refused=[number])
    assert not await task
    memory.close()


async def test_the_end_of_the_server_leaves_it_in_doubt(front):
    memory = await front.known()
    task = await front.begun(memory)
    front.deliveries.stop()
    with pytest.raises(DeliveryInDoubtError):
        await task
    assert front.open_descriptors == 0
    front.answer(delivered=[front.sent[0].number])  # too late for anybody
    memory.close()


async def test_each_answer_begins_the_wait_for_the_next(front, monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    memories = [await front.known() for _ in range(2)]
    tasks = [await front.begun(memories[0])]
    now = 101.0
    tasks.append(await front.begun(memories[1]))
    assert front.worker.delivering == 100.0
    now = 102.0
    front.answer(delivered=[front.sent[0].number])
    assert front.worker.delivering == 102.0
    front.answer(refused=[front.sent[1].number])
    assert front.worker.delivering is None
    assert await asyncio.gather(*tasks) == [True, False]
    for each in memories:
        each.close()


async def test_few_memories_are_remembered(front, monkeypatch):
    monkeypatch.setattr(module, "_MAX_SEEN", 2)
    first, *others = [front.memory() for _ in range(3)]
    for each in (first, *others):
        assert not await front.deliver(each)
    assert not await front.deliver(first)
    assert not front.sent
    for each in (first, *others):
        each.close()
