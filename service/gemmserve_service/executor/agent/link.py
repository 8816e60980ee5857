"""The agent's end of a link: the greeting, frames of both kinds, and the lease that they renew."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final, cast

from pydantic import ValidationError

from gemmserve_service.executor.agent.texts import Texts
from gemmserve_service.executor.join_protocol import (
    AGENT_SHARE,
    BEAT_S,
    GREETING,
    MAX_FRAME,
    MAX_GREETING_FRAME,
    TO_AGENT,
    Bytes,
    JoinDecoder,
    Joined,
    Pulse,
    Refused,
)
from gemmserve_service.executor.prompt_writes import PromptWriter
from gemmserve_service.executor.protocol import Drop, ProtocolError, RunBatch, Write, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

    from gemmserve_service.executor.agent.exchanges import Address
    from gemmserve_service.executor.agent.texts import Sent
    from gemmserve_service.executor.join_protocol import Frame, Join
    from gemmserve_service.executor.protocol import Cancel, Forget, Stop

    FromFront = RunBatch | Cancel | Forget | Write | Drop | Stop

log = logging.getLogger(__name__)

_LOOKS: Final = 8
"""Looks at the lease in the time that it lasts, and signs of life to the front."""
_HANDSHAKE_S: Final = 10.0


class JoinRefused(Exception):  # noqa: N818 (says what is the case)
    """The front does not take this worker; `slug` says why."""

    def __init__(self, slug: str, detail: str) -> None:
        super().__init__(detail)
        self.slug = slug


class Link(asyncio.Protocol):
    """One connection of messages. `on_message(message)` hears each but tasks of a known text, which `on_task(sent)`
    hears; `on_bytes(extent, offset, bytes)` what comes of small operands, `on_lost(reason)` the end, once.

    The lease: the front has to be heard from every now and then. The clock is looked at before anything that came is
    read, and before anything is sent: what a process that stood still finds in its sockets may be old.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.joined: asyncio.Future[Joined] = asyncio.get_running_loop().create_future()
        self.limit_s = _HANDSHAKE_S
        """Seconds of silence after which the lease is over."""
        self.on_message: Callable[[FromFront], None] = lambda _: None
        self.on_task: Callable[[Sent], None] = lambda _: None
        self.on_bytes: Callable[[str, int, bytes], None] = lambda *_: None
        self.on_lost: Callable[[str], None] = lambda _: None
        self.reason: str | None = None
        """Reason of its end, once it has ended."""
        self._clock = clock
        self._decoder = JoinDecoder(MAX_GREETING_FRAME)
        self._transport: asyncio.Transport | None = None
        self._writer: PromptWriter | None = None
        self._texts = Texts()
        self._heard = clock()
        self._looker: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, address: Address, join: Join) -> tuple[Link, Joined]:
        """Connect and join. Raises OSError, TimeoutError, ProtocolError where there is no front that answers, and
        JoinRefused.
        """
        async with asyncio.timeout(_HANDSHAKE_S):
            link = cast("Link", await address.connect(cls))
            try:
                link._write(GREETING + encode(join))
                return link, await link.joined
            except BaseException:
                link.close("not joined")
                raise

    # -- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._writer = PromptWriter(self._transport)

    def data_received(self, data: bytes) -> None:
        if not self.lasts():
            return
        self._heard = self._clock()
        try:
            for frame in self._decoder.feed(data):
                if self.reason is not None:
                    return
                self._take(frame)
        except (ProtocolError, ValidationError) as error:
            log.exception("the front speaks nonsense")
            if not self.joined.done():
                self.joined.set_exception(ProtocolError(str(error)))
            self.close("the front speaks nonsense")

    def connection_lost(self, exc: Exception | None) -> None:
        self.close("the front closed the connection" if exc is None else f"the connection broke: {exc}")

    # -- inside and outside -------------------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        if frame.raw is None and (sent := self._texts.find(frame.body)) is not None:
            self.on_task(sent)
            return
        message = TO_AGENT.validate_json(frame.body)
        if not self.joined.done():
            if isinstance(message, Joined):
                self.limit_s = message.silence_s * AGENT_SHARE
                self._decoder.limit = MAX_FRAME
                self.joined.set_result(message)
                self._look()
            elif isinstance(message, Refused):
                self.joined.set_exception(JoinRefused(message.slug, message.detail))
            else:
                raise ProtocolError("a message before the worker had joined")
        elif isinstance(message, Bytes):
            if frame.raw is None:
                raise ProtocolError("bytes in a frame that has none")
            self.on_bytes(message.extent, message.offset + frame.at, bytes(frame.raw))
        elif isinstance(message, Joined | Refused) or frame.raw is not None:
            raise ProtocolError("a message that has no place here")
        elif not isinstance(message, Pulse):
            if isinstance(message, RunBatch):
                self._texts.learn(frame.body, message)
            self.on_message(message)

    def _look(self) -> None:
        if self.lasts():
            self._write(encode(Pulse()))
            self._looker = asyncio.get_running_loop().call_later(min(self.limit_s / _LOOKS, BEAT_S), self._look)

    def lasts(self) -> bool:
        """Whether the lease lasts; ends the link where it does not."""
        if self.reason is not None:
            return False
        silent_s = self._clock() - self._heard
        if silent_s > self.limit_s:
            self.close(f"nothing was heard of the front for {silent_s:.1f} s")
            return False
        return True

    def send(self, *messages: BaseModel | bytes | memoryview) -> None:
        """Send messages, or frames in pieces, together: the front is woken once. Nothing is sent after the end of the
        lease. Memory that is given is the caller's again after this.
        """
        if self.lasts():
            self._write(*[each if isinstance(each, bytes | memoryview) else encode(each) for each in messages])

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were sent, and that the connection has not taken."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _write(self, *pieces: bytes | memoryview) -> None:
        if self._writer is not None:
            self._writer.write(*pieces)

    def close(self, reason: str, *, flush: bool = False) -> None:
        """End the link; `flush`: after what was sent."""
        if self.reason is not None:
            return
        self.reason = reason
        if self._looker is not None:
            self._looker.cancel()
        if self._transport is not None:
            if flush:
                self._transport.close()
            else:
                self._transport.abort()
        if not self.joined.done():
            self.joined.set_exception(ConnectionResetError(reason))
        self.on_lost(reason)
