"""The protocol of connections whose small requests take the fast path; all others go to the app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.connections import LimitedProtocol
from gemmserve_service.fast_path import lines

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from gemmserve_service.connections import Connections
    from gemmserve_service.fast_path import Exchange, FastPath

_END: Final = b"\r\n"
_CLOSE: Final = b"connection: close\r\n\r\n"


class FastProtocol(LimitedProtocol):
    """`LimitedProtocol` that takes the fast path where it can. Made by `fast`, which sets `path`."""

    path: FastPath

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exchange: Exchange | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost()

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None or not exchange.gathering or exchange.cycle is not self.cycle or self._refusing:
            super().on_body(body)
            return
        if self.left is not None:
            self.left -= len(body)
        exchange.feed(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        exchange = self._exchange
        if exchange is not None and exchange.gathering and exchange.cycle is self.cycle and not self._refusing:
            exchange.complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        exchange = self.path.accept(self, cycle)
        if exchange is None:
            super()._start_asgi_task(cycle, app)
        else:
            self._exchange = exchange
            exchange.start()

    def hand_over(self, cycle: RequestResponseCycle) -> None:
        """The app answers this request."""
        self._exchange = None
        if cycle.body or not cycle.more_body:
            cycle.message_event.set()
        super()._start_asgi_task(cycle, self.app)

    def reply(self, cycle: RequestResponseCycle, status: bytes, head: bytes, body: bytes) -> None:
        """Sends a whole answer and goes on to the next request."""
        self._exchange = None
        cycle.response_started = cycle.response_complete = True
        last = _END if cycle.keep_alive else _CLOSE
        self.transport.write(b"".join((status, lines(self.server_state.default_headers), head, last, body)))
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()


def fast(connections: Connections, path: FastPath) -> type[FastProtocol]:
    """The protocol class of a server whose connections are those."""
    return type("FastProtocol", (FastProtocol,), {"registry": connections, "path": path})
