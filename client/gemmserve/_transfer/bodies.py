"""Bodies to send and receivers for what comes back: both directions of the wire, without doing any I/O.

A body knows its length and yields its pieces anew for every attempt. A receiver is fed the pieces of one answer and
gives its value at the end; large arrays are received in the memory that the caller will own.
"""

from __future__ import annotations

import io
import json
import secrets
import zipfile
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

import numpy as np

from gemmserve import _errors
from gemmserve._transfer.arrays import npy_header, pieces
from gemmserve.wire import (
    DATA_HEADER,
    NPY,
    NPY_HEADER,
    NPZ,
    RESULT_DTYPES,
    NpyError,
    NpyHeader,
    parse_npy_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gemmserve._transfer.arrays import AnyArray

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_JOIN_BELOW: Final = 1 << 16
"""Pieces are joined up to here, so that a small request is one write; the figure has no finer source."""

_BOUNDARY: Final = secrets.token_hex(16)  # of every request: the server does not parse a head again that it has seen
_MAX_JSON: Final = 64 << 20
"""Upper bound in bytes of an answer that is not an array; none comes near it. It bounds what a stray server can make
us hold."""


class Body:
    """Body that a request sends: parts one behind the other, arrays of them from their own memory."""

    def __init__(self, content_type: str, parts: Sequence[bytes | AnyArray]) -> None:
        self.content_type = content_type
        self.nbytes = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
        self._parts = parts

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The whole body once, from its start."""
        return joined(self._walk())

    def _walk(self) -> Iterator[bytes | memoryview]:
        for part in self._parts:
            if isinstance(part, bytes):
                yield part
            else:
                yield from pieces(part)


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Strict JSON; NumPy scalars count as numbers. Raises ParameterInvalid for what JSON has no word for."""
    try:
        return _ENCODER.encode(value).encode()
    except (TypeError, ValueError) as error:
        raise _errors.ParameterInvalid(f"a parameter cannot be sent as JSON: {error}") from error


def _plain(item: object) -> Any:
    if isinstance(item, np.generic):
        return item.item()
    raise TypeError(f"{type(item).__name__} cannot be sent")


_ENCODER: Final = json.JSONEncoder(allow_nan=False, default=_plain)


def json_body(value: Mapping[str, Any]) -> Body:
    """A JSON object. Raises ParameterInvalid."""
    return Body("application/json", [encode_json(value)])


class NpyBody(Body):
    """An array as .npy."""

    def __init__(self, array: AnyArray) -> None:
        self.array = array
        super().__init__(NPY, [npy_header(array), array])

    def header_alone(self) -> Body:
        """The body of the same array when its data go by shared memory."""
        return Body(NPY_HEADER, [npy_header(self.array)])


def form_head(boundary: str, params: Mapping[str, Any]) -> bytes:
    """Beginning of a form: its part of parameters as JSON, first, so that it can be judged before any array arrives."""
    disposition = 'Content-Disposition: form-data; name="params"'
    return f"--{boundary}\r\n{disposition}\r\nContent-Type: application/json\r\n\r\n".encode() + encode_json(params)


def part_head(boundary: str, name: str) -> str:
    """Beginning of the part of a form that holds the array of that name; further headers follow."""
    return f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{name}.npy"\r\n'


class MultipartBody(Body):
    """multipart/form-data of parameters, then arrays.

    Of those named in `numbers` the header alone is sent: their data are in the shared memory of that number.
    """

    def __init__(
        self, params: Mapping[str, Any], arrays: Mapping[str, AnyArray], numbers: Mapping[str, int] = {}
    ) -> None:
        self.arrays = arrays
        self._params = params
        parts: list[bytes | AnyArray] = [form_head(_BOUNDARY, params)]
        for name, array in arrays.items():
            head = part_head(_BOUNDARY, name)
            if name in numbers:
                head += f"Content-Type: {NPY_HEADER}\r\n{DATA_HEADER}: {numbers[name]}\r\n\r\n"
                parts.append(head.encode() + npy_header(array))
            else:
                head += f"Content-Type: {NPY}\r\n\r\n"
                parts += [head.encode() + npy_header(array), array]
        parts.append(f"\r\n--{_BOUNDARY}--\r\n".encode())
        super().__init__(f"multipart/form-data; boundary={_BOUNDARY}", parts)

    def shared(self, numbers: Mapping[str, int]) -> Body:
        """The body of the same request when some arrays' data go by shared memory."""
        return MultipartBody(self._params, self.arrays, numbers)


def joined(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes with neighbouring small pieces made one; large pieces pass through uncopied."""
    small = bytearray()
    for part in parts:
        if len(small) + len(part) <= _JOIN_BELOW:
            small += part
            continue
        if small:
            yield bytes(small)
            small.clear()
        if len(part) > _JOIN_BELOW:
            yield part
        else:
            small += part
    if small:
        yield bytes(small)


class Receiver(Protocol[T_co]):
    """Takes one answer's body piece by piece. Raises ProtocolError when it is not what was asked for."""

    def feed(self, piece: bytes | memoryview) -> None: ...

    def finish(self) -> T_co: ...


@runtime_checkable
class Placing(Protocol):
    """A receiver that knows where bytes belong before they come."""

    def place(self) -> memoryview:
        """Return the memory where the next bytes belong; empty while that is not known."""
        ...

    def landed(self, count: int) -> None:
        """Record that `count` bytes were read to `place()`."""
        ...


class Whole:
    """Collects a body that is small by nature and parses it at the end."""

    def __init__(self, parse: Callable[[bytes], Any]) -> None:
        self._parse = parse
        self._data = bytearray()

    def feed(self, piece: bytes | memoryview) -> None:
        if len(self._data) + len(piece) > _MAX_JSON:
            raise _errors.ProtocolError(f"an answer of more than {_MAX_JSON} bytes where a short one was expected")
        self._data += piece

    def finish(self) -> Any:
        return self._parse(bytes(self._data))


def parse_json(data: bytes) -> Any:
    """The decoded JSON, or ProtocolError."""
    try:
        return json.loads(data.decode())
    except ValueError:
        raise _errors.ProtocolError(f"the answer is not JSON: {data[:80]!r}") from None


class NpyReceiver:
    """Receives a .npy straight into the array it returns: header from the first pieces, then every piece in place.

    `feed` takes them in order; `put` and `memory` are for those that know where in the file they are.
    """

    def __init__(self, content_length: int | None, out: AnyArray | None = None) -> None:
        """`out`: memory that is received into, if the file's array lies as it does; else fresh memory is."""
        self._content_length = content_length
        self._out = out
        self._head = bytearray()
        self._array: AnyArray | None = None
        self.header = b""
        """The .npy header as it came, once it is whole."""
        self._target = memoryview(bytearray())
        self._position = 0
        self._offset = 0

    def feed(self, piece: bytes | memoryview) -> None:
        self.put(self._position, piece)
        self._position += len(piece)

    def put(self, position: int, piece: bytes | memoryview) -> None:
        """The file's bytes from `position` on; in order until the header is whole."""
        if self._array is not None:
            self._store(position - self._offset, piece)
            return
        if position != len(self._head):
            raise _errors.ProtocolError("the .npy header has not come yet")
        self._head += piece
        try:
            header = parse_npy_header(self._head, RESULT_DTYPES)
        except NpyError as error:
            raise _errors.ProtocolError(f"the answer is no array: {error}") from error
        if header is not None:
            self._begin(header)

    def _begin(self, header: NpyHeader) -> None:
        expected = header.data_offset + header.nbytes
        if self._content_length is not None and self._content_length != expected:
            raise _errors.ProtocolError(
                f"the answer's header promises {expected} bytes, Content-Length says {self._content_length}"
            )
        self._offset = header.data_offset
        out, self._out = self._out, None
        if out is not None and _lies_as(out, header):
            self._array = out
        else:
            self._array = np.empty(header.shape, header.dtype, order="F" if header.fortran_order else "C")
        if self._array.nbytes:
            self._target = self._array.reshape(-1, order="A").view(np.uint8).data
        head, self._head = self._head, bytearray()
        self.header = bytes(head[: self._offset])
        self._store(0, memoryview(head)[self._offset :])

    def _store(self, start: int, piece: bytes | memoryview) -> None:
        if start + len(piece) > len(self._target):
            raise _errors.ProtocolError("the answer is longer than its .npy header says")
        self._target[start : start + len(piece)] = piece

    def memory(self, position: int, stop: int | None) -> memoryview:
        """Return the memory where the file's bytes [position, stop) belong; empty while that is not known."""
        if self._array is None:
            return memoryview(b"")
        end = len(self._target) if stop is None else stop - self._offset
        return self._target[position - self._offset : end]

    def place(self) -> memoryview:
        """Return the memory where the next bytes belong; empty while that is not known."""
        return self.memory(self._position, None)

    def landed(self, count: int) -> None:
        """Record that `count` more bytes are there."""
        self._position += count

    def stored(self, start: int, stop: int) -> memoryview:
        """The file's bytes [start, stop) behind the header, where they are."""
        return self._target[max(start - self._offset, 0) : stop - self._offset]

    def finish(self) -> AnyArray:
        came = self._position - self._offset
        if self._array is None or came != len(self._target):
            # Content-Length frames the answer, so this is a broken transfer, not a misunderstanding: worth a retry.
            raise _errors.TransportError(f"the answer ended after {came} of {len(self._target)} data bytes")
        return self.array()

    def array(self) -> AnyArray:
        """Return the received array, in this machine's byte order."""
        assert self._array is not None
        return self._array if self._array.dtype.isnative else self._array.astype(self._array.dtype.newbyteorder("="))


def _lies_as(array: AnyArray, header: NpyHeader) -> bool:
    """Whether the elements of a file with that header can be received into an array's memory as they come."""
    contiguous = array.flags.f_contiguous if header.fortran_order else array.flags.c_contiguous
    return bool(contiguous and array.flags.writeable and array.shape == header.shape and array.dtype == header.dtype)


class NpzReceiver:
    """Receives several arrays: a .npz, collected in memory, for reductions are small beside what they reduce."""

    def __init__(self) -> None:
        self._data = io.BytesIO()

    def feed(self, piece: bytes | memoryview) -> None:
        self._data.write(piece)

    def finish(self) -> dict[str, AnyArray]:
        self._data.seek(0)
        try:
            with np.load(self._data, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise _errors.ProtocolError(f"the answer is no .npz: {error}") from error


def receive_arrays(headers: Mapping[str, str]) -> NpyReceiver | NpzReceiver:
    """The receiver that fits the answer's Content-Type. Raises ProtocolError when it holds no array."""
    kind = (headers.get("content-type") or "").partition(";")[0].strip().lower()
    length = headers.get("content-length")
    if kind == NPY:
        return NpyReceiver(int(length) if length and length.isdecimal() else None)
    if kind in {NPZ, "application/zip"}:
        return NpzReceiver()
    raise _errors.ProtocolError(f"the answer is {kind or 'of no type'}, not an array; is this a gemmserve server?")
