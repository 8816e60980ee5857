"""Write-back: a job has succeeded when its results are on a device and what they are made of is on record; the bytes go
to the store later: to the host arena, where everybody can read them, and from there to files; straight to files where
the arena has no room.

Until then an array is used where it is: jobs on it go to the device that has it, downloads have it written first. If
the device is lost, it is computed again from its lineage, whose operands are pinned as long (Zaharia et al., "Resilient
Distributed Datasets", NSDI 2012). What its owner deletes before it was written, and what nothing else was made of, is
never written. `gemmserve_service.store.pending` says what is to be done when; here it is done. `write_orders` says
which results go first.

The operands' pins are the task's until it has ended, then its lineage's until the results are settled.

Everything here happens in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import Draining, JobFailed, JobTimeout, ServiceError, StoreFull, TierUnavailable, describe
from gemmserve_service.executor.packing import row_of
from gemmserve_service.executor.protocol import Done, Drop, Write
from gemmserve_service.runtime.background import Background, report
from gemmserve_service.scheduling.results.recomputation import Lineage, Recomputation
from gemmserve_service.scheduling.results.write_orders import LARGE_BYTES, Urgency, WriteOrders
from gemmserve_service.scheduling.tasks import deferrable
from gemmserve_service.store.pending import Event, Instruction, PendingResults, State, handle_event, lost
from gemmserve_service.store.spill import Spill

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.executor.protocol import ExtentRow, Written
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.extents.arena import Arena
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.record import Record

_MIN_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 5.0
_MAX_DOUBLINGS: Final = 12  # of _MIN_RETRY_S, where the disk does not take results: they are computed anew, for little
_MIN_WAIT_S: Final = 5e-3  # between two looks at what is due
_BUSY_TIMES: Final = 7.0
"""Times of `write_back_delay_s` that small results have besides while their device computes. For want of room they go
sooner: those of a stream of products of 1024^3 on an H200 after about a second, if nobody deletes them."""
_DISK_RATE: Final = 1e9  # bytes a second, by which is said how long a drain may take before that is seen
_REPORT_S: Final = 5.0  # between two words of how far a drain is
_TO_BE_WRITTEN: Final = {
    State.UNRECORDED,
    State.UNRECORDED_HOST,
    State.HELD,
    State.REQUESTED,
    State.POSTPONED,
    State.HOST,
    State.SYNCING,
    State.STORED,
}

log = logging.getLogger(__name__)


class WriteBack:
    """All pending results."""

    def __init__(
        self,
        store: ArrayStore,
        executor: Executor,
        submit: Callable[[Task], None],
        cancel: Callable[[Task], None],
        dispatch: Callable[[], None],
    ) -> None:
        """`submit`, `cancel`: the scheduler's. `dispatch`: has it look at tasks that may have waited for results."""
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
        self._dispatch = dispatch
        self._held: dict[str, tuple[PendingResults, Worker]] = {}
        """Results that a device has, and its worker, by job."""
        self._orders: dict[Worker, WriteOrders] = {}
        """Orders of every worker that has said hello, and is expected back if it is lost."""
        self._offering: dict[Worker, WriteOrders] = {}
        """Those that have results which may be written."""
        self._spill = Spill(store, lambda pending: self._handle(pending, Event.WRITTEN))
        self._hurry = False
        """Whether everything is to be written without delay."""
        self._unwritten_jobs = self._unwritten_bytes = 0
        self._flush_began: tuple[float, int] | None = None
        """Time at which `flush` began (time.monotonic), and the bytes that were not written then."""
        self._room_at = 0.0
        """Time at which arena and disk are asked again for room (time.monotonic)."""
        self._room_delay_s = _MIN_RETRY_S
        self._file_made = False
        """Whether a file was made, or could not be, for the results whose turn it is."""
        self._dropping: dict[Worker, list[str]] = {}
        """Jobs whose results nobody needs, of which their workers are not told yet."""
        self._telling = False
        """Whether `_tell_workers` is about to be called."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._settled = asyncio.Event()
        """Set whenever results come to be on record, are dropped or lost."""
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
        nbytes = _result_bytes(task)
        task.pending = pending = PendingResults(task.id, State.UNRECORDED, nbytes, holder=worker.id)
        pending.trace = task.trace
        self._lineages[pending] = Lineage.of(task, algorithm)
        self._count(pending, 1)
        self._held[task.id] = pending, worker
        self._orders[worker].keep(pending)

    def place_ahead(self, task: Task) -> None:
        """Give the results of a large product places in the host arena, to which all blocks are written; nothing where
        they have places, or are to be in files before the job's end, or where the arena has no room for them.
        """
        arena, uploads = self._store.arena, [each for each in task.results.values() if each.spec.nbytes]
        if arena is None or task.recomputes or task.verify or not task.durable:
            return
        sizes = [each.spec.nbytes for each in uploads]
        if any(each.extent is not None for each in uploads) or not deferrable(
            task.params, sum(sizes), arena.share_bytes
        ):
            return
        extents = arena.allocate_share(sizes)
        if extents is not None:
            task.in_arena = True
            for upload, extent in zip(uploads, extents, strict=True):
                upload.extent = extent

    def give_back_places(self, task: Task) -> None:
        """Take places in the host arena back from a product that is to be written elsewhere after all."""
        for upload in task.results.values() if task.in_arena else ():
            if upload.extent is not None:
                self._arena.free(upload.extent)
                upload.extent = None
        task.in_arena = False

    def track_in_arena(self, task: Task, algorithm: str) -> None:
        """Take over the results of a task that has ended, and its operands: every byte is in the host arena, and no
        worker writes there any more, unless it was lost.
        """
        nbytes = _result_bytes(task)
        task.pending = pending = PendingResults(task.id, State.UNRECORDED_HOST, nbytes)
        pending.trace = task.trace
        self._lineages[pending] = Lineage.of(task, algorithm)
        self._count(pending, 1)

    def track_lost(self, task: Task, algorithm: str) -> PendingResults:
        """Take over the results of a task that has ended, and its operands: the disk did not take their files. They are
        computed again when they are on record.
        """
        nbytes = _result_bytes(task)
        task.pending = pending = PendingResults(task.id, State.UNRECORDED_LOST, nbytes, sync_failures=1)
        for upload in task.results.values():
            self._store.replace_failed(upload)
        self._lineages[pending] = Lineage.of(task, algorithm)
        return pending

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
        worker.moved = time.monotonic()  # a task that waits for room gets on by this
        for job in (*message.tasks, *message.lost):
            pending = self._taken_from(worker, job)
            if pending is None:
                continue
            if job in message.lost or not pending.ordered:  # what it was not told to write it can only have dropped
                event = Event.NOT_WRITTEN
            else:
                event = Event.COPIED if pending.places else Event.WRITTEN
            pending.ordered = False
            self._handle(pending, event)
            for place in pending.places.values():
                self._arena.free(place)
            pending.places = {}
        self._tell_soon()

    def worker_ready(self, worker: Worker) -> None:
        """A worker said hello: it, and the process before it, have ended all that they were asked before."""
        if worker not in self._orders:
            self._orders[worker] = WriteOrders(worker, _BUSY_TIMES * self._store.settings.write_back_delay_s)
        if self._store.arena is not None:
            self._store.arena.worker_ready(worker.id)
        self._order_writes()

    def rest(self) -> None:
        """No worker has a task: results whose time that had put off may be due."""
        if self._offering:
            self._tell_soon()

    def worker_gone(self, worker: Worker) -> None:
        """A lost worker is expected no longer."""
        self._orders.pop(worker, None)
        self._offering.pop(worker, None)

    def worker_lost(self, worker: Worker) -> None:
        """A worker's memory is gone, and with it what it held; to places of its tasks' results it may still write."""
        for task in worker.tasks.values():
            for upload in task.whole.results.values() if task.whole.in_arena else ():
                if upload.extent is not None:
                    self._arena.suspect(upload.extent, worker.id)
        held = [job for job, (_, holder) in self._held.items() if holder is worker]
        for job in held:
            pending = self._taken_from(worker, job)
            if pending is None:
                continue
            pending.ordered = False
            for place in pending.places.values():
                self._arena.quarantine(place, worker.id)
            pending.places = {}
            self._handle(pending, Event.WORKER_LOST)
        if worker.link is not None and self._store.arena is not None:
            self._store.arena.worker_ready(worker.id)  # nothing that it sends is taken: it writes nowhere
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
        orders = self._orders[worker]
        orders.remove(pending)
        worker.asked = time.monotonic() if orders.expected else None
        return pending

    # -- who needs them ---------------------------------------------------------------------------------------------

    def stands(self, worker: Worker) -> bool:
        """Whether that worker's device is to have room made, and nothing is written: for want of room in arena and
        disk, or because the ends of jobs cannot be put on record.
        """
        orders = self._orders.get(worker)
        return orders is not None and orders.pressed and not orders.ordered_bytes

    def lacks_room(self, task: Task, worker: Worker) -> bool:
        """Whether a task's results would wait on that worker's device for others to be written, none of which is: sent
        there, it would hold up what needs no such room.
        """
        if not self.stands(worker) or task.blocks is not None or not task.may_be_deferred(worker):
            return False
        coming = sum([_result_bytes(other) for other in worker.tasks.values() if other.may_be_deferred(worker)])
        return self._orders[worker].kept_bytes + coming + _result_bytes(task) > worker.result_bytes

    def holder(self, pending: PendingResults) -> Worker | None:
        """Return the worker whose device has pending results, if one does."""
        held = self._held.get(pending.job)
        return None if held is None else held[1]

    def usable(self, task: Task, worker: Worker) -> bool:
        """Whether that worker can compute with every operand of the task."""
        for pinned in task.operands.values():
            if not pinned.at_hand:
                break
        else:
            return True
        if any(pinned.cold is not None for pinned in task.operands.values()):
            self._bring_back(task)
            return False
        return all(
            (pending := pinned.pending) is None or pending.holder == worker.id for pinned in task.operands.values()
        )

    def _bring_back(self, task: Task) -> None:
        """Have operands come back from the tier, all of a task together; `_dispatch` follows."""
        if self._store.tier is not None and failure_of(task) is None:
            self._store.tier.ask(task, task.operands.values())

    def request_operands(self, task: Task, able: Callable[[Worker], bool]) -> None:
        """Have operands of a queued task written that keep it from running anywhere. `able`: whether a worker's device
        could run it.
        """
        for pinned in task.operands.values():
            if not pinned.at_hand:
                break
        else:
            return
        away = [pinned for pinned in task.operands.values() if not pinned.at_hand]
        for pinned in away:
            if pinned.cold is not None and self._store.tier is not None:
                pinned.cold.error = None
                self._bring_back(task)
        needed = [pending for pinned in away if (pending := pinned.pending) is not None]
        holders = {held[1] for pending in needed if (held := self._held.get(pending.job)) is not None}
        if len(holders) > 1 or not all(map(able, holders)):
            for pending in needed:
                self._handle(pending, Event.REQUESTED)

    async def wait_readable(self, pinned: Pinned, timeout_s: float | None) -> None:
        """Return when the bytes of a pinned array can be read. Raises ArrayLost, JobTimeout, Draining, TierUnavailable,
        ArrayCorrupt.
        """
        await self._store.bring_back([pinned], timeout_s)
        pending = pinned.pending
        if pending is None:
            return
        self._handle(pending, Event.REQUESTED)
        stopping = asyncio.ensure_future(self._stopping.wait())
        available = asyncio.ensure_future(pending.available.wait())
        try:
            await asyncio.wait((stopping, available), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            available.cancel()
        if pending.error is not None:
            raise pending.error
        if not pending.available.is_set():
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
        """Have everything written that devices and the host arena hold; False if it took longer."""
        self._hurry = True
        self._order_writes()
        self._spill.hurry()
        began = time.monotonic()
        self._flush_began = began, self._unwritten_bytes
        left_s = timeout_s
        while self._unwritten_jobs:
            log.info(
                "results of %d jobs, %d bytes, are being written, in about %.0f s; what is not on disk after %.0f s is "
                "computed again by the next start",
                *self.unwritten,
                self.write_s,
                left_s,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _REPORT_S)):
                    while self._unwritten_jobs:
                        self._settled.clear()
                        await self._settled.wait()
            left_s = timeout_s - (time.monotonic() - began)
            if left_s <= 0:
                break
        if self._unwritten_jobs:
            log.warning("results of %d jobs, %d bytes, are not written: the next start computes them", *self.unwritten)
        return not self._unwritten_jobs

    @property
    def unwritten(self) -> tuple[int, int]:
        """Jobs whose results a device or the host arena has and the disk, on record, has not; and their bytes."""
        return self._unwritten_jobs, self._unwritten_bytes

    @property
    def write_s(self) -> float:
        """Seconds in which those will be on disk: at the rate of the flush, once that is seen, or at a usual disk's."""
        if self._flush_began is not None:
            began, nbytes = self._flush_began
            written = nbytes - self._unwritten_bytes
            if written > 0:
                return self._unwritten_bytes * (time.monotonic() - began) / written
        return self._unwritten_bytes / _DISK_RATE

    def _count(self, pending: PendingResults, sign: int) -> None:
        self._unwritten_jobs += sign
        self._unwritten_bytes += sign * pending.nbytes

    async def stop(self) -> None:
        """Refuse whoever waits; what is being put on record is finished first."""
        self._stopping.set()
        if self._timer is not None:
            self._timer.cancel()
        await self._spill.stop()
        await self._background.wait()

    # -- instructions -----------------------------------------------------------------------------------------------

    def _handle(self, pending: PendingResults, event: Event, error: Exception | None = None) -> None:
        """Carry out what `event` asks for. `error`: why they are UNRECOVERABLE."""
        before = pending.state in _TO_BE_WRITTEN
        pending.state, instructions = handle_event(pending.state, event)
        if (after := pending.state in _TO_BE_WRITTEN) != before:
            self._count(pending, 1 if after else -1)
            self._settled.set()  # also where they are lost: whoever waits for the others looks again
        for instruction in instructions:
            match instruction:
                case Instruction.WRITE_LATER:
                    self._offer(pending, Urgency.NORMAL)
                case Instruction.WRITE_FIRST:
                    self._offer(pending, Urgency.WAITED_FOR)
                case Instruction.WRITE_LAST:
                    self._offer(pending, Urgency.HIDDEN)
                case Instruction.DROP:
                    self._drop(pending)
                case Instruction.SHOW:
                    self._show(pending)
                case Instruction.SPILL:
                    self._spill.put(pending)
                case Instruction.SYNC:
                    self._sync(pending)
                case Instruction.REPLACE:
                    for record in pending.records:
                        self._store.replace_failed(record)
                case Instruction.COMMIT:
                    self._commit(pending)
                case Instruction.RECOMPUTE:
                    self._recompute(pending)
                case Instruction.CANCEL:
                    self._cancel(self._recomputations[pending].task)
                case Instruction.TAINT:
                    pending.tainted = True
                    for record in pending.records:
                        record.tainted |= record.extent is not None
                case Instruction.FAIL:
                    self._fail(pending, error)
                case Instruction.GIVE_SPACE_BACK:
                    for record in pending.records:
                        self._store.give_space_back(record)
                case Instruction.FREE:
                    self.spared += pending.error is None
                    self._release(pending)
                case Instruction.RELEASE:
                    self._release(pending)

    def _show(self, pending: PendingResults) -> None:
        for record in pending.records:
            record.extent = pending.places.pop(record.info.id, record.extent)
        for pinned in pending.readers:
            pinned.hold_place()
        if pending.trace is not None:
            pending.trace.written("copy")
        pending.available.set()

    def _sync(self, pending: PendingResults) -> None:
        if self._store.secures:
            self._background.spawn(self._ask_disk(pending))
        else:
            self._handle(pending, Event.SYNCED)

    async def _ask_disk(self, pending: PendingResults) -> None:
        event = None
        while event is None:
            try:
                await self._store.secure_all(pending.records)
                event = Event.SYNCED
            except (OSError, TierUnavailable, StoreFull) as error:
                log.warning("job %s: the disk or the tier does not take its results (%s)", pending.job, error)
                failed = any(record.extent is not None and record.extent.failed for record in pending.records)
                if failed and not any(reader.held for reader in pending.readers):  # who may look there for operands
                    event = Event.SYNC_FAILED
                if await self._stops_within(_MIN_RETRY_S * 2**pending.sync_failures):
                    return
                pending.sync_failures = min(pending.sync_failures + 1, _MAX_DOUBLINGS)
        self._handle(pending, event)
        if event is Event.SYNCED:
            self._dispatch()
        else:
            self._released(pending)  # whoever held them may have let go meanwhile

    async def _stops_within(self, seconds: float) -> bool:
        """Wait for so long; True, and no longer, if the server stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    def _commit(self, pending: PendingResults) -> None:
        # Until that is on record they stay together: what is deleted meanwhile keeps its row, by which after a crash
        # the others are computed again, and its file, which that row may name yet.
        if pending.trace is not None:
            pending.trace.written("write")
        pending.available.set()
        self._background.spawn(self._put_on_record(pending))

    async def _put_on_record(self, pending: PendingResults) -> None:
        delay_s = _MIN_RETRY_S
        while True:
            try:
                await self._store.set_written(pending.records, 1)
                break
            except Exception as error:
                log.warning("job %s: that its results are written is not on record yet (%s)", pending.job, error)
            if await self._stops_within(delay_s):
                return
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
        self._handle(pending, Event.ON_RECORD)
        self._tell_soon()  # the arena may have room now

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

        recomputation = self._recomputations[pending] = Recomputation(
            self._lineages[pending], pending.records, self._store.place, ended, closed
        )
        self._submit(recomputation.task)

    def _fail(self, pending: PendingResults, error: Exception | None) -> None:
        self.lost += 1
        pending.error = lost(pending.job, "" if error is None else describe(error).detail or str(error))
        pending.available.set()
        self._unpin(pending)
        self._store.set_written(pending.records, -1).add_done_callback(report)
        self.on_lost(pending)
        for record in pending.records:
            if record.hidden:
                self._store.settle(record)

    def _release(self, pending: PendingResults) -> None:
        self._spill.discard(pending)
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
        self._settled.set()

    # -- orders to the workers --------------------------------------------------------------------------------------

    @property
    def _arena(self) -> Arena:
        assert self._store.arena is not None  # whose extents are spoken of
        return self._store.arena

    def _offer(self, pending: PendingResults, urgency: Urgency) -> None:
        """Have results written when their turn comes; at once, if somebody waits for them."""
        _, worker = self._held[pending.job]
        if pending.ordered:
            if urgency is Urgency.WAITED_FOR:
                self._send_write(worker, pending, urgent=True)
            return
        delay_s = self._store.settings.write_back_delay_s
        due = time.monotonic() + (delay_s / 2 if pending.nbytes >= LARGE_BYTES else delay_s)
        self._orders[worker].offer(pending, urgency, due)
        self._offering[worker] = self._orders[worker]
        if urgency is Urgency.WAITED_FOR:
            self._order_writes()
        else:
            self._tell_soon()

    def _drop(self, pending: PendingResults) -> None:
        _, worker = self._held[pending.job]
        if not pending.ordered:
            self._orders[worker].remove(pending)
        self._dropping.setdefault(worker, []).append(pending.job)
        self._tell_soon()

    def _tell_soon(self) -> None:
        """Look, in this turn of the event loop, at what workers are to drop and to write: once for all answers, ends
        and deletions that have come together.
        """
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell_workers)

    def _tell_workers(self) -> None:
        self._telling = False
        dropping, self._dropping = self._dropping, {}
        for worker, jobs in dropping.items():
            # Whatever a worker has lost meanwhile its next process has never heard of.
            held = [job for job in jobs if (found := self._held.get(job)) is not None and found[1] is worker]
            if held:
                self._send(worker, Drop(tasks=held))
        self._order_writes()

    def _order_writes(self) -> None:
        """Tell the workers to write what is to be written now, as far as there is room for it."""
        if self._stopping.is_set():
            return
        now = time.monotonic()
        wake: list[float] = []
        for worker, orders in list(self._offering.items()):
            if not orders.offers:
                del self._offering[worker]
                continue
            pending = orders.next(now, hurry=self._hurry)
            while pending is not None and now >= self._room_at:
                self._order(worker, pending)
                pending = orders.next(now, hurry=self._hurry)
            if pending is not None:
                worker.moved = now  # its tasks may wait for the room that there is not
                wake.append(self._room_at)
            elif orders.due is not None and orders.due > now:
                wake.append(orders.due)
        if wake and (self._timer is None or min(wake) < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = min(wake)
            delay_s = max(self._timer_at - now, _MIN_WAIT_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._order_writes()

    def _order(self, worker: Worker, pending: PendingResults) -> None:
        """Tell a worker to write results, if there is room for them."""
        try:
            lacking = self._place(pending)
        except (StoreFull, OSError) as error:
            log.warning("job %s: its results stay on %s, for there is no room (%s)", pending.job, worker.id, error)
            self._room_at = time.monotonic() + self._room_delay_s
            self._room_delay_s = min(2 * self._room_delay_s, _MAX_RETRY_S)
            return
        if lacking:
            self._room_at = time.monotonic() + _MAX_RETRY_S  # sooner, when there is the file
            self.make_file(lacking, self._file_is_there)
            return
        self._room_delay_s = _MIN_RETRY_S
        pending.ordered = True
        self._orders[worker].ordered(pending)
        self._send_write(worker, pending, urgent=pending.state is State.REQUESTED)

    def make_file(self, nbytes: int, then: Callable[[], None]) -> None:
        """Have a file of so many bytes made beside the event loop; `then` is called, whatever comes of it."""
        self._background.spawn(self._make_file(nbytes, then))

    async def _make_file(self, nbytes: int, then: Callable[[], None]) -> None:
        try:
            await self._store.stock(nbytes)
        finally:
            then()

    def _file_is_there(self) -> None:
        """Look at the results whose turn it is: there is a file for them."""
        self._file_made = True
        self._room_at = 0.0
        self._order_writes()

    def _place(self, pending: PendingResults) -> int:
        """Give results places: in the host arena, or in files. Return the bytes of a file that has to be made first,
        beside the event loop, where that takes long; then none was given. Raises StoreFull, OSError, and has given none
        then.
        """
        records = [record for record in pending.records if record.info.nbytes]
        arena = self._store.arena
        if arena is not None and all(record.extent is None for record in records):
            places: dict[str, Extent] = {}
            for record in records:
                extent = arena.allocate(record.info.nbytes)
                if extent is None:
                    break
                places[record.info.id] = extent
            if len(places) == len(records):
                pending.places = places
                return 0
            for extent in places.values():
                arena.free(extent)
        tried, self._file_made = self._file_made, False
        lacking = [each.info.nbytes for each in records if each.extent is None]
        if not tried and (slow := next((each for each in lacking if not self._store.brief(each)), 0)):
            return slow
        made: list[Record] = []
        try:
            for record in records:
                if record.extent is None:
                    record.extent = self._store.place(record.info.nbytes)
                    made.append(record)
        except BaseException:
            for record in made:
                assert record.extent is not None
                self._store.displace(record.extent, record.info.nbytes)
                record.extent = None
            raise
        return 0

    def _send_write(self, worker: Worker, pending: PendingResults, *, urgent: bool) -> None:
        self._send(worker, Write(task=pending.job, places=_rows(pending), urgent=urgent))
        if urgent:
            self._orders[worker].expect(pending)
            worker.asked = worker.asked or time.monotonic()

    def _send(self, worker: Worker, message: Write | Drop) -> None:
        if not self._stopping.is_set():
            self._executor.send(worker, message)


def _rows(pending: PendingResults) -> dict[str, ExtentRow]:
    """Return where results are to be written, by the array's id."""
    places = {record.info.id: pending.places.get(record.info.id, record.extent) for record in pending.records}
    return {array: row_of(extent, array) for array, extent in places.items() if extent is not None}


def _result_bytes(task: Task) -> int:
    return sum([upload.spec.nbytes for upload in task.results.values()])


def failure_of(task: Task) -> JobFailed | None:
    """Return why a task can never run, if an operand is lost for good."""
    for pinned in task.operands.values():
        if (cold := pinned.cold) is not None and cold.error is not None:
            return JobFailed(describe(cold.error))
        if (pending := pinned.pending) is not None and pending.error is not None:
            return JobFailed(describe(pending.error))
    return None
