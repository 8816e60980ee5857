"""The protocol of connections whose small requests take the fast path; all others go to the app.

A head that was seen before does not pass the parser again, nor does its body: they are taken as they come from the
socket. Whatever follows waits until that request is answered, and the parser, which never saw it, is where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.http.protocol.connections import LimitedProtocol
from gemmserve_service.http.small import heads
from gemmserve_service.http.small.exchange import lines

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from gemmserve_service.http.protocol.connections import Connections
    from gemmserve_service.http.small.exchange import Body, Exchange, FastPath

_END: Final = b"\r\n"
_CLOSE: Final = b"connection: close\r\n\r\n"


class FastProtocol(LimitedProtocol):
    """`LimitedProtocol` that takes the fast path where it can. Made by `fast`, which sets `path`."""

    path: FastPath

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exchange: Exchange | None = None
        self._behind = b""
        """What has come behind a request that passed the parser by."""
        self._answered = 0.0
        """When the last request that passed the parser by was answered, by the loop's clock."""

    # -- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if self._behind:  # whoever delivers it although reading is paused
            self._wait_behind(data)
            return
        if exchange is not None and exchange.cycle is None:
            self._follow(exchange.feed_raw(data) if exchange.gathering else data)
            return
        if self._answering or self._in_head or self._in_body or self._refusing:
            super().data_received(data)
            return
        known = self.path.heads.find(data)
        exchange = None if known is None else self.path.accept(self, known[0], None)
        if known is not None and exchange is not None:
            self._fresh = False
            self._answering += 1
            self.registry.became_busy(self)
            self._exchange = exchange
            exchange.repeats = known[2]
            self._follow(exchange.start_raw(data, known[1]))
            return
        super().data_received(data)
        exchange = self._exchange
        if exchange is not None and exchange.keep_alive:  # its head came at the beginning of `data`
            self.path.heads.learn(data, exchange.head)

    def _follow(self, data: bytes) -> None:
        """What has come behind a request that passed the parser by; or did not, after all."""
        if data and self._exchange is None:
            super().data_received(data)
        elif data:
            self._wait_behind(data)

    def _wait_behind(self, data: bytes) -> None:
        self._behind += data
        self.flow.pause_reading()

    def _take_up(self) -> None:
        """The request before it is answered."""
        data, self._behind = self._behind, b""
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.data_received(data)

    # -- httptools --------------------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None or not exchange.gathering or exchange.cycle is not self.cycle or self._refusing:
            super().on_body(body)
            return
        if self.left is not None:
            self.left -= len(body)
        exchange.feed(body)

    def message_complete(self) -> None:
        """See `LandingProtocol`."""
        super().message_complete()
        exchange = self._exchange
        if exchange is not None and exchange.gathering and exchange.cycle is self.cycle and not self._refusing:
            exchange.complete()

    # -- uvicorn ----------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: Any = cycle.scope
        head = heads.read(scope)
        exchange = None if head is None else self.path.accept(self, head, cycle)
        if exchange is None:
            super()._start_asgi_task(cycle, app)
        else:
            self._exchange = exchange
            exchange.start()

    def _body_missing(self) -> bool:
        exchange = self._exchange
        return super()._body_missing() or (exchange is not None and exchange.gathering)

    def _saying(self) -> bool:
        return self._exchange is None and super()._saying()

    def shutdown(self) -> None:
        """As uvicorn's, which does not know of a request that passed the parser by: that is answered first."""
        exchange = self._exchange
        if exchange is not None and exchange.cycle is None:
            exchange.stays = False
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """As uvicorn's. The timer is not wound again for each request that passes the parser by."""
        left_s = self._answered + self.timeout_keep_alive - self.loop.time()
        if self._exchange is None and left_s <= 0:
            super().timeout_keep_alive_handler()
        else:
            self._keep_alive(max(left_s, 0.0) or self.timeout_keep_alive)

    def _keep_alive(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    # -- for exchanges ----------------------------------------------------------------------------------------------

    def hand_over(self, cycle: RequestResponseCycle) -> None:
        """The app answers this request."""
        self._exchange = None
        if cycle.body or not cycle.more_body:
            cycle.message_event.set()
        super()._start_asgi_task(cycle, self.app)

    def hand_over_raw(self, data: bytes) -> None:
        """The parser is given a request after all, as it came so far; the app will answer it."""
        self._exchange = None
        self._answering -= 1
        super().data_received(data)

    def reply(self, exchange: Exchange, status: bytes, head: bytes, body: Body) -> None:
        """Sends a whole answer and goes on to the next request."""
        self._exchange = None
        last = _END if exchange.keep_alive else _CLOSE
        cycle = exchange.cycle
        if cycle is not None:
            cycle.response_started = cycle.response_complete = True
        self.transport.write(b"".join((status, lines(self.server_state.default_headers), head, last, *body)))
        if last is _CLOSE:
            self.transport.close()
        if cycle is not None:
            self.on_response_complete()
            return
        self.server_state.total_requests += 1
        self._answered = self.loop.time()
        self._answered_one()
        if self._behind:
            self.loop.call_soon(self._take_up)
        elif self.timeout_keep_alive_task is None and last is _END:
            self._keep_alive(self.timeout_keep_alive)


def fast(connections: Connections, path: FastPath) -> type[FastProtocol]:
    """The protocol class of a server whose connections are those."""
    return type("FastProtocol", (FastProtocol,), {"registry": connections, "path": path})
