"""Arrays of requests in shared memory instead of their bodies, to a server on this machine.

A second socket, beside the server's, takes descriptors of memory (see docs/transfer.md). What a request carries is
decided here at the last moment: the same request, with the arrays' headers only, and the numbers of the pieces of
memory. Where anything about this fails, the request goes as it was.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np

from gemmserve import _errors
from gemmserve._local.memory import MAX_OPERAND_BYTES, MAX_RESULT_BYTES, Block, Pool, find, supported
from gemmserve._transfer.arrays import is_fortran
from gemmserve._transfer.bodies import MultipartBody, NpyBody
from gemmserve.wire import (
    BY_DEVICE,
    DATA_HEADER,
    DESCRIPTORS_SUFFIX,
    KEPT,
    NPY_HEADER,
    PAGES_HEADER,
    RESULT_DTYPES,
    RESULT_HEADER,
    SESSION_HEADER,
    NpyError,
    parse_npy_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from gemmserve._calls.requests import Request
    from gemmserve._transfer.arrays import AnyArray
    from gemmserve._transfer.bodies import Receiver

T = TypeVar("T")

REFUSED: Final = "descriptor-refused"
"""The problem by which a server does not take a request's shared memory: the same request is sent with its bytes."""

_FROM_BYTES: Final = 256 << 10
"""Arrays from here on go by shared memory: the socket was as fast up to here, and faster below."""
_MAX_PACKET: Final = 16 << 10
_TIMEOUT_S: Final = 5.0  # of a server that stands still; it answers a hello at once
_PAUSE_S: Final = 1.0  # before a server that went away is asked again
_MAX_DOUBLINGS: Final = 3  # of that pause, once each time
_MAX_REFUSALS: Final = 8  # after which nothing more is offered

log = logging.getLogger("gemmserve")


