"""Preparation of a job on stored arrays as a task: operands pinned, every product checked, space for its results
reserved; and of the task's outcome as the job's final fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels import ParameterInvalid
from gemmserve_service import products
from gemmserve_service.errors import JobCancelled, JobFailed, JobTimeout, ServiceError, describe
from gemmserve_service.executor.protocol import Done
from gemmserve_service.jobs.compile_program import arrays_of, compile_program, step_errors
from gemmserve_service.programs import outputs
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import GemmJob, GemmParams, GemmReduceParams, JobState, ProgramJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.programs import Problem, Program
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
    claim: Callable[[Problem], None] | None,
) -> Task:
    """The task of `request`. Whatever this raises, nothing stays held.

    `claim` is asked for room in the queue; None: the job had been admitted by an earlier process, and its operands may
    be hidden meanwhile. Raises KernelError (StepInvalid for whatever is wrong with a step of a program), NotFound,
    Gone, TooLarge, StoreFull, QuotaExceeded, QueueFull.
    """
    recovered = claim is None
    with contextlib.ExitStack() as undo:
        params, problem, operands = await understood(
            request, owner, undo, store=store, scheduler=scheduler, recovered=recovered
        )
        plans = {} if recovered else scheduler.check(problem)
        if claim is not None:
            claim(problem)
        ttl_s = store.settings.result_ttl_s if request.ttl_s is None else request.ttl_s
        life_s = math.inf if ttl_s is None else ttl_s
        results = await reserve_results(store, problem, life_s, undo, owner=owner, granted=recovered)
        undo.pop_all()
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


async def understood(
    request: GemmJob | GemmReduceJob | ProgramJob,
    owner: str,
    undo: contextlib.ExitStack,
    *,
    store: ArrayStore,
    scheduler: Scheduler,
    recovered: bool,
) -> tuple[GemmParams | GemmReduceParams | ProgramParams, Problem, dict[str, Pinned]]:
    """Return params, problem and operands of a request; the operands are pinned, until `undo` unless that is emptied.

    `recovered`: it had been admitted by an earlier process. Raises what `prepare` raises for it.
    """
    operands: dict[str, Pinned] = {}
    if isinstance(request, ProgramJob):
        if not recovered:
            check_length(len(request.steps), store.settings.max_program_steps)
        for number, step, field, array_id in arrays_of(request.steps):
            with step_errors(number, step, field):
                operands[array_id] = undo.enter_context(store.pin(array_id, hidden=recovered, owner=owner))
        program = await _compile(request, operands, None if recovered else store, scheduler)
        if not recovered:
            check_results(len(program.results), store.settings.max_program_steps)
        for unused in operands.keys() - program.arrays.keys():
            operands.pop(unused).release()
        return program.params, program, operands
    names = {"a": request.a, "b": request.b} | ({"c": request.c} if isinstance(request, GemmJob) else {})
    for name, optional in names.items():
        if optional is not None:
            operands[name] = undo.enter_context(store.pin(optional, hidden=recovered, owner=owner))
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
    problem: Problem,
    ttl_s: float,
    undo: contextlib.ExitStack,
    *,
    scratch: bool = False,
    owner: str = "",
    granted: bool = False,
) -> dict[str, Upload]:
    """Reserve space for every result of `problem`, given back by `undo`. Raises TooLarge, StoreFull, QuotaExceeded.

    Others have their turns meanwhile: a file is made for each. `granted`: limits were asked when the job was accepted.
    """
    results: dict[str, Upload] = {}
    for name, (shape, dtype, order) in outputs(problem).items():
        upload = store.allocate(dtype, shape, order, ttl_s=ttl_s, scratch=scratch, owner=owner, granted=granted)
        undo.callback(upload.abort)
        results[name] = upload
        if len(results) % _RESERVED_AT_ONCE == 0:
            await asyncio.sleep(0)
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
    specs = {worker.spec for worker in scheduler.executor.workers() if worker.spec is not None}

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
    return kind.model_construct(**{name: getattr(request, name) for name in kind.model_fields})
