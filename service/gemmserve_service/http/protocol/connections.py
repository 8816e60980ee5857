"""What connections may cost apart from the requests that reach the app: number, slow and large heads, stalled readers.

uvicorn has no limit for any of these, so its protocol is extended here, at the parser's callbacks, which are those of
httptools. A connection in the middle of a request is never closed for the sake of another; an idle one is: when there
are too many, the newcomer takes the place of the one that has been idle longest, of the same address if that has too
many. So hoarding connections keeps nobody else out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter, deque
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers

from gemmserve_service.errors import ServiceError
from gemmserve_service.http.middleware.observe import POLICY, SECURITY, context_of
from gemmserve_service.http.problems import HeadTooLarge, HeadTooSlow, TooManyConnections, problem_response
from gemmserve_service.http.protocol.corking import Corked
from gemmserve_service.http.protocol.landing import SENDING, LandingProtocol
from gemmserve_service.http.protocol.request_heads import check_head, describe_parser_error, refuse_rtsp
from gemmserve_service.runtime.open_files import OpenFiles
from gemmserve_service.runtime.unix_sockets import peer_user

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gemmserve_service.http.protocol.landing import Landing
    from gemmserve_service.settings import Settings

    Refused = Callable[[ServiceError, tuple[str, int] | None, Mapping[str, str], bool], None]
    """Called in the event loop with the error, the client, the request's id and whether it has a line elsewhere."""

LOCAL_USER: Final = "uid:"
"""What the address of a client on the Unix socket begins with; the user's number follows."""

_SWEEP_S: Final = 0.5
_ENDED_AT_ONCE: Final = 4
_BREATH_S: Final = 0.005  # for others, whose requests have several steps, before the next of these
_FIELD_OVERHEAD: Final = 4  # ": " and the line's end
_LINGER_S: Final = 1.0  # for what a refused client is still sending
_MOST_IGNORED: Final = 1 << 20  # bytes of that
_FIRST_LOOK_S: Final = 0.01  # after which a client that has hung up will have said so, on this machine ...
_LAST_LOOK_S: Final = 1.0  # ... and anywhere
_PATIENCE_S: Final = 5.0  # with a half-closed client of HTTP/1.0, to whom nothing can be said but the answer


