"""A small request and its answer, straight from the connection: what those of every route have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from gemmserve_service.http.headers.every_answer import EXCHANGE, POLICY, SECURITY
from gemmserve_service.http.middleware.observe import context_of, request_done
from gemmserve_service.http.middleware.request_traces import begin_trace
from gemmserve_service.http.problems import SLUG
from gemmserve_service.http.protocol.response_writer import STATUS_LINES, field_lines

if TYPE_CHECKING:
    import asyncio

    from gemmserve_service.http.metrics.metrics import Metrics
    from gemmserve_service.http.middleware.audit import AuditLog
    from gemmserve_service.http.protocol.asgi_cycle import AsgiCycle
    from gemmserve_service.http.protocol.connection import Body, Connection
    from gemmserve_service.http.small.heads import Head, Varying
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.jobs.small.small_products import SmallProducts
    from gemmserve_service.runtime.tracing.spans import RequestTrace, Tracing

PATIENCE_S: Final = 0.02
"""Seconds to wait for the rest of a body. Slower clients are left to the app, which has clocks for slow bodies."""

_GUARDS: Final = field_lines((*SECURITY, POLICY))

log = structlog.get_logger(__name__)


class Shared(Protocol):
    """State that the exchanges of one server share (`SmallRequests`)."""

    core: Core
    metrics: Metrics
    audit: AuditLog
    tracing: Tracing | None
    products: SmallProducts
    gathered: int
    """Bytes of the bodies that are being gathered, as their heads announce them."""

    def ended(self, exchange: Exchange, *, now: bool) -> None:
        """Answer it, soon."""

    def answered(self, exchange: Exchange) -> None:
        """Count it, soon."""


class Exchange(ABC):
    """One request and its answer. Every method belongs to the event loop's thread."""

    def __init__(
        self, path: Shared, protocol: Connection, head: Head, start: int, varying: Varying, scope: Any,
        cycle: AsgiCycle | None,
    ) -> None:  # fmt: skip
        self.protocol = protocol
        self.head = head
        self.cycle = cycle
        """ASGI cycle; None: the request came past the parser."""
        self.stays = True
        """Whether the connection does, of a request that came past the parser."""
        self.gathering = True
        """Whether the body is still coming."""
        self._began = time.perf_counter()
        self._path = path
        self._scope = scope
        self._varying = varying
        self._context = context_of(head.request_id, varying.traceparent)
        self._trace: RequestTrace | None = None
        if path.tracing is not None:
            self._trace = begin_trace(path.tracing, scope, self._context, varying.traceparent, head.fields)
        self._pieces: list[bytes] = []
        self._start = start
        """Offset of the body in the pieces."""
        self._patience: asyncio.TimerHandle | None = None
        self._received_s = 0.0
        self._gone = False
        self._ended_s = 0.0
        self._slug: str | None = None
        """Slug of the problem that was answered."""
        self._sent = (0, 0, 0)
        """Status, bytes that came and bytes that went; status 0: there was no answer."""
        path.gathered += head.size

    # -- for each route ---------------------------------------------------------------------------------------------

    @abstractmethod
    def take(self, body: bytes) -> None:
        """Begin with the body, which is whole, from offset `_start` on."""

    @abstractmethod
    def made(self) -> tuple[int, bytes, Body]:
        """Return the answer: status, fields as lines, body."""

    @abstractmethod
    def sent(self) -> None:
        """Called when the answer has been given to the transport, or nobody is there for it."""

    @abstractmethod
    def given_up(self) -> None:
        """Called when the client has hung up before the answer."""

    @abstractmethod
    def observed(self) -> str | None:
        """Tell the observers what came of it; return the URL of what was made, if anything was."""

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
        """The body is whole."""
        self._received_s = time.perf_counter() - self._began
        if self._trace is not None and self.head.size:
            self._trace.received()
        self.take(self._gathered())

    def _wait(self) -> None:
        self._patience = self.protocol.loop.call_later(PATIENCE_S, self._give_up)

    def _give_up(self) -> None:
        """The rest of the body does not come in time."""
        self.hand_over(self._gathered())

    def hand_over(self, data: bytes) -> None:
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

    # -- the answer -------------------------------------------------------------------------------------------------

    def lost(self) -> None:
        """The client hung up."""
        self._gone = True
        if self.gathering:
            self._sent = (0, max(len(self._gathered()) - self._start, 0), 0)
            self.record()
        else:
            self.given_up()

    def answer(self) -> None:
        """Sends what came of it, if there is still somebody."""
        self._gone = self._gone or self.protocol.transport.is_closing()
        status, count = 0, 0
        if self._trace is not None:
            self._trace.answering()
        try:
            if not self._gone:
                status, head, body = self.made()
                count = sum(map(len, body))
                names = b"x-request-id: %b\r\n" % self._context["request_id"].encode("ascii")
                if self._varying.repeats:
                    names += b"%b: %b\r\n" % (EXCHANGE, self._varying.repeats)
                self.protocol.reply(self, STATUS_LINES[status], head + names + _GUARDS, body)
        except Exception:
            log.exception("unexpected error")
            self.protocol.transport.abort()
            self._gone, status, count = True, 0, 0
        finally:
            self.sent()
        self._ended_s = time.perf_counter() - self._began
        self._sent = (status, self.head.size, count)
        self._path.answered(self)

    def record(self) -> None:
        """Count, log line and audit."""
        status, received, sent = self._sent
        location = self.observed()
        seconds = self._ended_s or time.perf_counter() - self._began
        if self._slug is not None and self._trace is not None:
            self._scope["state"][SLUG] = self._slug
        request_done(
            self._path.metrics, self._scope, self._context, status,
            seconds=seconds, received=received, sent=sent, complete=bool(status), trace=self._trace,
        )  # fmt: skip
        self._path.audit.request(self._scope, status, self._slug, location, **self._context)
