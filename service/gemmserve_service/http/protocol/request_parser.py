"""Requests from a connection's bytes: llhttp's parser without its leniencies, heads of bounded size, bodies that come
by another way.
"""

from __future__ import annotations

from typing import Final, Protocol

import httptools

from gemmserve_service.errors import ServiceError
from gemmserve_service.http.problems import HeadTooLarge
from gemmserve_service.http.protocol.request_heads import RequestHead, check_head, describe_parser_error, refuse_rtsp

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_FIELD_OVERHEAD: Final = 4  # ": " and the line's end


class RequestEvents(Protocol):
    """Listener of a `RequestParser`, called in the order of the bytes."""

    def head_begins(self) -> bool:
        """Takes note of a request's first byte. False: nothing that follows is wanted."""

    def head_ends(self, head: RequestHead) -> None:
        """Takes a whole head, checked."""

    def body_comes(self, data: bytes) -> None:
        """Takes the body's next bytes."""

    def request_ends(self) -> None:
        """Takes note that the request has come whole."""


class _StopError(Exception):
    """End of parsing: nothing that follows is wanted."""


class RequestParser:
    """The requests of one connection. Methods beginning with `on_` are httptools' callbacks."""

    def __init__(self, events: RequestEvents, max_head_bytes: int) -> None:
        self._events = events
        self._max_head_bytes = max_head_bytes
        self._llhttp: httptools.HttpRequestParser | None = _llhttp(self)
        self._refusal: ServiceError | None = None
        self._in_head = False
        self._replayed = False  # within a head that was read before
        self._bypassed = False  # the rest of the body does not pass llhttp
        self._raw = bytearray()  # what the head has come in, with whatever was before it in the first piece
        self._piece = b""
        self._head_bytes = 0  # of the head's fields, and of the trailers behind its body
        self._unseen = 0  # bytes of whole pieces since llhttp last gave something: of one field that does not end
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        """Fields of the head that is being read, or was read last; names in lower case."""
        self.left: int | None = None
        """Bytes of the body that have not come; None where their number is unknown."""

    def feed(self, data: bytes) -> None:
        """Parses the connection's next bytes.

        Raises MalformedRequest, HttpVersion, HeadTooLarge, TooLarge: nothing that follows can be read then.
        """
        if self._bypassed:
            assert self.left is not None
            body, data = data[: self.left], data[self.left :]
            self.left -= len(body)
            self._events.body_comes(body)
            self._look_for_the_end()
            if not data:
                return
        self._piece = data
        self._unseen += len(data)
        self._parse(memoryview(data))
        self._piece = b""
        if self._in_head:
            self._raw += data
        if self._unseen > self._max_head_bytes:
            raise self._too_large()

    def skip(self, count: int) -> None:
        """Counts bytes of the body that were received elsewhere; the rest of it passes llhttp by."""
        assert self.left is not None
        self._bypassed = True
        self.left -= count
        self._look_for_the_end()

    def close(self) -> None:
        """Lets go of llhttp's parser, whose callbacks refer to this object; nothing is fed any more."""
        self._llhttp = None

    def _look_for_the_end(self) -> None:
        if self.left == 0:
            self._bypassed = False
            if self._llhttp is not None:
                self._llhttp = _llhttp(self)
            self._events.request_ends()

    def _parse(self, data: memoryview) -> None:
        while True:
            try:
                assert self._llhttp is not None
                self._llhttp.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = data[stopped.args[0] :]
                self._go_on_behind_upgrade()
                if data:
                    continue
            except httptools.HttpParserCallbackError as error:
                if isinstance(error.__context__, _StopError):
                    return
                refusal, self._refusal = self._refusal, None
                if refusal is None:
                    raise
                raise refusal from None
            except httptools.HttpParserError as error:
                raise describe_parser_error(str(error)) from None
            return

    def _go_on_behind_upgrade(self) -> None:
        """Goes on behind a head with Upgrade, which is ignored (RFC 9110, section 7.8): llhttp stops there and takes
        what follows for another protocol. A parser that is given the head without that field knows the body's length.
        """
        framing = [b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING]
        self._llhttp = _llhttp(self)
        self._replayed = True
        self._parse(memoryview(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"])))

    # -- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._replayed:
            return
        if not self._events.head_begins():
            raise _StopError
        self._in_head = True
        self._head_bytes = self._unseen = 0
        self.url, self.headers = b"", []

    def on_url(self, url: bytes) -> None:
        if not self._replayed:
            self._count(len(url))
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._replayed:
            return
        self._count(len(name) + len(value) + _FIELD_OVERHEAD)
        if self._in_head:  # else it is a trailer, which nobody reads
            self.headers.append((name.lower(), value.strip(b" \t")))  # which are no part of it (RFC 9112, section 5.1)

    def on_headers_complete(self) -> None:
        if self._replayed:
            self._replayed = False
            return
        llhttp = self._llhttp
        assert llhttp is not None
        try:
            method = llhttp.get_method().decode("ascii")
            refuse_rtsp(method, self.url, self._raw + self._piece if self._raw else self._piece)
            version = llhttp.get_http_version()
            target = check_head(method, self.url, version, self.headers)
        except ServiceError as error:
            self._refusal = error
            raise
        self._raw = bytearray()
        self._in_head = False
        self._unseen = 0
        head = RequestHead(method, target, version, self.headers, version != "1.0" and llhttp.should_keep_alive())
        self.left = head.content_length
        self._events.head_ends(head)

    def on_body(self, body: bytes) -> None:
        self._unseen = 0
        if self.left is not None:
            self.left -= len(body)
        self._events.body_comes(body)

    def on_message_complete(self) -> None:
        """A request with Upgrade is complete for llhttp as soon as its head is (`_go_on_behind_upgrade`)."""
        self._unseen = 0
        if self._llhttp is not None and not self._llhttp.should_upgrade():
            self._events.request_ends()

    def _count(self, nbytes: int) -> None:
        """Adds to the head, or to its trailers."""
        self._unseen = 0
        self._head_bytes += nbytes
        if self._head_bytes > self._max_head_bytes:
            self._refusal = self._too_large()
            raise self._refusal

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(f"a request's line and headers have at most {self._max_head_bytes} bytes")


def _llhttp(callbacks: object) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(callbacks)
    # Else the bytes behind a request that ends the connection would be an error, also of the requests before it.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
