"""One-shot requests whose body is small and there at once: answered from memory, without tasks beside the request's."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gemmserve.wire import ALGORITHM_HEADER, NPY, SESSION_HEADER
from gemmserve_service.landing import EXTENSION
from gemmserve_service.routes.common import server_timing
from gemmserve_service.small import SmallProducts, run_small
from gemmserve_service.small_forms import MOST_BYTES, boundary_of, cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message

    from gemmserve_service.core import Core
    from gemmserve_service.schemas import GemmParams, GemmReduceParams

_PATIENCE_S: Final = 0.02
"""For the rest of a body. Who sends less at once may wait for a refusal before sending the data."""
_MOST_GATHERED: Final = 64 << 20  # bytes of all bodies that are being gathered


class SmallRequest:
    """Gathers one request's body; `expected`: whether that is worth trying."""

    _products = SmallProducts()
    _gathered = 0

    def __init__(
        self,
        request: Request,
        kind: type[GemmParams | GemmReduceParams],
        parse: Callable[[bytes | None], GemmParams | GemmReduceParams],
        names: tuple[str, ...],
    ) -> None:
        self._request = request
        self._kind = kind
        self._parse = parse
        self._names = {*names, "params"}
        self._messages: list[Message] = []
        headers = request.headers
        length = headers.get("content-length", "")
        self._boundary: bytes | None = None
        self._length = int(length) if length.isascii() and length.isdigit() and len(length) < 8 else MOST_BYTES + 1
        if self._length <= MOST_BYTES and SESSION_HEADER not in headers:
            self._boundary = boundary_of(headers.get("content-type", ""))

    @property
    def expected(self) -> bool:
        """Whether the head says nothing against it."""
        return self._boundary is not None and SmallRequest._gathered + self._length <= _MOST_GATHERED

    async def answer(self, core: Core, *, timeout_s: float | None, owner: str) -> Response | None:
        """The answer; None: the request is to be read in the ordinary way, from `unread`."""
        began = time.perf_counter()
        SmallRequest._gathered += self._length
        try:
            body = await self._body()
        finally:
            SmallRequest._gathered -= self._length
        parts = None if body is None else cut(body, self._boundary or b"")
        if body is None or parts is None or not parts.keys() <= self._names:
            return None
        product = self._products.get(self._kind, self._parse, body, parts)
        if product is None:
            return None
        received_s = time.perf_counter() - began
        content, done = await run_small(
            core, product, body, parts, self._request.receive, timeout_s=timeout_s, owner=owner
        )
        (result,) = product.results
        headers = {
            "Server-Timing": server_timing(done.timings, receive=received_s),
            ALGORITHM_HEADER: done.algorithm,
            "Cache-Control": "no-store",
            "Content-Disposition": f'attachment; filename="{result.name}.npy"',
        }
        return Response(content, headers=headers, media_type=NPY)

    async def _body(self) -> bytes | None:
        """The whole body; None if it is not there soon."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            return bytes(message.get("body", b""))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while message["type"] == "http.request" and message.get("more_body"):
                    message = await self._receive()
        except TimeoutError:
            return None
        if message["type"] != "http.request":
            return None
        return b"".join(each.get("body", b"") for each in self._messages)

    async def _receive(self) -> Message:
        message = await self._request.receive()
        self._messages.append(message)
        return message

    def unread(self) -> Request:
        """The request as it was before."""
        messages = iter(self._messages)
        receive = self._request.receive

        async def again() -> Any:
            message = next(messages, None)
            return await receive() if message is None else message

        # Not past `receive`, straight from the socket: what was gathered comes first.
        scope = self._request.scope
        extensions = {name: each for name, each in (scope.get("extensions") or {}).items() if name != EXTENSION}
        return Request({**scope, "extensions": extensions}, again)
