"""Exchanges past the HTTP library: HTTP/1.1 on a socket of our own, where no proxy and no transport of the caller's is
in between; and large answers that came by the library read from its socket into the memory where they belong.

The library takes a thousand calls for an exchange of some hundred bytes, which is most of a small product's time. Here
the head of an answer is read by one regular expression where it is as plain as servers send it: HTTP/1.1, fields of one
line, a Content-Length. Every other answer, in chunks or after an interim one, is h11's to read, the parser that the
library itself uses. Errors are the library's, so that both ways fail alike.
"""

from __future__ import annotations

import logging
import re
import select
import socket
import time
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlencode
from urllib.request import getproxies, proxy_bypass

import h11

from gemmserve._transfer.bodies import Placing
from gemmserve._transport.library import httpx

if TYPE_CHECKING:
    import ssl
    from collections.abc import Generator, Iterator, Mapping

    from gemmserve._calls.requests import Query
    from gemmserve._transfer.bodies import Receiver
    from gemmserve._transport.auth import KeyAuth

DIRECT_FROM: Final = 8 << 20
"""Bytes for which a connection is given up to read past httpx, at twice the rate: it costs another handshake."""
MAX_AT_ONCE: Final = 4 << 20
"""Bytes of one read, so that progress is seen."""
PLACED_FROM: Final = 1 << 16
"""Bytes from which the rest of an answer is read to where it belongs: below, it is one read all the same."""
IDLE_S: Final = 5.0
"""Seconds after which an idle connection is made anew; httpx's own figure."""
JOINED: Final = 1 << 16
"""Bytes of a body up to which it goes by one write with its head."""

_log: Final = logging.getLogger("gemmserve")

_READ: Final = 1 << 16
_MAX_HEAD: Final = 100 << 10  # bytes of an answer's head; httpcore's own figure
_MAX_PATHS: Final = 256  # that are remembered
_PLAIN_PATH: Final = re.compile(r"[A-Za-z0-9/_.-]+")
_HEAD: Final = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9][0-9]) [\t -~\x80-\xff]*\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n)*)\r\n"
)
_BLANK: Final = re.compile(rb"\n\r?\n")
_FIELD: Final = re.compile(r"([^:]+):[\t ]*([^\r]*?)[\t ]*\r\n")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_BODILESS: Final = frozenset({204, 304})


def raw_socket(response: httpx.Response) -> socket.socket | None:
    """The socket that an answer comes by, where it can be read past httpx: after the first piece, for h11 then holds
    nothing back. The connection is closed with the answer, for h11 does not see the rest of it.
    """
    stream = response.extensions.get("network_stream")
    found = None if stream is None else stream.get_extra_info("socket")
    return found if isinstance(found, socket.socket) else None  # an ssl.SSLSocket is one


def landed(source: socket.socket, place: memoryview, receiver: Placing, timeout: float | None) -> Iterator[int]:
    """Reads until `place` is full, yielding how many bytes came each time."""
    source.settimeout(timeout)
    while place:
        count = _received(source, place[:MAX_AT_ONCE])
        receiver.landed(count)
        yield count
        place = place[count:]


def _received(source: socket.socket, place: memoryview) -> int:
    """Reads some bytes to `place`; returns how many, at least one."""
    try:
        count = source.recv_into(place)
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except OSError as error:
        raise httpx.ReadError(str(error)) from error
    if not count:
        raise httpx.RemoteProtocolError("the server closed the connection before the answer was whole")
    return count


def may_be(base: httpx.URL, *, trust_env: bool) -> bool:
    """Whether a server can be reached past the library: by no proxy that the environment names, which the library knows
    how to speak to, and without a user in its URL, whose authentication is the library's affair.
    """
    return not base.userinfo and not (trust_env and _proxies())


def _proxies() -> dict[str, str]:
    """Proxies that the environment names, by the schemes that they are for."""
    found = getproxies()
    return {scheme: found[scheme] for scheme in ("http", "https", "all") if found.get(scheme)}


