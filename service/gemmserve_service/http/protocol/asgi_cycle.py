"""One request and its answer, as an ASGI app sees them: scope, receive, send, and HTTP's framing of what is sent."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from gemmserve_service.http.extensions import RECEIVER, SENDER
from gemmserve_service.http.protocol.body_receiver import BodyReceiver, BodySender
from gemmserve_service.http.protocol.response_writer import STATUS_LINES, ResponseWriter

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from gemmserve_service.http.protocol.connection import Connection
    from gemmserve_service.http.protocol.request_heads import RequestHead

_MAX_BUFFERED: Final = 1 << 16  # bytes of a body that the app has not taken; then no more are read
_NAME: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, section 5.6.2
_VALUE: Final = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
_BODILESS: Final = frozenset({204, 304})

log = logging.getLogger(__name__)


def asgi_scope(head: RequestHead, connection: Connection) -> dict[str, Any]:
    """The scope of a request."""
    path, _, query = head.target.partition(b"?")
    config = connection.config
    text = path.decode("ascii")
    return {
        "type": "http",
        "asgi": {"version": config.asgi_version, "spec_version": "2.3"},
        "http_version": head.version,
        "server": connection.server,
        "client": connection.client,
        "scheme": connection.scheme,
        "root_path": config.root_path,
        "headers": head.headers,
        "state": connection.app_state.copy(),
        "method": head.method,
        "path": config.root_path + (unquote(text) if "%" in text else text),
        "raw_path": config.root_path.encode("ascii") + path,
        "query_string": query,
    }


class AsgiCycle:
    """A request that was read, or is being read, and its answer."""

    def __init__(self, connection: Connection, head: RequestHead) -> None:
        self._connection = connection
        self.scope = asgi_scope(head, connection)
        self.scope["extensions"] = {RECEIVER: BodyReceiver(connection, self), SENDER: BodySender(connection, self)}
        self.writer = ResponseWriter(connection.transport, connection.loop)
        self.keep_alive = head.keeps_alive
        """Whether the connection stays once this request is answered."""
        self.expects_continue = head.version != "1.0" and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in head.headers
        )
        """Whether the client waits for 100 (Continue) before it sends the body (RFC 9110, section 10.1.1)."""
        self.disconnected = False
        """Whether the client is gone, or hears of the request's end from the connection itself."""
        # -- the request
        self.body = bytearray()
        """The body's bytes that have come and the app has not taken."""
        self.more_body = True
        self.changed = asyncio.Event()
        """Set when there is something for `receive`."""
        # -- the answer
        self.started = False
        self.complete = False
        self.remaining: int | None = None
        """Bytes of the answer that its Content-Length still promises; None: it promises none."""
        self._chunked = False

    # -- for the connection -----------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Takes the body's next bytes in; they are dropped once the answer is complete."""
        if not self.complete:
            self.body += data
            if len(self.body) > _MAX_BUFFERED:
                self._connection.flow.pause_reading()
            self.changed.set()

    def feed_end(self) -> None:
        """The body has come whole."""
        if not self.complete:
            self.more_body = False
            self.changed.set()

    def disconnect(self) -> None:
        """The client is gone: `receive` says so, and what is sent goes nowhere."""
        self.disconnected = True
        self.changed.set()

    def complete_elsewhere(self) -> None:
        """The answer was sent whole past `send`."""
        self.started = self.complete = True

    def send_continue(self) -> bool:
        """Asks a client that waits for it to send its body; returns whether it did wait."""
        if not self.expects_continue:
            return False
        self.expects_continue = False
        self.writer.interim(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    async def run(self, app: ASGIApp) -> None:
        """Runs the app. Whatever goes wrong in it is answered with 500, or breaks the answer off.

        Where the server ends and has waited for long enough, the connection breaks without an answer: what was asked
        for may have been done or not, and clients come back, as they do where it is killed.
        """
        ended = False
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException:
            task = asyncio.current_task()
            ended = task is not None and task.cancelling() > 0
            if not ended:
                log.exception("Exception in ASGI application")
        # They hold this in turn, and what counts their bytes holds the scope: a circle of all that the request had.
        self.scope.pop("extensions", None)
        if self.complete or self.disconnected:
            return
        if not ended:
            log.error("an answer was not completed")
        if ended or self.started:
            # Not `close`: that is how an answer without a length ends, for clients of HTTP/1.0.
            self._connection.transport.abort()
            return
        text = b"Internal Server Error"
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(text))]
        headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": text})

    # -- ASGI -------------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """The next piece of the body, or that the client is gone."""
        self.send_continue()
        if not self.disconnected and not self.complete:
            self._connection.read_on()
            await self.changed.wait()
            self.changed.clear()
        if self.disconnected or self.complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Sends the answer's head, or a piece of its body. Raises RuntimeError for what HTTP cannot frame."""
        flow = self._connection.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()
        if self.disconnected:
            return
        expected = "http.response.body" if self.started else "http.response.start"
        if self.complete or message["type"] != expected:
            raise RuntimeError(f"an ASGI message {message['type']!r} where none or {expected!r} belongs")
        if not self.started:
            self._send_head(message["status"], message.get("headers", ()))
        else:
            self._send_body(message.get("body", b""), last=not message.get("more_body", False))

    def _send_head(self, status: int, headers: Any) -> None:
        lines = [STATUS_LINES[status]]
        keep_alive, remaining, chunked = self.keep_alive, None, False
        says_close = framed = False
        for name, value in (*self._connection.server_state.default_headers, *headers):
            if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
                raise RuntimeError(f"{name!r} or its value cannot be sent in a header")
            lowered = name.lower()
            if lowered == b"content-length" and not framed:
                remaining, framed = int(value), True
            elif lowered == b"transfer-encoding" and value.lower() == b"chunked":
                remaining, chunked, framed = None, True, True
            elif lowered == b"connection" and b"close" in [token.strip() for token in value.lower().split(b",")]:
                keep_alive, says_close = False, True
            lines.append(b"%b: %b\r\n" % (lowered, value))
        # A body of unknown length ends with the connection for HTTP/1.0, as every connection does there.
        if not framed and self.scope["method"] != "HEAD" and status not in _BODILESS:
            chunked = self.scope["http_version"] != "1.0"
            if chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
        elif not framed:
            remaining = 0
        if not keep_alive and not says_close:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        # All that is known now: an answer whose head cannot be sent has not begun, and another may take its place.
        self.keep_alive, self.remaining, self._chunked = keep_alive, remaining, chunked
        self.started, self.expects_continue = True, False
        self.writer.head(b"".join(lines))

    def _send_body(self, body: bytes | memoryview, *, last: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.remaining = 0
        elif self._chunked:
            pieces = (b"%x\r\n" % len(body), body, b"\r\n") if len(body) else ()
            if last:
                pieces = (*pieces, b"0\r\n\r\n")
            if pieces:
                self.writer.body(*pieces)
        else:
            if self.remaining is not None:
                if len(body) > self.remaining:
                    raise RuntimeError("the answer is longer than its Content-Length")
                self.remaining -= len(body)
            self.writer.body(body)
        if last:
            if self.remaining:
                raise RuntimeError("the answer is shorter than its Content-Length")
            self.complete = True
            self.changed.set()
            self.writer.flush()
            self._connection.answered(self)
