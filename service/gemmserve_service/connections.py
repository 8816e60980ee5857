"""What connections may cost apart from the requests that reach the app: number, slow and large heads, stalled readers.

uvicorn has no limit for any of these, so its protocol is extended here, at the parser's callbacks, which are those of
httptools. A connection in the middle of a request is never closed for the sake of another; an idle one is: when there
are too many, the newcomer takes the place of the one that has been idle longest, of the same address if that has too
many. So hoarding connections keeps nobody else out.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.corking import Corked
from gemmserve_service.landing import LandingProtocol
from gemmserve_service.open_files import OpenFiles
from gemmserve_service.problems import HeadTooLarge, HeadTooSlow, TooManyConnections, problem_response
from gemmserve_service.unix_sockets import peer_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.errors import ServiceError
    from gemmserve_service.settings import Settings

LOCAL_USER: Final = "uid:"
"""What the address of a client on the Unix socket begins with; the user's number follows."""

_SWEEP_S: Final = 0.5
_FIELD_OVERHEAD: Final = 4  # ": " and the line's end


class Connections:
    """Every connection of one server, and which of them are idle; belongs to the event loop's thread."""

    def __init__(self, settings: Settings, refused: Callable[[ServiceError, str], None] | None = None) -> None:
        self.settings = settings
        self.most = OpenFiles.of(settings).connections
        """At one time, as far as the limit of open files allows what settings ask for."""
        self._refused = refused or (lambda _error, _address: None)
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

    def report(self, error: ServiceError, connection: LimitedProtocol) -> None:
        """Tells metrics and audit of a refusal."""
        self._refused(error, connection.address)

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
        self._sweeper = None
        if not self._by_address:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        limits = self.settings
        for connection, since in list(self._idle.items()):
            if connection.unfinished and now - since > limits.head_timeout_s:
                connection.too_slow()
        for connection, since in list(self._stalled.items()):
            if now - since > limits.send_stall_s:
                connection.transport.abort()
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
        self._refusing = False

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
            return
        within = self._in_head
        self._fresh = False
        super().data_received(data)
        if self._in_head and within:
            self._raw_bytes += len(data)
            if self._raw_bytes > self.registry.settings.max_head_bytes:
                self._refuse_head()

    def pause_writing(self) -> None:
        self.registry.stalled(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self.registry.flows(self)
        super().resume_writing()

    # -- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head, self._in_body = True, False
        self._head_bytes = self._raw_bytes = 0
        if not self._answering:
            self.registry.became_idle(self)  # the clock of the head starts
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + _FIELD_OVERHEAD
        if self._in_head:
            super().on_header(name, value)
        elif self._head_bytes > self.registry.settings.max_head_bytes:  # trailers, which nobody reads
            self._refuse_head()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        if self._head_bytes > self.registry.settings.max_head_bytes:
            self._refuse_head()
        if self._refusing:
            return
        self._answering += 1
        self.registry.became_busy(self)
        super().on_headers_complete()
        cycle: Any = self.cycle
        if cycle is not None and not isinstance(cycle.transport, Corked):
            cycle.transport = Corked(self.transport, self.loop)

    def on_body(self, body: bytes) -> None:
        if not self._refusing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._refusing:
            return
        super().on_message_complete()
        if not self._answering:
            self.registry.became_idle(self)

    def on_response_complete(self) -> None:
        self._answering -= 1
        if not self._answering and self.counted:
            self.registry.became_idle(self)
        super().on_response_complete()

    # -- refusals ---------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Makes room: closes without a word, as HTTP lets a server do with an idle connection."""
        self._uncount()
        self.transport.close()

    def too_slow(self) -> None:
        """The head, or the rest of a body that nobody waits for, did not come in time."""
        if self._in_head:
            self._refuse(HeadTooSlow("the request's head did not come in time"))
        else:
            self.drop()

    def _refuse_head(self) -> None:
        limit = self.registry.settings.max_head_bytes
        self._refuse(HeadTooLarge(f"a request's line and headers have at most {limit} bytes"))

    def _refuse(self, error: ServiceError) -> None:
        if self._refusing:
            return
        self._refusing = True
        self.registry.report(error, self)
        if not self._answering:  # else an answer is under way, and nothing may be written into it
            self.transport.write(_answer(error))
        self._uncount()
        self.transport.close()

    def _uncount(self) -> None:
        if self.counted:
            self.counted = False
            self.registry.close(self)


def limited(connections: Connections) -> type[LimitedProtocol]:
    """The protocol class of a server whose connections are those."""
    return type("LimitedProtocol", (LimitedProtocol,), {"registry": connections})


def _answer(error: ServiceError) -> bytes:
    """A whole HTTP/1.1 answer."""
    response = problem_response(error, {"Connection": "close"})
    status = HTTPStatus(response.status_code)
    head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    head += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])
