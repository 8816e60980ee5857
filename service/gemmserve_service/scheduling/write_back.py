"""Results on their way to the store: a job has succeeded when its results are on a device and what they are made of is
on record.

Until its bytes are in the store, an array is used where it is: jobs on it go to the device that has it, downloads wait
and have it written first. If the device is lost, the array is computed again from its lineage, by the same algorithm on
the same operands, which are pinned as long; then it is written at once. What its owner deletes before it was written,
and what nothing else was made of, is never written.

Everything here happens in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import Draining, JobFailed, JobTimeout, ServiceError, describe
from gemmserve_service.executor.protocol import Done
from gemmserve_service.executor.protocol import WriteBack as Wishes
from gemmserve_service.programs import Program
from gemmserve_service.runtime.background import Background, report
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.store.pending import Lineage, Rewritten, Unwritten, lost, places_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.executor.protocol import Written
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.catalog import Record
    from gemmserve_service.store.pin import Pinned

_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 5.0
_PRIORITY: Final = 100  # the highest: whoever waits for such an array waits for a job that has ended

log = logging.getLogger(__name__)


class WriteBack:
    """All results that the store has not, yet."""

    def __init__(
        self, store: ArrayStore, executor: Executor, submit: Callable[[Task], None], cancel: Callable[[Task], None]
    ) -> None:
        """`submit`, `cancel`: the scheduler's."""
        self.recomputed = 0
        """Jobs whose results were computed again."""
        self.spared = 0
        """Jobs none of whose results was ever written."""
        self.lost = 0
        """Jobs whose results are lost for good."""
        self.on_lost: Callable[[Unwritten], None] = lambda _: None
        """Told of those."""
        self._store = store
        self._executor = executor
        self._submit = submit
        self._cancel = cancel
        self._held: dict[str, Unwritten] = {}
        """By the name of the task that its holder knows."""
        self._again: dict[str, Unwritten] = {}
        """By the task that computes them once more."""
        self._background = Background()
        self._stopping = asyncio.Event()

    # -- the life of results ----------------------------------------------------------------------------------------

    def hold(self, task: Task, worker: Worker, algorithm: str) -> None:
        """A task has ended whose results are on `worker`'s device alone; its operands stay pinned for them."""
        way = None if isinstance(task.problem, Program) else algorithm
        lineage = Lineage(
            task.params, task.problem, task.operands, places_of(task.results), way, task.owner, task.verify
        )
        task.unwritten = Unwritten(task.id, lineage=lineage, keeper=self, holder=worker, task=task.id)
        self._held[task.id] = task.unwritten

    def discard(self, task: Task) -> None:
        """Nobody wants the results of a task, and no array will name them."""
        unwritten = task.unwritten
        assert unwritten is not None
        unwritten.close = lambda reusable: task.close(reusable=reusable)
        if unwritten.holder is None:
            self._gone(unwritten, reusable=unwritten.arrived)
            return
        unwritten.unneeded = True
        self._wish(unwritten, "never")

    def recorded(self, unwritten: Unwritten, records: Iterable[Record]) -> None:
        """The end of their job is on record, and they are arrays."""
        unwritten.records = list(records)
        for record in unwritten.records:
            record.unwritten = unwritten
            record.tainted = unwritten.orphaned
        if unwritten.arrived:
            self._arrived(unwritten)
        elif unwritten.orphaned:
            self._compute_again(unwritten)

    def written(self, worker: Worker, message: Written) -> None:
        """A worker has written results, or has nothing to do with them any more."""
        for name in message.tasks:
            unwritten = self._taken_from(worker, name)
            if unwritten is not None:
                self._arrived(unwritten)
        for name in message.lost:
            unwritten = self._taken_from(worker, name)
            if unwritten is not None:
                self._orphaned(unwritten, reusable=True)

    def worker_lost(self, worker: Worker) -> None:
        """Its memory is gone, and with it what it held."""
        mine = [unwritten for unwritten in self._held.values() if unwritten.holder is worker]
        for unwritten in mine:
            self._taken_from(worker, unwritten.task)
            self._orphaned(unwritten, reusable=False)
        if mine:
            log.warning("worker %s took results of %d jobs with it that were not written yet", worker.id, len(mine))

    def let_go(self, unwritten: Unwritten) -> None:
        """See `unwritten.Keeper`."""
        if unwritten.unneeded or not all(record.hidden for record in unwritten.records):
            return
        if any(record.pins for record in unwritten.records):
            if unwritten.holder is not None and not unwritten.late:
                unwritten.late = True
                self._wish(unwritten, "late")
            return
        unwritten.unneeded = True
        if unwritten.holder is not None:
            self._wish(unwritten, "never")
        elif unwritten.again is not None:
            self._cancel(unwritten.again)  # `Rewritten` tells when no worker is at it
        else:
            self._gone(unwritten, reusable=True)

    # -- who needs them ---------------------------------------------------------------------------------------------

    def allows(self, task: Task, worker: Worker) -> bool:
        """Whether that worker can compute with every operand of the task."""
        return not task.operands or all(
            (unwritten := pinned.unwritten) is None or unwritten.holder is worker for pinned in task.operands.values()
        )

    def make_way(self, task: Task, able: Callable[[Worker], bool]) -> None:
        """Has operands of a queued task written that keep it from running anywhere."""
        if not task.operands:
            return
        needed = [unwritten for pinned in task.operands.values() if (unwritten := pinned.unwritten) is not None]
        holders = {unwritten.holder for unwritten in needed} - {None}
        if len(holders) > 1 or any(holder is not None and not able(holder) for holder in holders):
            for unwritten in needed:
                self._wish(unwritten, "now")

    async def bring(self, pinned: Pinned, timeout_s: float | None) -> None:
        """Returns when the bytes of a pinned array are in the store. Raises ArrayLost, JobTimeout, Draining."""
        unwritten = pinned.unwritten
        if unwritten is None:
            return
        self._wish(unwritten, "now")
        stopping = asyncio.ensure_future(self._stopping.wait())
        settled = asyncio.ensure_future(unwritten.settled.wait())
        try:
            await asyncio.wait((stopping, settled), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            settled.cancel()
        if unwritten.error is not None:
            raise unwritten.error
        if not unwritten.settled.is_set():
            if self._stopping.is_set():
                raise Draining("the server is shutting down", retry_after_s=1.0)
            raise JobTimeout(f"the array's bytes were not in the store within {timeout_s:g} s")

    # -- starting and stopping --------------------------------------------------------------------------------------

    async def recover(
        self, found: Mapping[str, Unwritten], lineage_of: Callable[[Unwritten], Awaitable[Lineage]]
    ) -> None:
        """Takes up what an earlier process left unwritten, by job. Jobs that wait have pinned their operands.

        `lineage_of` raises ServiceError or ValueError where there is none any more.
        """
        needed: list[Unwritten] = []
        for job in sorted(found, reverse=True):  # the younger ones first: their lineages hold the older ones
            unwritten = found[job]
            unwritten.keeper = self
            if unwritten.error is not None:
                continue
            if all(record.hidden and not record.pins for record in unwritten.records):
                self._gone(unwritten, reusable=False)
                continue
            try:
                unwritten.lineage = await lineage_of(unwritten)
            except (ServiceError, ValueError) as error:  # KernelError is a ValueError
                log.error("job %s: its results cannot be computed again: %s", job, error)  # noqa: TRY400
                self._fail(unwritten, describe(error).detail or str(error))
                continue
            needed.append(unwritten)
        for unwritten in reversed(needed):
            self._compute_again(unwritten)
        if needed:
            log.info("recovery: results of %d jobs are computed again", len(needed))

    async def flush(self, timeout_s: float) -> bool:
        """Has everything written that a device holds; False if it took longer."""
        for unwritten in list(self._held.values()):
            self._wish(unwritten, "now")
        waits = [
            asyncio.ensure_future(unwritten.settled.wait())
            for unwritten in self._held.values()
            if not unwritten.unneeded
        ]
        if not waits:
            return True
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for wait in late:
            wait.cancel()
        return not late

    async def stop(self) -> None:
        """Whoever waits is told; what is being put on record is finished first."""
        self._stopping.set()
        await self._background.wait()

    # -- scheduler.Listener, of tasks that compute results once more ------------------------------------------------

    def started(self, task: Task) -> None:
        """Nobody asks."""

    def requeued(self, task: Task) -> None:
        """Nobody asks."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Its results are there, or will never be."""
        unwritten = self._again.pop(task.id)
        unwritten.again = None
        if isinstance(outcome, Done):
            task.unpin()
            self._arrived(unwritten)
        elif not unwritten.unneeded:
            self._fail(unwritten, describe(outcome).detail or str(outcome))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _taken_from(self, worker: Worker, name: str) -> Unwritten | None:
        unwritten = self._held.get(name)
        if unwritten is None or unwritten.holder is not worker:
            return None
        del self._held[name]
        unwritten.holder = None
        waited_for = any(other.urgent for other in self._held.values() if other.holder is worker)
        worker.asked = time.monotonic() if waited_for else None
        return unwritten

    def _wish(self, unwritten: Unwritten, wish: str) -> None:
        worker = unwritten.holder
        if worker is None or self._stopping.is_set():
            return
        self._executor.tell(worker, Wishes(**{wish: [unwritten.task]}))
        if wish == "now" and not unwritten.urgent:
            unwritten.urgent = True
            worker.asked = worker.asked or time.monotonic()

    def _arrived(self, unwritten: Unwritten) -> None:
        """The bytes are in the store, or nobody needs them."""
        unwritten.arrived = True
        if unwritten.unneeded:
            self._gone(unwritten, reusable=True)
        elif unwritten.records:
            for record in unwritten.records:
                record.unwritten = None
            unwritten.settled.set()
            self._background.spawn(self._put_on_record(unwritten))

    def _orphaned(self, unwritten: Unwritten, *, reusable: bool) -> None:
        """Nobody has them any more."""
        for record in unwritten.records:
            record.tainted = record.tainted or not reusable
        if unwritten.unneeded:
            self._gone(unwritten, reusable=reusable)
        elif unwritten.records:
            self._compute_again(unwritten)
        else:  # when their job's end is on record
            unwritten.orphaned = True

    def _gone(self, unwritten: Unwritten, *, reusable: bool) -> None:
        """Nobody needs them, and nobody can write to their place any more, unless not `reusable`."""
        self.spared += unwritten.error is None
        for record in unwritten.records:
            record.unwritten = None
            record.tainted = record.tainted or not reusable
        if unwritten.lineage is not None:
            unwritten.lineage.release()
        if unwritten.close is not None:
            unwritten.close(reusable)
        for record in unwritten.records:
            self._store.settle(record)

    def _compute_again(self, unwritten: Unwritten) -> None:
        lineage = unwritten.lineage
        assert lineage is not None
        self.recomputed += 1

        def closed(reusable: bool) -> None:
            if unwritten.unneeded and unwritten.records and unwritten.records[0].unwritten is unwritten:
                self._gone(unwritten, reusable=reusable)

        task = Task(
            new_id("job"),
            lineage.params,
            lineage.problem,
            {name: pinned.share() for name, pinned in lineage.operands.items()},
            {name: Rewritten(*place, closed) for name, place in lineage.places.items()},  # type: ignore[misc]
            self,
            owner=lineage.owner,
            priority=_PRIORITY,
            verify=lineage.verify,
            algorithm=lineage.algorithm,
            defers=False,
        )
        unwritten.again = task
        self._again[task.id] = unwritten
        self._submit(task)

    def _fail(self, unwritten: Unwritten, reason: str) -> None:
        """They are lost for good."""
        self.lost += 1
        unwritten.error = lost(unwritten.job, reason)
        unwritten.settled.set()
        if unwritten.lineage is not None:
            unwritten.lineage.release()
        self._store.set_written(unwritten.records, -1).add_done_callback(report)
        self.on_lost(unwritten)
        for record in unwritten.records:
            if record.hidden:
                self._store.settle(record)

    async def _put_on_record(self, unwritten: Unwritten) -> None:
        """Operands stay until it is: after a crash before that, the results are computed again."""
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                await self._store.secure_all(unwritten.records)
                await self._store.set_written(unwritten.records, 1)
                break
            except Exception as error:
                log.warning("job %s: that its results are written is not on record yet (%s)", unwritten.job, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)
        if unwritten.lineage is not None:
            unwritten.lineage.release()
        for record in unwritten.records:
            self._store.settle(record)


def failure_of(task: Task) -> JobFailed | None:
    """Why a task can never run: an operand is lost for good."""
    for pinned in task.operands.values():
        if (unwritten := pinned.unwritten) is not None and unwritten.error is not None:
            return JobFailed(describe(unwritten.error))
    return None
