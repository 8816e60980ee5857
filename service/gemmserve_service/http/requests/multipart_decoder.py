"""multipart/form-data (RFC 7578) without I/O: bytes are fed in, parts and their data come out.

The data of a part end where the next delimiter begins. Whoever knows how many they are (a .npy header says so) has them
skipped: then they are not looked at, and need not be fed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

from gemmserve.wire import DATA_HEADER, NPY_HEADER
from gemmserve_service.errors import UnsupportedMediaType
from gemmserve_service.http.problems import MalformedMultipart

MAX_PART_HEADERS: Final = 8
MAX_PART_HEADER_BYTES: Final = 4096
_MAX_BOUNDARY: Final = 70  # characters (RFC 2046, section 5.1.1)
_SEARCH_STEP: Final = 1 << 16  # bytes of a memoryview that are copied to be searched

_NAME: Final = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_FIELD: Final = re.compile(rf"({_NAME}):[ \t]*(.*)", re.DOTALL)
_OPTION: Final = re.compile(rf'[ \t]*;[ \t]*({_NAME})[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^;"\s]+)[ \t]*')


class Event(Enum):
    """Results of `MultipartDecoder.next_event` besides parts and data."""

    NEED_DATA = "need data"
    END = "end"
    """The closing delimiter. What follows it is ignored."""


NEED_DATA: Final = Event.NEED_DATA
END: Final = Event.END


@dataclass(frozen=True, slots=True)
class Part:
    """A part's headers; its data follow."""

    name: str
    """Name of the form's field."""
    shared: str | None
    """The number of the shared memory that holds the data of the array; None: they follow the .npy header."""


class _State(Enum):
    """State: what comes next, at `MultipartDecoder.position`.

    START (the first delimiter) -> DELIMITED (what is behind a delimiter) -> HEAD (a part's headers) -> DATA (its data,
    and a delimiter) -> DELIMITED -> ... -> EPILOGUE (what is ignored).
    """

    START = "start"
    DELIMITED = "delimited"
    HEAD = "head"
    DATA = "data"
    EPILOGUE = "epilogue"


class MultipartDecoder:
    """One body. `data`: its beginning, or all of it; the first `start` bytes are not of it."""

    def __init__(self, boundary: bytes, data: bytes | memoryview = b"", start: int = 0) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._state = _State.START
        self._data = data
        self._base = 0  # the position of its first byte
        self.position = start
        """Offset of the next byte that is to be decoded, counted from the first that was fed."""

    def feed(self, data: bytes) -> None:
        """The body's next bytes. To be called when there was `NEED_DATA`."""
        rest = self._data[self.position - self._base :]
        self._data = bytes(rest) + data if len(rest) else data
        self._base = self.position

    @property
    def skippable(self) -> bool:
        """Whether the next byte to come is a part's, and nothing is held back for what it might belong to."""
        return self._state is _State.DATA and self.position == self._base + len(self._data)

    def skip(self, count: int) -> None:
        """Takes the next `count` bytes for the part's data; those that were not fed will not be."""
        assert self._state is _State.DATA
        self.position += count
        if self.position > self._base + len(self._data):
            self._data, self._base = b"", self.position

    def at_delimiter(self) -> bool:
        """Whether the part's data end here, as far as was fed."""
        at = self.position - self._base
        return bytes(self._data[at : at + len(self._delimiter)]) == self._delimiter

    def next_event(self) -> Part | memoryview | Event:
        """A part, bytes of its data, or an `Event`. Raises MalformedMultipart."""
        data, delimiter = self._data, self._delimiter
        while True:
            at, state = self.position - self._base, self._state
            if state is _State.DATA:
                if isinstance(data, bytes):
                    found, end = data.find(delimiter, at), len(data)
                elif self.at_delimiter():
                    found, end = at, at
                else:
                    piece = bytes(data[at : at + _SEARCH_STEP])
                    found, end = piece.find(delimiter), at + len(piece)
                    found += at if found >= 0 else 0
                if found == at:
                    self.position += len(delimiter)
                    self._state = _State.DELIMITED
                    continue
                if found < 0:
                    found = end - self._held(bytes(data[max(at, end - len(delimiter) + 1) : end]))
                self.position = self._base + found
                return memoryview(data)[at:found] if found > at else NEED_DATA
            text, low = (data, at) if isinstance(data, bytes) else (bytes(data[at : at + MAX_PART_HEADER_BYTES]), 0)
            if state is _State.DELIMITED:
                if text.startswith(b"\r\n", low):
                    self._state = _State.HEAD
                elif text.startswith(b"--", low):
                    self._state = _State.EPILOGUE
                elif len(text) - low >= 2:
                    raise MalformedMultipart("a delimiter is followed by neither a line's end nor two hyphens")
                else:
                    return NEED_DATA
                self.position += 2
                if self._state is _State.EPILOGUE:
                    return END
            elif state is _State.HEAD:
                blank = (
                    low if text.startswith(b"\r\n", low) else text.find(b"\r\n\r\n", low, low + MAX_PART_HEADER_BYTES)
                )
                if blank >= 0:
                    self._state = _State.DATA
                    self.position += blank - low + 4
                    return _part(text[low:blank])
                if len(text) - low >= MAX_PART_HEADER_BYTES:
                    raise MalformedMultipart(f"a part's headers do not end within {MAX_PART_HEADER_BYTES} bytes")
                return NEED_DATA
            elif state is _State.START:
                # Some clients begin as if there were a part before.
                expected = delimiter if text.startswith(b"\r", low) else delimiter[2:]
                if not text.startswith(expected, low):
                    if expected.startswith(text[low:]):
                        return NEED_DATA
                    raise MalformedMultipart("the body does not begin with its boundary")
                self.position += len(expected)
                self._state = _State.DELIMITED
            else:
                self.position = self._base + len(data)
                return NEED_DATA

    def _held(self, tail: bytes) -> int:
        """Number of the last bytes that may begin a delimiter."""
        start = tail.find(b"\r")
        while start >= 0 and not self._delimiter.startswith(tail[start:]):
            start = tail.find(b"\r", start + 1)
        return len(tail) - start if start >= 0 else 0


