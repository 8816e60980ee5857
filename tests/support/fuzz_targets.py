"""What is fuzzed: each target takes bytes and raises AssertionError, or anything unforeseen, where an invariant breaks.

`tests/unit/service/http/test_fuzz.py` runs them for seconds on every commit, `tools/fuzz.py` (make fuzz) for as long as
one likes, with coverage guidance where atheris is installed.
"""

from __future__ import annotations

import asyncio
import io
import random
from pathlib import Path
from typing import TYPE_CHECKING

import h11
import numpy as np
import uvicorn
from request_shapes import SHAPES
from uvicorn.server import ServerState

from gemmserve.wire import DTYPES, NpyError, format_npy_header, parse_npy_header
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_service.errors import ServiceError
from gemmserve_service.http.headers.digests import parse_content_digest
from gemmserve_service.http.headers.preferences import choose_media_type, parse_prefer
from gemmserve_service.http.headers.ranges import UnsatisfiableError, parse_range
from gemmserve_service.http.protocol.connections import Connections
from gemmserve_service.http.protocol.protocol import protocol_class
from gemmserve_service.http.requests.long_json import read_object
from gemmserve_service.http.requests.multipart import OneShotForm
from gemmserve_service.http.requests.strict_json import one_shot_params, parse_object
from gemmserve_service.http.routes.oneshot import _check
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import GemmParams
from gemmserve_service.settings import Settings
from gemmserve_service.store.declared import NpyHead

if TYPE_CHECKING:
    from collections.abc import Callable

EXPECTED = (ServiceError, KernelError, NpyError)
BOUNDARY = b"XbX"
_LARGEST_HEAD = (1 << 16) + 12


def npy(data: bytes) -> None:
    """The .npy header: bounded, deterministic however the bytes are cut, and no more lenient than NumPy."""
    try:
        header = parse_npy_header(data)
    except NpyError:
        header = None
    assert header is None or header.data_offset <= min(len(data), _LARGEST_HEAD)
    if header is not None:
        assert header.dtype.newbyteorder("=") in DTYPES.values()
        assert header.nbytes == int(np.prod([int(n) for n in header.shape], dtype=object)) * header.dtype.itemsize
        assert header.nbytes < 1 << 62
        theirs = _numpy_s(data)
        assert theirs == (header.shape, header.fortran_order, header.dtype), theirs
    found = _in_pieces(data)
    assert (found is None) == (header is None), (found, header)
    if header is not None and found is not None:
        assert (found.shape, found.nbytes, found.dtype) == (header.shape, header.nbytes, header.dtype)


def _numpy_s(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """What NumPy reads in the same header, as version 2.0."""
    major = data[6]
    prefix, encoding = (10 if major == 1 else 12), ("utf-8" if major == 3 else "latin-1")
    text = data[prefix : prefix + int.from_bytes(data[8:prefix], "little")].decode(encoding).strip(" \n")
    body = text.encode("latin-1", "replace") + b"\n"
    file = io.BytesIO(len(body).to_bytes(4, "little") + body)
    return np.lib.format.read_array_header_2_0(file, max_header_size=1 << 20)


def _in_pieces(data: bytes):
    head = NpyHead()
    cuts = random.Random(len(data))
    start = 0
    try:
        while start < len(data):
            end = start + cuts.choice((1, 7, 64, 4096))
            if found := head.feed(data[start:end]):
                return found[0]
            start = end
    except NpyError:
        return None
    assert f"after {len(data)} bytes" in str(head.cut_short())
    return None


class _Store:
    """Stands for the ArrayStore: counts what is held, in memory."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def allocate(self, dtype, shape, order, **_):
        return _Upload(self, int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize)


class _Upload:
    def __init__(self, store: _Store, nbytes: int) -> None:
        self.nbytes, self.filled, self._store, self._open = nbytes, 0, store, True
        store.held += nbytes
        store.most = max(store.most, store.held)

    def write(self, data) -> None:
        assert self._open
        self.filled += len(data)
        assert self.filled <= self.nbytes, "more was written than was reserved"

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._store.held -= self.nbytes


class _Request:
    def __init__(self, body: bytes) -> None:
        self.scope: dict = {}
        self._pieces = self._cut(body)
        self.headers = {
            "content-length": str(len(body)),
            "content-type": f"multipart/form-data; boundary={BOUNDARY.decode()}",
        }

    @staticmethod
    def _cut(body: bytes):
        cuts = random.Random(len(body))
        start = 0
        while start < len(body):
            end = start + cuts.choice((1, 13, 64, 1000, 1 << 16))
            yield body[start:end]
            start = end

    async def receive(self):
        piece = next(self._pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}


def _run(coroutine) -> None:
    """To its end at once: nothing here waits, and an event loop would take most of the time."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something")


