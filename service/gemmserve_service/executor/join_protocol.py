"""Protocol of the front and workers that join it over TCP: greeting, frames, heads of data exchanges.

One port takes two kinds of connections, told apart by their first bytes:

A **link** begins with the line `GREETING`, then a frame `Join`; the front answers `Joined` or `Refused`. After that
both send the messages of `protocol` (the agent on the node stands for its worker process), `Pulse`, `Rate`, `Leave`,
and bytes of small arrays. A frame is four bytes of length, big-endian, then JSON. With the length's top bit set it is a
**binary frame**: the length counts four bytes of the header's length, the header, which is JSON, and raw bytes after
it, which are dealt with as they come.

Anything else is a **data exchange**: HTTP/1.1, `Authorization: Bearer <secret of the link>`, targets made here:

`GET /internal/extents/{extent}?offset=&length=`
: 200 with these bytes of an operand; 410 if no task that the link has now reads them.

`PUT /internal/results/{task}/{attempt}/{extent}?offset=`
: 204; 409 `stale-attempt` if the link does not have the task in this attempt; 403 if they are no place of its results.
With `&rows=&stride=` the body is cut into so many rows of equal length, which begin `stride` bytes apart.

`GET /internal/probe?length=`, `PUT /internal/probe`
: 200 with so many bytes of nothing; 204.

Offsets count from the beginning of the extent row's file: a place's offset and the row's `start`. Any refusal of a PUT
closes the connection.
"""

from __future__ import annotations

import struct
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gemmserve_service.executor.protocol import (
    Beat,
    Cancel,
    Compiling,
    Done,
    Drop,
    Failed,
    Forget,
    Hello,
    Kept,
    ProtocolError,
    RunBatch,
    Stop,
    Write,
    Written,
)

PROTOCOL: Final = 1
GREETING: Final = b"GEMMSERVE-LINK/1\r\n"
BEAT_S: Final = 1.0
"""Seconds between two signs of life, both ways: `Pulse` of a process at the link's ends, `Beat` of the worker's."""
AGENT_SHARE: Final = 0.8
"""Share of `Joined.silence_s` after which the agent gives up its tasks: before the front gives them away."""
INLINE_BYTES: Final = 1 << 16
"""Bytes of small operands of one task that may go in binary frames, together."""
RESULT_BYTES: Final = 1 << 20
"""Bytes of the results of one task that may, likewise."""
MAX_GREETING_FRAME: Final = 1 << 14
"""Bytes of a frame before the link is joined."""
MAX_FRAME: Final = 1 << 27
"""Bytes of a frame after that."""
PROBE_BYTES: Final = 8 << 20
"""Bytes that an agent sends or asks for to measure its link, at most."""

_LENGTH: Final = 4
_WORD: Final = struct.Struct(">I")
_BINARY: Final = 1 << 31
_EXTENTS: Final = "/internal/extents/"
_RESULTS: Final = "/internal/results/"
_PROBE: Final = "/internal/probe"
_MAX_PLACE: Final = 1 << 62


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Join(_Message):
    """Agent to front, first of all: who it is."""

    kind: Literal["join"] = "join"
    protocol: int = PROTOCOL
    token: str | None = Field(None, max_length=512, repr=False, description="worker token; null: it has none")
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="node's name, the same again after a restart"
    )
    host: str = Field(
        "", max_length=255, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$", description="host name, for people: logs and pages"
    )
    device: str = Field(pattern=r"^[a-z]+(:[0-9]{1,4})?$", description="device on the node, as in settings: cuda:0")
    cache_bytes: int = Field(0, ge=0, description="bytes of operands that it may keep")
    link_bytes_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="bytes/s of the link, as it measured; null: not yet"
    )
    session: str = Field(
        pattern=r"^[0-9a-f]{16}$", description="agent's process: one that comes again has its operands still"
    )

    @property
    def worker(self) -> str:
        """Worker's id at the front."""
        return f"{self.name}/{self.device}"


class Joined(_Message):
    """Front to agent: it may go on, with `Hello`."""

    kind: Literal["joined"] = "joined"
    protocol: int = PROTOCOL
    worker: str = Field(description="its id here: `Hello.worker` says it again")
    link: str = Field(repr=False, description="secret of this link: bearer token of its data exchanges")
    silence_s: float = Field(gt=0, description="silence of the link after which the front gives its tasks to others")
    heartbeat_timeout_s: float = Field(gt=0, description="silence of the worker after which it is taken for hung")
    block_side: int = Field(description="side of blocks of large products, as in settings")
    server: str = Field(description="the data directory's own: operands of another are of no use")


