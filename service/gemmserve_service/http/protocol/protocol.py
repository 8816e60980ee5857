"""HTTP/1.1 on one connection: the protocol class that uvicorn is given (`uvicorn.Config(http=...)`).

Bytes come in by the transport's callbacks, are made requests by a `RequestParser` and cycles of ASGI, which a task of
the app answers, one behind the other. Where the server has `small` requests, those pass ASGI by, and the parser too
when their head was seen before. Of uvicorn it takes what the constructor is given, and has `shutdown`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.errors import ServiceError
from gemmserve_service.http.headers.every_answer import POLICY, SECURITY, request_fields
from gemmserve_service.http.middleware.observe import (
    CONTEXT,
    REFUSED,
    context_of,
    context_of_headers,
)
from gemmserve_service.http.problems import HeadTooSlow, TooManyConnections, problem_response
from gemmserve_service.http.protocol.asgi_cycle import AsgiCycle
from gemmserve_service.http.protocol.connection import Connection
from gemmserve_service.http.protocol.connections import LOCAL_USER
from gemmserve_service.http.protocol.half_close import HalfClose
from gemmserve_service.http.protocol.request_parser import RequestParser
from gemmserve_service.http.protocol.response_writer import STATUS_LINES, FlowControl, field_lines
from gemmserve_service.runtime.unix_sockets import peer_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import uvicorn
    from uvicorn.server import ServerState

    from gemmserve_service.http.protocol.connection import Body
    from gemmserve_service.http.protocol.connections import Connections
    from gemmserve_service.http.protocol.request_heads import RequestHead
    from gemmserve_service.http.small.base_exchange import Exchange
    from gemmserve_service.http.small.exchange import SmallRequests
    from gemmserve_service.http.transfer.pool import TransferPool

_LINGER_S: Final = 1.0  # for what a refused client is still sending
_MAX_IGNORED: Final = 1 << 20  # bytes of that
_END: Final = b"\r\n"
_CLOSE: Final = b"connection: close\r\n\r\n"


class State(StrEnum):
    """State of what a connection reads. What it has to answer is another matter: the queue of its cycles.

    ======  =====================================  ==========  =========  ==========  ===========  ==========
    state   meaning                                head        head       request     known head   no more
                                                   begins      ends       ends        of a small   is read
                                                                                      request
    ======  =====================================  ==========  =========  ==========  ===========  ==========
    NEW     nothing has come                       HEAD                               SMALL        ENDED
    IDLE    between requests                       HEAD                               SMALL        ENDED
    HEAD    within a head                                      BODY                                ENDED
    BODY    within a body, or where one would be                          IDLE, LAST               ENDED
    SMALL   a small request past the parser; what                         IDLE                     ENDED
            follows waits until that is answered
    LAST    behind a request after which its       ENDED                                           ENDED
            client wants the connection to end
    ENDED   what comes is ignored                  ENDED                  ENDED                    ENDED
    ======  =====================================  ==========  =========  ==========  ===========  ==========

    LAST instead of IDLE where the request's head says so. ENDED is entered by refusals, by answers that close the
    connection, and by clients that end their side of it.
    """

    NEW = "new"
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    SMALL = "small"
    LAST = "last"
    ENDED = "ended"


_HEAD_BEGINS: Final = {State.NEW: State.HEAD, State.IDLE: State.HEAD, State.LAST: State.ENDED, State.ENDED: State.ENDED}
_HEAD_ENDS: Final = {State.HEAD: State.BODY}
_REQUEST_ENDS: Final = {State.BODY: State.IDLE, State.SMALL: State.IDLE, State.ENDED: State.ENDED}
_LAST_ENDS: Final = {State.BODY: State.LAST, State.ENDED: State.ENDED}
_SMALL_BEGINS: Final = {State.NEW: State.SMALL, State.IDLE: State.SMALL}
_UNFINISHED: Final = frozenset({State.NEW, State.HEAD, State.BODY})
_INCOMPLETE: Final = frozenset({State.HEAD, State.BODY})


class HttpProtocol(Connection):
    """One connection. Made by `protocol_class`, which sets the attributes of the class."""

    registry: Connections
    small: SmallRequests | None = None
    transfers: TransferPool | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.config = config
        self.server_state = server_state
        self.app_state = app_state
        self.loop = _loop or asyncio.get_running_loop()
        self.client: tuple[str, int] | None = None
        self.server: tuple[str, int | None] | None = None
        self.scheme = "http"
        self.address = ""
        self.counted = False
        self.lost = False
        self.state = State.NEW
        self.cycle: AsgiCycle | None = None
        """Cycle of the request that the parser read last."""
        self._parser = RequestParser(self, self.registry.settings.max_head_bytes)
        self._cycles: deque[AsgiCycle] = deque()  # not answered; the app, or an exchange, works on the first
        self._last = False  # whether the request that came last ends the connection
        self._incomplete = False  # whether a request was when reading ended
        self._ignored = 0  # bytes that came since
        self._refusal: bytes | None = None  # what is said when all that came before is answered
        self._half_closed = False
        self._context = contextvars.copy_context()
        # -- small requests
        self._exchange: Exchange | None = None
        self._behind = b""  # what has come behind a request that passed the parser by
        self._default_headers: list[tuple[bytes, bytes]] = []
        self._default_lines = b""
        self._handed_over = False  # whether the next head's request was found to be none of the small ones

    @property
    def unfinished(self) -> bool:
        """Whether an idle connection owes something: a first request, the rest of a head, the rest of a body."""
        return self.state in _UNFINISHED

    # -- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.flow = FlowControl(transport)
        self.server_state.connections.add(self)  # type: ignore[arg-type]  # uvicorn names its own classes
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        if isinstance(peer, tuple):
            self.client = (str(peer[0]), int(peer[1]))
        elif (found := peer_of(transport.get_extra_info("socket"))) is not None:
            self.client = (f"{LOCAL_USER}{found[1]}", 0)
        if isinstance(own, tuple):
            self.server = (str(own[0]), int(own[1]))
        elif isinstance(own, str):
            self.server = (own, None)
        if transport.get_extra_info("sslcontext") is not None:
            self.scheme = "https"
        self.address = self.client[0] if self.client else ""
        self.counted = self.registry.open(self)
        if not self.counted:
            self._refuse(TooManyConnections("every connection is in the middle of a request", retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.lost = True
        self.server_state.connections.discard(self)
        self._uncount()
        self._parser.close()
        for cycle in self._cycles:
            cycle.disconnect()
        self.flow.resume_writing()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost()

    def data_received(self, data: bytes) -> None:
        state = self.state
        if state is State.SMALL:
            exchange = self._exchange
            self._follow(exchange.feed_raw(data) if exchange is not None and exchange.gathering else data)
            return
        if state is State.ENDED:
            self._ignore(data)
            return
        small = self.small
        if small is None or self._cycles or state not in _SMALL_BEGINS:
            self._parse(data)
            return
        known = small.heads.find(data)
        exchange = None if known is None else small.accept(self, *known)
        if exchange is not None:
            self.state = _SMALL_BEGINS[state]
            self.registry.became_busy(self)
            self._exchange = exchange
            if rest := exchange.feed_raw(data):
                self._follow(rest)
            return
        self._parse(data)
        exchange = self._exchange
        if (
            exchange is not None and exchange.cycle is not None and exchange.cycle.keep_alive
        ):  # its head came at the beginning of `data`
            small.heads.learn(data, exchange.head)

    def eof_received(self) -> bool | None:
        """A client that sends no more still gets the answers to what it has sent whole."""
        exchange = self._exchange
        unanswered = self._cycles or exchange is not None
        missing = self.state is State.BODY or (exchange is not None and exchange.gathering)
        if not unanswered or missing or self.transport.get_extra_info("sslcontext") is not None:
            return None
        self._half_closed = True
        self._end_reading()
        one_dot_zero = self._last and self.cycle is not None and self.cycle.scope["http_version"] == "1.0"
        HalfClose(self.transport, self.loop, self._answering).watch(
            "1.0" if one_dot_zero else "1.1", may_write=len(self._cycles) <= 1
        )
        return True

    def pause_writing(self) -> None:
        self.registry.stalled(self)
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.registry.flows(self)
        self.flow.resume_writing()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed(data)
        except ServiceError as error:
            if self.state in _SMALL_BEGINS:  # nothing of it could be read
                self.head_begins()
            if self.state is State.LAST:
                self._end_reading()
            self._refuse(error)

    def head_begins(self) -> bool:
        """See `RequestEvents`."""
        self.state = _HEAD_BEGINS[self.state]  # what follows the last request is none (RFC 9112, section 9.6)
        if self.state is State.ENDED:
            return False
        if not self._cycles:
            self.registry.became_idle(self)  # the clock of the head starts
        return True

    def head_ends(self, head: RequestHead) -> None:
        """See `RequestEvents`."""
        self.cycle = cycle = AsgiCycle(self, head)
        self.state = _HEAD_ENDS[self.state]
        self._last = not head.keeps_alive
        self.registry.became_busy(self)
        self._cycles.append(cycle)
        if len(self._cycles) > 1:
            self.flow.pause_reading()
        else:
            self._begin(cycle)

    def body_comes(self, data: bytes) -> None:
        """See `RequestEvents`."""
        exchange, cycle = self._exchange, self.cycle
        assert cycle is not None
        if exchange is not None and exchange.gathering and exchange.cycle is cycle:
            exchange.feed(data)
        else:
            cycle.feed(data)

    def request_ends(self) -> None:
        """See `RequestEvents`."""
        exchange, cycle = self._exchange, self.cycle
        assert cycle is not None
        self.state = (_LAST_ENDS if self._last else _REQUEST_ENDS)[self.state]
        cycle.feed_end()
        if exchange is not None and exchange.gathering and exchange.cycle is cycle:
            exchange.complete()
        if not self._cycles and self.counted:
            self.registry.became_idle(self)

    def _begin(self, cycle: AsgiCycle) -> None:
        """Starts on the first request in the queue."""
        handed_over, self._handed_over = self._handed_over, False
        exchange = None if self.small is None or handed_over else self.small.begin(self, cycle)
        if exchange is None:
            self.run(cycle)
        else:
            self._exchange = exchange
            exchange.start()

    def run(self, cycle: AsgiCycle) -> None:
        """Starts a task in which the app answers a request."""
        # Not in the context of the request before, in which this may be called: its id and trace are bound there.
        task = self.loop.create_task(cycle.run(self.config.loaded_app), context=self._context.copy())
        task.add_done_callback(self.server_state.tasks.discard)
        self.server_state.tasks.add(task)

    def answered(self, cycle: AsgiCycle) -> None:
        """The answer to the first request in the queue is complete."""
        self.server_state.total_requests += 1
        self._cycles.popleft()
        if not cycle.keep_alive:
            self._close()
        elif not self.transport.is_closing():
            self.read_on()
            if self._cycles:
                self._context.copy().run(self._begin, self._cycles[0])
            else:
                self._all_answered()

    @property
    def alone(self) -> bool:
        """See `Connection`."""
        return self.registry.alone(self)

    def read_on(self) -> None:
        """See `Connection`."""
        if len(self._cycles) <= 1:
            self.flow.resume_reading()

    def _all_answered(self) -> None:
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            self.transport.write(refusal)
            self._close()
        elif self._half_closed:
            self.transport.close()
        elif self.counted:
            self.registry.became_idle(self)

    def _answering(self) -> bool:
        """Whether an answer has begun that is not complete."""
        return bool(self._cycles) and self._cycles[0].started

    # -- for large bodies -------------------------------------------------------------------------------------------

    def body_left(self, cycle: AsgiCycle) -> int:
        """Bytes of the body of `cycle` that are still in the socket; 0 where their number is unknown."""
        return 0 if cycle is not self.cycle or self._parser.left is None else self._parser.left

    def body_received(self, count: int) -> None:
        """Counts bytes of the body that were received past the parser."""
        self._parser.skip(count)

    # -- for small requests -----------------------------------------------------------------------------------------

    def hand_over(self, data: bytes) -> None:
        """Gives the parser, and then the app, a request that was to pass them by, as it came so far."""
        stays = self._exchange is None or self._exchange.stays
        self._exchange = None
        self.state = _REQUEST_ENDS[self.state]
        self._handed_over = True
        self._parse(data)
        if not stays and self._cycles:  # `shutdown` was called meanwhile
            self._cycles[-1].keep_alive = False

    def hand_over_cycle(self, cycle: AsgiCycle, data: bytes) -> None:
        """Gives the app a request that was to pass it by, of whose body `data` have come."""
        self._exchange = None
        cycle.body += data
        if cycle.body or not cycle.more_body:
            cycle.changed.set()
        self.run(cycle)

    def reply(self, exchange: Exchange, status: bytes, head: bytes, body: Body) -> None:
        """Sends a whole answer and goes on to the next request."""
        self._exchange = None
        cycle = exchange.cycle
        stays = exchange.stays if cycle is None else cycle.keep_alive
        if self.server_state.default_headers is not self._default_headers:  # another list every second
            self._default_headers = self.server_state.default_headers
            self._default_lines = field_lines(self._default_headers)
        self.transport.write(b"".join((status, self._default_lines, head, _END if stays else _CLOSE, *body)))
        if cycle is not None:
            cycle.complete_elsewhere()
            self.answered(cycle)
            return
        self.server_state.total_requests += 1
        if not stays or self.state is State.ENDED:  # its client has ended its side
            self.transport.close()
            return
        self.registry.became_idle(self)
        if self._behind:
            self.loop.call_soon(self._take_up)
        else:
            self.state = _REQUEST_ENDS[self.state]

    def _follow(self, data: bytes) -> None:
        """Keeps what came behind a request past the parser until that is answered; reads it if it was handed over."""
        if data and self.state is State.SMALL:
            self._behind += data
            self.flow.pause_reading()
        elif data:
            self.data_received(data)

    def _take_up(self) -> None:
        """Reads what was kept behind a request, now that it is answered."""
        self.state = _REQUEST_ENDS[self.state]
        data, self._behind = self._behind, b""
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.data_received(data)

    # -- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Called by uvicorn: closes once what has come is answered."""
        if self._exchange is not None:
            self._exchange.stays = False
        if self._cycles:
            self._cycles[-1].keep_alive = False
        elif self._exchange is None:
            self.transport.close()

    def drop(self) -> None:
        """Makes room: closes without a word, as HTTP lets a server do with an idle connection."""
        self._end_reading()
        self._uncount()
        self.transport.close()

    def too_slow(self) -> None:
        """The head, the rest of a body that nobody waits for, or the next request did not come in time."""
        if self.state is State.HEAD:
            self._refuse(HeadTooSlow("the request's head did not come in time"))
        else:
            self.drop()

    def _end_reading(self) -> None:
        if self.state is not State.ENDED:
            self._incomplete = self.state in _INCOMPLETE
            self.state = State.ENDED

    def _ignore(self, data: bytes) -> None:
        self._ignored += len(data)
        if self._ignored > _MAX_IGNORED:  # who looks meanwhile has the answer, or will have
            self.flow.pause_reading()

    def _refuse(self, error: ServiceError) -> None:
        """Reads no further, and says why when what came before is answered."""
        state, cycle = self.state, self.cycle
        if state is State.ENDED:
            return
        self._end_reading()
        context, logged = None, state is State.NEW
        if state is State.BODY and cycle is not None and cycle.complete:  # answered: another answer would be the next's
            self.registry.report(error, self, context_of("", ""), logged=True)
            self._close()
            return
        if state is State.BODY and cycle is not None:
            if cycle.started:  # an answer to half a request: nothing may be written into it, nor behind it
                self.registry.report(error, self, context_of("", ""), logged=True)
                self.transport.abort()
                return
            context, logged = self._take_out(cycle, error.status)
        elif state is State.HEAD:
            context = context_of_headers(self._parser.headers)
        context = context or context_of("", "")
        self._refusal = self._answer(error, context)
        self.registry.report(error, self, context, logged=logged)
        if not self._cycles:
            self._all_answered()

    def _take_out(self, cycle: AsgiCycle, status: int) -> tuple[Mapping[str, str], bool]:
        """The app hears that its client is gone, for the answer comes from here. Returns the request's context, and
        whether the app had it.
        """
        state = cycle.scope["state"]
        context: Mapping[str, str] = state.setdefault(CONTEXT, context_of_headers(cycle.scope["headers"]))
        state[REFUSED] = status
        began = self._cycles[0] is cycle
        self._cycles.remove(cycle)
        if began:
            cycle.disconnect()
        return context, began

    def _answer(self, error: ServiceError, context: Mapping[str, str]) -> bytes:
        """A whole HTTP/1.1 answer."""
        response = problem_response(error, {"Connection": "close"})
        fields = [*self.server_state.default_headers, *response.raw_headers]
        fields += [*request_fields(context), *SECURITY, POLICY]
        return b"".join([STATUS_LINES[response.status_code], field_lines(fields), _END, bytes(response.body)])

    def _close(self) -> None:
        """Closes behind what was written. Bytes that nobody has read would make the kernel reset the connection, and
        what was written would be lost: so where a request is not whole, reading goes on for a while (RFC 9112, 9.6).
        """
        self._end_reading()
        self._cycles.clear()
        if not self._incomplete or not self.counted or self._half_closed:
            self.transport.close()
            return
        self.registry.became_idle(self)
        if self.transport.can_write_eof():  # TLS has no such: the answer itself says that it is the last
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _uncount(self) -> None:
        if self.counted:
            self.counted = False
            self.registry.close(self)


def protocol_class(
    connections: Connections, small: SmallRequests | None = None, transfers: TransferPool | None = None
) -> type[HttpProtocol]:
    """The protocol class of a server whose connections are those."""
    return type("HttpProtocol", (HttpProtocol,), {"registry": connections, "small": small, "transfers": transfers})
