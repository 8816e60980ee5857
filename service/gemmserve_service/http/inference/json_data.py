"""Numbers of tensors in JSON: cut out of a request's text, read, and written, a piece at a time.

The interpreter lets nobody else have a turn while it makes a million numbers of one text. So the arrays are cut out
before the JSON is read, which is short then, and what is read or written at one time has some thousand characters.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_service.errors import InvalidParameters, QuotaExceeded, TooLarge
from gemmserve_service.http.problems import MalformedJson
from gemmserve_service.http.requests.long_json import LONG, MAX_VALUE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_service.runtime.yielding import Turns

# A quote within a string has a backslash before it, so this is the name of a member wherever it stands.
_NAME: Final = re.compile(rb'(?<!\\)"data"[ \t\r\n]*:[ \t\r\n]*(?=\[)')
_NUMBERS: Final = re.compile(rb"[-+0-9.eE, \t\r\n\[\]NaInfity]*")
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b"[],"))
_SPACE: Final = b" \t\r\n"
_MARKED: Final = bytes(byte if byte in b"[]," else ord("0") for byte in range(256))
_WINDOW: Final = 1 << 15  # bytes that are looked through in one go
_ELEMENTS: Final = 1 << 10  # that are written in one go
_READ: Final = 10
"""Bytes that a byte of numbers takes while it is read: short ones become eight, in two dtypes, beside the text."""
_WRITTEN: Final = 48
"""Bytes that an element takes while it is written, in a text of at most half as many and its pieces."""
_MEMORY: Final = 512 << 20


class JsonMemory:
    """Memory that numbers in JSON take, which is none of the store's: bounded, for a thousand clients may come at once.
    Belongs to the event loop's thread.
    """

    def __init__(self, limit: int = _MEMORY) -> None:
        self._limit = limit
        self._used: Counter[str] = Counter()

    def take_read(self, owner: str, nbytes: int) -> Callable[[], None]:
        """Take what reading so many bytes of JSON needs, and return what gives it back. Raises QuotaExceeded."""
        return self._take(owner, _READ * nbytes)

    def take_written(self, owner: str, elements: int) -> Callable[[], None]:
        """The same for writing so many elements."""
        return self._take(owner, _WRITTEN * elements)

    def _take(self, owner: str, nbytes: int) -> Callable[[], None]:
        of_one = self._limit // 2 if owner else self._limit  # without keys everybody is one
        for limit, used in ((of_one, self._used[owner]), (self._limit, self._used.total())):
            if used + nbytes > limit:
                raise QuotaExceeded(
                    "too many tensors are being read and written as JSON; send them as binary data, or later",
                    retry_after_s=1.0,
                    quota="json_bytes",
                    limit=limit,
                    used=used,
                )
        self._used[owner] += nbytes

        def give_back() -> None:
            self._used[owner] -= nbytes
            if not self._used[owner]:
                del self._used[owner]

        return give_back


async def cut_data(text: bytearray, turns: Turns) -> tuple[bytes, list[bytes]]:
    """The JSON without the arrays that are its members `data`, and these: in the place of each stands `[i]`, its
    number.

    Raises TooLarge if the rest is long: nothing that means anything is.
    """
    head, at = bytearray(), 0
    arrays: list[bytes] = []
    while (found := _NAME.search(text, at, at + LONG)) is not None and len(head) <= LONG:
        start = end = found.end()
        while (stop := _end_of_numbers(text, end)) > end:
            end = stop
            await turns.pause()
        array = bytes(text[start:end]).rstrip(b", \t\r\n")
        head += text[at:start] + b"[%d]" % len(arrays)
        arrays.append(array)
        at = start + len(array)
    if len(head) + len(text) - at > LONG:
        raise TooLarge(f"the JSON has more than {LONG} bytes beside the data of its tensors")
    return bytes(head + text[at:]), arrays


def _end_of_numbers(text: bytearray, start: int) -> int:
    found = _NUMBERS.match(text, start, start + _WINDOW)
    return start if found is None else found.end()


async def read_data(text: bytes, shape: Sequence[int], name: str, turns: Turns) -> np.ndarray[Any, Any]:
    """The numbers of an array, flat or nested as `shape` says: float64, flat. NaN, Infinity and -Infinity are numbers.

    Raises InvalidParameters, which names the tensor `name`, and MalformedJson.
    """
    count = math.prod(shape)
    made, filled, at = np.empty(min(count, len(text))), 0, 0
    fits = await _without(text, _NOT_STRUCTURE, turns) in _structures(shape, len(text))
    # The same brackets and commas may stand in the middle of a row: 1[,]2.
    marked = await _without(text, _SPACE, turns, _MARKED)
    fits = fits and b"0[" not in marked and b"]0" not in marked
    flat = await _without(text, b"[]", turns)
    if not count:  # of nested ones the commas between the rows are left
        fits = fits and not flat.strip(b", \t\r\n")
        flat = b""
    while fits and at < len(flat):
        end = flat.find(b",", at + MAX_VALUE)
        end = len(flat) if end < 0 else end
        if end - at > 2 * MAX_VALUE:
            raise MalformedJson(f"{name}: a number of more than {MAX_VALUE} characters")
        values = _numbers(flat[at:end], name)
        made[filled : filled + len(values)] = values
        filled, at = filled + len(values), end + 1
        await turns.pause()
    if not fits or filled != count:
        message = f"data is not {count} numbers, flat or nested as the shape {list(shape)} says"
        raise InvalidParameters(f"{name}: {message}", [{"field": name, "message": message}])
    return made


def _numbers(text: bytes, name: str) -> list[float]:
    try:
        return [float(number) for number in json.loads(f"[{text.decode('ascii')}]")]
    except (ValueError, OverflowError) as error:
        raise MalformedJson(f"{name}: data cannot be read: {error}") from None


def _structures(shape: Sequence[int], longest: int) -> tuple[bytes, ...]:
    """Brackets and commas of a flat and of a nested array of that shape, if they have no more than `longest` bytes."""
    count = math.prod(shape)
    if count > longest:
        return ()
    flat = b"[" + b"," * max(count - 1, 0) + b"]"
    if not shape or math.prod(max(extent, 1) for extent in shape) > longest:
        return (flat,)
    nested = b""
    for extent in reversed(shape):
        nested = b"[" + b",".join([nested] * extent) + b"]"
    return flat, nested


async def _without(text: bytes, deleted: bytes, turns: Turns, table: bytes | None = None) -> bytes:
    """`text` without the bytes `deleted`; what is left goes through `table`, as in bytes.translate."""
    pieces = []
    for start in range(0, len(text), _WINDOW):
        pieces.append(text[start : start + _WINDOW].translate(table, deleted))
        await turns.pause()
    return b"".join(pieces)


async def write_data(values: np.ndarray[Any, Any], turns: Turns) -> bytes:
    """JSON of a flat array; NaN and infinities are NaN, Infinity and -Infinity."""
    pieces = []
    for start in range(0, len(values), _ELEMENTS):
        pieces.append(json.dumps(values[start : start + _ELEMENTS].tolist())[1:-1])
        await turns.pause()
    return f"[{', '.join(pieces)}]".encode("ascii")
