"""Small one-shot products straight from the connection: without ASGI, without a task of asyncio's, in one write.

A request whose head is plain and whose body is small is gathered by the connection's protocol and answered from
callbacks. It passes the same gate, queue, limits and workers as any other and leaves the same log line, counts and
audit. Whatever is unusual or wrong, in its head or in its body, is handed to the app with every byte that came: there
it is answered as if it had gone there at once.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from gemmserve.wire import ALGORITHM_HEADER, NPY, NpyError
from gemmserve_kernels.problem.errors import DeviceError, KernelError
from gemmserve_service.errors import JobCancelled, ServiceError
from gemmserve_service.executor.protocol import Done
from gemmserve_service.http.headers.every_answer import EXCHANGE, POLICY, SECURITY
from gemmserve_service.http.middleware.observe import context_of, request_done
from gemmserve_service.http.problems import problem_response
from gemmserve_service.http.protocol.response_writer import STATUS_LINES, field_lines
from gemmserve_service.http.requests.multipart import MAX_PARAMS
from gemmserve_service.http.requests.multipart_decoder import split
from gemmserve_service.http.routes.common import elements_header, server_timing
from gemmserve_service.http.small import heads
from gemmserve_service.http.small.heads import KnownHeads
from gemmserve_service.jobs.one_shot import summary
from gemmserve_service.jobs.small import small_products
from gemmserve_service.jobs.small.bundles import BundleTask

if TYPE_CHECKING:
    import asyncio

    from fastapi import FastAPI

    from gemmserve_service.http.metrics.metrics import Metrics
    from gemmserve_service.http.middleware.access import Gate
    from gemmserve_service.http.middleware.audit import AuditLog
    from gemmserve_service.http.protocol.asgi_cycle import AsgiCycle
    from gemmserve_service.http.protocol.connection import Body, Connection
    from gemmserve_service.http.small.heads import Head
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.settings import Settings

_PATIENCE_S: Final = 0.02
"""Seconds to wait for the rest of a body. Slower clients are left to the app, which has clocks for slow bodies."""
_MAX_GATHERED: Final = 64 << 20  # bytes of all bodies that are being gathered
_ALGORITHM: Final = ALGORITHM_HEADER.lower()

log = structlog.get_logger(__name__)


_GUARDS: Final = field_lines((*SECURITY, POLICY))


class SmallRequests:
    """State that the exchanges of one server share; belongs to the event loop's thread."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        self.core: Core = app.state.core
        self.gate: Gate = app.state.gate
        self.metrics: Metrics = app.state.metrics
        self.audit: AuditLog = app.state.audit
        self.products = small_products.SmallProducts()
        self.heads = KnownHeads()
        self.gathered = 0
        """Bytes of the bodies that are being gathered, as their heads announce them."""
        self._proxies = ProxyHeadersMiddleware(_nobody, settings.trusted_proxies) if settings.trusted_proxies else None
        self._ended: list[Exchange] = []
        self._answered: list[Exchange] = []

    def begin(self, protocol: Connection, cycle: AsgiCycle) -> Exchange | None:
        """The exchange of a request whose head the parser has read; None: it is the app's."""
        head = heads.read(cycle.scope)
        return None if head is None else self.accept(protocol, head, 0, head.repeats, cycle)

    def accept(
        self, protocol: Connection, head: Head, start: int, repeats: bytes, cycle: AsgiCycle | None = None
    ) -> Exchange | None:
        """The exchange of a request with that head; None: it is the app's.

        Without a `cycle` the request comes past the parser, and the first `start` bytes that are fed are its head's.
        `repeats`: what the answer says again of the request.
        """
        if protocol.flow.write_paused or self.gathered + head.size > _MAX_GATHERED:
            return None
        connection = {"client": protocol.client, "scheme": protocol.scheme}
        scope: Any = {**head.scope, **connection} if cycle is None else cycle.scope
        if not self.gate.anyone(scope, head.fields):
            try:
                self.gate.caller(scope, partial(_values, head.fields))
            except ServiceError:
                return None
        if self._proxies is not None:
            with contextlib.suppress(StopIteration):  # it awaits nothing before the app, nor does that
                self._proxies(scope, None, None).send(None)  # type: ignore[arg-type]
        scope["route"] = head.route
        return Exchange(self, protocol, head, start, repeats, scope, cycle)

    def ended(self, exchange: Exchange, *, now: bool) -> None:
        """Answers it: later in this turn of the event loop, when the workers have been given what follows; `now`,
        where nothing follows.
        """
        if now and not self._ended and not self.core.scheduler.queued:
            exchange.answer()
            return
        if not self._ended:
            exchange.protocol.loop.call_soon(self._answer_all)
        self._ended.append(exchange)

    def _answer_all(self) -> None:
        ended, self._ended = self._ended, []
        for exchange in ended:
            exchange.answer()

    def answered(self, exchange: Exchange) -> None:
        """Counts it in the next turn of the event loop: what was written goes out at the end of this one."""
        if not self._answered:
            exchange.protocol.loop.call_soon(self._record_all)
        self._answered.append(exchange)

    def _record_all(self) -> None:
        answered, self._answered = self._answered, []
        for exchange in answered:
            try:
                exchange.record()
            except Exception:
                log.exception("unexpected error")


