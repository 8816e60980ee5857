"""A batch from its items to its results: through the same admission, queue and workers as every other product."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.errors import InvalidParameters, ServiceError, TooLarge
from gemmserve_service.executor.protocol import Done
from gemmserve_service.jobs.batch.task import (
    BatchProblem,
    BatchTask,
    Group,
    Packed,
    Placed,
    each_result,
    pack,
    place,
    sort,
)
from gemmserve_service.jobs.one_shot import Waiter, outcome_of
from gemmserve_service.jobs.small.bundles import reserve
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.runtime.tracing.spans import product_trace
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import ArrayInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    import numpy as np

    from gemmserve_service.executor.protocol import Done
    from gemmserve_service.jobs.batch.task import Failures, Item
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.schemas import BatchOptions
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.upload import Upload

_WATCH_AFTER_S: Final = 0.005  # a batch that is done sooner is not worth a look whether its client is still there
_COMMITS_A_TURN: Final = 32  # each takes the loop's thread for some 0.2 ms before its row goes to the database's


@dataclass
class Outcome:
    """Outcome of a batch. `release` when its results have been sent."""

    failures: Failures
    groups: list[Group] = field(default_factory=list)
    done: Done | None = None
    """Answer of the worker; None: there was nothing to compute."""
    packed: Packed | None = None
    bundle: Upload | None = None
    """Upload that holds inline results."""
    arrays: dict[str, str] = field(default_factory=dict)
    """Id of the array that holds all of a result, by result."""
    array_of: dict[tuple[int, str], str] = field(default_factory=dict)
    """Id of a result's array, by product and result."""

    infos: list[ArrayInfo] = field(default_factory=list)
    """The stored results."""

    def release(self) -> None:
        """Gives inline results' space back; idempotent."""
        if self.bundle is not None:
            self.bundle.abort()


async def run_batch(
    core: Core,
    items: Sequence[Item | ServiceError],
    options: BatchOptions,
    held: contextlib.ExitStack,
    gone: Callable[[], Awaitable[object]],
    *,
    owner: str,
) -> Outcome:
    """Computes what can be computed. `held`: what the operands need, closed when no worker can touch them any more.

    `gone` returns when the client has hung up, which cancels the batch; it is called once the batch has taken a while.
    Raises InvalidParameters, TooLarge, StoreFull, QuotaExceeded, QueueFull, NotReady, Draining, JobTimeout, JobFailed,
    JobCancelled (the client has hung up), WorkerCrashed.
    """
    arrived = time.monotonic()
    scheduler = core.scheduler
    with contextlib.ExitStack() as undo:
        undo.enter_context(held)
        with scheduler.admission(owner) as claim:
            groups, failures = await sort(items, scheduler.check)
            outcome = Outcome(failures, groups)
            if not groups:
                return outcome
            problem = BatchProblem(tuple(groups))
            claim(problem.nbytes())
            outcome.packed = pack(groups, len(items))
            uploads = await _reserve(core, outcome, options, undo, owner=owner)
            waiter = Waiter(asyncio.get_running_loop().create_future())
            task = BatchTask(
                new_id("job", scheduler.settings.cell),
                groups[0].params,
                problem,
                waiter,
                items=items,
                results=uploads,
                held=held,
                owner=owner,
                priority=options.priority,
                timeout_s=scheduler.settings.oneshot_timeout_s if options.timeout_s is None else options.timeout_s,
                verify=options.verify,
                durable=False,
                submitted=arrived,
                trace=product_trace(),
            )
            workers = scheduler.fleet.representatives
            await task.prepare([worker.spec for worker in workers if worker.spec is not None])
        undo.pop_all()
    scheduler.submit(task, soon=True)
    with _watching(gone, lambda: scheduler.cancel(task)):
        outcome.done = await outcome_of(task, waiter, scheduler, core.observe)
    task.unpin()
    if options.results != "inline":
        await _publish(core.store, uploads)
        outcome.infos = [upload.info for upload in uploads if isinstance(upload.info, ArrayInfo)]
    return outcome


@contextlib.contextmanager
def _watching(gone: Callable[[], Awaitable[object]], cancel: Callable[[], None]) -> Iterator[None]:
    """Calls `cancel` when `gone()` returns before the block ends."""
    watch: asyncio.Future[object] | None = None

    def look() -> None:
        nonlocal watch
        watch = asyncio.ensure_future(gone())
        watch.add_done_callback(ended)

    def ended(watch: asyncio.Future[object]) -> None:
        if not watch.cancelled() and watch.exception() is None:
            cancel()

    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, look)
    try:
        yield
    finally:
        timer.cancel()
        if watch is not None:
            watch.cancel()


