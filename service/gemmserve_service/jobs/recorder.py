"""Ends of jobs on their way to the disk: told only once they are there, so that no restart takes one back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.errors import StoreFull, TierUnavailable
from gemmserve_service.store.database.migrations import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_service.jobs.forms.form import Ended
    from gemmserve_service.jobs.job_queue import JobQueue
    from gemmserve_service.schemas import JobInfo
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.upload import Upload

_MIN_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 5.0
_PASSING: Final = (StoreFull, TierUnavailable, DatabaseError, sqlite3.OperationalError, OSError)

log = logging.getLogger(__name__)


class LostBytesError(Exception):
    """The disk did not take a result's file: its bytes may be gone, and have to be written anew."""


class Recorder:
    """Records ends, and tries again while the disk is full or fails: it may have room again."""

    def __init__(self, store: ArrayStore, queue: JobQueue) -> None:
        self.waiting: set[str] = set()
        """Jobs whose end could not be put on record yet."""
        self._store = store
        self._queue = queue
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make no further attempt after one that fails."""
        self._stopping.set()

    async def record(
        self,
        info: JobInfo | Ended,
        uploads: Sequence[Upload],
        rows: Sequence[dict[str, Any]],
        refused: Callable[[], bool] = lambda: False,
    ) -> bool:
        """The job's end and the rows of its results, all or nothing. False: the server stops before it could be done.

        `refused`: whether the job itself could not be recorded, so that nobody wants its end. Raises LostBytesError,
        and what else trying again would not mend.
        """
        delay_s = _MIN_RETRY_S
        while True:
            try:
                for upload, row in zip(uploads, rows, strict=False):  # none to secure, or as many
                    await self._store.secure(upload)
                    row["tier"] = upload.tier
                await asyncio.shield(self._queue.finish(info, rows))
            except _PASSING as error:
                if any(upload.extent is not None and upload.extent.failed for upload in uploads):
                    raise LostBytesError(str(error)) from error
                if refused():
                    self.waiting.discard(info.id)
                    raise
                log.warning("job %s: its end could not be recorded (%s); trying again in %g s", info.id, error, delay_s)
            except BaseException:
                self.waiting.discard(info.id)
                raise
            else:
                self.waiting.discard(info.id)
                return True
            self.waiting.add(info.id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return False
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