class Exchange:
    """One request and its answer; the scheduler's listener for its product."""

    def __init__(
        self, path: SmallRequests, protocol: Connection, head: Head, start: int, repeats: bytes, scope: Any,
        cycle: AsgiCycle | None,
    ) -> None:  # fmt: skip
        self._began = time.perf_counter()
        self.protocol = protocol
        self.head = head
        self.cycle = cycle
        """ASGI cycle; None: the request came past the parser."""
        self.stays = True
        """Whether the connection does, of a request that came past the parser."""
        self.gathering = True
        """Whether the body is still coming."""
        self._path = path
        self._scope = scope
        self._repeats = repeats
        self._context = context_of(head.request_id, head.traceparent)
        self._pieces: list[bytes] = []
        self._start = start
        """Offset of the body in the pieces."""
        self._patience: asyncio.TimerHandle | None = None
        self._received_s = 0.0
        self._gone = False
        self._product: small_products.SmallProduct | None = None
        self._task: BundleTask | None = None
        self._outcome: Done | Exception | None = None
        self._ended_s = 0.0
        self._slug: str | None = None
        """Slug of the problem that was answered."""
        self._sent = (0, 0, 0)
        """Status, bytes that came and bytes that went; status 0: there was no answer."""
        path.gathered += head.size

    # -- the body ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Takes up what the cycle has of the body, and waits for the rest."""
        cycle, protocol = self.cycle, self.protocol
        assert cycle is not None
        if cycle.body:
            self._pieces.append(bytes(cycle.body))
            cycle.body = bytearray()
        if not cycle.more_body:
            self.complete()
            return
        protocol.flow.resume_reading()
        cycle.send_continue()
        self._wait()

    def feed(self, piece: bytes) -> None:
        """The body's next piece."""
        self._pieces.append(piece)

    def feed_raw(self, data: bytes) -> bytes:
        """Takes what has come past the parser; returns what is not this request's."""
        pieces = self._pieces
        missing = self._start + self.head.size - sum(map(len, pieces))
        rest = b""
        if len(data) > missing:
            data, rest = data[:missing], data[missing:]
        pieces.append(data)
        if len(data) == missing:
            self.complete()
        elif self._patience is None:
            self._wait()
        return rest

    def complete(self) -> None:
        """The body is whole: its product is queued."""
        arrived = time.monotonic()
        path, head = self._path, self.head
        self._received_s = time.perf_counter() - self._began
        body = self._gathered()
        parts = split(body, head.boundary, self._start)
        product = None
        begin, end = (0, 0) if parts is None else parts.get("params", (0, 0))
        if parts is not None and parts.keys() <= head.route.names and end - begin <= MAX_PARAMS:
            product = path.products.get(head.route.kind, head.route.parse, body, parts)
        if parts is None or product is None:
            self._hand_over(body)
            return
        self._product = product
        try:
            self._task = small_products.begin(
                path.core,
                product,
                body,
                parts,
                self,
                arrived=arrived,
                timeout_s=head.timeout_s,
                owner=self._scope["state"]["caller"].owner,
            )
        except Exception as error:
            self._outcome = error
            path.ended(self, now=False)

    def _wait(self) -> None:
        self._patience = self.protocol.loop.call_later(_PATIENCE_S, self._give_up)

    def _give_up(self) -> None:
        """The rest of the body does not come in time."""
        self._hand_over(self._gathered())

    def _hand_over(self, data: bytes) -> None:
        """Gives the request to the app, as if it had been the app's from the start."""
        if self.cycle is None:
            self.protocol.hand_over(data)
        else:
            self.protocol.hand_over_cycle(self.cycle, data)

    def _gathered(self) -> bytes:
        """Ends gathering; returns what has come."""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self.gathering = False
        self._pieces = []
        self._path.gathered -= self.head.size
        if self._patience is not None:
            self._patience.cancel()
        return data

    # -- the scheduler's listener -----------------------------------------------------------------------------------

    def started(self, task: Task) -> None:
        """Do nothing: nobody asks."""

    def requeued(self, task: Task) -> None:
        """Do nothing: nobody asks."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """See `tasks.Listener`."""
        assert isinstance(task, BundleTask)
        # Not while it is being queued, nor where the answer to a cycle begins with the next request at once.
        now = self._task is not None and self.cycle is None
        self._task, self._outcome = task, outcome
        self._path.ended(self, now=now)

    # -- the answer -------------------------------------------------------------------------------------------------

    def lost(self) -> None:
        """The client hung up."""
        self._gone = True
        if self.gathering:
            self._sent = (0, max(len(self._gathered()) - self._start, 0), 0)
            self.record()
        elif self._task is not None:
            self._path.core.scheduler.cancel(self._task)

    def answer(self) -> None:
        """Sends what came of it, if there is still somebody."""
        outcome, task = self._outcome, self._task
        gone = self._gone or self.protocol.transport.is_closing()
        self._gone = gone
        status, sent = 0, 0
        try:
            if not gone:
                status, head, body = self._result(outcome) if isinstance(outcome, Done) else self._problem(outcome)
                sent = sum(map(len, body))
                names = b"x-request-id: %b\r\n" % self._context["request_id"].encode("ascii")
                if self._repeats:
                    names += b"%b: %b\r\n" % (EXCHANGE, self._repeats)
                self.protocol.reply(self, STATUS_LINES[status], head + names + _GUARDS, body)
        except Exception:
            log.exception("unexpected error")
            self.protocol.transport.abort()
            self._gone, status, sent = True, 0, 0
        finally:
            if isinstance(outcome, Done):
                assert task is not None
                task.close()  # it has been copied
        self._ended_s = time.perf_counter() - self._began
        self._sent = (status, self.head.size, sent)
        self._path.answered(self)

    def _result(self, done: Done) -> tuple[int, bytes, Body]:
        product, task = self._product, self._task
        assert product is not None
        assert task is not None
        (slot,) = product.results
        made = task.room.extent.view(task.room.nbytes)[slot.offset : slot.offset + slot.nbytes]
        timing = server_timing(done.timings, self._received_s, time.perf_counter() - self._began)
        counted = "".join(f"{name.lower()}: {value}\r\n" for name, value in elements_header(done.elements).items())
        head = (
            f"server-timing: {timing}\r\n{_ALGORITHM}: {done.algorithm}\r\n{counted}cache-control: no-store\r\n"
            f'content-disposition: attachment; filename="{slot.name}.npy"\r\n'
            f"content-length: {len(product.answer_head) + slot.nbytes}\r\n"
            f"content-type: {NPY}\r\n"
        )
        return 200, head.encode("ascii"), (product.answer_head, made)

    def _problem(self, error: Exception | None) -> tuple[int, bytes, Body]:
        assert error is not None
        if not isinstance(error, ServiceError | KernelError | DeviceError | NpyError):
            log.error("unexpected error", exc_info=error, **self._context)
        response = problem_response(error)
        self._slug = response.slug
        return response.status_code, field_lines(response.raw_headers), (bytes(response.body),)

    def record(self) -> None:
        """Count, log line and audit."""
        path, task, outcome = self._path, self._task, self._outcome
        status, received, sent = self._sent
        scope = self._scope
        if task is not None and isinstance(outcome, Done | ServiceError):
            observed = JobCancelled("the client hung up") if self._gone else outcome
            path.core.observe(summary(task, observed), task.size)
        seconds = self._ended_s or time.perf_counter() - self._began
        request_done(
            path.metrics, scope, self._context, status,
            seconds=seconds, received=received, sent=sent, complete=bool(status),
        )  # fmt: skip
        path.audit.request(scope, status, self._slug, **self._context)
        self._task = None  # which has this as its listener: nothing is left to the garbage collector


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    """An app that does nothing."""


def _values(fields: dict[bytes, bytes], name: str) -> tuple[str, ...]:
    value = fields.get(name.encode("ascii"))
    return () if value is None else (value.decode("latin-1"),)
