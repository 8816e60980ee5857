"""Base of a client's connections: headers, timeouts, digests, and the state that belongs to one process.

`_sync_io` and `_async_io` send a Request through httpx with this and feed its receiver; they differ in `await` alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gemmserve import _errors
from gemmserve._calls.places import Elsewhere, Places, location_of
from gemmserve._local import memory
from gemmserve._local.addresses import HTTP_BASE, socket_path
from gemmserve._local.session import SharedMemory
from gemmserve._transfer.parts import PARTS_FROM
from gemmserve._transfer.progress import Progress, SharedBar, watched
from gemmserve._transport import direct
from gemmserve._transport.answers import check_confirmed, check_exchange, receiver_of
from gemmserve._transport.auth import auth_of
from gemmserve._transport.digests import WANTED, field_value
from gemmserve._transport.library import ERRORS, as_error, httpx, other_scheme
from gemmserve._transport.pool import CLOSED
from gemmserve._transport.urls import context_of, is_loopback, normal_url, speaks_tls
from gemmserve.wire import EXCHANGE_HEADER, SESSION_HEADER

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    from gemmserve._calls.requests import Pause, Request
    from gemmserve._transfer.arrays import AnyArray
    from gemmserve._transfer.bodies import Body, Receiver
    from gemmserve._transport.digests import Digests
    from gemmserve._transport.direct import Answer

T = TypeVar("T")

_MAX_URLS = 256  # that are remembered

ELSEWHERE = "this stream of events was begun in another process"

TLS_LIMIT_S = 2.0
"""Seconds of silence after which a server is not asked any longer whether it speaks TLS."""

lock = threading.Lock()
"""Lock that is held while what belongs to a process is made anew."""
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forked() -> None:
    """Renew the lock and leave the connections in a child process: a thread of the parent may have held the lock, and
    the sockets are the parent's.
    """
    global lock
    lock = threading.Lock()
    for connection in _connections:
        connection.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Connection:
    """The base URL, the headers of every request, timeouts, and how a Request becomes httpx's arguments.

    Connections, shared memory and progress bars belong to one process and are made anew where that changed.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        verify: bool | str | ssl.SSLContext,
        timeout: float,
        progress: bool,
        digests: Digests,
        own_transport: bool,
    ) -> None:
        self.socket = socket_path(url)
        """Path of the server's Unix socket, where that is the way to it."""
        self.url = normal_url(url) if self.socket is None else f"unix:{self.socket}"
        self.base = self.url if self.socket is None else HTTP_BASE
        """Base URL that httpx is given."""
        self.address = httpx.URL(self.base)
        self._verify = verify
        self.verify = context_of(self.base, verify)
        self.timeout = timeout
        self.digests = digests
        self.answered = False
        """Whether the server has ever answered."""
        self.headers = {
            "User-Agent": f"gemmserve/{importlib.metadata.version('gemmserve')}",
            "Accept": "application/json",
            # Most arrays hardly compress, and their bytes are copied as they come; a request may say otherwise.
            "Accept-Encoding": "identity",
        }
        self.auth = auth_of(api_key, self.base)
        self.made_of: dict[str, Any] = {
            "base_url": self.base, "headers": self.headers, "auth": self.auth, "verify": self.verify,
            "trust_env": not is_loopback(self.base),
        }  # fmt: skip
        """The arguments of httpx's clients."""
        self._show_progress = progress
        self._own_transport = own_transport
        self.places = Places(self.base)
        self._urls: dict[str, httpx.URL] = {}
        self._made_in = os.getpid()
        self._closed = False
        self._renew()
        _connections.add(self)

    def _renew(self) -> None:
        """Make anew what belongs to this process."""
        self._pid = os.getpid()
        self._progress = Progress(enabled=self._show_progress)
        key = None if self.auth is None else self.auth.key
        self._shared = SharedMemory(self.socket, key) if self.socket is not None else None
        self._pools: dict[Any, Any] = {}

    def leave(self) -> None:
        """Give up, in a child process, what is the parent's. What was closed there stays closed."""
        for pool in self._pools.values():
            pool.leave()
        if self._shared is not None:
            self._shared.leave()
        self._renew()
        if self._shared is not None and self._closed:
            self._shared.close()

    def check_open(self) -> None:
        """Raises ClientClosed once the client is closed."""
        if self._closed:
            raise _errors.ClientClosed(CLOSED)

    def own(self) -> None:
        """Makes sure that everything belongs to this process. Raises TransportError where it cannot: a transport of the
        caller's own has connections that nobody else can make anew.
        """
        pid = os.getpid()
        if self._pid != pid:  # a fork past os.fork
            with lock:
                if self._pid != pid:
                    self.leave()
        if self._own_transport and self._made_in != pid:
            raise _errors.TransportError(
                "this client was made in another process, with a transport that belongs to that: make one here",
                retriable=False,
            )

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def progress(self) -> Progress:
        """Bars of the process that asks."""
        self.own()
        return self._progress

    def goes_whole(self, array: AnyArray) -> bool:
        """Whether an array goes to the server in one request, however large: by shared memory."""
        shared = self.shared
        return shared is not None and shared.takes_operand(array)

    def comes_whole(self, nbytes: int) -> bool:
        """Whether an array of so many bytes comes in one request: by shared memory, or since it is not large."""
        shared = self.shared
        return shared is not None and (nbytes < PARTS_FROM or shared.takes_result(nbytes))

    @property
    def shared(self) -> SharedMemory | None:
        """Shared memory of the process that asks."""
        self.own()
        return self._shared

    def empty(self, shape: int | Sequence[int], dtype: Any, order: str) -> AnyArray:
        """An array in memory that can be passed to the server, if there is such; else an ordinary one."""
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        made = np.empty(0, dtype)
        shared = self.shared
        if shared is not None and memory.supported() and not made.dtype.hasobject:
            with contextlib.suppress(OSError):  # no more descriptors, say
                return memory.empty(extents, made.dtype, order, shared.pool)
        return np.empty(extents, dtype, order="F" if order == "F" else "C")

    def freeze(self, array: AnyArray) -> AnyArray:
        """A read-only array with the same elements, in sealed memory if that can be passed to the server."""
        shared = self.shared
        if shared is not None and memory.supported():
            with contextlib.suppress(OSError):
                return memory.freeze(array, shared.pool)
        frozen = array.copy(order="A")
        frozen.flags.writeable = False
        return frozen

    def headers_of(self, request: Request[Any]) -> dict[str, str]:
        headers = {**request.headers, EXCHANGE_HEADER: secrets.token_hex(12)}
        if request.body is not None:
            headers["Content-Type"] = request.body.content_type
            headers["Content-Length"] = str(request.body.nbytes)
        if self.digested(request):
            if request.body is not None and request.body.nbytes:
                headers.setdefault("Content-Digest", field_value(request.body.pieces()))
            headers[f"Want-{request.digest.capitalize()}-Digest"] = WANTED
        return headers

    def digested(self, request: Request[Any]) -> bool:
        """Whether everything of an exchange has a digest: but for events, and what goes by shared memory."""
        return self.digests == "always" and request.digest != "none" and SESSION_HEADER not in request.headers

    def url_of(self, http: httpx.Client | httpx.AsyncClient, path: str, place: str | None = None) -> httpx.URL:
        """URL of a path, as one of this server's `http` would make it: most paths come again, and to parse one takes a
        tenth of a small exchange's time. `place`: the cell's that it goes to.
        """
        path = path if place is None else place + path
        found = self._urls.get(path)
        if found is None:
            if len(self._urls) >= _MAX_URLS:
                self._urls.clear()
            found = self._urls[path] = http.build_request("GET", path).url
        return found

    def timeout_of(self, request: Request[Any]) -> httpx.Timeout:
        """Silence allowed: the client's timeout, plus what the request lets the server wait."""
        silence = self.timeout if request.limit_s is None else min(self.timeout, request.limit_s)
        return httpx.Timeout(silence, read=silence + request.wait_s, pool=None)

    def _sent(self, body: Body, label: str) -> Iterator[bytes | memoryview]:
        return watched(body.pieces(), self.progress, f"sending {label}", body.nbytes)

    def content_of(self, request: Request[Any], bar: SharedBar | None) -> Iterator[bytes | memoryview] | None:
        """Return the pieces to send, if any, counted on `bar` or on one of their own."""
        if request.body is None:
            return None
        if bar is None:
            return self._sent(request.body, request.label)
        return watched(request.body.pieces(), self.progress, request.label, None, bar)

    def learn(self, document: Any) -> None:
        """Take in which cells there are. Raises ProtocolError."""
        self.places.learn(document)
        if self.auth is not None:
            self.auth.trust(self.places.urls)

    def asks(self, request: Request[Any]) -> bool:
        """Whether the cells are to be asked for before the request is sent."""
        return self.socket is None and self.places.unknown(request)

    def sent_on(self, response: httpx.Response | Answer, content: bytes) -> Elsewhere:
        """Return where a 307 with that body sends its request on to. Raises CrossedAnswer; ProtocolError where no cell
        sends it.
        """
        check_exchange(response)
        location = location_of(response.headers, content)
        if location is None:
            raise _errors.from_answer(response.status_code, response.headers, content)
        return Elsewhere(location)

    def verify_of(self, url: httpx.URL) -> ssl.SSLContext:
        """Return the SSL context for connections there: a cell may have TLS where the router has none."""
        if url.scheme == "https" and self.address.scheme != "https":
            return context_of(str(url), self._verify)
        return self.verify

    def options_of(self, place: str | None) -> dict[str, Any]:
        """Return the arguments of httpx's clients for a cell; None: for the server."""
        return self.made_of if place is None else {**self.made_of, "verify": self.verify_of(httpx.URL(place))}

    def receiver(self, request: Request[T], response: httpx.Response | Answer) -> Receiver[T]:
        """Return what takes this answer's body; see `answers`. Raises CrossedAnswer, ProtocolError."""
        check_exchange(response)
        self.answered = True
        check_confirmed(response)
        return receiver_of(request, response, compare=self.digests != "never", required=self.digested(request))

    def doubt(self, pause: Pause) -> Callable[[], None] | None:
        """Function that asks a server, which has never answered and broke an exchange without TLS, whether it speaks
        TLS, for `TLS_LIMIT_S` at most, and no longer than is to spare; it raises TransportError where it does. None:
        that is not what went wrong, or there is no time for it.
        """
        error = pause.after
        if not isinstance(error, _errors.TransportError) or isinstance(error, _errors.TransportTimeout):
            return None
        limit_s = min(TLS_LIMIT_S, self.timeout, pause.spare_s)
        if self.answered or not error.retriable or error.unmet or limit_s <= 0:
            return None
        if self.address.scheme != "http" or self.socket or self._own_transport:
            return None
        if not direct.may_be(self.address, trust_env=self.made_of["trust_env"]):
            return None  # it is reached by a proxy
        host, port = self.address.raw_host.decode("ascii"), self.address.port or 80

        def ask() -> None:
            if speaks_tls(host, port, limit_s):
                raise _errors.TransportError(
                    f"{self.url} speaks TLS: it is asked by {other_scheme(self.url)}", retriable=False
                )

        return ask

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise what httpx raises as a GemmserveError."""
        try:
            yield
        except ERRORS as error:
            raise self.as_error(error) from error

    def as_error(self, error: Exception) -> _errors.GemmserveError:
        """The error that an exception of httpx's stands for, in an exchange with this server."""
        proxy = None
        if self._own_transport:
            proxy = ""
        elif self.made_of["trust_env"] and self.socket is None:
            proxy = direct.proxy_of(self.address)
        return as_error(error, self.url, answered=self.answered, proxy=proxy)
