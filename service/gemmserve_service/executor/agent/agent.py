"""Agent of a joined worker: link after link to the front, one worker process through all of them.

A link's end, for whatever reason, ends its tasks: the worker is made to let go of them, or killed, before the agent
joins again. So what the front gives to another worker is nobody's here by then. Copies of the front's arrays stay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import secrets
import signal
import socket
import ssl
import time
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from gemmserve_service.executor.agent.child import Child, DeviceGone
from gemmserve_service.executor.agent.exchanges import Address, Exchanges
from gemmserve_service.executor.agent.link import JoinRefused, Link
from gemmserve_service.executor.agent.node_memory import NodeMemory
from gemmserve_service.executor.agent.relay import Relay
from gemmserve_service.executor.join_protocol import AGENT_SHARE, PROBE_BYTES, Join, Leave, Probe, Rate
from gemmserve_service.executor.protocol import ProtocolError, Stop
from gemmserve_service.runtime.mapping import most_mappings
from gemmserve_service.runtime.start_error import UsageError
from gemmserve_service.settings import is_loopback

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gemmserve_service.executor.agent.child import Control
    from gemmserve_service.executor.agent.link import FromFront
    from gemmserve_service.executor.join_protocol import Joined
    from gemmserve_service.runtime.handoff import AgentHandoff

T = TypeVar("T")
log = logging.getLogger(__name__)

_MIN_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0
_FETCHES: Final = 4  # connections for operands
_UPLOADS: Final = 2  # and for results
_PROBE_PIECE: Final = 1 << 20
_PROBE_S: Final = 0.1  # after which no more pieces are asked for
_OWN_FILES: Final = 64  # descriptors that are no memory
_PORT: Final = 8443
REFUSED: Final = {"token": os.EX_NOPERM, "protocol": os.EX_PROTOCOL, "name": os.EX_CONFIG, "malformed": os.EX_PROTOCOL}
"""Exit status by the reason of a refusal that will be the same the next time."""


def address_of(handoff: AgentHandoff) -> Address:
    """Return the front's address. Raises UsageError for a URL that is none, or certificates that cannot be read."""
    try:
        url = urlsplit(handoff.join)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise UsageError(f"{handoff.join!r} is no URL: {error}") from error
    if url.scheme not in {"http", "https"} or not host or url.path not in {"", "/"} or url.query or url.username:
        raise UsageError(f"{handoff.join!r} is no URL of a port for workers: https://host:port or http://host:port")
    if url.scheme == "http":
        if not (handoff.insecure or is_loopback(host)):
            raise UsageError(
                f"{handoff.join} is no TLS: the token and arrays could be read on the way; use https://, or give "
                "--join-insecure on a network that nobody else is on"
            )
        return Address(host, port or _PORT)
    try:
        tls = ssl.create_default_context(cafile=handoff.ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(f"the certificates in {handoff.ca_file} cannot be used: {error}") from error
    return Address(host, port or _PORT, tls)


class Agent:
    """Agent of one device. `run` is called once."""

    def __init__(self, handoff: AgentHandoff) -> None:
        """Raises UsageError."""
        self._handoff = handoff
        self._address = address_of(handoff)
        self._session = secrets.token_hex(8)
        self._rate: float | None = None
        self._server: str | None = None
        """The front whose arrays there are copies of."""
        self._stopping = asyncio.Event()
        self._said: str | None = None
        """Why it could not join, as it said last."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = most_mappings() if limit == resource.RLIM_INFINITY else min(max(limit - _OWN_FILES, 8), most_mappings())
        self.memory = NodeMemory(handoff.memory_bytes, most, self._destroyed)
        self._relay: Relay | None = None

    def stop(self) -> None:
        """Have `run` return once the worker has answered its task."""
        self._stopping.set()

    async def run(self) -> int:
        """Join and serve until SIGTERM; return the exit status. Raises UsageError where the device is none."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        read, write = os.pipe()
        child = Child(self._handoff.settings, self._handoff.device, read)
        try:
            await child.start()
            return await self._join_for_ever(child)
        except DeviceGone:
            log.error("%s cannot be used", self._handoff.device)  # noqa: TRY400 (its own log says more)
            return os.EX_UNAVAILABLE
        finally:
            await child.close()
            os.close(write)
            os.close(read)

    async def _join_for_ever(self, child: Child) -> int:
        pause_s = 0.0
        while (control := await self._unless_stopped(child.connected())) is not None:
            try:
                opened = await self._unless_stopped(Link.open(self._address, self._greeting()))
            except JoinRefused as refused:
                self._say(f"the front refuses this worker: {refused}")
                if refused.slug in REFUSED:
                    return REFUSED[refused.slug]
            except (OSError, TimeoutError, ProtocolError) as error:
                self._say(f"no front at {self._handoff.join}: {error or type(error).__name__}")
            else:
                if opened is None:
                    break
                link, joined = opened
                pause_s, self._said = 0.0, None
                if joined.block_side != child.block_side:
                    link.close("the worker starts again with the front's block side")
                    child.block_side = joined.block_side
                    child.kill()
                    continue
                await self._serve(link, joined, child, control)
                continue
            pause_s = min(max(2 * pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
            await self._unless_stopped(asyncio.sleep(pause_s * random.uniform(0.5, 1.0), True))  # noqa: S311 (no secret)
        return 0

    async def _serve(self, link: Link, joined: Joined, child: Child, control: Control) -> None:
        """Serve the front until the link ends, or the worker, or this agent is told to stop."""
        log.info("joined %s as %s", self._handoff.join, joined.worker)
        if joined.server != self._server:
            self.memory.clear()
            self._server = joined.server
        over = asyncio.get_running_loop().create_future()

        def end(reason: str) -> None:
            if not over.done():
                over.set_result(reason)

        def fail(error: Exception) -> None:
            end(str(error))

        fetches = Exchanges(self._address, joined.link, _FETCHES, fail, link.lasts)
        uploads = Exchanges(self._address, joined.link, _UPLOADS, fail, link.lasts)
        relay = Relay(link, control, self.memory, fetches, uploads, fail, inline_bytes=self._handoff.inline_bytes)
        self._relay = relay

        def front_said(message: FromFront) -> None:
            if isinstance(message, Stop):
                end("the front ends")
            else:
                relay.front_said(message)

        link.on_message, link.on_bytes, link.on_lost = front_said, relay.bytes_came, end
        link.on_task = lambda sent: relay.tasks_came([sent])
        control.on_lost = lambda: end("the worker is gone")
        assert control.hello is not None
        if link.reason is not None or not control.alive:
            end(link.reason or "the worker is gone")
        else:
            link.send(control.hello.model_copy(update={"worker": joined.worker}))
            control.attach(relay.worker_said)
            if self._rate is None:
                self._measure(link, fetches)
        beat_s = joined.heartbeat_timeout_s
        stop = asyncio.get_running_loop().create_task(self._stopping.wait())
        try:
            while not over.done():
                await asyncio.wait({over, stop}, timeout=beat_s / 4, return_when=asyncio.FIRST_COMPLETED)
                if stop.done() and not over.done():
                    relay.drain(lambda: end("told to stop"))
                    await asyncio.wait({over}, timeout=self._handoff.settings.drain_s)
                    end("told to stop, and its task took too long")
                for exchanges in (fetches, uploads):
                    exchanges.look(beat_s)
                if not over.done() and time.monotonic() - control.heard > beat_s:
                    child.kill()
                    end(f"the worker gave no sign of life for {beat_s:.1f} s")
        finally:
            stop.cancel()
            reason = over.result() if over.done() else "told to stop"
            log.info("the link ended: %s", reason)
            if stop.done():
                link.send(Leave())
            link.close(reason, flush=stop.done())
            fetches.close()
            uploads.close()
            control.on_lost = _nothing
            control.attach(_ignore)
            await child.settle(control, joined.heartbeat_timeout_s * (1 - AGENT_SHARE) / 2)
            self._relay = None  # the worker forgets all extents by itself when it comes again
            relay.end()

    def _greeting(self) -> Join:
        handoff = self._handoff
        return Join(
            token=handoff.token,
            name=handoff.name,
            host=socket.gethostname(),
            device=handoff.device,
            cache_bytes=handoff.memory_bytes,
            link_bytes_s=self._rate,
            session=self._session,
        )

    def _measure(self, link: Link, fetches: Exchanges) -> None:
        """Measure the link, once: after the first piece, whose time says how many more."""
        target = memoryview(bytearray(_PROBE_PIECE))
        piece = (Probe(_PROBE_PIECE).target, target)
        began = time.monotonic()

        def first(_: Exception | None) -> None:
            spent_s = time.monotonic() - began
            count = min(int(_PROBE_S / max(spent_s, 1e-4)), PROBE_BYTES // _PROBE_PIECE - 1)
            if count < 1:
                say(_PROBE_PIECE / spent_s)
                return
            again = time.monotonic()
            fetches.fetch(
                [piece] * count, lambda _: say(count * _PROBE_PIECE / max(time.monotonic() - again, 1e-6)), urgency=2
            )

        def say(bytes_s: float) -> None:
            self._rate = bytes_s
            link.send(Rate(bytes_s=bytes_s))

        fetches.fetch([piece], first, urgency=2)

    def _destroyed(self, extent: str) -> None:
        if self._relay is not None:
            self._relay.extent_gone(extent)

    def _say(self, text: str) -> None:
        """Log why it could not join, unless that was said last."""
        if text != self._said:
            self._said = text
            log.warning("%s", text)

    async def _unless_stopped(self, coroutine: Coroutine[None, None, T]) -> T | None:
        """Return what a coroutine returns; None if the agent is told to stop before."""
        task = asyncio.get_running_loop().create_task(coroutine)
        stop = asyncio.get_running_loop().create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() and not self._stopping.is_set() else None
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)


def _ignore(*_: object) -> None:
    """Handler of what a worker says after the end of its link: it is of no use."""


def _nothing() -> None:
    """Handler of the end of such a connection."""
