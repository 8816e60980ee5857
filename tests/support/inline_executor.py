"""The CPU backend in a thread of this process: for tests and for embedding. Same messages, no socket."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from gemmserve_service.executor.port import Worker
from gemmserve_service.executor.protocol import TO_FRONT, TO_WORKER, Cancel, Hello, RunBatch, encode
from gemmserve_service.executor.worker.checks.selftest import verified_error
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.executor.port import ExecutorOwner, ToOne
    from gemmserve_service.executor.protocol import Done, Failed, Forget

_LOOK_S: Final = 1e-3  # as `worker.loop`

log = logging.getLogger(__name__)


class InlineExecutor:
    """One worker named "cpu"."""

    def __init__(self) -> None:
        self._worker = Worker("cpu")
        self._replace()
        self._owner: ExecutorOwner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, owner: ExecutorOwner) -> None:
        """Verifies a product, then takes tasks."""
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        error = await self._loop.run_in_executor(self._thread, verified_error, self._runner.backend)
        self._greet(error)

    async def stop(self) -> None:
        """Waits for the task that runs to reach its next panel, drops the others."""
        self._owner = None
        self._worker.ready = False
        for task in self._worker.tasks:
            self._runner.cancel(task)
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    def workers(self) -> Sequence[Worker]:
        """The one."""
        return [self._worker]

    def send(self, worker: Worker, message: ToOne) -> None:
        """Queue tasks for the thread, through the same JSON as over a socket; or set a cancelled one's flag, which is
        looked at between panels. The processor keeps no copies.
        """
        del worker
        if isinstance(message, RunBatch):
            self._thread.submit(self._run, self._runner, encode(message)[4:])
        elif isinstance(message, Cancel):
            self._runner.cancel(message.task)

    def kill(self, worker: Worker, reason: str) -> None:
        """A thread cannot be ended: it is left alone, and another takes its place."""
        log.error("worker %s is given up: %s", worker.id, reason)
        owner, self._owner = self._owner, None
        if owner is None:
            return
        for task in worker.tasks:
            self._runner.cancel(task)
        worker.ready = False
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._replace()
        owner.worker_lost(worker)
        self._owner = owner
        self._greet(worker.verified_error or 0.0)

    def forget(self, message: Forget) -> None:
        """Drop the runner's mappings."""
        self._thread.submit(self._runner.forget, message.extents, message.arrays)

    def _replace(self) -> None:
        self._runner = Runner(CpuBackend())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gemmserve-inline")

    def _greet(self, error: float) -> None:
        spec = self._runner.backend.spec_fields()
        self._worker.greeted(Hello(worker="cpu", pid=os.getpid(), spec=spec, verified_error=error))
        self._worker.heard = math.inf  # it lives as long as this process does
        if self._owner is not None:
            self._owner.worker_ready(self._worker)

    def _run(self, runner: Runner, text: bytes) -> None:
        message = TO_WORKER.validate_json(text)
        assert isinstance(message, RunBatch)
        if self._loop is None:
            return
        loop = self._loop
        looked = 0.0

        def look() -> None:
            nonlocal looked
            if (now := time.monotonic()) - looked >= _LOOK_S:
                looked = now
                loop.call_soon_threadsafe(self._worker.beat, runner.task, runner.progress)

        runner.look = look
        for task in message.tasks:
            answer = runner.run(task).model_dump_json()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._answer, runner, answer)

    def _answer(self, runner: Runner, text: str) -> None:
        answer: Done | Failed = TO_FRONT.validate_json(text)  # type: ignore[assignment]
        if self._owner is not None and runner is self._runner:
            self._owner.task_ended(self._worker, answer)
