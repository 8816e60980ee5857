"""Handles of jobs: a state that was last seen, and what to do about it."""

from __future__ import annotations

from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from gemmserve import _errors
from gemmserve._calls import requests
from gemmserve._calls.flows import Watch
from gemmserve._pickling import PickledByClient
from gemmserve._remote import ArraySession, AsyncArraySession, AsyncRemoteArray, RemoteArray

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from gemmserve._calls.flows import Flow, Flows
    from gemmserve._model import JobInfo
    from gemmserve._transfer.arrays import LocalArray
    from gemmserve._transport.async_io import AsyncIO
    from gemmserve._transport.sync_io import SyncIO

T = TypeVar("T")
S = TypeVar("S")


class Session(ArraySession, Protocol):
    """Interface of the client as jobs and programs that it made use it: `Client` is one."""

    @property
    def _flows(self) -> Flows: ...
    @property
    def _io(self) -> SyncIO: ...
    def _run(self, flow: Flow[T]) -> T: ...
    def _call(self, request: requests.Request[T]) -> T: ...
    def put(self, a: LocalArray, ttl_s: float | None = None) -> RemoteArray: ...


class AsyncSession(AsyncArraySession, Protocol):
    """Interface of an AsyncClient as its jobs and programs use it."""

    @property
    def _flows(self) -> Flows: ...
    @property
    def _io(self) -> AsyncIO: ...
    async def _run(self, flow: Flow[T]) -> T: ...
    async def _call(self, request: requests.Request[T]) -> T: ...
    async def put(self, a: LocalArray, ttl_s: float | None = None) -> AsyncRemoteArray: ...


class JobHandle(PickledByClient, Generic[S]):
    """Base of both kinds of job: the last state seen (`info`), and the errors that a state stands for."""

    def __init__(self, client: S, info: JobInfo) -> None:
        self._client = client
        self.info = info

    def _reduced(self) -> tuple[Any, ...]:
        return type(self), self.info

    @property
    def id(self) -> str:
        """The job's id; `client.job(id)` finds it again, from any process."""
        return self.info.id

    @property
    def state(self) -> str:
        """queued, running, succeeded, failed, cancelled or expired, as last seen: `refresh()` asks again."""
        return self.info.state

    @property
    def done(self) -> bool:
        """Whether the state, as last seen, is final."""
        return self.info.final

    def _raise_unless_succeeded(self, timeout: float | None) -> None:
        info = self.info
        if info.state == "succeeded":
            return
        problem = dict(info.error or {})
        cause = _errors.from_problem(problem, job=self) if problem else None
        detail = cause.detail if cause else ""
        if not info.final:
            within = "in time" if timeout is None else f"within {timeout} s"
            raise _errors.JobTimeout(f"job {info.id} was still {info.state}: not done {within}", job=self)
        if info.state == "cancelled":
            raise _errors.JobCancelled(detail or f"job {info.id} was cancelled", problem=problem, job=self)
        if info.state == "expired" or isinstance(cause, _errors.JobTimeout):
            raise _errors.JobTimeout(
                detail or f"job {info.id} passed its deadline", problem=problem, job=self
            ) from cause
        raise _errors.JobFailed(
            detail or f"job {info.id} failed",
            slug=cause.slug if cause else None,
            status=cause.status if cause else None,
            problem=problem,
            job=self,
        ) from cause

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.info.id} {self.info.op} {self.info.state}>"


