"""The CPU backend in a thread of this process: for tests and for embedding. Same messages, no socket."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from gemmserve_service.executor.base import Worker
from gemmserve_service.executor.protocol import TO_FRONT, TO_WORKER, Hello, Run
from gemmserve_service.worker.device import CpuBackend
from gemmserve_service.worker.runner import Runner
from gemmserve_service.worker.selftest import verified_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.executor.base import ExecutorOwner
    from gemmserve_service.executor.protocol import Done, Failed


class InlineExecutor:
    """One worker named "cpu"."""

    def __init__(self) -> None:
        self._worker = Worker("cpu")
        self._runner = Runner(CpuBackend())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gemmserve-inline")
        self._owner: ExecutorOwner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, owner: ExecutorOwner) -> None:
        """Verifies a product, then takes tasks."""
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        error = await self._loop.run_in_executor(self._thread, verified_error, self._runner.backend)
        spec = self._runner.backend.spec_fields()
        self._worker.greeted(Hello(worker="cpu", pid=os.getpid(), spec=spec, verified_error=error))
        owner.worker_ready(self._worker)

    async def stop(self) -> None:
        """Waits for the task that runs, drops the others."""
        self._owner = None
        self._worker.ready = False
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    def workers(self) -> Sequence[Worker]:
        """The one."""
        return [self._worker]

    def send(self, worker: Worker, task: Run) -> None:
        """Queues the task for the thread, through the same JSON as over a socket."""
        del worker
        self._thread.submit(self._run, task.model_dump_json())

    def forget(self, extent: str) -> None:
        """Drops the runner's mapping."""
        self._thread.submit(self._runner.forget, [extent])

    def _run(self, text: str) -> None:
        message = TO_WORKER.validate_json(text)
        assert isinstance(message, Run)
        answer = self._runner.run(message).model_dump_json()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._answer, answer)

    def _answer(self, text: str) -> None:
        answer: Done | Failed = TO_FRONT.validate_json(text)  # type: ignore[assignment]
        if self._owner is not None:
            self._owner.task_ended(self._worker, answer)
