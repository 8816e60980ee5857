"""Retention: old jobs and Idempotency-Keys are removed in time."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from gemmserve_service.runtime import clock

if TYPE_CHECKING:
    from gemmserve_service.jobs.idempotency import IdempotencyKeys
    from gemmserve_service.jobs.job_queue import JobQueue
    from gemmserve_service.settings import Settings

_EVERY_S: Final = 3600.0

log = logging.getLogger(__name__)


async def purge(settings: Settings, queue: JobQueue, keys: IdempotencyKeys) -> None:
    """Forgets what is too old, every hour, until it is cancelled."""
    while True:
        moment = clock.time()
        keys_before = moment - settings.idempotency_ttl_s
        try:
            await queue.purge(jobs_before=moment - settings.job_history_s, keys_before=keys_before)
        except Exception:  # a full disk, say: the next round may find room
            log.exception("old jobs could not be removed")
        keys.forget(keys_before)
        await asyncio.sleep(_EVERY_S)
