"""Limits of connections apart from the requests that reach the app: their number, slow heads, stalled readers.

A connection in the middle of a request is never closed for the sake of another; an idle one is: when there are too
many, the newcomer takes the place of the one that has been idle longest, of the same address if that has too many. So
hoarding connections keeps nobody else out.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from gemmserve_service.runtime.open_files import OpenFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gemmserve_service.errors import ServiceError
    from gemmserve_service.http.protocol.connection import Connection
    from gemmserve_service.settings import Settings

    Refused = Callable[[ServiceError, tuple[str, int] | None, Mapping[str, str], bool], None]
    """Called in the event loop with the error, the client, the request's id and whether it has a line elsewhere."""

LOCAL_USER: Final = "uid:"
"""Beginning of the address of a client on the Unix socket; the user's number follows."""

_SWEEP_S: Final = 0.5
_SWEEPS: Final = 3  # at least, within the time that a connection may be idle
_ENDED_AT_ONCE: Final = 4
_BREATH_S: Final = 0.005  # for others, whose requests have several steps, before the next of these
_ALONE_AFTER_S: Final = 0.1
"""Time without a request of any other connection after which one counts as alone."""


class Connections:
    """Registry of one server's connections, and of those that are idle; belongs to the event loop's thread."""

    def __init__(self, settings: Settings, refused: Refused | None = None) -> None:
        self.settings = settings
        self.most = OpenFiles.of(settings).connections
        """Connections at one time, as far as the limit of open files allows what settings ask for."""
        self._refused = refused or (lambda *_: None)
        self._proxies = [ipaddress.ip_network(text, strict=False) for text in settings.trusted_proxies]
        self._by_address: Counter[str] = Counter()
        self._idle: dict[Connection, float] = {}  # in the order in which they became idle
        self._stalled: dict[Connection, float] = {}
        self._latest: Connection | None = None  # the one that had the latest request
        self._latest_since = 0.0  # time since which all requests were its
        self._sweep_s = min(_SWEEP_S, settings.keep_alive_s / _SWEEPS)
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Connections now."""
        return self._by_address.total()

    @property
    def idle(self) -> int:
        """Connections that are not in the middle of a request."""
        return len(self._idle)

    def alone(self, connection: Connection) -> bool:
        """Whether no other connection is in the middle of a request, or has just been."""
        return (
            connection is self._latest
            and self.count - self.idle <= 1
            and connection.loop.time() - self._latest_since >= _ALONE_AFTER_S
        )

    def open(self, connection: Connection) -> bool:
        """Takes a new connection in; False: there is no place for it."""
        limits = self.settings
        address = connection.address
        crowded = self._by_address[address] >= limits.max_connections_per_address and not self._trusted(address)
        if crowded and not self._displace(address):
            return False
        if self.count >= self.most and not self._displace(None):
            return False
        self._by_address[address] += 1
        self._idle[connection] = connection.loop.time()  # its caller counts it from now on
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(self._sweep_s, self._sweep)
        return True

    def close(self, connection: Connection) -> None:
        """Forgets a connection; idempotent by `connection.counted`."""
        self._idle.pop(connection, None)
        self._stalled.pop(connection, None)
        if connection is self._latest:
            self._latest = None
        else:
            self._latest_since = connection.loop.time()
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def became_idle(self, connection: Connection) -> None:
        """Note that it waits for a request, or for the rest of one that is answered already."""
        self._idle.pop(connection, None)
        if connection.counted:
            self._idle[connection] = connection.loop.time()
        if connection is not self._latest:
            self._latest_since = connection.loop.time()

    def became_busy(self, connection: Connection) -> None:
        """Note that it has a request that the app works on."""
        self._idle.pop(connection, None)
        if connection is not self._latest:
            self._latest, self._latest_since = connection, connection.loop.time()

    def stalled(self, connection: Connection) -> None:
        """Its client does not take what is sent to it."""
        self._stalled.setdefault(connection, connection.loop.time())

    def flows(self, connection: Connection) -> None:
        """Its client has taken some."""
        self._stalled.pop(connection, None)

    def report(self, error: ServiceError, connection: Connection, context: Mapping[str, str], *, logged: bool) -> None:
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

    def _end_late(self, idle: deque[Connection], loop: asyncio.AbstractEventLoop) -> None:
        """Ends those of `idle` that owe something and are late, or have been idle for too long, and sweeps again in a
        while. Only some at a time: to refuse hundreds with log and audit takes as many tenths of a millisecond.
        """
        settings = self.settings
        ended = 0
        while idle and ended < _ENDED_AT_ONCE:
            connection = idle.popleft()
            since = self._idle.get(connection)
            allowed_s = settings.head_timeout_s if connection.unfinished else settings.keep_alive_s
            if since is not None and loop.time() - since > allowed_s:
                connection.too_slow()
                ended += 1
        if idle:
            self._sweeper = loop.call_later(_BREATH_S, self._end_late, idle, loop)
        else:
            self._sweeper = loop.call_later(self._sweep_s, self._sweep)
