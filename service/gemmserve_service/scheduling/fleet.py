"""Fleet: the workers, by what is asked for every task, so that the answer takes as long with a thousand as with one.

Workers whose devices are equal form a device class: they share plans and estimates. A worker is open while it may be
given something; one that has as much as it is to have leaves the heap of those until it has answered. Copies of arrays
are found by the array, not by the worker.

Everything here happens in the event loop's thread.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.store.pin import Pinned


class Fleet:
    """The workers of an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._places: dict[Worker, int] = {}
        """Places of the workers, those that the executor has named first before others: of two that could run a task
        the first does. No two have ever the same."""
        self._next_place = itertools.count()
        self._open: list[tuple[int, Worker]] = []
        self._in_heap: set[Worker] = set()
        self._idle: set[Worker] = set()
        self._known: dict[Worker, None] = {}
        """Workers that have said which device they have."""
        self.representatives: Sequence[Worker] = ()
        """One worker of each device class, lost or not."""
        self.result_bytes = 0
        """Bytes of results that may stay on some device."""
        self._holders: dict[str, set[Worker]] = {}
        """Workers whose devices have copies of arrays, by array."""
        self._held: dict[Worker, set[str]] = {}
        """The arrays of each of them."""
        self.running = 0
        """Tasks that workers have."""
        self._here: set[Worker] = set()
        """Ready workers of the front's own host."""

    # -- workers ----------------------------------------------------------------------------------------------------

    @property
    def unknown(self) -> bool:
        """Whether some worker has not said yet which device it has."""
        return len(self._known) < len(self._executor.workers())

    @property
    def here(self) -> bool:
        """Whether a worker of the front's own host is ready: to it the store's arrays do not come over a network."""
        return bool(self._here)

    @property
    def workers_here(self) -> Iterator[Worker]:
        """Yield the ready workers of the front's own host."""
        return iter(self._here)

    @property
    def idle(self) -> int:
        """Workers that are ready and have no task."""
        return len(self._idle)

    @property
    def idle_workers(self) -> Iterator[Worker]:
        """Yield those."""
        return iter(self._idle)

    def ready(self, worker: Worker) -> None:
        """Note that a worker takes tasks from now on; its device may be another than before, and has no copies."""
        if worker not in self._places:
            for each in self._executor.workers():
                if each not in self._places:
                    self._places[each] = next(self._next_place)
        self._known[worker] = None
        self._look()
        self._drop_copies(worker)
        if worker.link is None:
            self._here.add(worker)
        if not worker.tasks:
            self._idle.add(worker)
        self.open(worker)

    def lost(self, worker: Worker, tasks: int) -> None:
        """Note that a worker is gone, and so many tasks with it."""
        self.running -= tasks
        self._idle.discard(worker)
        self._in_heap.discard(worker)
        self._here.discard(worker)
        self._drop_copies(worker)

    def gone(self, worker: Worker) -> None:
        """Note that a lost worker is expected no longer: what it has nobody else has is no reason to wait."""
        self._known.pop(worker, None)
        self._places.pop(worker, None)
        self._look()

    def began(self, worker: Worker) -> None:
        """Note that a worker was sent a task."""
        self.running += 1
        self._idle.discard(worker)

    def ended(self, worker: Worker) -> None:
        """Note that a worker has answered a task."""
        self.running -= 1
        if worker.ready:
            if not worker.tasks:
                self._idle.add(worker)
            self.open(worker)

    def open(self, worker: Worker) -> None:
        """Note that a worker may be given something."""
        if worker.ready and worker not in self._in_heap:
            self._in_heap.add(worker)
            heapq.heappush(self._open, (self._places[worker], worker))

    def take_open(self) -> Worker | None:
        """Take the first worker that is open out of the heap."""
        while self._open:
            _, worker = heapq.heappop(self._open)
            if worker in self._in_heap:
                self._in_heap.remove(worker)
                return worker
        return None

    # -- copies of arrays -------------------------------------------------------------------------------------------

    def others_have_copies(self, worker: Worker) -> bool:
        """Whether any other device than a worker's has copies of arrays."""
        return len(self._held) > (worker in self._held)

    def copied(self, operands: Iterable[Pinned], worker: Worker) -> int:
        """Return the bytes of operands of which a worker's device has copies."""
        held = self._held.get(worker)
        return sum([each.info.nbytes for each in operands if each.info.id in held]) if held else 0

    def most_copied(self, operands: Collection[Pinned]) -> int:
        """Return the most bytes of operands of which any device has copies."""
        everything = sum([each.info.nbytes for each in operands])
        most = 0
        for worker in set().union(*[self._holders.get(each.info.id, ()) for each in operands]):
            most = max(most, self.copied(operands, worker))
            if most == everything:
                break
        return most

    def holder(self, array: str) -> Worker | None:
        """Return a ready worker of the front's own host whose device has a copy of an array, if there is one."""
        return next((worker for worker in self._holders.get(array, ()) if worker in self._here), None)

    def copies_changed(self, worker: Worker, came: Iterable[str], went: Iterable[str]) -> None:
        """Note arrays that came to a worker's device and went from there."""
        for array in came:
            self._held.setdefault(worker, set()).add(array)
            self._holders.setdefault(array, set()).add(worker)
        for array in went:
            self._no_longer(array, worker)

    def forget_array(self, array: str) -> None:
        """Note that an array is gone: nobody will ask for its copies."""
        for worker in tuple(self._holders.get(array, ())):
            self._no_longer(array, worker)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        known = sorted(self._known, key=lambda each: each.link is None)  # of a class, this host's rather than others
        self.representatives = list({each.device_class: each for each in known}.values())
        self.result_bytes = max((each.result_bytes for each in self._known), default=0)

    def _drop_copies(self, worker: Worker) -> None:
        for array in tuple(self._held.get(worker, ())):
            self._no_longer(array, worker)

    def _no_longer(self, array: str, worker: Worker) -> None:
        holders = self._holders.get(array)
        if holders is None or worker not in holders:
            return
        holders.remove(worker)
        if not holders:
            del self._holders[array]
        self._held[worker].remove(array)
        if not self._held[worker]:
            del self._held[worker]
