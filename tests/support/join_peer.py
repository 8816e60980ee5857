"""A joined worker in a test's own hands: it speaks the protocol by plain sockets, and lies where the test wants it to.

with JoinPeer(port, name="liar") as peer:
    peer.hello()
    work = peer.task()
    peer.put(work, "d", data)      # -> status
    peer.done(work)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from typing import Any, Self

import numpy as np

from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_service.executor.join_protocol import (
    GREETING,
    PROTOCOL,
    Frame,
    JoinDecoder,
    ReadExtent,
    ResultBytes,
    WriteResult,
    binary_frame,
)
from gemmserve_service.executor.port import spec_adapter
from gemmserve_service.executor.protocol import Done, Form, Hello, encode
from gemmserve_service.schemas import Timings

_WAIT_S = 120.0


class Work:
    """Task of one product, as it came: what the rows of its arrays are."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.task: str = fields["task"]
        self.attempt: int = fields["attempt"]
        (self._part,) = fields["parts"]
        self.form = Form.model_validate_json(self._part["form"])
        self.algorithm: str = self._part["algorithm"]

    def place(self, name: str) -> tuple[str, int, int]:
        """Extent, offset in its file, and bytes of an array."""
        side, kinds = ("operands", self.form.operands) if name in self.form.operands else ("results", self.form.results)
        ((number, offset),) = self._part[side][name]
        extent, _, _, start, _ = self.fields["extents"][number]
        return extent, start + offset, math.prod(kinds[name].shape) * np.dtype(kinds[name].dtype).itemsize


class JoinPeer:
    """One link, and exchanges of data by its secret."""

    def __init__(
        self, port: int, name: str = "peer", *, token: str | None = None, device: str = "cpu", **fields: Any
    ) -> None:
        self._address = ("127.0.0.1", port)
        self.join = {
            "protocol": PROTOCOL,
            "name": name,
            "device": device,
            "token": token,
            "session": os.urandom(8).hex(),
            **fields,
        }
        self.said: list[dict[str, Any]] = []
        """What came by the link, but bytes."""
        self.raw: dict[tuple[str, int], bytes] = {}
        """Bytes of operands that came by the link, by extent and offset."""
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self.ended = threading.Event()
        """Set once the front has closed the link."""
        self.secret = ""

    def __enter__(self) -> Self:
        """Joins. Raises PermissionError with what the front said where it refuses."""
        self.link = socket.create_connection(self._address, timeout=_WAIT_S)
        self.link.sendall(GREETING + frame({"kind": "join", **self.join}))
        self._decoder = JoinDecoder()
        self._read = threading.Thread(target=self._receive, daemon=True)
        self._read.start()
        first = self.wait("joined", "refused")
        if first["kind"] == "refused":
            self.__exit__()
            raise PermissionError(first["slug"], first["detail"])
        self.secret, self.id = first["link"], first["worker"]
        self.joined = first
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)
        self._read.join(_WAIT_S)
        self.link.close()

    def hello(self, *, beats: bool = True, **fields: Any) -> None:
        """Greets, as a processor's worker; and beats every half a second from then on."""
        spec = spec_adapter().dump_python(DeviceSpec.cpu(), mode="json")
        self.send(encode(Hello(worker=self.id, pid=1, spec=spec, verified_error=0.0, **fields)))
        if beats:
            threading.Thread(target=self._beat, daemon=True).start()

    def send(self, data: bytes) -> None:
        """Sends bytes by the link."""
        with self._sending:
            self.link.sendall(data)

    def wait(self, *kinds: str) -> dict[str, Any]:
        """Return the first message of these kinds that came, and drop it and what came before it."""
        with self._changed:
            deadline = time.monotonic() + _WAIT_S
            while True:
                for at, message in enumerate(self.said):
                    if message["kind"] in kinds:
                        del self.said[: at + 1]
                        return message
                assert not self.ended.is_set(), f"the front closed the link; it said {self.said}"
                assert self._changed.wait(deadline - time.monotonic()), f"no {kinds} came; but {self.said}"

    def task(self) -> Work:
        """The next task, alone in its message."""
        (fields,) = self.wait("run_batch")["tasks"]
        return Work(fields)

    def get(self, work: Work, name: str) -> tuple[int, bytes]:
        """Status and bytes of an operand."""
        return self.exchange("GET", ReadExtent(*work.place(name)).target)

    def put(self, work: Work, name: str, data: bytes, *, attempt: int | None = None) -> int:
        """Status of the upload of a result."""
        extent, offset, _ = work.place(name)
        target = WriteResult(work.task, work.attempt if attempt is None else attempt, extent, offset).target
        return self.exchange("PUT", target, data)[0]

    def exchange(self, method: str, target: str, body: bytes = b"", *, secret: str | None = None) -> tuple[int, bytes]:
        """Status and body of one exchange, on a connection of its own."""
        with self.connection() as connection:
            head = [f"{method} {target} HTTP/1.1", "Host: front"]
            head += [f"Authorization: Bearer {self.secret if secret is None else secret}"]
            head += [f"Content-Length: {len(body)}"] if method == "PUT" else []
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
                connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
            return answer(connection)

    def connection(self) -> socket.socket:
        """A new connection to the port."""
        return socket.create_connection(self._address, timeout=_WAIT_S)

    def inline(self, work: Work, name: str, data: bytes, *, attempt: int | None = None) -> None:
        """Sends a small result by the link."""
        extent, offset, _ = work.place(name)
        attempt = work.attempt if attempt is None else attempt
        head = ResultBytes(task=work.task, attempt=attempt, extent=extent, offset=offset)
        self.send(b"".join(binary_frame(head, data)))

    def done(self, work: Work, **fields: Any) -> None:
        """Says that the task is done."""
        self.send(encode(Done(task=work.task, algorithm=work.algorithm, timings=Timings(), **fields)))

    def _beat(self) -> None:
        while not self.ended.wait(0.5):
            with contextlib.suppress(OSError):
                self.send(frame({"kind": "beat"}))

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.link.recv(1 << 16):
                for each in self._decoder.feed(data):
                    self._take(each)
        self.ended.set()
        with self._changed:
            self._changed.notify_all()

    def _take(self, each: Frame) -> None:
        message = json.loads(each.body)
        with self._changed:
            if each.raw is not None:
                place = message["extent"], message["offset"]
                self.raw[place] = (self.raw[place] if each.at else b"") + bytes(each.raw)
            else:
                self.said.append(message)
            self._changed.notify_all()


def frame(message: dict[str, Any]) -> bytes:
    """A frame of JSON, whatever it says."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer; (0, b"") where the connection ends without one."""
    with connection.makefile("rb") as file:
        try:
            line = file.readline()
            if not line:
                return 0, b""
            headers = {}
            while (text := file.readline()) not in {b"\r\n", b""}:
                name, _, value = text.decode().partition(":")
                headers[name.lower()] = value.strip()
            return int(line.split()[1]), file.read(int(headers.get("content-length", 0)))
        except ConnectionResetError:
            return 0, b""
