"""Deliveries: arrays that a device of this host has, and a client of this host wants, go straight into its memory.

By way of the store they would be copied twice, the second time by this process, whose processors bring some 3 GB/s each
into memory that must not be mapped. A worker has the client's memory registered with its device's driver, which copies
at the rate of the link (`executor.worker.memory.deliveries`). To register memory costs as much as some copies, so that
is for memory that comes again.

A client uses its memory again once it has an answer. So there is none while something may write there: a delivery is
over when the worker says so, or when the process after it says hello. Whoever waits for a worker that is lost, or for
long, is left without an answer instead: the connection breaks, and the client asks again with other memory.

Everything here happens in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_service.executor.protocol import Deliver

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.executor.protocol import Delivered
    from gemmserve_service.store.extents.shared_memory import Memory
    from gemmserve_service.store.pin import Pinned

MIN_BYTES: Final = 1 << 20
"""Bytes below which an array is as soon there by way of the store: a quarter of a millisecond."""
MAX_MEMORY_BYTES: Final = 1 << 30
"""Bytes of the largest memory: while it is registered, other deliveries wait, for some 50 ms."""
_SPARE: Final = 4
"""Times of an array that its memory may take: all of it is registered, whoever else's has to go for that."""
_MAX_OF_WORKER: Final = 16
_MAX_OF_OWNER: Final = 8
"""Deliveries of a worker, and of an owner, that may be under way: the link is kept busy by two. Each has a descriptor,
also when its client has hung up. More arrays go by way of the store."""
_MAX_BEFORE: Final = 16
"""Times of an array's bytes that may be before it: with more it is sooner there by way of the store, at 3 GB/s."""
_AT_HAND_S: Final = 5.0
"""Seconds that are waited for an array that could go by way of the store."""
_MAX_SEEN: Final = 4096
"""Memories that are remembered, by their names."""


class DeliveryInDoubtError(Exception):
    """A device may still write to a client's memory: no answer may say that the client can use it."""


@dataclass(eq=False, slots=True)
class _Delivery:
    worker: Worker
    owner: str
    nbytes: int
    outcome: asyncio.Future[bool | None]
    """Whether the array is there; None: nobody will know."""
    fd: int
    """Descriptor of the client's memory, by which the worker opens it."""

    def tell(self, outcome: bool | None) -> None:
        """Tell whoever waits."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def end(self, outcome: bool | None) -> None:
        """Nothing is written any more."""
        os.close(self.fd)
        self.tell(outcome)


class Deliveries:
    """Those of all workers."""

    def __init__(self, executor: Executor, holder: Callable[[Pinned], Worker | None]) -> None:
        """`holder` returns the worker whose device has a copy of an array, if there is one."""
        self.delivered_bytes = 0
        """Bytes that went straight to clients."""
        self._executor = executor
        self._holder = holder
        self._numbers = itertools.count(1)
        self._under_way: dict[int, _Delivery] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        """Memories that have come before, the longest ago first."""
        self._stopping = False

    async def deliver(self, pinned: Pinned, memory: Memory, owner: str, timeout_s: float | None) -> bool:
        """Copy a pinned array of `owner`'s to the start of a client's memory, whose pages stay the same. False: it did
        not get there, and nothing will write there. Raises DeliveryInDoubtError.
        """
        worker, nbytes = self._holder(pinned), pinned.info.nbytes
        if worker is None or not worker.ready or not worker.delivers or worker.link is not None or self._stopping:
            return False
        capacity = memory.nbytes
        if not MIN_BYTES <= nbytes <= capacity <= min(_SPARE * nbytes, MAX_MEMORY_BYTES):
            return False
        if not (memory.writable and memory.takes(capacity) and self._came_before(memory.name)):
            return False
        of_worker = [each for each in self._under_way.values() if each.worker is worker]
        if len(of_worker) >= _MAX_OF_WORKER or sum(each.owner == owner for each in of_worker) >= _MAX_OF_OWNER:
            return False
        if sum(each.nbytes for each in of_worker) > _MAX_BEFORE * nbytes:
            return False
        try:
            fd = memory.duplicate()
        except OSError:  # too many are open
            return False
        number, loop = next(self._numbers), asyncio.get_running_loop()
        delivery = self._under_way[number] = _Delivery(worker, owner, nbytes, loop.create_future(), fd)
        worker.delivering = worker.delivering or time.monotonic()
        order = Deliver(
            number=number,
            array=pinned.info.id,
            nbytes=nbytes,
            memory=memory.name,
            path=f"/proc/{os.getpid()}/fd/{fd}",
            capacity=capacity,
        )
        self._executor.send(worker, order)
        # What has begun goes on if its client hangs up, and the descriptor stays open for it.
        if pinned.pending is None:
            timeout_s = _AT_HAND_S if timeout_s is None else min(timeout_s, _AT_HAND_S)
        await asyncio.wait((delivery.outcome,), timeout=timeout_s)
        delivered = delivery.outcome.result() if delivery.outcome.done() else None
        if delivered is None:
            raise DeliveryInDoubtError(f"nobody knows whether array {pinned.info.id} is in its client's memory")
        self.delivered_bytes += nbytes * delivered
        return delivered

    def _came_before(self, memory: str) -> bool:
        """Return whether that memory has been seen; it has from now on."""
        found = memory in self._seen
        self._seen[memory] = None
        self._seen.move_to_end(memory)
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return found

    def answered(self, worker: Worker, message: Delivered) -> None:
        """A worker has delivered arrays, or will not."""
        for numbers, delivered in ((message.numbers, True), (message.refused, False)):
            for number in numbers:
                delivery = self._under_way.get(number)
                if delivery is not None and delivery.worker is worker:
                    del self._under_way[number]
                    delivery.end(delivered)
        waits = any(delivery.worker is worker for delivery in self._under_way.values())
        worker.delivering = time.monotonic() if waits else None

    def worker_lost(self, worker: Worker) -> None:
        """A worker's process is gone, or is being ended: it may still write for a while."""
        worker.delivering = None
        for delivery in self._under_way.values():
            if delivery.worker is worker:
                delivery.tell(None)

    def worker_ready(self, worker: Worker) -> None:
        """A worker said hello: it, and the process before it, have ended all that they were asked before."""
        for number, delivery in list(self._under_way.items()):
            if delivery.worker is worker:
                del self._under_way[number]
                delivery.end(None)

    def stop(self) -> None:
        """Leave what is under way in doubt: nobody hears of it any more."""
        self._stopping = True
        under_way, self._under_way = self._under_way, {}
        for delivery in under_way.values():
            delivery.end(None)
