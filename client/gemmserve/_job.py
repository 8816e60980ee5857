"""Handles of jobs: a state that was last seen, and what to do about it."""

from __future__ import annotations

from contextlib import aclosing, closing, contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from gemmserve import _errors
from gemmserve._calls import requests
from gemmserve._calls.watch import Watch
from gemmserve._handles.display import at
from gemmserve._pickling import PickledByClient
from gemmserve._remote import ArraySession, AsyncArraySession

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping

    from gemmserve._calls.exchanges import Flow
    from gemmserve._calls.flows import Flows
    from gemmserve._calls.submissions import Expected
    from gemmserve._handles.view import Base
    from gemmserve._model import ArrayInfo, JobInfo
    from gemmserve._remote import AsyncRemoteArray, RemoteArray
    from gemmserve._transfer.progress import JobBar
    from gemmserve._transport.async_io import AsyncIO
    from gemmserve._transport.sync_io import SyncIO

T = TypeVar("T")
S = TypeVar("S", bound="Session | AsyncSession")


class Session(ArraySession, Protocol):
    """Interface of the client as jobs and programs that it made use it: `Client` is one."""

    @property
    def _flows(self) -> Flows: ...
    @property
    def _io(self) -> SyncIO: ...
    def _handle(
        self, array_id: str, info: ArrayInfo | None = None, *, base: Base | None = None, made: bool = False
    ) -> RemoteArray: ...
    def _run(self, flow: Flow[T]) -> T: ...
    def _call(self, request: requests.Request[T]) -> T: ...


class AsyncSession(AsyncArraySession, Protocol):
    """Interface of an AsyncClient as its jobs and programs use it."""

    @property
    def _flows(self) -> Flows: ...
    @property
    def _io(self) -> AsyncIO: ...
    def _handle(self, array_id: str, info: ArrayInfo | None = None, *, made: bool = False) -> AsyncRemoteArray: ...
    async def _run(self, flow: Flow[T]) -> T: ...
    async def _call(self, request: requests.Request[T]) -> T: ...


class JobHandle(PickledByClient, Generic[S]):
    """Base of both kinds of job: the last state seen (`info`), and the errors that a state stands for."""

    def __init__(self, client: S, info: JobInfo, expected: Expected | None = None) -> None:
        self._client = client
        self.info = info
        self._expected = expected
        """Function that returns what the results are, by name, once the job has succeeded."""
        self._results: dict[str, Any] = {}
        """Handles of the results that were asked for: they last as long as the job's handle."""
        self._shared = False
        """Whether another process may ask for the results."""
        client._flows.outstanding.add(self)

    @property
    def _makes(self) -> bool:
        """Whether the results go with their handles, where the client deletes by itself: not what has a name."""
        return not self._shared and not (self.info.fields.get("request") or {}).get("name")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the handle by its state and its client's options. From then on its results outlive their handles."""
        reduced = super().__reduce__()
        self._shared = True
        for result in self._results.values():
            result.keep()
        return reduced

    def _reduced(self) -> tuple[Any, ...]:
        return type(self), self.info, self._expected

    @property
    def id(self) -> str:
        """The job's id; `client.job(id)` finds it again, from any process."""
        return self.info.id

    @property
    def state(self) -> str:
        """queued, running, succeeded, failed, cancelled or expired, as last seen: `refresh()` asks again."""
        return self.info.state

    @property
    def progress(self) -> float | None:
        """Share of the job that is done, 0 to 1, as last seen; None where it ended without success.

        Programs get on by steps, large products by blocks, others from 0 to 1 at once.
        """
        return self.info.progress

    @property
    def done(self) -> bool:
        """Whether the state, as last seen, is final."""
        return self.info.final

    @contextmanager
    def _watched(self) -> Iterator[Callable[[JobInfo], object] | None]:
        """Function that shows states on a bar, for as long as the job is waited for; None where nobody would see it."""
        client: Any = self._client
        bar: JobBar | None = None if self.done else client._io.progress.job()
        try:
            yield None if bar is None else bar.show
        finally:
            if bar is not None:
                bar.close()

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
        if isinstance(cause, _errors.JobFailed):
            raise cause
        raise _errors.JobFailed(
            detail or f"job {info.id} failed",
            slug=cause.slug if cause else None,
            status=cause.status if cause else None,
            problem=problem,
            job=self,
        ) from cause

    def _handles(self, timeout: float | None) -> Any:
        """The handle of the result, or several by name. Raises as `_raise_unless_succeeded` does."""
        self._raise_unless_succeeded(timeout)
        expected: Mapping[str, Base | None] = {} if self._expected is None else self._expected()
        client: Any = self._client
        for name, array_id in self.info.result.items():
            if name not in self._results:
                self._results[name] = client._handle(array_id, base=expected.get(name), made=self._makes)
        return next(iter(self._results.values())) if self.info.single else dict(self._results)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.info.id} {self.info.op} {self.info.state}{at(self._client)}>"


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
        with self._watched() as seen:
            self.info = self._client._run(self._client._flows.wait(self.info, deadline=deadline, seen=seen))
        if not self.info.final:
            self._raise_unless_succeeded(timeout)
        return self

    def result(self, timeout: float | None = None) -> RemoteArray | dict[str, RemoteArray]:
        """Waits, then the result: a RemoteArray, or several by name (`gemm_reduce` with a list or `return_c`).

        Where the operands are not known here, as of a job that was found by its id, the server is asked for the
        results' shapes and dtypes. Raises JobFailed, JobCancelled, JobTimeout; then also NotFound, Gone.
        """
        self.wait(timeout)
        found = self._result()
        for handle in self._results.values():
            if handle._known is None:
                handle.refresh()
        return found

    def _result(self, timeout: float | None = None) -> RemoteArray | dict[str, RemoteArray]:
        """The result of a job that is waited for already, as far as it is known."""
        found: RemoteArray | dict[str, RemoteArray] = self._handles(timeout)
        return found

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
        with self._watched() as seen:
            self.info = await self._client._run(self._client._flows.wait(self.info, deadline=deadline, seen=seen))
        if not self.info.final:
            self._raise_unless_succeeded(timeout)
        return self

    async def result(self, timeout: float | None = None) -> AsyncRemoteArray | dict[str, AsyncRemoteArray]:  # noqa: ASYNC109
        """Waits, then the result: an AsyncRemoteArray, or several by name: see `Job.result`.

        Raises JobFailed, JobCancelled, JobTimeout; where the operands are not known here also NotFound, Gone.
        """
        await self.wait(timeout)
        return await self._result()

    async def _result(self, timeout: float | None = None) -> AsyncRemoteArray | dict[str, AsyncRemoteArray]:  # noqa: ASYNC109
        """The result of a job that is waited for already, its shape and dtype asked for where they are not known."""
        found: AsyncRemoteArray | dict[str, AsyncRemoteArray] = self._handles(timeout)
        for handle in self._results.values():
            if handle._known is None:
                await handle.refresh()
        return found

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
