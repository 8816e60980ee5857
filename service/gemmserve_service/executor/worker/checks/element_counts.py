"""Element counts: how products between two readings of a device's counters were computed, as a job reports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmserve_service.schemas import Elements

if TYPE_CHECKING:
    from gemmserve_kernels.device.element_counts import Reading


def between(before: Reading | None, after: Reading | None) -> Elements | None:
    """The elements that were counted; None where none were. Waits for the device to come to the second reading.

    Exact where no other product was on the device meanwhile, as in a worker, which computes one task at a time.
    """
    if before is None or after is None or after is before:
        return None
    found = after.counts() - before.counts()
    return Elements(planned=found.planned, wide=found.wide, plain=found.plain) if found.total else None
