"""HEAD wherever there is GET (RFC 9110, section 9.3.2): the same request as a GET, whose body stays here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """Asks the app for GET where a request is HEAD and no route of its own knows that, and answers with the head."""

    def __init__(self, app: ASGIApp, own: Callable[[Scope], bool]) -> None:
        """`own(scope)`: whether there is a route for HEAD itself."""
        self._app = app
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or self._own(scope):
            await self._app(scope, receive, send)
            return
        answer = _HeadAlone(receive, send)
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, answer.receive, answer.send)
        finally:
            if "route" in asked:
                scope["route"] = asked["route"]  # for the log and the metrics


class _HeadAlone:
    """One answer; whoever would go on sending hears that nobody listens."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._said = False

    async def receive(self) -> Message:
        return {"type": "http.disconnect"} if self._said else await self._receive()

    async def send(self, message: Message) -> None:
        if self._said:
            return
        await self._send(message if message["type"] == "http.response.start" else {"type": "http.response.body"})
        self._said = message["type"] == "http.response.body"
