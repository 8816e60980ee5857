"""JSON as RFC 8259 and I-JSON (RFC 7493) mean it: UTF-8, no NaN, no duplicate names; then pydantic on the object."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from gemmserve_service.problems import InvalidParameters, MalformedJson, describe_validation

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `data`. Raises MalformedJson (400), or InvalidParameters (422) for JSON of another type."""
    try:
        value = json.loads(
            bytes(data).decode("utf-8"), object_pairs_hook=_unique_names, parse_constant=_reject_constant
        )
    except MalformedJson:
        raise
    except UnicodeDecodeError as error:
        raise MalformedJson(f"the JSON is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedJson(f"the JSON cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidParameters(f"expected a JSON object, not {_json_type(value)}")
    return value


def validate(adapter: TypeAdapter[T] | type[BaseModel], value: dict[str, Any], *, tags: Sequence[str] = ()) -> Any:
    """`value` as the adapter's model; `tags` of unions are no field names. Raises InvalidParameters (422)."""
    try:
        # Strict: what the OpenAPI document calls an integer is no string of digits.
        if isinstance(adapter, TypeAdapter):
            return adapter.validate_python(value, strict=True)
        return adapter.model_validate(value, strict=True)
    except ValidationError as error:
        raise InvalidParameters(*describe_validation(error.errors(include_context=False), skip=tags)) from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise MalformedJson(f"the JSON object names {twice[:80]!r} twice")
    return names


def _reject_constant(name: str) -> NoReturn:
    raise MalformedJson(f"{name} is not JSON: numbers are finite")


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    return {list: "an array", str: "a string", bool: "a boolean"}.get(type(value), "a number")
