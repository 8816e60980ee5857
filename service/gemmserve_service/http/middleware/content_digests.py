"""Content-Digest of requests that are no uploads, and of answers, as plain ASGI (RFC 9530).

A request that says what the SHA-256 of its body is, is refused where the body has another; the routes that `_compares`
names hash what they take while it arrives in its place. The answer repeats the digest that was compared, so that a
client whose field got lost or changed on the way does not take silence for consent.

An answer has a digest where the request wants that (Want-Content-Digest): here those that are sent in one piece, which
is all but arrays and streams of events. Arrays' routes see to theirs themselves (`digest_of`).
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers

from gemmserve.wire import CHECKED_HEADER
from gemmserve_service.errors import DigestMismatch, InvalidRequest
from gemmserve_service.http.extensions import RECEIVER
from gemmserve_service.http.headers.digests import digest_field, parse_content_digest, wants_sha256
from gemmserve_service.http.problems import problem_response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER: Final = b"content-digest"
_CHECKED: Final = CHECKED_HEADER.lower().encode("ascii")
_INLINE: Final = 1 << 18  # bytes that are hashed sooner than a thread is woken
_BODILESS: Final = frozenset({204, 304})


class ContentDigests:
    """Passes everything on that neither has a digest nor wants one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if wants_sha256(headers.get("want-content-digest")) and scope["method"] != "HEAD":
                send = _Answer(send).send
            if "content-digest" in headers:
                try:
                    expected = parse_content_digest(headers["content-digest"])
                except InvalidRequest as error:
                    if _uploads(
                        scope["path"]
                    ):  # whose route refuses it, and other methods of these paths for themselves
                        await self._app(scope, receive, send)
                    else:
                        await problem_response(error)(scope, receive, send)
                    return
                if expected is not None:
                    body = None
                    if not _compares(scope["method"], scope["path"]):
                        # Every byte is to pass here: none is received past `receive`.
                        extensions = scope.get("extensions") or {}
                        scope["extensions"] = {key: each for key, each in extensions.items() if key != RECEIVER}
                        body = _Body(receive, expected, headers.get("content-length", ""))
                        receive = body.receive
                    send = _Confirmed(send, expected, body).send
        await self._app(scope, receive, send)


def _compares(method: str, path: str) -> bool:
    """Whether a route compares the digest itself: uploads, whole or in parts."""
    return (method == "POST" and path == "/v1/arrays") or (method == "PUT" and path.startswith("/v1/uploads/"))


def _uploads(path: str) -> bool:
    """Whether some method of that path is an upload."""
    return path == "/v1/arrays" or path.startswith("/v1/uploads/")


class _Body:
    """A body whose digest is known beforehand."""

    def __init__(self, receive: Receive, expected: bytes, length: str) -> None:
        self._receive = receive
        self._expected = expected
        self._length = int(length) if length.isascii() and length.isdigit() else None
        self._hash = hashlib.sha256()
        self._came = 0
        self._over = False

    @property
    def compared(self) -> bool:
        """Whether the whole body came and has the digest."""
        return self._over

    async def receive(self) -> Message:
        """The next message. Raises DigestMismatch with the last one of a body that is another: nobody gets that."""
        message = await self._receive()
        if message["type"] == "http.request" and not self._over:
            body = message.get("body", b"")
            self._hash.update(body)
            self._came += len(body)
            self._over = not message.get("more_body", False) or self._came == self._length
            if self._over and self._hash.digest() != self._expected:
                raise DigestMismatch(f"Content-Digest names sha-256 {self._expected.hex()}, the body has another")
        return message


class _Confirmed:
    """An answer that says which digest its request's body was compared with. `body`: what compares it; None: the route
    itself does, and succeeds only if it is the right one.
    """

    def __init__(self, send: Send, expected: bytes, body: _Body | None) -> None:
        self._send = send
        self._body = body
        self._field = (_CHECKED, digest_field(expected).encode("ascii"))

    async def send(self, message: Message) -> None:
        """Adds the field to the head of a success."""
        compared = self._body is None or self._body.compared
        if message["type"] == "http.response.start" and 200 <= message["status"] < 300 and compared:
            message["headers"] = [*message["headers"], self._field]
        await self._send(message)


class _Answer:
    """An answer that is to have a digest."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        """Keeps the head back until there is a body that it can tell of, or one that is not whole."""
        if message["type"] == "http.response.start" and message["status"] not in _BODILESS:
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            if not message.get("more_body", False) and all(name != _HEADER for name, _ in start["headers"]):
                value = digest_field(hashlib.sha256(message.get("body", b"")).digest())
                start["headers"] = [*start["headers"], (_HEADER, value.encode("ascii"))]
            await self._send(start)
        await self._send(message)


async def digest_of(
    request: Request, pieces: Callable[[], Iterable[bytes | memoryview]], *, size: int | None = None
) -> dict[str, str]:
    """The header for an answer of these pieces, where the request wants it. They are gone through in a thread, unless
    their bytes are known to be few.
    """
    if not wants_sha256(request.headers.get("want-content-digest")):
        return {}
    digest = hashlib.sha256()

    def read() -> None:
        for piece in pieces():
            digest.update(piece)

    if size is not None and size <= _INLINE:
        read()
    else:
        await asyncio.to_thread(read)
    return {"Content-Digest": digest_field(digest.digest())}
