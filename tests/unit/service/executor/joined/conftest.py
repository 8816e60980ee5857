"""A core whose workers join, and nodes that speak the protocol as a test wants it, in the same event loop."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_service.executor.join_protocol import (
    GREETING,
    TO_AGENT,
    Join,
    JoinDecoder,
    Joined,
    Pulse,
    ReadExtent,
    Refused,
    ResultBytes,
    WriteResult,
    binary_frame,
)
from gemmserve_service.executor.joined.executor import JoinedExecutor
from gemmserve_service.executor.port import spec_adapter
from gemmserve_service.executor.protocol import Done, Hello, RunBatch, encode
from gemmserve_service.jobs.core import Core
from gemmserve_service.schemas import Timings
from gemmserve_service.tenancy.keyring import KeyringWatch


class Answer:
    """Status and body of a data exchange; None for a connection that ended."""

    def __init__(self, status, body=b""):
        self.status, self.body = status, body


class DataConnection:
    """A data connection, request by request."""

    def __init__(self, reader, writer, secret):
        self.reader, self.writer, self.secret = reader, writer, secret

    def send(self, method, target, body=b"", length=None):
        """Sends a head, and of a body what is given."""
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.secret}\r\n"
        if method == "PUT":
            head += f"Content-Length: {len(body) if length is None else length}\r\n"
        self.writer.write(head.encode() + b"\r\n" + body)

    async def answer(self):
        try:
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        status = int(head.split()[1])
        length = 0
        for line in head.decode().lower().split("\r\n"):
            if line.startswith("content-length:"):
                length = int(line.split(":")[1])
        try:
            return Answer(status, await asyncio.wait_for(self.reader.readexactly(length), 60))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def exchange(self, method, target, body=b""):
        self.send(method, target, body)
        return await self.answer()


class Node:
    """A node whose agent says what the test says."""

    def __init__(self, port, name="node", token=None, session="0" * 16):
        self.port = port
        self.join = Join(name=name, device="cpu", session=session, token=token, host="there", cache_bytes=1 << 20)
        self.decoder = JoinDecoder()
        self.heard = []
        self.frames = []
        self.writers = []

    async def connect(self, hello=True):
        """Joins; the front's first answer."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(self.writer)
        self.writer.write(GREETING + encode(self.join))
        self.joined = await self.hear(Joined, Refused)
        if hello and isinstance(self.joined, Joined):
            self.hello()
        return self

    def hello(self, **fields):
        spec = spec_adapter().dump_python(DeviceSpec.cpu(), mode="json")
        self.say(Hello(**{"worker": self.join.worker, "pid": 1, "spec": spec, "verified_error": 1e-8} | fields))

    def say(self, message):
        self.writer.write(message if isinstance(message, bytes) else encode(message))

    async def hear(self, *kinds):
        """The next message, of these kinds if any are named; None at the link's end. Binary frames go to `frames`."""
        while True:
            while self.heard:
                message = self.heard.pop(0)
                if not isinstance(message, Pulse) and (not kinds or isinstance(message, kinds)):
                    return message
            try:
                data = await asyncio.wait_for(self.reader.read(1 << 16), 60)
            except ConnectionError:
                return None
            if not data:
                return None
            for frame in self.decoder.feed(data):
                message = TO_AGENT.validate_json(frame.body)
                if frame.raw is not None:
                    before = self.frames.pop()[1] if frame.at else b""
                    self.frames.append((message, before + bytes(frame.raw)))
                else:
                    self.heard.append(message)

    async def task(self):
        (work,) = (await self.hear(RunBatch)).tasks
        return work

    async def data(self, secret=None):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        self.writers.append(writer)
        return DataConnection(reader, writer, self.joined.link if secret is None else secret)

    def done(self, work, **fields):
        self.say(Done(**{"task": work.task, "algorithm": "numpy", "timings": Timings(kernel_s=0.001)} | fields))

    def inline(self, work, data, name="d", of=None, after=0):
        """Sends a result by the link; `of`: so many bytes of the frame alone, or those `after` so many."""
        extent, offset = place(work, name)
        head = ResultBytes(task=work.task, attempt=work.attempt, extent=extent, offset=offset)
        self.say(b"".join(binary_frame(head, data))[after:of])

    def close(self):
        for writer in self.writers:
            writer.close()


def place(work, name):
    """Extent and offset of an array of a task of one product."""
    (part,) = work.parts
    row, offset = (part.operands | part.results)[name][0]
    extent, _, _, start, _ = work.extents[row]
    return extent, start + offset


def reads(work, name, nbytes):
    return ReadExtent(*place(work, name), nbytes).target


def writes(work, name="d", **fields):
    extent, offset = place(work, name)
    return WriteResult(
        **{"task": work.task, "attempt": work.attempt, "extent": extent, "offset": offset} | fields
    ).target


@pytest.fixture
def targets():
    """(reads, writes): targets of data exchanges about a task."""
    return reads, writes


@pytest.fixture
async def make_joined(make_settings):
    """make_joined(**settings): a core all of whose workers join."""
    cores = []

    async def make(**fields):
        listener = socket.create_server(("127.0.0.1", 0))
        settings = make_settings(device="none", join_port=0, **{"join_silence_s": 3600} | fields)
        settings.data_dir.mkdir(exist_ok=True)
        keyring = KeyringWatch(settings.data_dir)
        executor = JoinedExecutor(listener, settings, keyring)
        core = Core(settings, executor, keyring=keyring)
        core.port = listener.getsockname()[1]
        await core.start()
        cores.append(core)
        return core

    yield make
    for core in cores:
        await core.stop()


@pytest.fixture
async def joined(make_joined):
    return await make_joined()


@pytest.fixture
async def make_node(joined, eventually):
    """make_node(name): a node that has joined and said hello."""
    nodes = []

    async def make(name="node", *, hello=True, core=joined, **fields):
        node = Node(core.port, name, **fields)
        nodes.append(node)
        await node.connect(hello)
        if hello and isinstance(node.joined, Joined):
            await eventually(lambda: any(w.ready and w.id == node.join.worker for w in core.executor.workers()))
        return node

    yield make
    for node in nodes:
        node.close()
