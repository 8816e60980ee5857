"""A front of the join port that does what a test says: it has arrays in memory, and gives them away and takes them."""

from __future__ import annotations

import asyncio
import re
import secrets

from gemmserve_service.executor.join_protocol import (
    FROM_AGENT,
    GREETING,
    Bytes,
    Join,
    JoinDecoder,
    Joined,
    Probe,
    Pulse,
    Rate,
    ReadExtent,
    Refused,
    ResultBytes,
    binary_frame,
    parse_target,
)
from gemmserve_service.executor.protocol import Beat, Hello, encode

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class JoinFront:
    """`extents` holds bytes by name, operands and places of results; `gets` and `puts` list what was exchanged. The
    port is open from `start` to `stop`, which may follow each other again.
    """

    def __init__(
        self, *, heartbeat_timeout_s=600.0, silence_s=None, block_side=4096, refuse=None, answer_put=None, tls=None
    ):
        self.extents: dict[str, bytearray] = {}
        self.gets, self.puts, self.inline = [], [], []
        self.joins: list[Join] = []
        self.hellos: list[Hello] = []
        self.messages: asyncio.Queue = asyncio.Queue()
        """What the worker said but beats and rates, None for the end of a link."""
        self.beats: list[Beat] = []
        self.rates: list[float] = []
        self.server = "server"
        self.port = 0
        self.pulses = True
        """Whether the agent hears of this front."""
        self.hold = asyncio.Event()
        """Clear: operands do not go out."""
        self.hold.set()
        self._timeout_s, self._block_side = heartbeat_timeout_s, block_side
        self._silence_s = silence_s or heartbeat_timeout_s
        self.pulsed = asyncio.Event()
        """Set once the agent has said that it lives."""
        self._refuse, self._answer_put, self._tls = refuse, answer_put or (lambda target: 204), tls
        self._writer = None
        self._secret = None
        self._tasks = set()
        self._server = None

    @property
    def url(self):
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self):
        return await self.start()

    async def __aexit__(self, *_):
        await self.stop()

    def say(self, *messages, inline=()):
        """Send messages to the worker, after bytes of extents: name, offset, bytes."""
        frames = [b"".join(binary_frame(Bytes(extent=name, offset=offset), raw)) for name, offset, raw in inline]
        self._writer.write(b"".join([*frames, *map(encode, messages)]))

    async def hear(self, kind=None):
        """The next message of that kind, those before it left out; a link that ends before is one for Hello alone."""
        while True:
            message = await asyncio.wait_for(self.messages.get(), 120)
            if kind is None or isinstance(message, kind):
                return message
            assert message is not None or kind is Hello, f"the link ended before {kind}"

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            first = await reader.readuntil(b"\r\n")
            if first == GREETING:
                await self._link(reader, writer)
            else:
                await self._exchanges(first, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _link(self, reader, writer):
        decoder = JoinDecoder()
        pulse = None
        try:
            while data := await reader.read(1 << 16):
                for frame in decoder.feed(data):
                    message = FROM_AGENT.validate_json(frame.body)
                    if isinstance(message, Join):
                        self.joins.append(message)
                        if self._refuse is not None:
                            writer.write(encode(Refused(slug=self._refuse, detail="not here")))
                            await writer.drain()
                            return
                        self._secret, self._writer = secrets.token_hex(16), writer
                        writer.write(
                            encode(
                                Joined(
                                    worker=message.worker,
                                    link=self._secret,
                                    silence_s=self._silence_s,
                                    heartbeat_timeout_s=self._timeout_s,
                                    block_side=self._block_side,
                                    server=self.server,
                                )
                            )
                        )
                        pulse = asyncio.create_task(self._pulse(writer))
                    elif isinstance(message, ResultBytes):
                        self.inline += [message] if not frame.at else []
                        self._put(message.extent, message.offset + frame.at, frame.raw)
                    elif isinstance(message, Hello):
                        self.hellos.append(message)
                        self.messages.put_nowait(message)
                    elif isinstance(message, Beat):
                        self.beats.append(message)
                    elif isinstance(message, Pulse):
                        self.pulsed.set()
                    elif isinstance(message, Rate):
                        self.rates.append(message.bytes_s)
                    else:
                        self.messages.put_nowait(message)
        finally:
            if pulse is not None:
                pulse.cancel()
                self.messages.put_nowait(None)

    async def _pulse(self, writer):
        while True:
            if self.pulses:
                writer.write(encode(Pulse()))
            await asyncio.sleep(self._silence_s / 20)

    def _put(self, name, offset, raw):
        extent = self.extents[name]
        assert offset + len(raw) <= len(extent)
        extent[offset : offset + len(raw)] = raw

    async def _exchanges(self, line, reader, writer):
        while True:
            head = line + await reader.readuntil(b"\r\n\r\n")
            method, target, _ = line.decode().split(" ")
            wanted = parse_target(method, target)
            if f"Bearer {self._secret}".encode() not in head:
                writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
                return
            if isinstance(wanted, Probe):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % wanted.length + bytes(wanted.length))
            elif isinstance(wanted, ReadExtent):
                await self.hold.wait()
                self.gets.append(wanted)
                data = self.extents[wanted.extent][wanted.offset : wanted.offset + wanted.length]
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            else:
                body = await reader.readexactly(int(_LENGTH.search(head)[1]))
                self.puts.append(wanted)
                status = self._answer_put(wanted)
                if status == 204:
                    self._put(wanted.extent, wanted.offset, body)
                writer.write(b"HTTP/1.1 %d Answer\r\nContent-Length: 0\r\n\r\n" % status)
                if status != 204:
                    await writer.drain()
                    return
            await writer.drain()
            line = await reader.readuntil(b"\r\n")