def multipart(data: bytes) -> None:
    """A one-shot's body: only problems come of it, never more is held than was sent, and nothing afterwards."""
    store = _Store()
    form = OneShotForm(
        store, names=("a", "b", "c"), check=lambda text, declared: _check(one_shot_params(GemmParams, text), declared)
    )
    try:
        _run(form.read(_Request(data)))
        whole = True
    except EXPECTED:
        whole = False
    assert store.most <= len(data), "more was reserved than the body can hold"
    if whole:
        assert {"a", "b"} <= form.operands.keys()
        assert all(upload.filled == upload.nbytes for upload in form.operands.values())
    form.abort()
    assert store.held == 0


def json(data: bytes) -> None:
    """The JSON of jobs and params; what is read in turns is what is read at one go."""
    found = []
    for parse in (parse_object, _in_turns, lambda text: one_shot_params(GemmParams, text)):
        try:
            found.append(repr(parse(data)))
        except EXPECTED:
            found.append("refused")
    assert found[0] == found[1], found


def _kept(_number: int, element: object) -> object:
    return element


def _in_turns(data: bytes) -> dict:
    reading = read_object(data, {"items": _kept, "a": _kept}, Turns())
    try:
        while True:
            reading.send(None)
    except StopIteration as ended:
        return ended.value


class _Wire(asyncio.Transport):
    """Takes whatever is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed or data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing comes by itself."""

    def resume_reading(self) -> None:
        """Likewise."""


def requests(data: bytes) -> None:
    """A connection: what is taken for a request is one for h11 too, with the same body, as far as h11 reads it."""
    ours = asyncio.run(_taken(data))
    theirs, whole = _h11_s(data)
    for mine, its in zip(ours, theirs, strict=False):
        assert mine == its, (mine, its)
    assert not whole or len(ours) <= len(theirs), (ours[len(theirs) :], theirs)


async def _taken(data: bytes) -> list[tuple[str, bytes]]:
    """Method and body of the requests that the app is given, in their order."""
    found: list[tuple[str, bytes]] = []

    async def app(scope, receive, send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        found.append((scope["method"], body))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, ws="none", log_config=None, lifespan="off")
    config.load()
    state = ServerState()
    settings = Settings(data_dir=Path("/nowhere"), head_timeout_s=1e6)
    protocol = protocol_class(Connections(settings))(config=config, server_state=state, app_state={})
    wire = _Wire()
    protocol.connection_made(wire)
    cuts = random.Random(len(data))
    start = 0
    while start < len(data) and not wire.closed:
        end = start + cuts.choice((1, 7, 64, 4096))
        protocol.data_received(data[start:end])
        start = end
        await asyncio.sleep(0)
    for _ in range(200):
        if not state.tasks:
            break
        await asyncio.sleep(0)
        if protocol.cycle is not None and protocol.cycle.more_body:
            break
    protocol.connection_lost(None)
    await asyncio.gather(*state.tasks)
    return found