class Refused(_Message):
    """Front to agent, which it closes the link of."""

    kind: Literal["refused"] = "refused"
    slug: Literal["token", "protocol", "name", "full", "malformed"] = Field(
        description="token: unknown, revoked, or of another scope; full: too many workers, later perhaps not"
    )
    detail: str


class Pulse(_Message):
    """Front to agent, and agent to front, every second: the sender lives, and the link carries."""

    kind: Literal["pulse"] = "pulse"


class Leave(_Message):
    """Agent to front, last of all: it was told to stop, and has answered its task."""

    kind: Literal["leave"] = "leave"


class Rate(_Message):
    """Agent to front: rate of the link, measured by `/internal/probe`."""

    kind: Literal["rate"] = "rate"
    bytes_s: float = Field(gt=0, allow_inf_nan=False)


class Bytes(_Message):
    """Head of a binary frame, front to agent, before the `RunBatch` whose task reads them: bytes of an operand."""

    kind: Literal["bytes"] = "bytes"
    extent: str
    offset: int = Field(ge=0, lt=_MAX_PLACE, description="from the beginning of the row's file")


class ResultBytes(_Message):
    """Head of a binary frame, agent to front, before `Done` or `Written`: bytes of a result."""

    kind: Literal["result_bytes"] = "result_bytes"
    task: str
    attempt: int = Field(ge=0)
    extent: str
    offset: int = Field(ge=0, lt=_MAX_PLACE, description="from the beginning of the row's file")


_ToAgent = RunBatch | Cancel | Forget | Write | Drop | Stop | Pulse | Joined | Refused | Bytes
_FromAgent = Hello | Beat | Compiling | Done | Failed | Written | Kept | Rate | Join | Leave | Pulse | ResultBytes
TO_AGENT: Final[TypeAdapter[_ToAgent]] = TypeAdapter(Annotated[_ToAgent, Field(discriminator="kind")])
FROM_AGENT: Final[TypeAdapter[_FromAgent]] = TypeAdapter(Annotated[_FromAgent, Field(discriminator="kind")])


class Frame(NamedTuple):
    """One frame, or a part of a binary one: its JSON, and raw bytes; None for a frame of JSON alone."""

    body: bytes
    raw: memoryview | None = None
    at: int = 0
    """Raw bytes of the frame before these."""
    nbytes: int = 0
    """All raw bytes of the frame."""


