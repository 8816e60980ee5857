r"""Wire format: dtypes, the .npy header, complex scalars, header names. Pure; numpy only.

The service imports this module and nothing else of the client, so both ends read and write the same bytes.

The .npy format is NumPy's own (NEP 1, and `numpy.lib.format` for versions 2.0 and 3.0): magic ``\x93NUMPY``, two
version bytes, a little-endian header length (2 bytes in 1.0, 4 in 2.0 and 3.0), then a Python literal
``{'descr': ..., 'fortran_order': ..., 'shape': ...}``. The parser here works on the first bytes of a stream, before any
of the data exists, and trusts nothing: no pickle, no structured or object dtypes, no sizes past 2**62 bytes.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NPY: Final = "application/x-npy"
NPZ: Final = "application/x-npz"
OCTET_STREAM: Final = "application/octet-stream"
PROBLEM: Final = "application/problem+json"

ALGORITHM_HEADER: Final = "Gemm-Algorithm"
ELEMENTS_HEADER: Final = "Gemm-Elements"
IDEMPOTENCY_HEADER: Final = "Idempotency-Key"
EXCHANGE_HEADER: Final = "Gemmserve-Exchange"
"""The header of a request that its answer repeats, whatever the answer is, so that no other can be taken for it. Not
X-Request-Id, which proxies such as Envoy replace on the way."""
EXCHANGE_PATTERN: Final = r"[A-Za-z0-9_-]{1,64}"
"""Pattern of the values that are repeated; of other values the answer says nothing."""

CHECKED_HEADER: Final = "Gemmserve-Checked-Digest"
"""The header of a success that repeats the Content-Digest with which the request's body was compared: without it, the
request's own field may have got lost on the way, and then nothing was compared."""

ROUTED_HEADER: Final = "Gemmserve-Routed"
"""The header that a router in front of cells adds: what is large is not to go by it, and is answered 307."""
CELLS_HEADER: Final = "Gemmserve-Cells"
"""The header that a router in front of cells adds to each answer, so that clients ask which cells there are."""
STRAIGHT_FROM: Final = 1 << 20
"""Bytes of a body above which it goes straight to its cell."""

TRACEPARENT_HEADER: Final = "traceparent"
"""The header that says which trace a request belongs to (W3C Trace Context)."""

NPY_HEADER: Final = "application/x-npy-header"
"""A .npy header alone: the data are in a piece of shared memory (docs/transfer.md)."""
SESSION_HEADER: Final = "Gemmserve-Session"
"""The secret of the connection by which shared memory was passed."""
DATA_HEADER: Final = "Gemmserve-Data"
"""Header of a request or a part: the number of the piece that holds the data."""
RESULT_HEADER: Final = "Gemmserve-Result"
"""Header of a request: the number of the piece that may take the result; of an answer: that it did, and `BY_DEVICE`
where a device wrote it, for which a worker has the memory mapped."""
BY_DEVICE: Final = "device"
PAGES_HEADER: Final = "Gemmserve-Result-Pages"
"""Header of a request: `KEPT`, where the pages of that piece stay what they are for as long as anybody has it open."""
KEPT: Final = "kept"
DESCRIPTORS_SUFFIX: Final = ".fds"
"""Suffix that the path of the socket for shared memory has after the server's."""

MAX_JOBS: Final = 1000
"""Jobs of one request to /v1/jobs, at most."""
MAX_DELETED: Final = 1000
"""Arrays that one request deletes, at most: a transaction, and a turn of the event loop, of some milliseconds."""
MAX_STATES: Final = 256
"""Jobs whose states one request asks for, at most."""

DTYPES: Final[dict[str, np.dtype]] = {
    name: np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128")
}

RESULT_DTYPES: Final[dict[str, np.dtype]] = {**DTYPES, "int64": np.dtype("int64")}
"""Dtypes of a stored array or an answer: `DTYPES` and int64, which argmax and argmin give; an operand never has it."""

PIECE: Final = 1 << 20
"""Bytes of one body piece in either direction; 1 MiB was the fastest of the sizes measured (docs/transfer.md)."""