def proxy_of(base: httpx.URL) -> str | None:
    """URL of the environment's proxy for a server, without its user; empty where it is to be passed by, as far as can
    be told without the library, which decides that. None: there is none.
    """
    found = _proxies()
    named = found.get(base.scheme) or found.get("all")
    if named is None:
        return None
    if proxy_bypass(base.netloc.decode("ascii")):
        return ""
    try:
        proxy = httpx.URL(named if "://" in named else f"http://{named}")
    except httpx.InvalidURL:
        return ""
    return f"{proxy.scheme}://{proxy.netloc.decode('ascii')}"


class Fields(dict[str, str]):
    """Header fields by their names in lower case, whichever case they are asked for by."""

    __slots__ = ()

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())


class Asked:
    """Request of an answer: what is compared with it."""

    __slots__ = ("headers",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = Fields({name.lower(): value for name, value in headers.items()})


class Answer:
    """Answer whose head has come; its body is read once, by `pieces` or `given_to`. What is the same of it as of
    httpx.Response has that one's names.
    """

    __slots__ = ("_came", "_left", "_parser", "_wire", "headers", "request", "status_code")

    def __init__(self, wire: Wire, status: int, headers: Fields, asked: Asked) -> None:
        self.status_code = status
        self.headers = headers
        self.request = asked
        self._wire = wire
        self._came = b""
        self._left = 0
        self._parser: h11.Connection | None = None

    @property
    def is_success(self) -> bool:
        """Whether the status says that what was asked for is done."""
        return 200 <= self.status_code < 300

    def pieces(self) -> Generator[bytes]:
        """The body as it comes. Raises httpx's errors."""
        if self._parser is not None:
            yield from self._wire.parsed(self._parser)
            return
        while self._left:
            piece = self._came or self._wire.read(min(self._left, _READ))
            self._came = b""
            self._left -= len(piece)
            if not self._left:
                self._wire.ended(self.headers)
            yield piece

    def given_to(self, receiver: Receiver[Any]) -> Generator[int]:
        """Feed the body to `receiver`, yielding how many bytes came each time: to where they belong, once that is
        known. Raises httpx's errors.
        """
        for piece in self.pieces():
            receiver.feed(piece)
            yield len(piece)
            if self._left < PLACED_FROM or not isinstance(receiver, Placing):
                continue
            place = receiver.place()
            if len(place) != self._left:
                continue
            for count in self._wire.landed(place, receiver):
                self._left -= count
                if not self._left:
                    self._wire.ended(self.headers)
                yield count


class Wire:
    """Connection to the server, for one exchange at a time: made when one begins and there is none that is of use.

    `host` and `port`, or the path of a Unix socket; `context` where TLS is spoken.
    """

    def __init__(
        self, base: httpx.URL, *, path: str | None, context: ssl.SSLContext | None, headers: Mapping[str, str],
        auth: KeyAuth | None,
    ) -> None:  # fmt: skip
        self._path = path
        self._host = base.raw_host.decode("ascii")
        self._port = base.port or (443 if base.scheme == "https" else 80)
        self._context = context
        self._auth = auth
        self._fields = {"Host": base.netloc.decode("ascii"), "Connection": "keep-alive", **headers}
        self._base = base
        self._prefix = base.raw_path.decode("ascii").rstrip("/")
        self._paths: dict[str, str] = {}
        self._poll: select.poll | None = None
        self._since = 0.0
        self._read_timeout: float | None = None
        self.socket: socket.socket | None = None
        """The connection, where there is one."""
        self._whole = True  # nothing of an exchange is still on the connection
        self._cut = False  # a request was not sent to its end

    @property
    def is_closed(self) -> bool:
        """Whether there is no connection."""
        return self.socket is None

    def close(self) -> None:
        """Close the connection; another exchange makes one again."""
        found, self.socket, self._poll = self.socket, None, None
        if found is not None:
            found.close()

    def leave(self) -> None:
        """Close the connection where an exchange was not brought to its end: the rest of it would come by it."""
        if not self._whole:
            self.close()

    def ready(self, timeout: float) -> socket.socket | None:
        """Connect unless a connection is there that the server has not closed; return the socket where it is new.

        Raises httpx.ConnectError, httpx.ConnectTimeout.
        """
        if self.socket is not None:
            if self._whole and time.monotonic() - self._since < IDLE_S and not self._readable(self.socket):
                return None
            self.close()
        try:
            self.socket = self._connected(timeout)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:  # ssl.SSLError too
            raise httpx.ConnectError(str(error)) from error
        self._whole, self._cut = True, False
        if hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(self.socket, select.POLLIN)
        return self.socket

    def _connected(self, timeout: float) -> socket.socket:
        if self._path is not None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                made.settimeout(timeout)
                made.connect(self._path)
            except BaseException:
                made.close()
                raise
            return made
        made = socket.create_connection((self._host, self._port), timeout)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is None:
                return made
            self._context.set_alpn_protocols(["http/1.1"])
            return self._context.wrap_socket(made, server_hostname=self._host)
        except BaseException:
            made.close()
            raise

    def _readable(self, found: socket.socket) -> bool:
        """Whether something came that nobody asked for: the server's end of the connection, or bytes past an answer's
        end, which TLS may have decrypted with it, so that the socket has them no more.
        """
        if self._context is not None and cast("ssl.SSLSocket", found).pending():
            return True
        if self._poll is not None:
            return bool(self._poll.poll(0))
        return bool(select.select([found], [], [], 0)[0])

    def exchange(
        self,
        method: str,
        path: str,
        query: Query,
        headers: Mapping[str, str],
        content: Iterator[bytes | memoryview] | None,
        *,
        silence: float,
        wait: float,
    ) -> Answer:
        """Send a request on the connection that is `ready`; return its answer, whose body is still to be read.

        `silence`: seconds that the other side may be silent for; `wait`: more of them before and within the answer.
        Raises httpx's errors.
        """
        source = self.socket
        assert source is not None
        self._whole = False
        self._read_timeout = silence + wait
        source.settimeout(silence)
        self._send(source, method, self._target(path, query), headers, content)
        if wait:
            source.settimeout(self._read_timeout)
        answer = self._answer(method, Asked(headers))
        _log.debug("%s %s: status %d", method, path, answer.status_code)
        return answer

    def _target(self, path: str, query: Query) -> str:
        if _PLAIN_PATH.fullmatch(path):
            found = self._prefix + path
        else:
            known = self._paths.get(path)
            if known is None:
                if len(self._paths) >= _MAX_PATHS:
                    self._paths.clear()
                known = httpx.URL(f"{str(self._base).rstrip('/')}{path}").raw_path.decode("ascii")
                self._paths[path] = known
            found = known
        return f"{found}?{urlencode(query, doseq=True)}" if query else found

    def _send(
        self,
        source: socket.socket,
        method: str,
        target: str,
        headers: Mapping[str, str],
        content: Iterator[bytes | memoryview] | None,
    ) -> None:
        """Write a request. What the server does not take it may have answered already: that is read next."""
        data = self._head(method, target, headers)
        try:
            for piece in content or ():
                if len(data) + len(piece) <= JOINED:
                    data += piece
                    continue
                _write(source, data)
                data = b""
                _write(source, piece)
            if data:
                _write(source, data)
        except TimeoutError as error:
            raise httpx.WriteTimeout(str(error)) from error
        except OSError:  # the server takes no more: it may have said why, which is read next
            self._cut = True
        finally:
            del data  # the head has the key: no traceback shows it

    def _head(self, method: str, target: str, headers: Mapping[str, str]) -> bytes:
        """Return the head of a request. Raises httpx.LocalProtocolError for what would be another field."""
        fields = {**self._fields, **headers}
        if self._auth is not None:
            fields["Authorization"] = f"Bearer {self._auth.key}"
        lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
        head = f"{method} {target} HTTP/1.1\r\n{''.join(lines)}\r\n"
        ends = len(lines) + 2
        if head.count("\r") != ends or head.count("\n") != ends or "\0" in head or not head.isascii():
            del fields, lines, head
            raise httpx.LocalProtocolError("a header field has a character that none can have")
        return head.encode("ascii")

    def read(self, most: int) -> bytes:
        """Return some bytes of an answer, at least one. Raises httpx's errors."""
        source = self.socket
        assert source is not None
        try:
            data = source.recv(most)
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        if not data:
            raise httpx.RemoteProtocolError("the server closed the connection before the answer was whole")
        return data

    def landed(self, place: memoryview, receiver: Placing) -> Iterator[int]:
        """Read until `place` is full, yielding how many bytes came each time."""
        assert self.socket is not None
        return landed(self.socket, place, receiver, self._read_timeout)

    def _answer(self, method: str, asked: Asked) -> Answer:
        data = self.read(_READ)
        while (blank := _BLANK.search(data)) is None and len(data) < _MAX_HEAD and data[:9] == b"HTTP/1.1 ":
            data += self.read(_READ)
        end = len(data) if blank is None else blank.end()
        found = _HEAD.fullmatch(data, 0, end)
        if found is None:
            return self._by_h11(method, data, asked)
        listed = _FIELD.findall(found[2].decode("latin-1"))
        headers = Fields({name.lower(): value for name, value in listed})
        length = "0" if (status := int(found[1])) in _BODILESS else headers.get("content-length", "")
        if len(headers) != len(listed) or "transfer-encoding" in headers or not _LENGTH.fullmatch(length):
            return self._by_h11(method, data, asked)
        answer = Answer(self, status, headers, asked)
        answer._left = int(length)
        answer._came = data[end : end + answer._left]
        if len(data) > end + answer._left:
            raise httpx.RemoteProtocolError("the server sent more than the answer")
        if not answer._left:
            self.ended(headers)
        return answer

    def ended(self, headers: Mapping[str, str]) -> None:
        """Note that an answer is whole: the connection takes another request, unless the server says that it ends."""
        if self._cut or "close" in headers.get("connection", "").lower():
            self.close()
        self._whole = True
        self._since = time.monotonic()

    def _by_h11(self, method: str, data: bytes, asked: Asked) -> Answer:
        """Return the answer as h11 reads it, whatever its form."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
        parser.send(h11.Request(method=method, target="/", headers=[("Host", "server")]))
        parser.send(h11.EndOfMessage())
        event = self._event(parser, data)
        while isinstance(event, h11.InformationalResponse):
            event = self._event(parser)
        if not isinstance(event, h11.Response):
            raise httpx.RemoteProtocolError("the server closed the connection without an answer")
        headers = Fields()
        for name, value in event.headers:
            key, text = name.decode("ascii"), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        answer = Answer(self, event.status_code, headers, asked)
        answer._parser = parser
        return answer

    def parsed(self, parser: h11.Connection) -> Generator[bytes]:
        """The body of an answer that h11 reads."""
        while isinstance(event := self._event(parser), h11.Data):
            yield bytes(event.data)
        if parser.their_state is h11.DONE and parser.our_state is h11.DONE and not parser.trailing_data[0]:
            self.ended({})
        else:
            self.close()

    def _event(self, parser: h11.Connection, data: bytes = b"") -> Any:
        try:
            if data:
                parser.receive_data(data)
            while (event := parser.next_event()) is h11.NEED_DATA:
                parser.receive_data(self._read_or_end())
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        return event

    def _read_or_end(self) -> bytes:
        """Return some bytes, or none at the connection's end, which ends an answer without a length."""
        source = self.socket
        assert source is not None
        try:
            return source.recv(_READ)
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error

    def __repr__(self) -> str:
        return f"<Wire to {self._path or self._base}>"


def _write(source: socket.socket, data: bytes | memoryview) -> None:
    """Write all of `data`; each write may take the socket's timeout."""
    try:
        sent = source.send(data)
        if sent < len(data):
            rest = memoryview(data)[sent:]
            while rest:
                rest = rest[source.send(rest) :]
    finally:
        del data  # as above