def binary_frame(head: Bytes | ResultBytes, raw: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """Return the binary frame of a head and its bytes, in two pieces: what goes before the bytes, and these. Raises
    ProtocolError if there are too many.
    """
    return _binary(head.model_dump_json(), raw, INLINE_BYTES if isinstance(head, Bytes) else RESULT_BYTES)


def result_frame(
    task: str, attempt: int, extent: str, offset: int, raw: memoryview
) -> tuple[bytes, bytes | memoryview]:
    """Return the binary frame of these `ResultBytes`, as `binary_frame` does: an agent makes one for every result, in a
    quarter of the time that a model takes in a process that was asleep.
    """
    whose, place = f'"task":{quoted(task)},"attempt":{attempt}', f'"extent":{quoted(extent)},"offset":{offset}'
    head = f'{{"kind":"result_bytes",{whose},{place}}}'
    return _binary(head, raw, RESULT_BYTES)


def _binary(head: str, raw: bytes | memoryview, most: int) -> tuple[bytes, bytes | memoryview]:
    if len(raw) > most:
        raise ProtocolError(f"{len(raw)} bytes in one frame")
    header = head.encode()
    length = _LENGTH + len(header) + len(raw)
    return b"".join(((length | _BINARY).to_bytes(_LENGTH, "big"), len(header).to_bytes(_LENGTH, "big"), header)), raw


class JoinDecoder:
    """Cuts a stream of bytes, after the greeting, into frames of both kinds, binary ones into what has come of them.

    `limit`: bytes of a frame of JSON, which may be changed between two calls; `most`: raw bytes of a binary one.
    """

    def __init__(self, limit: int = MAX_FRAME, most: int = RESULT_BYTES) -> None:
        self.limit = limit
        self._most = most
        self._buffer = bytearray()
        """Bytes that have come of a frame of JSON, or up to the end of a header."""
        self._head = b""
        """Header of the binary frame whose bytes come."""
        self._nbytes = self._left = 0
        """Raw bytes of it, and those that have not come."""

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Return the frames that `data` completes, and parts of binary ones, whose bytes are those of `data` itself.
        Raises ProtocolError for one too long, as soon as it says so, or one whose header is longer than it.
        """
        view = memoryview(data)
        frames: list[Frame] = []
        while view:
            if self._left:
                part, view = view[: self._left], view[self._left :]
                frames.append(Frame(self._head, part, self._nbytes - self._left, self._nbytes))
                self._left -= len(part)
            elif self._buffer:
                missing = self._needs(self._buffer) - len(self._buffer)
                self._buffer += view[:missing]
                view = view[missing:]
                if len(self._buffer) == self._needs(self._buffer):
                    frames += self._complete(memoryview(self._buffer))
                    self._buffer = bytearray()
            elif len(view) < (needed := self._needs(view)):
                self._buffer += view
                break
            else:
                frames += self._complete(view[:needed])
                view = view[needed:]
        return frames

    def _needs(self, start: bytearray | memoryview) -> int:
        """Return the bytes of a frame up to its end, or its header's, as far as its first ones say it. Raises
        ProtocolError.
        """
        if len(start) < _LENGTH:
            return _LENGTH
        (word,) = _WORD.unpack_from(start)
        length: int = word & ~_BINARY
        if not word & _BINARY:
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes")
            return _LENGTH + length
        if length > min(self.limit, self._most + MAX_GREETING_FRAME):
            raise ProtocolError(f"a frame of {length} bytes")
        if length < _LENGTH:
            raise ProtocolError("a binary frame without a header")
        if len(start) < 2 * _LENGTH:
            return 2 * _LENGTH
        header: int = _WORD.unpack_from(start, _LENGTH)[0]
        if header > length - _LENGTH:
            raise ProtocolError("a binary frame whose header is longer than it")
        if (raw := length - _LENGTH - header) > self._most:
            raise ProtocolError(f"{raw} bytes in one frame")
        return 2 * _LENGTH + header

    def _complete(self, start: memoryview) -> list[Frame]:
        """Return the frame that this is, unless its bytes are still to come."""
        (word,) = _WORD.unpack_from(start)
        if not word & _BINARY:
            return [Frame(bytes(start[_LENGTH:]))]
        self._head = bytes(start[2 * _LENGTH :])
        self._nbytes = self._left = (word & ~_BINARY) - _LENGTH - len(self._head)
        return [] if self._left else [Frame(self._head, memoryview(b""))]


class ReadExtent(NamedTuple):
    """GET of bytes of an operand."""

    extent: str
    offset: int
    length: int

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{_EXTENTS}{quote(self.extent, safe='')}?offset={self.offset}&length={self.length}"


class WriteResult(NamedTuple):
    """PUT of bytes of a result; `rows` of them, `stride` bytes from the beginning of one to that of the next, where
    they are no single run.
    """

    task: str
    attempt: int
    extent: str
    offset: int
    rows: int = 1
    stride: int = 0

    @property
    def target(self) -> str:
        """Path and query."""
        window = f"&rows={self.rows}&stride={self.stride}" if self.rows != 1 else ""
        path = f"{quote(self.task, safe='')}/{self.attempt}/{quote(self.extent, safe='')}"
        return f"{_RESULTS}{path}?offset={self.offset}{window}"


class Probe(NamedTuple):
    """GET or PUT that measures the link; `length` is that of a GET."""

    length: int = 0

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{_PROBE}?length={self.length}" if self.length else _PROBE


def parse_target(method: str, target: str) -> ReadExtent | WriteResult | Probe:
    """Return what a data exchange asks for. Raises ValueError for anything else."""
    path, _, query = target.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=4) if query else []
    values = {name: _number(text) for name, text in pairs}
    if len(values) != len(pairs):
        raise ValueError("a parameter comes twice")
    if method == "GET" and path.startswith(_EXTENTS):
        _expect(values, {"offset", "length"}, {"offset", "length"})
        return ReadExtent(_name(path.removeprefix(_EXTENTS)), values["offset"], values["length"])
    if method == "PUT" and path.startswith(_RESULTS):
        task, attempt, extent = path.removeprefix(_RESULTS).split("/")
        _expect(values, {"offset"}, {"offset", "rows", "stride"})
        rows, stride = values.get("rows", 1), values.get("stride", 0)
        if rows < 1 or (rows == 1) != (stride == 0):
            raise ValueError("rows without a stride, or a stride without rows")
        return WriteResult(_name(task), _number(attempt), _name(extent), values["offset"], rows, stride)
    if path == _PROBE and method in {"GET", "PUT"}:
        _expect(values, set(), {"length"} if method == "GET" else set())
        length = values.get("length", 0)
        if length > PROBE_BYTES:
            raise ValueError("more bytes than a probe has")
        return Probe(length)
    raise ValueError("no such exchange")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or (value := int(text)) >= _MAX_PLACE:
        raise ValueError("no number of bytes")
    return value


def _name(text: str) -> str:
    if not (name := unquote(text, errors="strict")):
        raise ValueError("an empty name")
    return name


def _expect(values: dict[str, int], needed: set[str], known: set[str]) -> None:
    if not needed <= values.keys() <= known:
        raise ValueError("other parameters than it has")
