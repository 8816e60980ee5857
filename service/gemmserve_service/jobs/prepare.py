"""Preparation of a job on stored arrays as a task: operands pinned, every product checked, space for its results
reserved; and of the task's outcome as the job's final fields.
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels import KernelError, ParameterInvalid
from gemmserve_kernels.device.caching import cached
from gemmserve_service import products
from gemmserve_service.errors import JobCancelled, JobFailed, JobTimeout, ServiceError, describe
from gemmserve_service.executor.protocol import Done
from gemmserve_service.jobs.compile_program import (
    arrays_of,
    as_program,
    compile_program,
    has_views,
    product_errors,
    step_errors,
)
from gemmserve_service.programs import Program, outputs
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import GemmJob, GemmParams, GemmReduceParams, JobState, ProgramJob
from gemmserve_service.store.extents.extents import size_class
from gemmserve_service.store.record import NO_TAGS, Reservation, Tags

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from gemmserve_kernels import Plan
    from gemmserve_service.jobs.forms.form import Form, Ids
    from gemmserve_service.programs import Problem
    from gemmserve_service.scheduling.scheduler import Scheduler
    from gemmserve_service.scheduling.tasks import Listener
    from gemmserve_service.schemas import GemmReduceJob, ProgramParams
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.upload import Upload

_SHORT: Final = 16
"""Steps that are checked in less time than it takes to hand them to a thread and back."""

_RESERVED_AT_ONCE: Final = 32

_compilers = ThreadPoolExecutor(1, thread_name_prefix="gemmserve-compile")
"""One thread: long programs wait for each other, and for nobody else."""


async def prepare(
    job_id: str,
    request: GemmJob | GemmReduceJob | ProgramJob,
    owner: str,
    *,
    store: ArrayStore,
    scheduler: Scheduler,
    listener: Listener,
    claim: Callable[[int], None] | None,
) -> Task:
    """The task of `request`. Whatever this raises, nothing stays held.

    `claim` is asked for room in the queue; None: the job had been admitted by an earlier process, and its operands may
    be hidden meanwhile. Raises KernelError (StepInvalid for whatever is wrong with a step of a program), NotFound,
    Gone, TooLarge, StoreFull, QuotaExceeded, QueueFull.
    """
    recovered = claim is None
    params, problem, operands = await understood(request, owner, store=store, scheduler=scheduler, recovered=recovered)
    try:
        with product_errors(request):
            plans = {} if recovered else scheduler.check(problem)
        described = outputs(problem)
        nbytes = sum([math.prod(shape) * dtype.itemsize for shape, dtype, _ in described.values()])
        if claim is not None:
            claim(problem.nbytes() if isinstance(problem, Program) else nbytes)
        ttl_s = store.settings.result_ttl_s if request.ttl_s is None else request.ttl_s
        life_s = math.inf if ttl_s is None else ttl_s
        # A recovered job's results take their places when it runs: were the disk full now, it would be lost.
        deferred = recovered or (not request.verify and scheduler.may_defer(params, nbytes))
        tags = Tags(request.name, request.labels) if request.name is not None or request.labels else NO_TAGS
        results = await reserve_results(
            store, described, life_s, owner=owner, granted=recovered, deferred=deferred, tags=tags
        )
    except BaseException:
        _release(operands)
        raise
    return Task(
        job_id,
        params,
        problem,
        operands,
        results,
        listener,
        owner=owner,
        priority=request.priority,
        timeout_s=request.timeout_s,
        verify=request.verify,
        plans=plans,
    )


@dataclass(slots=True)
class _Checked:
    """A form of job on operands of certain kinds, found to be right."""

    params: GemmParams | GemmReduceParams
    problem: Problem
    plans: dict[int, Plan | KernelError]
    nbytes: int
    """Bytes of the results."""
    results: dict[str, Reservation]
    deferred: bool


def prepare_alike(
    form: Form,
    operands: Sequence[Ids],
    owner: str,
    *,
    store: ArrayStore,
    scheduler: Scheduler,
    listener: Listener,
    claim: Callable[[int], None] | None = None,
) -> list[Task] | None:
    """The tasks of jobs of one form, as `prepare` makes them one by one, without waiting for anything. None: nothing is
    held, and `prepare` has to say what is wrong with one, or to wait.

    `claim`: see `prepare`; None: they are queued in this turn of the event loop.
    """
    if store.tier is not None:
        return None
    pinned: list[dict[str, Pinned]] = []
    try:
        return _alike(form, operands, owner, pinned, store, scheduler, listener, claim)
    except (KernelError, ServiceError, OSError):
        for each in pinned:
            _release(each)
        return None
    except BaseException:
        for each in pinned:
            _release(each)
        raise


def _alike(
    form: Form,
    operands: Sequence[Ids],
    owner: str,
    pinned: list[dict[str, Pinned]],
    store: ArrayStore,
    scheduler: Scheduler,
    listener: Listener,
    claim: Callable[[int], None] | None,
) -> list[Task] | None:
    request, names = form.request, form.operands
    first: dict[str, Pinned] = {}
    known: dict[Ids, _Checked] = {}
    checked: list[_Checked] = []
    wanted: list[Reservation] = []
    nbytes = 0
    for ids in operands:
        pins: dict[str, Pinned] = {}
        pinned.append(pins)
        for name, array_id in zip(names, ids, strict=True):
            found = first.get(array_id)
            if found is None:
                pins[name] = first[array_id] = store.pin(array_id, owner=owner)
            else:
                pins[name] = found.share()
        each = known.get(ids)
        if each is None:
            kinds = tuple([(pin.info.dtype, pin.info.shape, pin.info.order) for pin in pins.values()])
            of_kinds = form.known.get(kinds)
            if of_kinds is None or of_kinds[0] is not scheduler.fleet.representatives:
                of_kinds = scheduler.fleet.representatives, _check(form, pins, scheduler)
                form.remember(kinds, of_kinds)
            each = known[ids] = of_kinds[1]
        checked.append(each)
        wanted += each.results.values()
        nbytes += each.nbytes
    deferred = checked[0].deferred
    if not scheduler.admissions.fits(owner, nbytes) or any(each.deferred is not deferred for each in checked[1:]):
        for pins in pinned:
            _release(pins)
        return None
    ttl_s = store.settings.result_ttl_s if request.ttl_s is None else request.ttl_s
    uploads = iter(
        store.allocate_all(wanted, owner=owner, ttl_s=math.inf if ttl_s is None else ttl_s, deferred=deferred)
    )
    if claim is not None:
        claim(nbytes)
    cell = store.settings.cell
    return [
        Task(
            new_id("job", cell),
            each.params,
            each.problem,
            pins,
            dict(zip(each.results, uploads, strict=False)),
            listener,
            owner=owner,
            priority=request.priority,
            timeout_s=request.timeout_s,
            verify=request.verify,
            plans=each.plans.copy(),
        )
        for each, pins in zip(checked, pinned, strict=True)
    ]


def _check(form: Form, pins: Mapping[str, Pinned], scheduler: Scheduler) -> _Checked:
    """Raises KernelError."""
    params = _params(form.request)
    problem = products.build_stored(params, {name: pin.info for name, pin in pins.items()})
    described = outputs(problem)
    single = len(described) == 1
    results = {}
    for name, (shape, dtype, order) in described.items():
        nbytes = math.prod(shape) * dtype.itemsize
        results[name] = Reservation(
            dtype.newbyteorder("=").name,
            tuple(shape),
            order,
            nbytes,
            size_class(nbytes) if nbytes else 0,
            form.tags.part(name, single=single),
        )
    nbytes = sum([each.nbytes for each in results.values()])
    deferred = not form.request.verify and scheduler.may_defer(params, nbytes)
    return _Checked(params, problem, scheduler.check(problem), nbytes, results, deferred)


async def understood(
    request: GemmJob | GemmReduceJob | ProgramJob,
    owner: str,
    *,
    store: ArrayStore,
    scheduler: Scheduler,
    recovered: bool,
) -> tuple[GemmParams | GemmReduceParams | ProgramParams, Problem, dict[str, Pinned]]:
    """Return params, problem and operands of a request; the operands are pinned, and the caller's to release.

    `recovered`: it had been admitted by an earlier process. Raises what `prepare` raises for it; then nothing is held.
    """
    operands: dict[str, Pinned] = {}
    try:
        with product_errors(request):
            if not isinstance(request, ProgramJob) and has_views(request):
                request = as_program(request)
            return await _understood(request, owner, operands, store, scheduler, recovered=recovered)
    except BaseException:
        _release(operands)
        raise


def _release(operands: dict[str, Pinned]) -> None:
    for pinned in operands.values():
        pinned.release()


async def _understood(
    request: GemmJob | GemmReduceJob | ProgramJob,
    owner: str,
    operands: dict[str, Pinned],
    store: ArrayStore,
    scheduler: Scheduler,
    *,
    recovered: bool,
) -> tuple[GemmParams | GemmReduceParams | ProgramParams, Problem, dict[str, Pinned]]:
    if isinstance(request, ProgramJob):
        if not recovered:
            check_length(len(request.steps), store.settings.max_program_steps)
        for number, step, field, array_id in arrays_of(request.steps):
            with step_errors(number, step, field):
                operands[array_id] = store.pin(array_id, hidden=recovered, owner=owner)
        program = await _compile(request, operands, None if recovered else store, scheduler)
        if not recovered:
            check_results(len(program.results), store.settings.max_program_steps)
        for unused in operands.keys() - program.arrays.keys():
            operands.pop(unused).release()
        return program.params, program, operands
    for name in ("a", "b", "c"):
        operand = getattr(request, name, None)
        if operand is not None:
            operands[name] = store.pin(operand, hidden=recovered, owner=owner)
    params = _params(request)
    infos = {name: pinned.info for name, pinned in operands.items()}
    return params, products.build_stored(params, infos), operands


def check_length(steps: int, most: int) -> None:
    """Raises ParameterInvalid for a program of too many steps."""
    if steps > most:
        raise ParameterInvalid(f"a program of {steps} steps; this server takes at most {most}", "steps")


def check_results(count: int, most: int) -> None:
    """Raises ParameterInvalid for a program that is to keep too many results."""
    if count > most:
        raise ParameterInvalid(f"{count} results are to be kept; of one program this server keeps {most}", "keep")


async def reserve_results(
    store: ArrayStore,
    described: Mapping[str, tuple[tuple[int, ...], np.dtype[Any], str]],
    ttl_s: float,
    *,
    scratch: bool = False,
    owner: str = "",
    granted: bool = False,
    deferred: bool = False,
    tags: Tags = NO_TAGS,
) -> dict[str, Upload]:
    """Reserve space for results, each given by shape, dtype and memory order. Raises TooLarge, StoreFull,
    QuotaExceeded; then none is reserved.

    Others have their turns meanwhile: a file is made for each, unless they are `deferred`. `granted`: limits were asked
    when the job was accepted. `tags`: name and labels of a single result; of several each has its own behind the name.
    """
    results: dict[str, Upload] = {}
    try:
        for name, (shape, dtype, order) in described.items():
            if not (granted or scratch):
                await store.make_room(math.prod(shape) * dtype.itemsize, owner, deferred=deferred)
            results[name] = store.allocate(
                dtype, shape, order, ttl_s=ttl_s, scratch=scratch, owner=owner, granted=granted, deferred=deferred,
                tags=tags.part(name, single=len(described) == 1),
            )  # fmt: skip
            if len(results) % _RESERVED_AT_ONCE == 0:
                await asyncio.sleep(0)
    except BaseException:
        for upload in results.values():
            upload.abort()
        raise
    return results


def steps_of(request: GemmJob | GemmReduceJob | ProgramJob) -> int:
    """Return the steps of a program; 0 of a product."""
    return len(request.steps) if isinstance(request, ProgramJob) else 0


def final_fields(outcome: Done | ServiceError) -> dict[str, Any]:
    """Return the fields of a JobInfo that its end decides."""
    if isinstance(outcome, Done):
        return {
            "state": JobState.SUCCEEDED,
            "timings": outcome.timings,
            "algorithm": outcome.algorithm,
            "residual": outcome.residual,
            "mismatch": outcome.mismatch,
            "elements": outcome.elements,
            "steps": outcome.steps,
        }
    if isinstance(outcome, JobCancelled):
        return {"state": JobState.CANCELLED, "error": describe(outcome).problem()}
    state = JobState.EXPIRED if isinstance(outcome, JobTimeout) else JobState.FAILED
    return {"state": state, "error": describe(outcome).problem()}


def failure(error: Exception) -> ServiceError:
    """Return what ended a job, as its owner is told."""
    return error if isinstance(error, ServiceError) else JobFailed(describe(error))


async def _compile(
    request: ProgramJob, operands: dict[str, Pinned], limits: ArrayStore | None, scheduler: Scheduler
) -> Program:
    arrays = {name: products.operand_of(pinned.info) for name, pinned in operands.items()}
    max_array_bytes = None if limits is None else limits.settings.max_array_bytes
    specs = [worker.spec for worker in scheduler.fleet.representatives if worker.spec is not None]

    def compiled() -> Program:
        program = compile_program(request, arrays, max_array_bytes)
        for spec in specs:
            program.warm(spec)
        return program

    if len(request.steps) <= _SHORT:
        return compiled()
    return await asyncio.get_running_loop().run_in_executor(_compilers, compiled)


def _params(request: GemmJob | GemmReduceJob) -> GemmParams | GemmReduceParams:
    kind = GemmParams if isinstance(request, GemmJob) else GemmReduceParams
    return cached(_made, kind, _VALUES[kind](request))


def _made(kind: type[GemmParams | GemmReduceParams], values: tuple[Any, ...]) -> GemmParams | GemmReduceParams:
    return kind.model_construct(**dict(zip(kind.model_fields, values, strict=True)))


_VALUES: Final = {kind: attrgetter(*kind.model_fields) for kind in (GemmParams, GemmReduceParams)}
