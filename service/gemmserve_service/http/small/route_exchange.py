"""Short requests of routes that answer with JSON or with nothing, straight from the connection."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from gemmserve.wire import NpyError
from gemmserve_kernels.problem.errors import DeviceError, KernelError
from gemmserve_service.errors import ServiceError
from gemmserve_service.http.headers.preferences import NO_PREFERENCE
from gemmserve_service.http.problems import problem_response
from gemmserve_service.http.protocol.response_writer import field_lines
from gemmserve_service.http.routes import arrays, deletions, jobs
from gemmserve_service.http.small.base_exchange import Exchange
from gemmserve_service.jobs.live_jobs import LiveJob
from gemmserve_service.runtime.tracing.spans import REQUEST

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response

    from gemmserve_service.http.protocol.connection import Body
    from gemmserve_service.jobs.forms.form import Asked, Ended
    from gemmserve_service.schemas import JobInfo, StatesQuestion

_ACCEPTED: Final = (
    b"cache-control: no-store\r\nlocation: /v1/jobs/%b\r\ncontent-length: %d\r\ncontent-type: application/json\r\n"
)
_STATES: Final = b"cache-control: no-store\r\ncontent-length: %d\r\ncontent-type: application/json\r\n"

log = structlog.get_logger(__name__)


class RouteExchange(Exchange):
    """A request that a coroutine answers."""

    _response: Response
    _plain: tuple[int, bytes, Body] | None = None
    """The answer, where there is no response object."""

    @abstractmethod
    async def respond(self, body: bytes, owner: str) -> Response:
        """Return the answer. `owner`: that of the key. Raises ServiceError, KernelError."""

    def take(self, body: bytes) -> None:
        """Begin the answer."""
        tasks = self.protocol.server_state.tasks  # which the server waits for when it ends
        task = self.protocol.loop.create_task(self._run(body[self._start :]))
        task.add_done_callback(tasks.discard)
        tasks.add(task)

    async def _run(self, body: bytes) -> None:
        if self._path.tracing is not None:  # also None: this may run in the context of the request before
            REQUEST.set(self._trace)
        try:
            self._response = await self.respond(body, self._scope["state"]["caller"].owner)
        except asyncio.CancelledError:
            self.protocol.transport.abort()
            raise
        except Exception as error:
            self._fail(error)
        self.answer()

    def _fail(self, error: BaseException) -> None:
        """Make the error the answer."""
        if not isinstance(error, ServiceError | KernelError | DeviceError | NpyError):
            log.error("unexpected error", exc_info=error, **self._context)
        problem = problem_response(error)
        self._slug, self._response = problem.slug, problem

    def made(self) -> tuple[int, bytes, Body]:
        """Return the answer, or the problem."""
        if self._plain is not None:
            return self._plain
        response = self._response
        return response.status_code, field_lines(response.raw_headers), (bytes(response.body),)

    def sent(self) -> None:
        """Do nothing: jobs are the queue's, arrays the store's."""

    def given_up(self) -> None:
        """Do nothing: a client that hangs up cancels no job."""

    def observed(self) -> str | None:
        """Return the URL of the job that was made, if one was."""
        response: Any = getattr(self, "_response", None)
        return None if response is None else response.headers.get("location")


class SubmissionExchange(RouteExchange):
    """A job, or several: queued, and waited for where the request prefers that.

    A job of a form that is known is on its way to the record when the body has come, and answered by the callback of
    the record, or of its end where that is waited for: no task, whose turns would take as long as all the rest.
    """

    _accepted: tuple[Asked, LiveJob] | None = None
    """The job that was accepted so."""
    _url = ""
    """URL of that, or of one that was waited for."""

    def take(self, body: bytes) -> None:
        """Begin the answer."""
        core, preference = self._path.core, self.head.preference
        wait_s = jobs.granted_s(core, preference)
        if self._path.tracing is not None or (wait_s <= 0 and preference != NO_PREFERENCE):
            super().take(body)
            return
        try:
            text = body[self._start :].decode("ascii", "replace")
            owner = self._scope["state"]["caller"].owner
            accepted = jobs.accept_now(core, text, self._varying.key, owner, waits=wait_s > 0)
        except Exception as error:
            self._fail(error)
            self.answer()
            return
        if accepted is None:
            super().take(body)
        else:
            asked, live, insert = accepted
            insert.add_done_callback(partial(self._recorded, asked, live, wait_s))

    def _recorded(self, asked: Asked, live: LiveJob, wait_s: float, insert: asyncio.Future[Any]) -> None:
        """Called when the job is on record, or cannot be."""
        if insert.cancelled():
            self.protocol.transport.abort()
            return
        error = insert.exception()
        if error is not None:
            self._fail(error)
        elif wait_s > 0:
            self._path.core.jobs.when_over(live, wait_s, partial(self._over, live, wait_s))
            return
        else:
            self._accepted, self._url = (asked, live), f"/v1/jobs/{live.first.id}"
        self.answer()

    def _over(self, live: LiveJob, wait_s: float) -> None:
        """Called when a job that is waited for is over, or was waited for long enough."""
        try:
            status, head, body = jobs.waited_for(live, self.head.preference, wait_s)
            self._plain, self._url = (status, head, (body,)), f"/v1/jobs/{live.first.id}"
        except Exception as error:
            self._fail(error)
        self.answer()

    def made(self) -> tuple[int, bytes, Body]:
        """Return the answer, or the problem."""
        if self._accepted is None:
            return super().made()
        body = jobs.accepted_json(*self._accepted)
        return 202, _ACCEPTED % (self._accepted[1].first.id.encode(), len(body)), (body,)

    def observed(self) -> str | None:
        """Return the URL of the job that was made, if one was."""
        return self._url or super().observed()

    async def respond(self, body: bytes, owner: str) -> Response:
        """Return the job, or jobs."""
        return await jobs.answer(self._path.core, body, self._varying.key, self.head.preference, owner)


class WaitingExchange(RouteExchange):
    """A look at jobs of which one may be waited for: where that is in memory without a task, too."""

    _taking = False
    """Whether the request is being taken in: what follows it on the connection must not be read within that."""

    def wait(self, job: LiveJob | JobInfo | Ended, asked_s: float, seen: Callable[[], None]) -> None:
        """Call `seen()` when a job is over, or was waited for long enough."""
        core = self._path.core
        wait_s = min(asked_s, core.settings.max_wait_s)
        self._taking = True
        if wait_s > 0 and isinstance(job, LiveJob):
            core.jobs.when_over(job, wait_s, partial(self._told, seen))
        else:
            self._told(seen)
        self._taking = False

    def _told(self, seen: Callable[[], None]) -> None:
        if self._taking:
            self.protocol.loop.call_soon(seen)
        else:
            seen()


class JobStateExchange(WaitingExchange):
    """State of a job."""

    def take(self, body: bytes) -> None:
        """Begin the answer."""
        job = self._path.core.jobs.in_memory(self._varying.item, self._scope["state"]["caller"].owner)
        if job is None or self._path.tracing is not None:
            super().take(body)
        else:
            self.wait(job, self.head.timeout_s or 0.0, partial(self._seen, job))

    def _seen(self, job: LiveJob | JobInfo | Ended) -> None:
        """Called when the job is over, or was waited for long enough."""
        try:
            status, head, body = jobs.seen(job, self._varying.item)
            self._plain = status, head, (body,)
        except Exception as error:
            self._fail(error)
        self.answer()

    async def respond(self, body: bytes, owner: str) -> Response:  # noqa: ARG002
        """Return the job."""
        return await jobs.look(self._path.core, self._varying.item, self.head.timeout_s or 0.0, owner)


class StatesExchange(WaitingExchange):
    """States of several jobs."""

    _question: StatesQuestion
    _waited = False

    def take(self, body: bytes) -> None:
        """Begin the answer."""
        core, owner = self._path.core, self._scope["state"]["caller"].owner
        try:
            self._question = jobs.parsed_question(body[self._start :])
        except Exception as error:
            self._fail(error)
            self.protocol.loop.call_soon(self.answer)
            return
        first = core.jobs.in_memory(self._question.ids[0], owner)
        if first is None or self._path.tracing is not None:
            super().take(body)
        else:
            self.wait(first, self._question.wait, self._seen)

    def _seen(self) -> None:
        """Called when the first job is over, or was waited for long enough."""
        owner = self._scope["state"]["caller"].owner
        try:
            body = jobs.answer_states_now(self._path.core, self._question, owner)
        except Exception as error:
            self._fail(error)
        else:
            if body is None:  # some are in the database
                self._waited = True
                super().take(b"")
                return
            self._plain = 200, _STATES % len(body), (body,)
        self.answer()

    async def respond(self, body: bytes, owner: str) -> Response:  # noqa: ARG002
        """Return the jobs."""
        return await jobs.answer_states(self._path.core, self._question, owner, waits=not self._waited)


class ArrayExchange(RouteExchange):
    """Metadata of an array, or its deletion."""

    async def respond(self, body: bytes, owner: str) -> Response:  # noqa: ARG002
        """Return the array, or nothing once it is hidden."""
        call = arrays.remove if self._scope["method"] == "DELETE" else arrays.look
        return await call(self._path.core, self._varying.item, owner)


class DeletionsExchange(RouteExchange):
    """Deletion of many arrays."""

    async def respond(self, body: bytes, owner: str) -> Response:
        """Return what was deleted."""
        return await deletions.answer(self._path.core, body, owner)
