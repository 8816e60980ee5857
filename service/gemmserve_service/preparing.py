"""From a job on stored arrays to a task: operands pinned, the product checked, space for its results reserved."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from gemmserve_service import operations
from gemmserve_service.schemas import GemmJob, GemmParams, GemmReduceParams
from gemmserve_service.single import reserve_results
from gemmserve_service.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.operations import Problem
    from gemmserve_service.pins import Pinned
    from gemmserve_service.scheduler import Scheduler
    from gemmserve_service.schemas import GemmReduceJob
    from gemmserve_service.store import ArrayStore
    from gemmserve_service.tasks import Listener


def prepare(
    job_id: str,
    request: GemmJob | GemmReduceJob,
    owner: str,
    *,
    store: ArrayStore,
    scheduler: Scheduler,
    listener: Listener,
    claim: Callable[[Problem], None] | None,
) -> Task:
    """The task of `request`. Whatever this raises, nothing stays held.

    `claim` is asked for room in the queue; None: the job had been admitted by an earlier process, and its operands may
    be hidden meanwhile. Raises KernelError, NotFound, Gone, TooLarge, StoreFull, QuotaExceeded, QueueFull.
    """
    recovered = claim is None
    with contextlib.ExitStack() as undo:
        operands: dict[str, Pinned] = {}
        names = {"a": request.a, "b": request.b} | ({"c": request.c} if isinstance(request, GemmJob) else {})
        for name, array_id in names.items():
            if array_id is not None:
                operands[name] = undo.enter_context(store.pin(array_id, hidden=recovered, owner=owner))
        params = _params(request)
        problem = operations.build_stored(params, operands)
        plans = {} if recovered else scheduler.check(problem)
        if claim is not None:
            claim(problem)
        ttl_s = store.settings.result_ttl_s if request.ttl_s is None else request.ttl_s
        life_s = math.inf if ttl_s is None else ttl_s
        results = reserve_results(store, problem, life_s, undo, owner=owner, granted=recovered)
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


def _params(request: GemmJob | GemmReduceJob) -> GemmParams | GemmReduceParams:
    kind = GemmParams if isinstance(request, GemmJob) else GemmReduceParams
    return kind.model_construct(**{name: getattr(request, name) for name in kind.model_fields})
