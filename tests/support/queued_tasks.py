"""Tasks that are nothing but what a queue looks at."""

from __future__ import annotations

import itertools

from gemmserve_service.scheduling.tasks import ServiceClass

_NUMBERS = itertools.count()


class QueuedTask:
    """One of `owner`, in the order of its making."""

    def __init__(
        self,
        owner: str = "",
        cost: float = 1.0,
        *,
        priority: int = 0,
        nbytes: int = 10,
        name: str = "",
        service_class: ServiceClass = ServiceClass.BULK,
        submitted: float | None = None,
    ):
        self.owner = owner
        self.cost_s = cost
        self.order = (-priority, next(_NUMBERS))
        self.submitted = self.order[1] if submitted is None else submitted
        self.queued_bytes = nbytes
        self.service_class = service_class
        self.name = name or owner
        self.blocks = None


def drain(queue, most: int = 10**9) -> list[QueuedTask]:
    """Takes what a FairQueue gives, in its order."""
    order = []
    while len(order) < most and (found := queue.take(lambda _: True)) is not None:
        order.append(found)
    return order
