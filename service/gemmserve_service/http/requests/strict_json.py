"""JSON as RFC 8259 and I-JSON (RFC 7493) mean it: UTF-8, no NaN, no duplicate names; then pydantic on the object.

No request has more than a few levels, nor an object with many members: what has is refused before a model sees it, for
pydantic makes an error of each name that it does not know. Long texts are read by `long_json`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from gemmserve_service.errors import InvalidParameters, TooLarge, UnsupportedMediaType
from gemmserve_service.http.problems import MalformedJson, describe_validation
from gemmserve_service.http.requests.body import media_type_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from gemmserve_service.schemas import GemmParams, GemmReduceParams

T = TypeVar("T")

MAX_MEMBERS: Final = 64
"""Members of one object. The largest that means anything has some twenty."""
MAX_DEPTH: Final = 32
"""Levels of arrays and objects. A program's step with its configuration has four."""

_SPACE: Final = " \t\n\r"
# A string that does not end is taken to the text's end, once: to look at each of its quotes again would take for ever.
_BRACKETS: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)


async def read_json(request: Request, most: int, what: str) -> bytearray:
    """A JSON body of at most so many bytes. `what`: what it is, for the problem. Raises UnsupportedMediaType,
    TooLarge.
    """
    media_type = media_type_of(request)
    if media_type != "application/json":
        raise UnsupportedMediaType(f"Content-Type is {media_type or 'missing'}; {what} is application/json")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise too_large(most, what)
    return body


def too_large(most: int, what: str) -> TooLarge:
    """The error of a JSON text that is longer."""
    return TooLarge(f"{what} has at most {most} bytes")


def parse_object(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object in `data`. Raises MalformedJson (400), or InvalidParameters (422) for JSON of another type, or
    too deep, or with too many members.
    """
    try:
        text = bytes(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"the JSON is not UTF-8: {error.reason} at byte {error.start}") from error
    check_depth(text)
    value, end = one_value(text, len(text) - len(text.lstrip(_SPACE)))
    if rest := text[end:].lstrip(_SPACE):
        raise MalformedJson(f"the JSON cannot be read: extra data: char {len(text) - len(rest)}")
    if not isinstance(value, dict):
        raise InvalidParameters(f"expected a JSON object, not {json_type(value)}")
    return value


def one_value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends. Raises MalformedJson, InvalidParameters."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise MalformedJson(f"the JSON cannot be read: {error}") from error
    return value, end


def check_depth(text: str) -> None:
    """Raises InvalidParameters for arrays and objects within each other past `MAX_DEPTH`, before any is made."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for found in _BRACKETS.finditer(text):
        bracket = found[0]
        if bracket in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise InvalidParameters(f"the JSON has more than {MAX_DEPTH} levels of arrays and objects")
        elif bracket in "]}":
            depth -= 1


def validate(adapter: TypeAdapter[T] | type[BaseModel], value: dict[str, Any], *, tags: Sequence[str] = ()) -> Any:
    """`value` as the adapter's model; `tags` of unions are no field names. Raises InvalidParameters (422)."""
    try:
        # Strict: what the OpenAPI document calls an integer is no string of digits.
        if isinstance(adapter, TypeAdapter):
            return adapter.validate_python(value, strict=True)
        return adapter.model_validate(value, strict=True)
    except ValidationError as error:
        raise InvalidParameters(*describe_validation(error.errors(include_url=False), skip=tags)) from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_MEMBERS:
        raise InvalidParameters(f"a JSON object has at most {MAX_MEMBERS} members here, not {len(pairs)}")
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise MalformedJson(f"the JSON object names {twice[:80]!r} twice")
    return names


def _reject_constant(name: str) -> NoReturn:
    raise MalformedJson(f"{name} is not JSON: numbers are finite")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique_names, parse_constant=_reject_constant)


def json_type(value: object) -> str:
    """Name of a value's type in JSON."""
    if value is None:
        return "null"
    return {list: "an array", str: "a string", bool: "a boolean"}.get(type(value), "a number")


def one_shot_params(kind: type[GemmParams | GemmReduceParams], text: bytes | None) -> GemmParams | GemmReduceParams:
    """Return the parameters that the params part of a one-shot says; without one, the defaults.

    Raises MalformedJson, InvalidParameters.
    """
    params: GemmParams | GemmReduceParams = validate(kind, {} if text is None else parse_object(text))
    return params
