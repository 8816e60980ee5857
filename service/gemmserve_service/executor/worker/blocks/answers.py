"""Answer of a large product, of the answers of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmserve_service.executor.worker.batches import sum_of
from gemmserve_service.schemas import Elements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.executor.protocol import Done


def whole_answer(dones: Sequence[Done]) -> Done:
    """Return the last block's answer with the seconds and elements of all, the first one's wait for the device, and the
    largest residual and mismatch.
    """
    timings = sum_of([done.timings for done in dones])
    timings.queue_s = dones[0].timings.queue_s
    counted = [done.elements for done in dones if done.elements is not None]
    residuals = [done.residual for done in dones if done.residual is not None]
    mismatches = [done.mismatch for done in dones if done.mismatch is not None]
    elements = Elements(
        planned=sum(each.planned for each in counted),
        wide=sum(each.wide for each in counted),
        plain=sum(each.plain for each in counted),
    )
    return dones[-1].model_copy(
        update={
            "timings": timings,
            "elements": elements if counted else None,
            "residual": max(residuals, default=None),
            "mismatch": max(mismatches, default=None),
        }
    )