def _h11_s(data: bytes) -> tuple[list[tuple[str, bytes]], bool]:
    """The same by h11; whether it read everything. Without Upgrade, which it would wait for an answer to."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    found: list[tuple[str, bytes]] = []
    method, body = "", b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                method, body = event.method.decode(), b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                found.append((method, body))
                connection.send(h11.Response(status_code=204, headers=[]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    return found, True
                connection.start_next_cycle()
            else:
                return found, True
    except h11.ProtocolError:
        return found, False


def headers(data: bytes) -> None:
    """Header fields with a grammar: Range, Prefer, Accept, Content-Digest."""
    text = data.decode("latin-1")
    try:
        span = parse_range(text, 1000)
        assert span is None or (0 <= span.start < span.stop <= 1000 and span.step == 1)
    except UnsatisfiableError:
        pass
    parse_prefer([text])
    choose_media_type(text, ("application/x-npy", "application/octet-stream"))
    try:
        digest = parse_content_digest(text)
        assert digest is None or len(digest) == 32
    except EXPECTED:
        pass


TARGETS: dict[str, Callable[[bytes], None]] = {
    "npy": npy,
    "multipart": multipart,
    "json": json,
    "headers": headers,
    "requests": requests,
}


def part(name: str, content: bytes, extra: bytes = b"") -> bytes:
    """One part of a form."""
    disposition = b'Content-Disposition: form-data; name="' + name.encode() + b'"'
    return b"--" + BOUNDARY + b"\r\n" + disposition + extra + b"\r\n\r\n" + content + b"\r\n"


def seeds(target: str) -> list[bytes]:
    """Well-formed inputs to begin with."""
    arrays = [np.ones((2, 2), dtype) for dtype in ("<f4", ">c16", "<f2")] + [
        np.zeros((0, 3)),
        np.asfortranarray(np.eye(3)),
    ]
    files = []
    for array in arrays:
        for version in ((1, 0), (2, 0), (3, 0)):
            file = io.BytesIO()
            np.lib.format.write_array(file, array, version=version)
            files.append(file.getvalue())
    if target == "npy":
        huge = [format_npy_header(np.dtype("f8"), (1 << 60,)), format_npy_header(np.dtype("c8"), (1 << 30, 1 << 29))]
        return files + huge
    end = b"--" + BOUNDARY + b"--\r\n"
    params = b'{"alpha": [1, 2], "trans_b": "C"}'
    if target == "multipart":
        return [
            part("a", files[0]) + part("b", files[0]) + end,
            part("params", params) + part("a", files[3]) + part("b", files[3]) + end,
            part("b", files[0], b'; filename="b.npy"\r\nContent-Type: application/x-npy') + part("a", files[0]) + end,
            part("a", files[9]) + part("b", files[0]) + part("c", files[0]) + part("params", b"{}") + end,
        ]
    if target == "json":
        job = (
            b'{"op": "gemm", "a": "arr_01jd2w7m4h8k3n5p6q9r0s1t2v", "b": "arr_01jd2w7m4h8k3n5p6q9r0s1t2v", "beta": 1e3}'
        )
        return [params, job, b'{"reduce": ["sum"], "config": {"block_m": 64}}', b"[1]", b'{"a": {"a": 1, "a": 2}}']
    if target == "requests":
        return [shape.data for shape in SHAPES]
    return [
        b"bytes=0-99",
        b"bytes=-5",
        b"bytes=1-2, 4-5",
        b"wait=10, respond-async",
        b'application/x-npy;q=0.5, */*; q="1"',
        b"sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:",
    ]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """`data` with a few bytes changed, cut, doubled or replaced by what parsers trip over."""
    dictionary = (
        b"\x93NUMPY", b"\x01\x00", b"\xff\xff", b"\xff\xff\xff\xff", b"'descr'", b"'shape'", b"(", b")", b"[", b"{",
        b"-", b"9" * 25, b"1e999", b"NaN", b"|O", b"<f8", b"\r\n", b"\r\n\r\n", b"--" + BOUNDARY,
        b"--" + BOUNDARY + b"--",
        b'name="a"', b"Content-Disposition: form-data", b"\x00", b"\xc3\x28", b"True", b"None", b"0x", b"'", b'"',
        b"\\", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Connection: Upgrade\r\nUpgrade: x\r\n",
        b"0\r\n\r\n", b" HTTP/1.1\r\n", b"\n", b"\r", b"\t", b": ",
    )  # fmt: skip
    out = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randint(0, len(out))
        match chance.randint(0, 5):
            case 0 if out:
                out[at % len(out)] = chance.randrange(256)
            case 1:
                del out[at : at + chance.randint(1, 30)]
            case 2:
                out[at:at] = chance.choice(dictionary)
            case 3:
                out[at : at + 4] = chance.choice(dictionary)
            case 4:
                out[at:at] = out[at : at + chance.randint(1, 200)] * chance.randint(1, 3)
            case _:
                out[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
    return bytes(out)
