"""Ledger of what each owner uses; refuses what would exceed a quota. One ledger, in the event loop's thread.

Nothing is counted twice or forgotten: stored bytes follow the store's own reservations and are taken up again from the
rows at a start; waiting jobs are what the scheduler holds; an owner's device seconds are on record no later than the
job's end. Without API keys there is nobody to be charged: then they are soon, and cost a job's commit nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import QuotaExceeded, StorageQuotaExceeded
from gemmserve_service.store.database.database import load_sql
from gemmserve_service.tenancy.api_keys import Quota

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator

    from gemmserve_service.store.database.database import Database

_SQL: Final = load_sql("quotas")
_DAY_S: Final = 86_400
_DAYS_KEPT: Final = 400
_BODY_RETRY_S: Final = 1.0  # bodies and one-shot products come and go within seconds; no measurement behind the figure
_FLUSH_S: Final = 2.0  # each costs milliseconds, for which small requests wait

log = logging.getLogger(__name__)


class Quotas:
    """The ledger. `quota_of(owner)` gives an owner's limits as they are now; "" has none but the server's."""

    def __init__(
        self,
        quota_of: Callable[[str], Quota] = lambda _: Quota(),
        database: Database | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._quota_of = quota_of
        self._database = database
        self._clock = clock
        self._stored: defaultdict[str, int] = defaultdict(int)
        self._bodies: defaultdict[str, int] = defaultdict(int)
        self._scratch: defaultdict[str, int] = defaultdict(int)
        self._device: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._unrecorded: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._owed = False
        """Whether some of them are an owner's."""
        self._failing = False
        """Whether the last try to record them failed."""
        self._flush: asyncio.TimerHandle | None = None
        if database is not None:
            database.before_begin(self._record_owed)

    async def start(self) -> None:
        """Takes up today's device seconds from the records."""
        if self._database is None:
            return
        today = self._today()

        def take_up(db: sqlite3.Connection) -> list[sqlite3.Row]:
            db.execute(_SQL["forget_device_use"], {"before": today - _DAYS_KEPT})
            return db.execute(_SQL["device_use_since"], {"day": today - 1}).fetchall()

        for row in await self._database.write(take_up):
            self._device[row["day"], row["owner"]] = row["seconds"]

    def stop(self) -> None:
        """Puts on record what is not yet; to be called before the database closes."""
        if self._flush is not None:
            self._flush.cancel()
        self._record()

    # -- bytes ------------------------------------------------------------------------------------------------------

    def check_bytes(self, owner: str, nbytes: int, *, scratch: bool) -> None:
        """Raises QuotaExceeded if `nbytes` more of that kind are too many: stored ones, or those of one request."""
        if scratch:
            self._check_in_flight(owner, nbytes)
            return
        if not owner:
            return
        limit = self._quota_of(owner).stored_bytes
        used = self._stored.get(owner, 0)
        if limit is not None and used + nbytes > limit:
            raise StorageQuotaExceeded(
                f"{nbytes} bytes do not fit: {used} of the {limit} bytes that this key's owner may store are taken; "
                "delete arrays first",
                quota="stored_bytes",
                limit=limit,
                used=used,
            )

    def charge_bytes(self, owner: str, nbytes: int, *, scratch: bool) -> None:
        """Counts bytes that were reserved (`nbytes` > 0) or given back (< 0)."""
        _add(self._scratch if scratch else self._stored, owner, nbytes)

    @contextlib.contextmanager
    def in_flight(self, owner: str, nbytes: int) -> Iterator[None]:
        """Counts a body as in flight while it is read. Raises QuotaExceeded."""
        self._check_in_flight(owner, nbytes)
        _add(self._bodies, owner, nbytes)
        try:
            yield
        finally:
            _add(self._bodies, owner, -nbytes)

    def _check_in_flight(self, owner: str, nbytes: int) -> None:
        limit = self._quota_of(owner).inflight_bytes
        if limit is not None and (used := self.inflight_bytes(owner)) + nbytes > limit:
            raise QuotaExceeded(
                f"{nbytes} bytes are too many now: {used} of the {limit} bytes that this key's owner may have in "
                "flight are",
                # What can never fit is not worth another attempt.
                retry_after_s=_BODY_RETRY_S if nbytes <= limit else _DAY_S,
                quota="inflight_bytes",
                limit=limit,
                used=used,
            )

    # -- jobs -------------------------------------------------------------------------------------------------------

    def check_job(
        self, owner: str, waiting: int, more: int = 1, *, retry_after_s: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Raises QuotaExceeded if `more` jobs are too many beside `waiting`, or the day's device time is used up.

        `retry_after_s`: when a place in the queue is likely to be free.
        """
        if not owner:
            return
        quota = self._quota_of(owner)
        if quota.queued_jobs is not None and waiting + more > quota.queued_jobs:
            raise QuotaExceeded(
                f"{waiting} jobs wait, and this key's owner may have {quota.queued_jobs} waiting",
                retry_after_s=retry_after_s(),
                quota="queued_jobs",
                limit=quota.queued_jobs,
                used=waiting,
            )
        limit = quota.device_seconds_per_day
        if limit is None:
            return
        used = self.device_seconds(owner)
        if used >= limit:
            raise QuotaExceeded(
                f"{used:.1f} of the {limit:g} device seconds that this key's owner has today (UTC) are used",
                retry_after_s=self.resets_at() - self._clock(),
                quota="device_seconds_per_day",
                limit=limit,
                used=round(used, 6),
            )

    def charge_device(self, owner: str, seconds: float) -> None:
        """Counts device time: on record within `_FLUSH_S`, an owner's no later than any write begun after this."""
        if seconds <= 0:
            return
        entry = (self._today(), owner)
        self._device[entry] += seconds
        self._unrecorded[entry] += seconds
        self._owed = self._owed or bool(owner)
        if self._database is not None and self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush_now)

    # -- what is used: by one owner, or ("") by everybody --------------------------------------------------------------

    def stored_bytes(self, owner: str) -> int:
        """Bytes of stored arrays, and reserved for uploads and results."""
        return _sum(self._stored, owner)

    def inflight_bytes(self, owner: str) -> int:
        """Bytes of bodies that are being read, and of one-shot operands and results."""
        return _sum(self._bodies, owner) + _sum(self._scratch, owner)

    def scratch_bytes(self, owner: str) -> int:
        """Bytes of one-shot operands and results."""
        return _sum(self._scratch, owner)

    def device_seconds(self, owner: str) -> float:
        """Device time since midnight, UTC."""
        today = self._today()
        if owner:
            return self._device.get((today, owner), 0.0)
        return sum(seconds for (day, _), seconds in self._device.items() if day == today)

    def resets_at(self) -> float:
        """The next midnight, UTC, in seconds since 1970."""
        return float((self._today() + 1) * _DAY_S)

    def limits(self, owner: str) -> Quota:
        """The owner's limits now."""
        return self._quota_of(owner)

    def owners(self) -> set[str]:
        """Return the owners that use anything."""
        return {
            *self._stored,
            *self._bodies,
            *self._scratch,
            *(owner for day, owner in self._device if day == self._today()),
        }

    # -- inside -----------------------------------------------------------------------------------------------------

    def _today(self) -> int:
        return int(self._clock() // _DAY_S)

    def _flush_now(self) -> None:
        self._flush = None
        self._record()

    def _record_owed(self) -> None:
        if self._owed:
            self._record()

    def _record(self) -> None:
        """Adds what is not on record yet; tried again with the next write if the disk is full."""
        if self._database is None or not self._database.is_open or not self._unrecorded:
            return
        taken, self._unrecorded = self._unrecorded, defaultdict(float)
        self._owed = False
        rows = [{"owner": owner, "day": day, "seconds": seconds} for (day, owner), seconds in taken.items()]

        def recorded(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if not self._failing and error is not None:  # with every write of anything, while the disk is full
                log.error("device use could not be recorded; it is tried again with each write", exc_info=error)
            self._failing = error is not None
            if error is not None:
                for entry, seconds in taken.items():
                    self._unrecorded[entry] += seconds
                self._owed = True

        def write(db: sqlite3.Connection) -> None:
            db.executemany(_SQL["add_device_use"], rows)

        self._database.write_soon(write, rows=len(rows)).add_done_callback(recorded)


def _sum(ledger: defaultdict[str, int], owner: str) -> int:
    return ledger.get(owner, 0) if owner else sum(ledger.values())


def _add(ledger: defaultdict[str, int], owner: str, nbytes: int) -> None:
    ledger[owner] += nbytes
    if not ledger[owner]:
        del ledger[owner]
