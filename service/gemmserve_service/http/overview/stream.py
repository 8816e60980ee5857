"""Stream of the overview to many listeners (server-sent events): one rendering for all who have equal rights."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from starlette.responses import StreamingResponse

from gemmserve_service.errors import Draining
from gemmserve_service.http.overview.snapshot import Snapshot, View
from gemmserve_service.http.problems import TooManyListeners
from gemmserve_service.runtime.background import Background
from gemmserve_service.tenancy.identity import still_valid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from starlette.types import Receive, Scope, Send

    from gemmserve_service.http.overview.recent import Recent
    from gemmserve_service.http.overview.schemas import Overview, Point
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.tenancy.identity import Caller

MAX_LISTENERS: Final = 64
MAX_LISTENERS_OF_OWNER: Final = 32
"""So that one owner's screens leave room for others'; without keys there is one owner."""
_PERIOD_S: Final = 1.0
"""Seconds between two looks at what has changed."""
QUIET_S: Final = 15.0
"""Seconds after which an overview is sent although nothing has changed: proxies close silent connections after 60
(nginx's proxy_read_timeout), and a listener that is gone is noticed."""
_WAITING: Final = 8
"""Events that a listener may be behind, beside what is in the socket's buffers; then it is dropped."""
_RETRY_S: Final = 5.0


class Listener:
    """One listener, and the events that have not been sent to it."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.view = View.of(caller)
        self.ended = False
        self._events: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def put(self, event: bytes) -> None:
        """Send an event after those that wait; a listener that does not read ends instead."""
        if len(self._events) >= _WAITING:
            self._events.clear()
            self.ended = True
        elif not self.ended:
            self._events.append(event)
        self._changed.set()

    def end(self) -> None:
        """End after what waits."""
        self.ended = True
        self._changed.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield what there is to send."""
        while True:
            while self._events:
                yield self._events.popleft()
            if self.ended:
                return
            self._changed.clear()
            await self._changed.wait()


class Stream:
    """The listeners; belongs to the event loop's thread. While there are none nothing is looked at or rendered."""

    def __init__(self, core: Core, recent: Recent) -> None:
        self._core = core
        self._recent = recent
        self._listeners: set[Listener] = set()
        self._said: dict[View, tuple[bytes, float]] = {}
        """Overview that was sent last, without its time, and when (by the loop's clock), by rights."""
        self._background = Background()
        self._looking = False

    @property
    def listeners(self) -> int:
        """Listeners now."""
        return len(self._listeners)

    def listen(self, caller: Caller) -> StreamResponse:
        """Return the answer to a new listener, which begins with an overview. Raises Draining, TooManyListeners."""
        if self._core.draining:
            raise Draining("the server is shutting down", retry_after_s=_RETRY_S)
        own = sum(listener.caller.owner == caller.owner for listener in self._listeners)
        if len(self._listeners) >= MAX_LISTENERS or (caller.key_id and own >= MAX_LISTENERS_OF_OWNER):
            raise TooManyListeners(
                f"{len(self._listeners)} streams are open, {own} of them of this owner", retry_after_s=_RETRY_S
            )
        listener = Listener(caller)
        overview = Snapshot(self._core, self._recent).overview(listener.view)
        text = _text(overview)
        listener.put(_overview_event(overview.time, text))
        self._said.setdefault(listener.view, (text, asyncio.get_running_loop().time()))
        self._listeners.add(listener)
        if not self._looking:
            self._looking = True
            self._background.spawn(self._look())
        return StreamResponse(self, listener)

    def leave(self, listener: Listener) -> None:
        """Forget a listener; idempotent."""
        self._listeners.discard(listener)

    def publish(self, point: Point) -> None:
        """Send a point of the history to all."""
        if self._listeners:
            event = b"event: point\ndata: " + point.model_dump_json().encode() + b"\n\n"
            self._put(self._listeners, event)

    def end(self) -> None:
        """Send a last overview, which says why, and end every stream. Called when the server drains, and when it
        stops.
        """
        if self._listeners:
            self._send_changes()
        for listener in self._listeners:
            listener.end()

    async def stop(self) -> None:
        """End at once."""
        await self._background.stop()

    async def _look(self) -> None:
        try:
            while True:
                await asyncio.sleep(_PERIOD_S)
                if not self._listeners:
                    break
                self._send_changes()
        finally:
            self._looking = False
            self._said.clear()
            for listener in self._listeners:  # there are some if this failed: they come back
                listener.end()

    def _send_changes(self) -> None:
        """Send each listener the overview if it has changed, or was last sent a while ago; end those whose key is of no
        use any more.
        """
        keyring = self._core.keyring.current
        groups: dict[View, list[Listener]] = {}
        for listener in self._listeners:
            if still_valid(keyring, listener.caller):
                groups.setdefault(listener.view, []).append(listener)
            else:
                listener.end()
        before, self._said = self._said, {}
        snapshot = Snapshot(self._core, self._recent)
        now = asyncio.get_running_loop().time()
        for view, listeners in groups.items():
            overview = snapshot.overview(view)
            text = _text(overview)
            said, said_at = before.get(view, (b"", now))
            if text == said and now - said_at < QUIET_S:
                self._said[view] = said, said_at
                continue
            self._said[view] = text, now
            self._put(listeners, _overview_event(overview.time, text))

    def _put(self, listeners: Iterable[Listener], event: bytes) -> None:
        """Send an event to listeners; those that do not read count no more."""
        for listener in listeners:
            listener.put(event)
        self._listeners = {listener for listener in self._listeners if not listener.ended}


class StreamResponse(StreamingResponse):
    """The answer to a listener, who is forgotten however it ends."""

    def __init__(self, stream: Stream, listener: Listener) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(listener.events(), media_type="text/event-stream", headers=headers)
        self._stream = stream
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.leave(self._listener)


def _text(overview: Overview) -> bytes:
    """Return its JSON without the time, which changes always, and the history."""
    return overview.model_dump_json(exclude={"time", "history"}).encode()


def _overview_event(moment: float, text: bytes) -> bytes:
    return b'event: overview\ndata: {"time":%.3f,%b\n\n' % (moment, text[1:])
