"""Task: one product on its way through the scheduler, and who is told what becomes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from gemmserve_kernels import KernelError, Plan
    from gemmserve_service.errors import ServiceError
    from gemmserve_service.executor.base import Worker
    from gemmserve_service.executor.protocol import Done
    from gemmserve_service.operations import Problem
    from gemmserve_service.pins import Pinned
    from gemmserve_service.schemas import GemmParams, GemmReduceParams
    from gemmserve_service.uploads import Upload


class Listener(Protocol):
    """Told what becomes of a task."""

    def started(self, task: Task) -> None:
        """A worker was sent it; `task.attempt` counts."""

    def requeued(self, task: Task) -> None:
        """Its worker was lost; it waits again."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Nothing more happens. On Done the listener takes `operands` and `results` over; otherwise they go."""


@dataclass(eq=False)
class Task:
    """What to compute, on what, into what; for whom, and how far it is."""

    id: str
    params: GemmParams | GemmReduceParams
    problem: Problem
    operands: dict[str, Pinned]
    results: dict[str, Upload]
    listener: Listener
    owner: str = ""
    """Whose it is: the id of an API key, "" where the server has none."""
    priority: int = 0
    """Among the tasks of the same owner: the higher goes first."""
    timeout_s: float | None = None
    """Seconds after `submitted` at which it expires, wherever it is then."""
    verify: bool = False
    durable: bool = True
    """Whether it starts again with the server; others are refused when it drains."""
    attempt: int = 0
    """How often a worker has been sent it."""
    crashes: int = 0
    """How many workers were lost while they had it."""
    submitted: float = field(default_factory=time.monotonic)
    """When its request had arrived (time.monotonic, which no change of the clock touches)."""
    cost_s: float = 0.0
    """Estimated seconds of a device."""
    queue_s: float = 0.0
    began: float = 0.0
    """When its worker was sent it (time.monotonic)."""
    limit_s: float = 0.0
    """For how long its worker may show no progress before it is taken for hung."""
    over: bool = False
    """The listener has been told; a worker may still be at it."""
    worker: Worker | None = None
    order: tuple[int, int] = (0, 0)
    timer: asyncio.TimerHandle | None = None
    plans: dict[str, Plan | KernelError] = field(default_factory=dict)
    """By worker, how its device runs this, or why it cannot."""

    @cached_property
    def size(self) -> tuple[int, int]:
        """Bytes and operations of the problem."""
        return self.problem.nbytes(), self.problem.flops()

    def close(self, *, reusable: bool = True) -> None:
        """Gives operands and results back. Not `reusable`: a lost process may still write to the results."""
        for upload in self.results.values():
            if reusable:
                upload.abort()
            else:
                upload.discard()
        self.unpin()

    def unpin(self) -> None:
        """Lets the operands go."""
        for pinned in self.operands.values():
            pinned.release()
