"""The overview of a running server: what it observes, the clock of its history, and its answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gemmserve_service.http.overview.history import STEP_S, History
from gemmserve_service.http.overview.recent import Recent
from gemmserve_service.http.overview.snapshot import Snapshot, View
from gemmserve_service.http.overview.stream import Stream
from gemmserve_service.runtime.background import Background

if TYPE_CHECKING:
    from gemmserve_service.http.metrics.metrics import Metrics
    from gemmserve_service.http.overview.schemas import Overview
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.tenancy.identity import Caller


class LiveOverview:
    """Overview of one app; belongs to the event loop's thread."""

    def __init__(self, core: Core, metrics: Metrics) -> None:
        self._core = core
        self._recent = Recent()
        core.observers.append(self._recent)
        self.history = History(metrics.totals, self._recent, core.executor.workers)
        self.stream = Stream(core, self._recent)
        core.on_drain.append(self.stream.end)
        self._background = Background()

    def start(self) -> None:
        """Begin the history."""
        self._background.spawn(self._run())

    async def stop(self) -> None:
        """End it, and the streams."""
        self.stream.end()
        await self.stream.stop()
        await self._background.stop()

    def look(self, caller: Caller) -> Overview:
        """Return the overview as the caller may see it, without the history."""
        return Snapshot(self._core, self._recent).overview(View.of(caller))

    def render(self, caller: Caller, *, history: bool) -> bytes:
        """Return the JSON of `schemas.Overview` as the caller may see it."""
        text = self.look(caller).model_dump_json(exclude={"history"}).encode()
        # The hour is 70 kB, the same for all, and rendered once every five seconds.
        return text[:-1] + b',"history":' + (self.history.render() if history else b"null") + b"}"

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + STEP_S, loop.time())
            await asyncio.sleep(due - loop.time())
            self.stream.publish(self.history.advance())
