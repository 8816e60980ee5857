"""JSON objects that are too long to be read at one go: member by member, their long arrays element by element.

The interpreter lets nobody else have a turn while it makes a million objects of one text. Here what is read at one time
has at most `MAX_VALUE` characters, and others have their turns in between; what could not be part of any request is
refused before the rest is looked at. What is read is what `strict_json.parse_object` would have read.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gemmserve_service.errors import InvalidParameters
from gemmserve_service.http.problems import MAX_ERRORS, MalformedJson
from gemmserve_service.http.requests.strict_json import MAX_MEMBERS, check_depth, json_type, one_value, validate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic import TypeAdapter

    from gemmserve_service.runtime.yielding import Turns

T = TypeVar("T")

LONG: Final = 1 << 13
"""Bytes of JSON from which on it is long: as much is read in a tenth of a millisecond, at worst in three. What means
anything and is no long array has some hundred."""
MAX_VALUE: Final = 1 << 13
"""Characters of a member's value, or of one element of a long array."""

_WINDOW: Final = 4 * MAX_VALUE  # bytes; a character has four at most
_SPACE: Final = re.compile(r"[ \t\n\r]*")


async def read_object(
    data: bytes | bytearray | memoryview, lists: Mapping[str, Callable[[int, Any], Any]], turns: Turns
) -> dict[str, Any]:
    """The JSON object in `data`. `lists`: members that may be long arrays; each is given the number of an element, from
    0 on, and the element, and returns what is to be kept of it, or raises where they are too many. `turns`: of all that
    is done with this request in one go.

    Raises MalformedJson, InvalidParameters, and what `lists` raise.
    """
    text = _Text(data, turns)
    if await text.next() != "{":
        value = await text.value("the JSON")
        if await text.next():
            raise text.malformed("there is more behind it")
        raise InvalidParameters(f"expected a JSON object, not {json_type(value)}")
    text.skip()
    found: dict[str, Any] = {}
    if await text.next() == "}":
        text.skip()
    else:
        while True:
            if await text.next() != '"':
                raise text.malformed("the name of a member is expected")
            name: str = await text.value("a name")
            await text.expect(":")
            if name in found:
                raise MalformedJson(f"the JSON object names {name[:80]!r} twice")
            if len(found) >= MAX_MEMBERS:
                raise InvalidParameters(f"a JSON object has at most {MAX_MEMBERS} members here")
            if name in lists and await text.next() == "[":
                found[name] = await _elements(text, name, lists[name], turns)
            else:
                found[name] = await text.value(name[:80])
            await turns.pause()
            if await text.expect(",", "}") == "}":
                break
    if await text.next():
        raise text.malformed("there is more behind the object")
    return found


async def _elements(text: _Text, name: str, keep: Callable[[int, Any], Any], turns: Turns) -> list[Any]:
    elements: list[Any] = []
    text.skip()
    if await text.next() == "]":
        text.skip()
        return elements
    while True:
        number = len(elements)
        elements.append(keep(number, await text.value(f"{name}.{number}")))
        await turns.pause()
        if await text.expect(",", "]") == "]":
            return elements


async def validate_each(
    adapter: TypeAdapter[T], elements: Sequence[Any], name: str, turns: Turns, *, tags: Sequence[str] = ()
) -> list[T]:
    """The elements of the member `name` as the adapter's models, one by one. Raises InvalidParameters, which tells of
    the first that are wrong.
    """
    made: list[T] = []
    errors: list[Mapping[str, str]] = []
    for number, element in enumerate(elements):
        try:
            made.append(validate(adapter, element, tags=tags))
        except InvalidParameters as error:
            listed = error.extra.get("errors", [])
            errors += [{**entry, "field": _within(f"{name}.{number}", entry["field"])} for entry in listed]
            if len(errors) >= MAX_ERRORS:
                break
        await turns.pause()
    if errors:
        errors = errors[:MAX_ERRORS]
        raise InvalidParameters("; ".join(f"{entry['field']}: {entry['message']}" for entry in errors), errors)
    return made


def _within(name: str, field: str) -> str:
    return name if field == "body" else f"{name}.{field}"


class _Text:
    """UTF-8 as text, a window of it at a time, with a pause between two windows when it is due."""

    def __init__(self, data: bytes | bytearray | memoryview, turns: Turns) -> None:
        self._data = memoryview(data)
        self._turns = turns
        self._start = 0  # of what is not in the window yet
        self._text = ""
        self._at = 0

    async def next(self) -> str:
        """The next character that is no white space, which stays; none at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not await self._more():
                return ""

    def skip(self) -> None:
        """Passes the character that `next` has found."""
        self._at += 1

    async def expect(self, *characters: str) -> str:
        """Passes one of `characters`. Raises MalformedJson."""
        found = await self.next()
        if found not in characters:
            raise self.malformed(f"{' or '.join(characters)} is expected")
        self._at += 1
        return found

    async def value(self, where: str) -> Any:
        """The next value. Raises MalformedJson, InvalidParameters."""
        await self.next()
        while len(self._text) - self._at <= MAX_VALUE and await self._more():
            pass
        begin = self._at
        try:
            value, end = one_value(self._text, begin)
        except MalformedJson as error:
            if len(self._text) - begin > MAX_VALUE:
                raise MalformedJson(f"{where} is malformed, or has more than {MAX_VALUE} characters: {error}") from None
            raise
        if end - begin > MAX_VALUE:
            raise InvalidParameters(f"{where} has more than {MAX_VALUE} characters")
        check_depth(self._text[begin:end])
        self._at = end
        return value

    def malformed(self, why: str) -> MalformedJson:
        """Return the error to raise here."""
        return MalformedJson(f"the JSON cannot be read: {why}, about byte {self._start - len(self._text) + self._at}")

    async def _more(self) -> bool:
        """Takes the next bytes into the window; False: there are none."""
        await self._turns.pause()
        piece = bytes(self._data[self._start : self._start + _WINDOW])
        if not piece:
            return False
        try:
            decoded, used = utf_8_decode(piece, "strict", self._start + len(piece) == len(self._data))
        except UnicodeDecodeError as error:
            raise MalformedJson(f"the JSON is not UTF-8: {error.reason} at byte {self._start + error.start}") from error
        self._start += used
        self._text = self._text[self._at :] + decoded
        self._at = 0
        return True