async def _reserve(
    core: Core, outcome: Outcome, options: BatchOptions, undo: contextlib.ExitStack, *, owner: str
) -> list[Upload]:
    """Space for every result, where the options want it; sets the groups' results."""
    store, groups, packed = core.store, outcome.groups, outcome.packed
    assert packed is not None
    most = core.settings.max_batch_bytes
    if packed.nbytes > most:
        raise TooLarge(f"the results need {packed.nbytes} bytes, those of a batch have at most {most}")
    ttl_s = core.settings.result_ttl_s if options.ttl_s is None else options.ttl_s
    life_s = math.inf if ttl_s is None else ttl_s

    async def allocate(dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> Upload:
        await store.make_room(math.prod(shape) * dtype.itemsize, owner)
        upload = store.allocate(dtype, shape, order, ttl_s=life_s, owner=owner)
        undo.callback(upload.abort)
        return upload

    if options.results == "inline":
        largest = max(
            math.prod(shape) * dtype.itemsize for group in groups for shape, dtype, _ in group.outputs.values()
        )
        if packed.nbytes:
            outcome.bundle = reserve(store, packed.nbytes, largest=largest, owner=owner)
            undo.callback(outcome.bundle.abort)
        extent = None if outcome.bundle is None else outcome.bundle.extent
        await place(groups, lambda number, name: (extent, packed.offsets[number, name]))
        return [] if outcome.bundle is None else [outcome.bundle]
    if options.results == "packed":
        if packed.uniform is None:
            raise _not_uniform(outcome.failures)
        ups = {name: await allocate(dtype, shape, "C") for name, (shape, dtype) in packed.uniform.items()}
        outcome.arrays = {name: upload.spec.id for name, upload in ups.items()}
        start = {name: packed.offsets[0, name] for name in ups}
        await place(groups, lambda number, name: (ups[name].extent, packed.offsets[number, name] - start[name]))
        return list(ups.values())
    turns = Turns()
    made: dict[tuple[int, str], Upload] = {}
    for group in groups:
        for number in group.items:
            for name, (shape, dtype, order) in group.outputs.items():
                made[number, name] = await allocate(dtype, shape, order)
                await turns.pause()
    outcome.array_of = {key: upload.spec.id for key, upload in made.items()}
    await place(groups, lambda number, name: (made[number, name].extent, 0))
    return list(made.values())


def _not_uniform(failures: Failures) -> Exception:
    """Return why the results cannot be one array."""
    if failures:
        return failures[min(failures)]
    return InvalidParameters(
        'results "packed" need products whose results have one shape, dtype and C order; "each" and "inline" take any'
    )


async def _publish(store: ArrayStore, uploads: Sequence[Upload]) -> None:
    """Makes the results arrays; if one cannot be, or the caller is cancelled, none is."""
    commits: list[asyncio.Future[Any]] = []
    try:
        for upload in uploads:
            upload.filled = upload.nbytes
            commits.append(asyncio.ensure_future(upload.commit()))
            if not len(commits) % _COMMITS_A_TURN:
                await asyncio.sleep(0)
        await asyncio.wait(commits)
        for commit in commits:
            commit.result()
    except BaseException:
        # One that fails, or is stopped, gives its own space back, and nobody else may: its row may be on its way.
        for commit in commits:
            commit.cancel()
        for upload in uploads[len(commits) :]:
            upload.abort()
        await asyncio.shield(_withdraw(store, commits))  # also when the caller is cancelled once more
        raise


async def _withdraw(store: ArrayStore, commits: Sequence[asyncio.Future[Any]]) -> None:
    """Deletes those that have become arrays all the same: nobody learns their ids."""
    await asyncio.gather(*commits, return_exceptions=True)
    made = [commit.result() for commit in commits if not commit.cancelled() and commit.exception() is None]
    await asyncio.gather(*(store.delete(info.id) for info in made), return_exceptions=True)


def inline_results(outcome: Outcome) -> dict[str, tuple[Placed, memoryview]]:
    """Return the bundle's arrays and bytes by member: the stacks where all products are alike, else
    `<result>_<number>`.
    """
    packed, bundle = outcome.packed, outcome.bundle
    assert packed is not None

    def view(placed: Placed) -> memoryview:
        if bundle is None or not placed.nbytes:
            return memoryview(b"")
        return bundle.view[placed.offset : placed.offset + placed.nbytes]

    found: dict[str, Placed] = {}
    if packed.uniform is not None:
        for name, (shape, dtype) in packed.uniform.items():
            found[name] = Placed((dtype.newbyteorder("=").name, shape, "C"), None, packed.offsets[0, name])
    else:
        for number, name, placed in sorted(each_result(outcome.groups), key=lambda entry: entry[0]):
            found[f"{name}_{number}"] = placed
    return {member: (placed, view(placed)) for member, placed in found.items()}