class Job(JobHandle[Session]):
    """A job on the server, as `Client.submit` returns it. Every method may raise GemmserveError."""

    def refresh(self) -> Self:
        """Asks for the present state; returns the job itself."""
        self.info = self._client._call(requests.job_info(self.id))
        return self

    def wait(self, timeout: float | None = None) -> Self:
        """Waits until the state is final, however the job ended; returns the job itself.

        Raises JobTimeout after `timeout` seconds; the job goes on.
        """
        deadline = None if timeout is None else self._client._flows.clock() + timeout
        self.info = self._client._run(self._client._flows.wait(self.info, deadline=deadline))
        if not self.info.final:
            self._raise_unless_succeeded(timeout)
        return self

    def result(self, timeout: float | None = None) -> RemoteArray | dict[str, RemoteArray]:
        """Waits, then the result: a RemoteArray, or several by name (`gemm_reduce` with a list or `return_c`).

        Raises JobFailed, JobCancelled, JobTimeout.
        """
        self.wait(timeout)
        return self._result()

    def _result(self, timeout: float | None = None) -> RemoteArray | dict[str, RemoteArray]:
        self._raise_unless_succeeded(timeout)
        arrays = {name: RemoteArray(self._client, array_id) for name, array_id in self.info.result.items()}
        return next(iter(arrays.values())) if self.info.single else arrays

    def cancel(self) -> Self:
        """Cancels the job unless it is final already; returns the job itself, its state as of now."""
        info = self._client._call(requests.cancel_job(self.id))
        if info is None:
            return self.refresh()
        self.info = info
        return self

    def events(self) -> Generator[JobInfo]:
        """Each change of state as it happens, until the final one. Goes on where the connection breaks."""
        watch = Watch(self._client._flows, self.id)
        while True:
            try:
                with closing(self._client._io.events(watch.request())) as events:
                    for event in events:
                        info = watch.take(event)
                        if info is None:
                            continue
                        if info.final and watch.unchecked:
                            info = self._client._call(requests.job_info(self.id))
                        self.info = info
                        yield info
                        if info.final:
                            return
            except _errors.GemmserveError as error:
                pause = watch.broke(error)
                if pause is None:
                    raise
            else:
                pause = watch.ended()
            self._client._io._sleep(pause)


class AsyncJob(JobHandle[AsyncSession]):
    """A job of an AsyncClient: the same, awaited."""

    async def refresh(self) -> Self:
        """Asks for the present state; returns the job itself."""
        self.info = await self._client._call(requests.job_info(self.id))
        return self

    async def wait(self, timeout: float | None = None) -> Self:  # noqa: ASYNC109 (the same signature as Job's)
        """Waits until the state is final, however the job ended; returns the job itself.

        Raises JobTimeout after `timeout` seconds; the job goes on.
        """
        deadline = None if timeout is None else self._client._flows.clock() + timeout
        self.info = await self._client._run(self._client._flows.wait(self.info, deadline=deadline))
        if not self.info.final:
            self._raise_unless_succeeded(timeout)
        return self

    async def result(self, timeout: float | None = None) -> AsyncRemoteArray | dict[str, AsyncRemoteArray]:  # noqa: ASYNC109
        """Waits, then the result: an AsyncRemoteArray, or several by name.

        Raises JobFailed, JobCancelled, JobTimeout.
        """
        await self.wait(timeout)
        return await self._result()

    async def _result(self, timeout: float | None = None) -> AsyncRemoteArray | dict[str, AsyncRemoteArray]:  # noqa: ASYNC109
        self._raise_unless_succeeded(timeout)
        arrays = {
            name: AsyncRemoteArray(self._client, array_id, await self._client._array_info(array_id))
            for name, array_id in self.info.result.items()
        }
        return next(iter(arrays.values())) if self.info.single else arrays

    async def cancel(self) -> Self:
        """Cancels the job unless it is final already; returns the job itself, its state as of now."""
        info = await self._client._call(requests.cancel_job(self.id))
        if info is None:
            return await self.refresh()
        self.info = info
        return self

    async def events(self) -> AsyncGenerator[JobInfo]:
        """Each change of state as it happens, until the final one. Goes on where the connection breaks."""
        watch = Watch(self._client._flows, self.id)
        while True:
            try:
                async with aclosing(self._client._io.events(watch.request())) as events:
                    async for event in events:
                        info = watch.take(event)
                        if info is None:
                            continue
                        if info.final and watch.unchecked:
                            info = await self._client._call(requests.job_info(self.id))
                        self.info = info
                        yield info
                        if info.final:
                            return
            except _errors.GemmserveError as error:
                pause = watch.broke(error)
                if pause is None:
                    raise
            else:
                pause = watch.ended()
            await self._client._io._sleep(pause)