def boundary_of(content_type: str, hint: str) -> bytes:
    """Return the boundary in a form's Content-Type. `hint`: what the client is told to send instead of other types.

    Raises UnsupportedMediaType, MalformedMultipart.
    """
    kind, options = _options(content_type)
    if kind != "multipart/form-data":
        raise UnsupportedMediaType(f"Content-Type is {content_type.partition(';')[0].strip() or 'missing'}; {hint}")
    boundary = options.get("boundary", "")
    if not 1 <= len(boundary) <= _MAX_BOUNDARY:
        raise MalformedMultipart(f"Content-Type names no boundary of 1 to {_MAX_BOUNDARY} characters")
    return boundary.encode("latin-1")


def split(body: bytes, boundary: bytes, start: int) -> dict[str, tuple[int, int]] | None:
    """Offsets in `body` at which each part's data begin and end, by name; `start`: of the first delimiter.

    None where the body is malformed or not whole, has a name twice, or arrays in shared memory. For small bodies, of
    which there are many: a quarter of the time that the decoder takes.
    """
    delimiter = b"\r\n--" + boundary
    found: dict[str, tuple[int, int]] = {}
    if not body.startswith(delimiter[2:], start):
        return None
    position = start + len(delimiter) - 2
    while body.startswith(b"\r\n", position):
        blank = body.find(b"\r\n\r\n", position, position + MAX_PART_HEADER_BYTES)
        end = body.find(delimiter, blank + 4)
        if blank < 0 or end < 0:
            return None
        try:
            part = _part(body[position + 2 : blank])
        except MalformedMultipart:
            return None
        if part.name in found or part.shared is not None:
            return None
        found[part.name] = (blank + 4, end)
        position = end + len(delimiter)
    return found if body.startswith(b"--", position) else None


@lru_cache(256)
def _part(head: bytes) -> Part:
    """A part by its headers; the same come again and again. Raises MalformedMultipart."""
    lines = head.decode("utf-8", "replace").split("\r\n")
    if len(lines) > MAX_PART_HEADERS:
        raise MalformedMultipart(f"a part has more than {MAX_PART_HEADERS} headers")
    fields: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line) if line else None
        if line and (match is None or match[1].lower() in fields):
            raise MalformedMultipart(f"a part has a header that is none, or is given twice: {line[:80]!r}")
        if match is not None:
            fields[match[1].lower()] = match[2].strip(" \t")
    kind, options = _options(fields.get("content-disposition", ""))
    if kind != "form-data" or not options.get("name"):
        raise MalformedMultipart("a part lacks Content-Disposition: form-data; name=...")
    is_header = _options(fields.get("content-type", ""))[0] == NPY_HEADER
    return Part(options["name"], fields.get(DATA_HEADER.lower(), "") if is_header else None)


def _options(value: str) -> tuple[str, dict[str, str]]:
    """A field's value and its parameters, in lower case both; no parameters where they cannot be read in one way."""
    kind, semicolon, _ = value.partition(";")
    options: dict[str, str] = {}
    position = len(kind)
    while semicolon and position < len(value):
        match = _OPTION.match(value, position)
        if match is None or match[1].lower() in options:
            options.clear()
            break
        text = match[2]
        options[match[1].lower()] = re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text
        position = match.end()
    return kind.strip().lower(), options
