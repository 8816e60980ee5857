"""Write-back: a job has succeeded when its results are on a device and what they are made of is on record; the bytes go
to the store later.

Until then an array is used where it is: jobs on it go to the device that has it, downloads have it written first. If
the device is lost, it is computed again from its lineage, whose operands are pinned as long (Zaharia et al., "Resilient
Distributed Datasets", NSDI 2012). What its owner deletes before it was written, and what nothing else was made of, is
never written. `gemmserve_service.store.pending` says what is to be done when; here it is done.

The operands' pins are the task's until it has ended, then its lineage's until the results are settled.

Everything here happens in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import Draining, JobFailed, JobTimeout, ServiceError, describe
from gemmserve_service.executor.protocol import Done, WriteOrder
from gemmserve_service.runtime.background import Background, report
from gemmserve_service.scheduling.recomputation import Lineage, Recomputation
from gemmserve_service.store.pending import Event, Instruction, PendingResults, State, handle_event, lost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.executor.protocol import Written
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.record import Record

_MIN_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 5.0

log = logging.getLogger(__name__)


class WriteBack:
    """All pending results."""

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
        self.on_lost: Callable[[PendingResults], None] = lambda _: None
        """Called with those."""
        self._store = store
        self._executor = executor
        self._submit = submit
        self._cancel = cancel
        self._held: dict[str, tuple[PendingResults, Worker]] = {}
        """Results that a device has, and its worker, by job."""
        self._lineages: dict[PendingResults, Lineage] = {}
        self._abandoned: dict[PendingResults, Task] = {}
        """Tasks to be closed with their results, which became no arrays."""
        self._recomputations: dict[PendingResults, Recomputation] = {}
        self._background = Background()
        self._stopping = asyncio.Event()
        store.on_pending_released(self._released)

    # -- what happens to results ------------------------------------------------------------------------------------

    def track(self, task: Task, worker: Worker, algorithm: str) -> None:
        """Take over the results of a task that has ended, and its operands: they are on `worker`'s device alone."""
        task.pending = pending = PendingResults(task.id, State.UNRECORDED, holder=worker.id)
        self._lineages[pending] = Lineage.of(task, algorithm)
        self._held[task.id] = pending, worker

    def recorded(self, pending: PendingResults, records: Iterable[Record]) -> None:
        """The end of their job is on record, and they are arrays."""
        pending.records = list(records)
        for record in pending.records:
            record.pending = pending
        self._handle(pending, Event.RECORDED)

    def abandon(self, task: Task) -> None:
        """The results of a task become no arrays."""
        assert task.pending is not None
        self._abandoned[task.pending] = task
        self._handle(task.pending, Event.ABANDONED)

    def written(self, worker: Worker, message: Written) -> None:
        """A worker has written results, or has nothing to do with them any more."""
        for jobs, event in ((message.tasks, Event.WRITTEN), (message.lost, Event.NOT_WRITTEN)):
            for job in jobs:
                pending = self._taken_from(worker, job)
                if pending is not None:
                    self._handle(pending, event)

    def worker_lost(self, worker: Worker) -> None:
        """A worker's memory is gone, and with it what it held."""
        held = [job for job, (_, holder) in self._held.items() if holder is worker]
        for job in held:
            pending = self._taken_from(worker, job)
            if pending is not None:
                self._handle(pending, Event.WORKER_LOST)
        if held:
            log.warning("worker %s took results of %d jobs with it that were not written yet", worker.id, len(held))

    def _released(self, pending: PendingResults) -> None:
        """Called by the store when a hidden result is pinned by fewer than before."""
        if all(record.hidden for record in pending.records):
            used = any(record.pins for record in pending.records)
            self._handle(pending, Event.HIDDEN if used else Event.UNUSED)

    def _taken_from(self, worker: Worker, job: str) -> PendingResults | None:
        pending, holder = self._held.get(job, (None, None))
        if pending is None or holder is not worker:
            return None
        del self._held[job]
        pending.holder = None
        waited_for = any(other.state is State.REQUESTED for other, holder in self._held.values() if holder is worker)
        worker.asked = time.monotonic() if waited_for else None
        return pending

    # -- who needs them ---------------------------------------------------------------------------------------------

    def usable(self, task: Task, worker: Worker) -> bool:
        """Whether that worker can compute with every operand of the task."""
        return not task.operands or all(
            (pending := pinned.pending) is None or pending.holder == worker.id for pinned in task.operands.values()
        )

    def request_operands(self, task: Task, able: Callable[[Worker], bool]) -> None:
        """Have operands of a queued task written that keep it from running anywhere. `able`: whether a worker's device
        could run it.
        """
        needed = [pending for pinned in task.operands.values() if (pending := pinned.pending) is not None]
        holders = {held[1] for pending in needed if (held := self._held.get(pending.job)) is not None}
        if len(holders) > 1 or not all(map(able, holders)):
            for pending in needed:
                self._handle(pending, Event.REQUESTED)

    async def wait_stored(self, pinned: Pinned, timeout_s: float | None) -> None:
        """Return when the bytes of a pinned array are in the store. Raises ArrayLost, JobTimeout, Draining."""
        pending = pinned.pending
        if pending is None:
            return
        self._handle(pending, Event.REQUESTED)
        stopping = asyncio.ensure_future(self._stopping.wait())
        settled = asyncio.ensure_future(pending.settled.wait())
        try:
            await asyncio.wait((stopping, settled), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            settled.cancel()
        if pending.error is not None:
            raise pending.error
        if not pending.settled.is_set():
            if self._stopping.is_set():
                raise Draining("the server is shutting down", retry_after_s=1.0)
            raise JobTimeout(f"the array's bytes were not in the store within {timeout_s:g} s")

    # -- starting and stopping --------------------------------------------------------------------------------------

    async def recover(
        self, found: Mapping[str, PendingResults], lineage_of: Callable[[PendingResults], Awaitable[Lineage]]
    ) -> None:
        """Compute again what an earlier process left, by job, as far as it is needed. Jobs that wait have pinned their
        operands before.

        `lineage_of` raises ServiceError or ValueError where there is none any more.
        """
        needed: list[PendingResults] = []
        for job in sorted(found, reverse=True):  # the younger ones first: their lineages pin the older ones
            pending = found[job]
            if pending.state is State.FAILED:
                continue
            if all(record.hidden and not record.pins for record in pending.records):
                self._handle(pending, Event.ABANDONED)
                continue
            try:
                self._lineages[pending] = await lineage_of(pending)
            except (ServiceError, ValueError) as error:  # KernelError is a ValueError
                log.error("job %s: its results cannot be computed again: %s", job, error)  # noqa: TRY400
                self._handle(pending, Event.UNRECOVERABLE, error)
                continue
            needed.append(pending)
        for pending in reversed(needed):
            self._handle(pending, Event.RECOVERABLE)
        if needed:
            log.info("recovery: results of %d jobs are computed again", len(needed))

    async def flush(self, timeout_s: float) -> bool:
        """Have everything written that a device holds; False if it took longer."""
        for pending, _ in list(self._held.values()):
            self._handle(pending, Event.REQUESTED)
        waits = [
            asyncio.ensure_future(pending.settled.wait())
            for pending, _ in self._held.values()
            if pending.state is not State.DROPPED
        ]
        if not waits:
            return True
        _, unfinished = await asyncio.wait(waits, timeout=timeout_s)
        for wait in unfinished:
            wait.cancel()
        return not unfinished

    async def stop(self) -> None:
        """Refuse whoever waits; what is being put on record is finished first."""
        self._stopping.set()
        await self._background.wait()

    # -- instructions -----------------------------------------------------------------------------------------------

    def _handle(self, pending: PendingResults, event: Event, error: Exception | None = None) -> None:
        """Carry out what `event` asks for. `error`: why they are UNRECOVERABLE."""
        pending.state, instructions = handle_event(pending.state, event)
        for instruction in instructions:
            match instruction:
                case Instruction.WRITE_FIRST:
                    self._order(pending, WriteOrder(first=[pending.job]))
                case Instruction.WRITE_LAST:
                    self._order(pending, WriteOrder(last=[pending.job]))
                case Instruction.DROP:
                    self._order(pending, WriteOrder(drop=[pending.job]))
                case Instruction.COMMIT:
                    self._commit(pending)
                case Instruction.RECOMPUTE:
                    self._recompute(pending)
                case Instruction.CANCEL:
                    self._cancel(self._recomputations[pending].task)
                case Instruction.TAINT:
                    pending.tainted = True
                    for record in pending.records:
                        record.tainted = True
                case Instruction.FAIL:
                    self._fail(pending, error)
                case Instruction.FREE:
                    self.spared += pending.error is None
                    self._release(pending)
                case Instruction.RELEASE:
                    self._release(pending)

    def _order(self, pending: PendingResults, order: WriteOrder) -> None:
        _, worker = self._held[pending.job]
        if self._stopping.is_set():
            return
        self._executor.send(worker, order)
        if order.first:
            worker.asked = worker.asked or time.monotonic()

    def _commit(self, pending: PendingResults) -> None:
        for record in pending.records:
            record.pending = None
        pending.settled.set()
        self._background.spawn(self._put_on_record(pending))

    async def _put_on_record(self, pending: PendingResults) -> None:
        delay_s = _MIN_RETRY_S
        while True:
            try:
                await self._store.secure_all(pending.records)
                await self._store.set_written(pending.records, 1)
                break
            except Exception as error:
                log.warning("job %s: that its results are written is not on record yet (%s)", pending.job, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
        self._handle(pending, Event.ON_RECORD)

    def _recompute(self, pending: PendingResults) -> None:
        self.recomputed += 1

        def ended(outcome: Done | ServiceError) -> None:
            del self._recomputations[pending]
            if isinstance(outcome, Done):
                self._handle(pending, Event.WRITTEN)
            else:
                self._handle(pending, Event.UNRECOVERABLE, outcome)

        def closed(reusable: bool) -> None:
            self._handle(pending, Event.NOT_WRITTEN if reusable else Event.WORKER_LOST)

        recomputation = self._recomputations[pending] = Recomputation(self._lineages[pending], ended, closed)
        self._submit(recomputation.task)

    def _fail(self, pending: PendingResults, error: Exception | None) -> None:
        self.lost += 1
        pending.error = lost(pending.job, "" if error is None else describe(error).detail or str(error))
        pending.settled.set()
        self._unpin(pending)
        self._store.set_written(pending.records, -1).add_done_callback(report)
        self.on_lost(pending)
        for record in pending.records:
            if record.hidden:
                self._store.settle(record)

    def _release(self, pending: PendingResults) -> None:
        for record in pending.records:
            record.pending = None
        self._unpin(pending)
        task = self._abandoned.pop(pending, None)
        if task is not None:
            task.close(reusable=not pending.tainted)
        for record in pending.records:
            self._store.settle(record)

    def _unpin(self, pending: PendingResults) -> None:
        lineage = self._lineages.pop(pending, None)
        if lineage is not None:
            lineage.release()


def failure_of(task: Task) -> JobFailed | None:
    """Return why a task can never run, if an operand is lost for good."""
    for pinned in task.operands.values():
        if (pending := pinned.pending) is not None and pending.error is not None:
            return JobFailed(describe(pending.error))
    return None