class Connections:
    """Every connection of one server, and which of them are idle; belongs to the event loop's thread."""

    def __init__(self, settings: Settings, refused: Refused | None = None) -> None:
        self.settings = settings
        self.most = OpenFiles.of(settings).connections
        """At one time, as far as the limit of open files allows what settings ask for."""
        self._refused = refused or (lambda *_: None)
        self._proxies = [ipaddress.ip_network(text, strict=False) for text in settings.trusted_proxies]
        self._by_address: Counter[str] = Counter()
        self._idle: dict[LimitedProtocol, float] = {}  # in the order in which they became idle
        self._stalled: dict[LimitedProtocol, float] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Connections now."""
        return self._by_address.total()

    @property
    def idle(self) -> int:
        """Of these, the ones that are not in the middle of a request."""
        return len(self._idle)

    def open(self, connection: LimitedProtocol) -> bool:
        """Takes a new connection in; False: there is no place for it."""
        limits = self.settings
        address = connection.address
        crowded = self._by_address[address] >= limits.max_connections_per_address and not self._trusted(address)
        if crowded and not self._displace(address):
            return False
        if self.count >= self.most and not self._displace(None):
            return False
        self._by_address[address] += 1
        self.became_idle(connection)
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(_SWEEP_S, self._sweep)
        return True

    def close(self, connection: LimitedProtocol) -> None:
        """Forgets a connection; idempotent by `connection.counted`."""
        self._idle.pop(connection, None)
        self._stalled.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def became_idle(self, connection: LimitedProtocol) -> None:
        """It waits for a request, or for the rest of one that is answered already."""
        self._idle.pop(connection, None)
        self._idle[connection] = connection.loop.time()

    def became_busy(self, connection: LimitedProtocol) -> None:
        """It has a request that the app works on."""
        self._idle.pop(connection, None)

    def stalled(self, connection: LimitedProtocol) -> None:
        """Its client does not take what is sent to it."""
        self._stalled.setdefault(connection, connection.loop.time())

    def flows(self, connection: LimitedProtocol) -> None:
        """Its client has taken some."""
        self._stalled.pop(connection, None)

    def report(
        self, error: ServiceError, connection: LimitedProtocol, context: Mapping[str, str], *, logged: bool
    ) -> None:
        """Tells metrics and audit of a refusal. `context`: the request's id; `logged`: it has a line elsewhere, or is
        no request.
        """
        self._refused(error, connection.client, context, logged)

    def _trusted(self, address: str) -> bool:
        if not self._proxies or not address or address.startswith(LOCAL_USER):
            return False
        return any(ipaddress.ip_address(address) in network for network in self._proxies)

    def _displace(self, address: str | None) -> bool:
        """Closes the connection that has been idle longest, of that address if one is given."""
        victim = next((one for one in self._idle if address is None or one.address == address), None)
        if victim is None:
            return False
        victim.drop()
        return True

    def _sweep(self) -> None:
        if not self._by_address:
            self._sweeper = None
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection, since in list(self._stalled.items()):
            if now - since > self.settings.send_stall_s:
                connection.transport.abort()
        self._end_late(deque(self._idle), loop)

    def _end_late(self, idle: deque[LimitedProtocol], loop: asyncio.AbstractEventLoop) -> None:
        """Ends those of `idle` that owe something and are late, and sweeps again in a while. Only some at a time: to
        refuse hundreds with log and audit takes as many tenths of a millisecond.
        """
        ended = 0
        while idle and ended < _ENDED_AT_ONCE:
            connection = idle.popleft()
            since = self._idle.get(connection)
            if since is not None and connection.unfinished and loop.time() - since > self.settings.head_timeout_s:
                connection.too_slow()
                ended += 1
        if idle:
            self._sweeper = loop.call_later(_BREATH_S, self._end_late, idle, loop)
        else:
            self._sweeper = loop.call_later(_SWEEP_S, self._sweep)


class LimitedProtocol(LandingProtocol):
    """uvicorn's protocol with limits. Made by `limited`, which sets `registry`."""

    registry: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.address = ""
        self.counted = False
        self._answering = 0  # requests whose answer is not complete
        self._in_head = False
        self._in_body = False
        self._fresh = True  # nothing has come yet
        self._head_bytes = 0  # of whole fields of the head that is being read
        self._raw_bytes = 0  # of pieces that lie wholly within it
        self._head = bytearray()  # pieces before the one that is parsed, in which the head began
        self._piece = b""
        self._last = False  # the request that came last ends the connection
        self._refusing = False  # nothing more is read
        self._ignored = 0  # bytes that came since
        self._refusal: bytes | None = None  # what is said when all that came before is answered
        self._half_closed = False

    @property
    def unfinished(self) -> bool:
        """Whether an idle connection owes something: a first request, the rest of a head, the rest of a body."""
        return self._fresh or self._in_head or self._in_body

    # -- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is None and (user := peer_user(transport.get_extra_info("socket"))) is not None:
            self.client = (f"{LOCAL_USER}{user}", 0)
        self.address = self.client[0] if self.client else ""
        self.counted = self.registry.open(self)
        if not self.counted:
            self._refuse(TooManyConnections("every connection is in the middle of a request", retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._uncount()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusing:
            self._ignored += len(data)
            if self._ignored > _MOST_IGNORED and self._answering:
                self.flow.pause_reading()
            elif self._ignored > _MOST_IGNORED:
                self.transport.abort()
            return
        within = self._in_head
        self._fresh = False
        self._piece = data
        super().data_received(data)
        self._piece = b""
        if self._in_head:
            self._head += data
        if self._in_head and within:
            self._raw_bytes += len(data)
            if self._raw_bytes > self.registry.settings.max_head_bytes:
                self._refuse_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A client that sends no more still gets the answers to what it has sent whole."""
        if not self._answering or self._body_missing() or self.transport.get_extra_info("sslcontext") is not None:
            return None
        self._half_closed = self._refusing = True
        self._ask_who_is_there(_FIRST_LOOK_S)
        return True

    def pause_writing(self) -> None:
        self.registry.stalled(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self.registry.flows(self)
        super().resume_writing()

    # -- httptools --------------------------------------------------------------------------------------------------

    def malformed(self, message: str) -> None:
        """See `LandingProtocol`."""
        self._refuse(describe_parser_error(message))

    def on_message_begin(self) -> None:
        if self._last:
            self._refusing = True  # what follows a request that ends the connection is none (RFC 9112, section 9.6)
        if self._refusing:
            return
        self._in_head, self._in_body = True, False
        self._head_bytes = self._raw_bytes = 0
        if not self._answering:
            self.registry.became_idle(self)  # the clock of the head starts
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._refusing:
            self._head_bytes += len(url)
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._refusing:
            return
        self._head_bytes += len(name) + len(value) + _FIELD_OVERHEAD
        if self._in_head:
            super().on_header(name, value.strip(b" \t"))  # which are no part of it (RFC 9112, section 5.1)
        elif self._head_bytes > self.registry.settings.max_head_bytes:  # trailers, which nobody reads
            self._refuse_head()

    def on_headers_complete(self) -> None:
        if self._refusing:
            return
        if self._head_bytes > self.registry.settings.max_head_bytes:
            self._refuse_head()
            return
        parser = self.parser
        try:
            method = parser.get_method().decode("ascii")
            refuse_rtsp(method, self.url, self._head + self._piece if self._head else self._piece)
            self._head = bytearray()
            self.url = check_head(method, self.url, parser.get_http_version(), self.headers)
        except ServiceError as error:
            self._refuse(error)
            return
        self._in_head, self._in_body = False, True
        self._answering += 1
        self.registry.became_busy(self)
        super().on_headers_complete()
        cycle: Any = self.cycle
        self._last = not cycle.keep_alive
        if not isinstance(cycle.transport, Corked):
            cycle.transport = Corked(self.transport, self.loop, self._end)

    def on_body(self, body: bytes) -> None:
        if not self._refusing:
            super().on_body(body)

    def message_complete(self) -> None:
        """See `LandingProtocol`."""
        if self._refusing:
            return
        self._in_body = False
        super().message_complete()
        if not self._answering:
            self.registry.became_idle(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answered_one()

    def _answered_one(self) -> None:
        """An answer is complete."""
        self._answering -= 1
        if self._answering:
            return
        if self._refusal is not None:
            self._say_refusal()
        elif self._half_closed:
            self.transport.close()
        elif self.counted:
            self.registry.became_idle(self)

    # -- refusals ---------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Makes room: closes without a word, as HTTP lets a server do with an idle connection."""
        self._uncount()
        self.transport.close()

    def too_slow(self) -> None:
        """The head, or the rest of a body that nobody waits for, did not come in time."""
        if self._in_head and not self._refusing:
            self._refuse(HeadTooSlow("the request's head did not come in time"))
        else:
            self.drop()

    def _refuse_head(self) -> None:
        limit = self.registry.settings.max_head_bytes
        self._refuse(HeadTooLarge(f"a request's line and headers have at most {limit} bytes"))

    def _refuse(self, error: ServiceError) -> None:
        """Reads no further, and says why when what came before is answered."""
        if self._refusing:
            return
        self._refusing = True
        cycle: Any = self.cycle if self._in_body else None
        context, logged = None, False
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:  # an answer to half a request: nothing may be written into it, nor behind it
                self.registry.report(error, self, context_of("", ""), logged=True)
                self.transport.abort()
                return
            context, logged = self._take_out(cycle, error.status)
        elif self._in_head:
            fields = dict(self.headers)
            texts = [fields.get(name, b"").decode("latin-1") for name in (b"x-request-id", b"traceparent")]
            context = context_of(*texts)
        context = context or context_of("", "")
        self._refusal = self._answer(error, context)
        self.registry.report(error, self, context, logged=logged or self._fresh)
        if not self._answering:
            self._say_refusal()

    def _take_out(self, cycle: Any, status: int) -> tuple[dict[str, str], bool]:
        """The app hears that its client is gone, for the answer comes from here. Returns the request's context, and
        whether the app had it.
        """
        landing: Landing = cycle.scope["extensions"][SENDING]
        if landing.context is None:
            values = Headers(scope=cycle.scope)
            landing.context = context_of(values.get("x-request-id", ""), values.get("traceparent", ""))
        landing.refused = status
        self._answering -= 1
        waiting = len(self.pipeline)
        self.pipeline = deque(entry for entry in self.pipeline if entry[0] is not cycle)
        if len(self.pipeline) < waiting:
            return landing.context, False
        cycle.disconnected = True
        cycle.message_event.set()
        return landing.context, True

    def _answer(self, error: ServiceError, context: Mapping[str, str]) -> bytes:
        """A whole HTTP/1.1 answer."""
        response = problem_response(error, {"Connection": "close"})
        status = HTTPStatus(response.status_code)
        head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        fields = [*self.server_state.default_headers, *response.raw_headers]
        fields += [(b"x-request-id", context["request_id"].encode("ascii")), *SECURITY, POLICY]
        head += [b"%b: %b" % field for field in fields]
        return b"\r\n".join([*head, b"", bytes(response.body)])

    def _say_refusal(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None and not self.transport.is_closing():
            self.transport.write(refusal)
            self._end()

    def _end(self) -> None:
        """Closes behind what was written. Bytes that nobody has read would make the kernel reset the connection, and
        what was written would be lost: so where a request is not whole, reading goes on for a while (RFC 9112, 9.6).
        """
        self._refusing = True
        self.pipeline.clear()
        whole = not (self._in_head or self._body_missing())
        if whole or not self.counted or self._half_closed or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.registry.became_idle(self)
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _body_missing(self) -> bool:
        """Whether the rest of a body is still to come."""
        return self._in_body

    def _uncount(self) -> None:
        if self.counted:
            self.counted = False
            self.registry.close(self)

    # -- half-closed connections ------------------------------------------------------------------------------------

    def _ask_who_is_there(self, after_s: float) -> None:
        """Finds out whether a client that has ended its side has hung up, or waits for its answer: the kernel tells
        only when something is sent. 100 (Continue) is what every client of HTTP/1.1 skips; one of HTTP/1.0 is waited
        for `_PATIENCE_S`.
        """
        cycle: Any = self.cycle
        if self._last and cycle.scope["http_version"] == "1.0":
            self.loop.call_later(_PATIENCE_S, self._lose_patience)
            return
        if not self.pipeline and not self._saying():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(after_s, self._look_who_is_there, after_s)

    def _look_who_is_there(self, after_s: float) -> None:
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._hang_up()
        else:
            after_s = min(2 * after_s, _LAST_LOOK_S)
            self.loop.call_later(after_s, self._look_who_is_there, after_s)

    def _lose_patience(self) -> None:
        if not self._saying():  # to whom an answer is sent shows whether it is there
            self._hang_up()

    def _hang_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def _saying(self) -> bool:
        """Whether an answer has begun that is not complete."""
        cycle: Any = self.cycle
        return cycle is not None and cycle.response_started and not cycle.response_complete


def limited(connections: Connections) -> type[LimitedProtocol]:
    """The protocol class of a server whose connections are those."""
    return type("LimitedProtocol", (LimitedProtocol,), {"registry": connections})
