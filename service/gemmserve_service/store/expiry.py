"""Arrays whose time has passed: hidden at once, on record soon, freed with the last pin. No other is ever evicted."""

from __future__ import annotations

import asyncio
import logging
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from gemmserve_service.runtime import clock
from gemmserve_service.runtime.background import report
from gemmserve_service.store.database.database import load_sql

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Awaitable, Callable

    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.store.catalog import Catalog
    from gemmserve_service.store.database.database import Database
    from gemmserve_service.store.record import Record

_SQL: Final = load_sql("arrays")
_LOOK_AT_LEAST_S: Final = 60.0  # at the wall clock: it may have jumped
_RETRY_S: Final = 1.0

log = logging.getLogger(__name__)


class Expiry:
    """Sweeps one store's catalog. `settle(record)` frees what is hidden and pinned by nobody."""

    def __init__(
        self, catalog: Catalog, database: Database, settle: Callable[[Record], None], *, history_s: float
    ) -> None:
        self.on_jump: list[Callable[[float], Awaitable[object]]] = []
        """Callbacks, given the seconds by which the clock jumped: moments on record are to be moved along."""
        self._catalog = catalog
        self._database = database
        self._settle = settle
        self._history_s = history_s
        self._unrecorded: list[Record] = []
        self.jumped_s = 0.0
        """Seconds by which the clock has jumped since the start."""
        self._wake = asyncio.Event()
        self._upcoming = -math.inf
        """Time of the next expiry that `run` waits for."""

    def wake(self, expires_at: float = -math.inf) -> None:
        """Note that there is an array that expires at that time, which may be before all others."""
        if expires_at < self._upcoming:
            self._wake.set()

    def commit(self, info: ArrayInfo, jumped_s: float) -> ArrayInfo:
        """Return the info of an array whose row is committed, moved along with a clock that has jumped meanwhile.

        `jumped_s`: what that was when the info was made.
        """
        seconds = self.jumped_s - jumped_s
        if not seconds or info.expires_at is None:
            return info
        expires = info.expires_at + timedelta(seconds=seconds)
        # Its row was moved or not, depending on which came first.
        row = {"id": info.id, "expires_at": expires.timestamp()}
        self._database.write_soon(lambda db: db.execute(_SQL["set_expiry"], row), rows=1).add_done_callback(report)
        return info.model_copy(update={"expires_at": expires})

    async def run(self) -> None:
        """Sweeps until it is cancelled."""
        while True:
            self._wake.clear()
            delay = _LOOK_AT_LEAST_S
            upcoming = self._catalog.next_expiry()
            self._upcoming = math.inf if upcoming is None else upcoming
            if upcoming is not None:
                delay = min(delay, max(upcoming - clock.time(), 0.0))
            if self._unrecorded:
                delay = 0.0
            if delay > 0:
                try:
                    # Not wait_for: before Python 3.12 it swallows a cancellation that comes with the wake-up.
                    async with asyncio.timeout(delay):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            try:
                await self.follow_clock()
                await self.expire_due()
            except Exception:  # a full disk, say: the arrays are hidden already, their rows follow later
                log.exception("could not record expiries")
                await asyncio.sleep(_RETRY_S)

    async def follow_clock(self) -> None:
        """Moves every expiry along with a wall clock that has jumped: what had an hour left still has it."""
        jump = clock.CLOCK.adjust()
        if not jump:
            return
        log.warning("the system's clock jumped by %.1f s; expiries and deadlines move along", jump)
        self._catalog.shift(jump)
        self.jumped_s += jump
        arrays = self._database.write(lambda db: db.execute(_SQL["shift"], {"seconds": jump}))
        await asyncio.gather(arrays, *(tell(jump) for tell in self.on_jump))

    async def expire_due(self) -> None:
        """Hides what is due and puts it on record."""
        now = clock.time()
        self._unrecorded += self._catalog.due(now)
        due = list(self._unrecorded)
        if not due:
            return
        rows = [{"id": record.info.id, "state": "expired"} for record in due]
        before = now - self._history_s

        def expire(db: sqlite3.Connection) -> None:
            db.executemany(_SQL["set_state"], rows)
            db.execute(_SQL["purge_expired"], {"before": before})

        await self._database.write(expire)
        self._unrecorded = []
        for record in due:
            record.hidden = True
            self._settle(record)