_MAGIC: Final = b"\x93NUMPY"
_MAX_HEADER: Final = 1 << 16
_USUAL_HEADER: Final = 246  # of three blocks of 64 bytes at most; longer ones are not remembered
_MAX_NBYTES: Final = 1 << 62
_MAX_NDIM: Final = 32
_PLAIN: Final = re.compile(
    rb"\{'descr': '([<>|=]?[a-zA-Z]\d{0,3})', 'fortran_order': (True|False), "
    rb"'shape': \((?:((?:NUMBER, )*NUMBER,|(?:NUMBER, )+NUMBER))?\)(?:, ?)?\}[ \n]*".replace(
        b"NUMBER", rb"(?:0|[1-9]\d{0,18})"
    )
)
"""A header as NumPy writes it. Others are compiled, which CPython 3.11 fails at now and then when several threads do so
(SystemError: AST constructor recursion depth mismatch; python/cpython#106905)."""
_DESCR: Final = re.compile(r"[<>|=]?[a-zA-Z]\d{0,3}")


class NpyError(ValueError):
    """The bytes are no .npy array that this project reads; the message says why."""


class NpyDtypeError(NpyError):
    """A well-formed .npy header whose dtype is not one of `DTYPES`."""


@dataclass(frozen=True)
class NpyHeader:
    """Contents of a .npy header: `dtype` (possibly big-endian), `shape`, order, and where the data begins."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran_order: bool
    data_offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of data that must follow the header."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def order(self) -> str:
        """F or C."""
        return "F" if self.fortran_order else "C"


def parse_npy_header(head: bytes | bytearray | memoryview, dtypes: Mapping[str, np.dtype] = DTYPES) -> NpyHeader | None:
    """Reads the header from the first bytes of a stream; None means that more bytes are needed.

    Raises NpyError (NpyDtypeError for a dtype outside `dtypes`). Never asks for more than 64 KiB + 12 bytes.
    """
    head = bytes(head[: _MAX_HEADER + 12])
    if head.startswith(b"PK"):
        raise NpyError("a .npz archive, of several arrays, and not the .npy file of one: numpy.load(file)[name] is one")
    if not _MAGIC.startswith(head[:6]):
        raise NpyError("not a .npy file: it does not begin with \\x93NUMPY")
    if len(head) < 8:
        return None
    major, minor = head[6], head[7]
    if (major, minor) not in {(1, 0), (2, 0), (3, 0)}:
        raise NpyError(f"unknown .npy version {major}.{minor}; 1.0, 2.0 and 3.0 are read")
    prefix = 10 if major == 1 else 12
    if len(head) < prefix:
        return None
    length = int.from_bytes(head[8:prefix], "little")
    if length > _MAX_HEADER:
        raise NpyError(f"the .npy header claims {length} bytes; at most {_MAX_HEADER} are read")
    if len(head) < prefix + length:
        return None
    text = head[prefix : prefix + length]
    read = _read_literal if length <= _USUAL_HEADER else _read_literal.__wrapped__
    fields = read(text, "utf-8" if major == 3 else "latin-1")
    dtype = _parse_descr(fields["descr"], dtypes)
    return NpyHeader(dtype, check_shape(fields["shape"]), fields["fortran_order"], prefix + length)


@lru_cache(maxsize=256)  # compiling the literal is most of the work, and the same headers come again and again
def _read_literal(text: bytes, encoding: str) -> dict[str, Any]:
    if plain := _PLAIN.fullmatch(text):
        descr, fortran_order, shape = plain.groups()
        numbers = [] if shape is None else shape.rstrip(b",").split(b",")
        return {
            "descr": descr.decode("ascii"),
            "fortran_order": fortran_order == b"True",
            "shape": tuple(map(int, numbers)),
        }
    try:
        fields = ast.literal_eval(text.decode(encoding).strip(" \n"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise NpyError("the .npy header is not a Python literal") from error
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise NpyError("the .npy header must hold exactly descr, fortran_order and shape")
    if not isinstance(fields["fortran_order"], bool):
        raise NpyError("fortran_order in the .npy header must be True or False")
    return fields


def _parse_descr(descr: object, dtypes: Mapping[str, np.dtype]) -> np.dtype:
    if not isinstance(descr, str):
        raise NpyDtypeError(f"structured dtypes are not read; {_supported()}")
    if not _DESCR.fullmatch(descr):
        raise NpyDtypeError(f"dtype {descr[:40]!r} is not read; {_supported()}")
    try:
        dtype = np.dtype(descr)
    except TypeError as error:
        raise NpyDtypeError(f"dtype {descr!r} is not read; {_supported()}") from error
    if dtype.hasobject:
        raise NpyDtypeError(f"object arrays are pickles and never read; {_supported()}")
    if dtype.newbyteorder("=") not in dtypes.values():
        raise NpyDtypeError(f"dtype {dtype.name} is not supported; {_supported()}")
    return dtype


def _supported() -> str:
    return "the dtypes are " + ", ".join(DTYPES)


def parse_dtype(name: str, dtypes: Mapping[str, np.dtype] = DTYPES) -> np.dtype:
    """The dtype of that name, one of `dtypes`. Raises NpyDtypeError."""
    try:
        return dtypes[name]
    except KeyError:
        raise NpyDtypeError(f"dtype {name[:40]!r} is not supported; {_supported()}") from None


def check_shape(shape: object, itemsize: int = 16) -> tuple[int, ...]:
    """Returns `shape` as a tuple of non-negative ints whose array stays below 2**62 bytes, or raises NpyError."""
    if not isinstance(shape, (tuple, list)) or not all(type(n) is int for n in shape):
        raise NpyError("shape must be a tuple of integers")
    if len(shape) > _MAX_NDIM:
        raise NpyError(f"an array has at most {_MAX_NDIM} dimensions, not {len(shape)}")
    if any(n < 0 for n in shape):
        raise NpyError(f"shape {tuple(shape)} has a negative dimension")
    # Zero-sized dimensions do not excuse absurd ones: strides are computed from them too.
    if math.prod(max(n, 1) for n in shape) * itemsize > _MAX_NBYTES:
        raise NpyError("shape overflows: the array would exceed 2**62 bytes")
    return tuple(shape)


def parse_shape(text: str) -> tuple[int, ...]:
    """Reads ``"1024,1024"`` (the `shape` query parameter; empty for a scalar) or raises NpyError."""
    parts = text.split(",") if text else []
    if not all(re.fullmatch(r"-?[0-9]{1,19}", part) for part in parts):
        raise NpyError(f"shape {text[:80]!r} is not a list of integers such as 1024,1024")
    return check_shape([int(part) for part in parts])


def format_npy_header(dtype: np.dtype, shape: Sequence[int], *, fortran_order: bool = False) -> bytes:
    """The header of a version 1.0 .npy file (2.0 where the shape needs it), padded so that data begins at 64 bytes."""
    descr = np.dtype(dtype).newbyteorder("<").str
    literal = repr({"descr": descr, "fortran_order": fortran_order, "shape": tuple(int(n) for n in shape)})
    for version, width in ((1, 2), (2, 4)):
        prefix = 8 + width
        length = -(-(prefix + len(literal) + 1) // 64) * 64 - prefix
        if length < 1 << (8 * width):
            body = literal.encode("latin-1").ljust(length - 1) + b"\n"
            return _MAGIC + bytes((version, 0)) + length.to_bytes(width, "little") + body
    raise NpyError("shape too long for a .npy header")


def encode_scalar(value: complex) -> float | list[float]:
    """A JSON number, or ``[re, im]`` for a complex value. Raises ValueError unless finite: JSON has no NaN."""
    value = complex(value)
    if not (math.isfinite(value.real) and math.isfinite(value.imag)):
        raise ValueError(f"a scalar must be finite, not {value}")
    return [value.real, value.imag] if value.imag else value.real


def decode_scalar(value: float | Sequence[float]) -> complex | float:
    """The inverse of `encode_scalar`: a float for a JSON number, a complex for ``[re, im]``. Raises ValueError."""
    parts: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in parts)
    if not numbers or len(parts) not in {1, 2} or (len(parts) == 1 and isinstance(value, (list, tuple))):
        raise ValueError("a scalar is a number or [re, im]")
    try:
        floats = [float(x) for x in parts]
    except OverflowError:
        raise ValueError("a scalar must fit a float64") from None
    if not all(math.isfinite(x) for x in floats):
        raise ValueError("a scalar must be finite")
    return floats[0] if len(floats) == 1 else complex(floats[0], floats[1])