class Session:
    """A connection by which memory is passed. Raises OSError, ValueError where there is no such server."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self._numbers = itertools.count(1)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(_TIMEOUT_S)
            self._socket.connect(path)
            self._socket.send(json.dumps({"kind": "hello", "version": 1, "api_key": api_key}).encode())
            self.secret = _secret(self._socket.recv(_MAX_PACKET))
        except BaseException:
            self._socket.close()
            raise

    def send(self, fd: int, offset: int = 0) -> int:
        """Passes a descriptor and returns the number by which a request may name it. Raises OSError."""
        number = next(self._numbers)
        frame = {"kind": "memory", "number": number, "offset": offset}
        socket.send_fds(self._socket, [json.dumps(frame).encode()], [fd])
        return number

    def close(self) -> None:
        """Ends it; what was passed and not used is let go by the server."""
        self._socket.close()


def _secret(answer: bytes) -> str:
    """Return the session's secret from the server's first packet. Raises ValueError."""
    match json.loads(answer or b"null"):
        case {"kind": "welcome", "session": str(secret)}:
            return secret
        case {"problem": {"detail": detail}}:
            raise ValueError(detail)
    raise ValueError("its answer is not understood")


class Staged:
    """A request whose arrays lie in shared memory. As a context manager: its exchange, after which memory is free."""

    def __init__(self, pool: Pool, session: Session, request: Request[Any]) -> None:
        self.request = request
        self.session = session
        self._pool = pool
        self._blocks: list[Block] = []
        self._result: Block | None = None

    def borrow(self, nbytes: int) -> Block | None:
        """Memory for the length of the exchange, if there is some to spare. Raises OSError."""
        block = self._pool.spare(nbytes)
        if block is not None:
            self._blocks.append(block)
        return block

    def expect(self, block: Block) -> None:
        """The result may be in `block`."""
        self._result = block

    def receiver(self, otherwise: Callable[[Mapping[str, str]], Receiver[T]]) -> Callable[[Mapping[str, str]], Any]:
        """Takes the answer from memory if it is there, else as `otherwise` does."""

        def choose(headers: Mapping[str, str]) -> Any:
            kind = (headers.get("content-type") or "").partition(";")[0].strip().lower()
            if kind == NPY_HEADER and self._result is not None and RESULT_HEADER in headers:
                self._result.mapped_elsewhere |= headers[RESULT_HEADER] == BY_DEVICE
                return _SharedReceiver(self)
            return otherwise(headers)

        return choose

    def result(self, head: bytes) -> AnyArray:
        """The array that `head`, a .npy header, describes, in the result's memory. Raises ProtocolError."""
        try:
            header = parse_npy_header(head, RESULT_DTYPES)
        except NpyError as error:
            raise _errors.ProtocolError(f"the answer is no array: {error}") from error
        block, self._result = self._result, None
        if header is None or block is None or header.nbytes > block.capacity or not header.dtype.isnative:
            raise _errors.ProtocolError("the answer's array does not fit the memory that it is said to be in")
        self._blocks.remove(block)
        block.own()
        return block.array(header.shape, header.dtype, header.order, self._pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Without an answer the server may still be at it: such memory is not used again.
        if kind is None or (isinstance(error, _errors.APIError) and error.status is not None):
            for block in self._blocks:
                self._pool.give(block)
        self._blocks.clear()


class _SharedReceiver:
    """Receiver of an answer that is a .npy header alone."""

    def __init__(self, staged: Staged) -> None:
        self._staged = staged
        self._head = bytearray()

    def feed(self, piece: bytes | memoryview) -> None:
        if len(self._head) > _MAX_PACKET:
            raise _errors.ProtocolError("an answer longer than any .npy header")
        self._head += piece

    def finish(self) -> AnyArray:
        return self._staged.result(bytes(self._head))


class SharedMemory:
    """One client's use of shared memory; safe to share between threads."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self.pool = Pool()
        self._path = path + DESCRIPTORS_SUFFIX
        self._api_key = api_key
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._not_before = 0.0
        self._failures = 0
        """Sessions that could not be begun since the last one."""
        self._refusals = 0
        self._closed = not supported()
        self._said = False

    def close(self) -> None:
        """Ends the session and gives memory back that no array uses."""
        self._closed = True
        with self._lock:
            if self._session is not None:
                self._session.close()
                self._session = None
        self.pool.close()

    def leave(self) -> None:
        """Give up a child process's copy of the session's socket, which goes on being the parent's. Does not take the
        lock, which a thread of the parent may hold for ever.
        """
        session, self._session, self._closed = self._session, None, True
        if session is not None:
            session.close()

    def worth(self, request: Request[Any]) -> bool:
        """Whether there is anything in a request that would go by shared memory."""
        return not self._closed and (
            request.result_nbytes >= _FROM_BYTES or any(_goes(array) for array in _arrays(request).values())
        )

    def takes_operand(self, array: AnyArray) -> bool:
        """Whether an array would go by shared memory, as far as is known: it lies there, or a copy has room."""
        return self._usable and (
            find(array) is not None or (array.nbytes <= MAX_OPERAND_BYTES and self.pool.has_room(array.nbytes))
        )

    def takes_result(self, nbytes: int) -> bool:
        """Whether a result of so many bytes would go by shared memory, as far as is known."""
        return self._usable and nbytes <= MAX_RESULT_BYTES and self.pool.has_room(nbytes)

    @property
    def _usable(self) -> bool:
        return not self._closed and (self._session is not None or time.monotonic() >= self._not_before)

    def stage(self, request: Request[Any]) -> Staged | None:
        """The request as it goes with shared memory; None where it goes as it is. Copies arrays that lie elsewhere."""
        session = self._open()
        if session is None:
            return None
        staged = Staged(self.pool, session, request)
        try:
            numbers: dict[str, int] = {}
            for name, array in _arrays(request).items():
                number = self._pass(session, array, staged) if _goes(array) else None
                if number is not None:
                    numbers[name] = number
            headers = {**request.headers, SESSION_HEADER: session.secret}
            goes = _FROM_BYTES <= request.result_nbytes <= MAX_RESULT_BYTES
            block = staged.borrow(request.result_nbytes) if goes else None
            if block is not None:
                headers[RESULT_HEADER] = str(session.send(block.fd))
                headers[PAGES_HEADER] = KEPT
                staged.expect(block)
        except OSError as error:
            self._lost(session, error)
            return None
        body = request.body
        if isinstance(body, MultipartBody):
            body = body.shared(numbers)
        elif isinstance(body, NpyBody) and numbers:
            headers[DATA_HEADER] = str(numbers[""])
            body = body.header_alone()
        staged.request = replace(request, headers=headers, body=body, receiver=staged.receiver(request.receiver))
        return staged

    def refused(self, staged: Staged, error: Exception) -> None:
        """The server did not take a request's: another session is begun, unless that has happened several times."""
        if staged.session is self._session:
            self._refusals += 1
        self._lost(staged.session, error)
        if self._refusals >= _MAX_REFUSALS:
            self._closed = True

    def _pass(self, session: Session, array: AnyArray, staged: Staged) -> int | None:
        """The number by which an array is passed; None: there is no memory to spare for a copy."""
        found = find(array)
        if found is not None:
            block, offset = found
            return session.send(block.fd, offset)
        spare = staged.borrow(array.nbytes) if array.nbytes <= MAX_OPERAND_BYTES else None
        if spare is None:
            return None
        order = "F" if is_fortran(array) else "C"
        np.copyto(spare.array(array.shape, array.dtype.newbyteorder("<"), order, None), array)
        return session.send(spare.fd)

    def _open(self) -> Session | None:
        with self._lock:
            if self._session is None and not self._closed and time.monotonic() >= self._not_before:
                try:
                    self._session = Session(self._path, self._api_key)
                    self._failures = 0
                except (OSError, ValueError) as error:
                    self._later(error)
            return self._session

    def _lost(self, session: Session, error: Exception) -> None:
        with self._lock:
            if self._session is session:
                self._session = None
                self._later(error)
        session.close()

    def _later(self, error: Exception) -> None:
        self._not_before = time.monotonic() + _PAUSE_S * 2 ** min(self._failures, _MAX_DOUBLINGS)
        self._failures += 1
        if not self._said:
            self._said = True
            log.info("no shared memory with %s (%s): arrays go through the socket", self._path, error)


def _arrays(request: Request[Any]) -> Mapping[str, AnyArray]:
    body = request.body
    if isinstance(body, MultipartBody):
        return body.arrays
    return {"": body.array} if isinstance(body, NpyBody) else {}


def _goes(array: AnyArray) -> bool:
    return array.nbytes >= _FROM_BYTES
