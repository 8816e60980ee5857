"""Executor of workers of both kinds: of this host's, which the supervisor starts, and of those that join over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.executor.joined.executor import JoinedExecutor
    from gemmserve_service.executor.local import LocalExecutor
    from gemmserve_service.executor.port import ExecutorOwner, ToOne, Worker
    from gemmserve_service.executor.protocol import Forget


class ComposedExecutor:
    """Both executors as one: this host's workers first, which never change, then others in the order in which they
    joined.
    """

    def __init__(self, local: LocalExecutor, joined: JoinedExecutor) -> None:
        self._local = local
        self._joined = joined
        self._workers: Sequence[Worker] = ()
        joined.changed = self._look
        self._look()

    def _look(self) -> None:
        self._workers = (*self._local.workers(), *self._joined.workers())

    async def start(self, owner: ExecutorOwner) -> None:
        """See `Executor`. Raises OSError, ssl.SSLError."""
        await self._local.start(owner)
        await self._joined.start(owner)

    async def stop(self) -> None:
        """See `Executor`."""
        await self._joined.stop()
        await self._local.stop()

    def workers(self) -> Sequence[Worker]:
        """See `Executor`; the same object until a worker comes or goes."""
        return self._workers

    def send(self, worker: Worker, message: ToOne) -> None:
        """See `Executor`."""
        if worker.link is None:
            self._local.send(worker, message)
        else:
            self._joined.send(worker, message)

    def kill(self, worker: Worker, reason: str) -> None:
        """See `Executor`."""
        if worker.link is None:
            self._local.kill(worker, reason)
        else:
            self._joined.kill(worker, reason)

    def forget(self, message: Forget) -> None:
        """See `Executor`."""
        self._local.forget(message)
        self._joined.forget(message)
