"""Messages about single fields: what pydantic finds, as whoever filled the field in can read it."""

from __future__ import annotations

import json
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from gemmserve_service import schemas

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAX_SHOWN: Final = 40
"""Characters of a value that a message repeats."""

_KEY: Final = "[key]"
"""End of the place of an error of pydantic's that is about a key of an object."""
_EXACT: Final = 1e15
"""Size up to which a whole number is shown without its point."""

_KINDS: Final[Mapping[str, str]] = {
    "int": "a whole number",
    "float": "a number",
    "string": "a string",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
    "model_attributes": "an object",
}
"""Words for what pydantic's errors `<kind>_type` and `<kind>_parsing` ask for."""

_BOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
"""Words of a bound, and where pydantic's context has its value."""

_LENGTHS: Final[Mapping[str, tuple[str, str, str]]] = {
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
}


def field_of(error: Mapping[str, Any]) -> tuple[int | str, ...]:
    """The place of the field that an error of pydantic's is about: that which tells models apart is in its object."""
    place: tuple[int | str, ...] = error["loc"]
    if place[-1:] == (_KEY,):
        return place[:-1]
    return (*place, _discriminator(error)) if error["type"].startswith("union_tag_") else place


def message_of(error: Mapping[str, Any], *, show: bool = True) -> str:
    """Return what is wrong with a field, to be read behind its name. `show`: the value may be repeated."""
    return f"the key {_message(error, show=show)}" if error["loc"][-1:] == (_KEY,) else _message(error, show=show)


def _message(error: Mapping[str, Any], *, show: bool) -> str:
    kind, value, context = str(error["type"]), error.get("input"), error.get("ctx") or {}
    given = f", not {_shown(value)}" if show else ""
    if kind == "extra_forbidden":
        name = str(error["loc"][-1])
        near = [each for each in get_close_matches(name, _names(), 1) if each != name]
        return "there is no such field here" + "".join(f"; is {each} meant?" for each in near)
    if kind in {"missing", "union_tag_not_found"}:
        return "is missing"
    if kind == "union_tag_invalid":
        tag = value.get(_discriminator(error)) if isinstance(value, dict) else context["tag"]
        return f"must be one of {context['expected_tags']}" + (f", not {_shown(tag)}" if show else "")
    if kind in {"literal_error", "enum"}:
        return f"must be {context['expected']}{given}"
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        number = _shown(value).strip("'")  # which is a string in a query
        return f"must be {words} {_shown(context[name])}" + (f", not {number}" if show else "")
    if kind in _LENGTHS:
        words, name, what = _LENGTHS[kind]
        most = context[name]
        return f"must have {words} {most} {what}{'' if most == 1 else 's'}"
    if kind == "string_pattern_mismatch":
        return f"must be {schemas.PATTERNS.get(context['pattern'], 'text of the pattern ' + context['pattern'])}{given}"
    if kind in {"finite_number", "int_from_float"}:
        return f"must be {'finite' if kind == 'finite_number' else 'a whole number'}{given}"
    wanted = _wanted(kind, error["loc"])
    if wanted is not None:
        return f"must be {wanted}{given}"
    said = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return said.replace("Input should be", "must be", 1)


def _wanted(kind: str, place: Sequence[int | str]) -> str | None:
    """Return what is to be in a field where something of another type is; None: that is not the error."""
    what, _, problem = kind.rpartition("_")
    if problem not in {"type", "parsing"} or what not in _KINDS:
        return None
    if place and place[-1] in {schemas.VALUE, schemas.VIEW}:
        return "the id of an array (in a program also $ and the id of a step), or a view of one, an object"
    return _KINDS[what]


def _discriminator(error: Mapping[str, Any]) -> str:
    return str(error["ctx"]["discriminator"]).strip("'").removesuffix("()")


def _shown(value: Any) -> str:
    """A value as JSON has it, so far as it is short and there is one."""
    if isinstance(value, (dict, BaseModel)):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)
    if isinstance(value, str):
        text = json.dumps(value)[1:-1].replace('\\"', '"')
        return f"'{text}'" if len(text) <= _MAX_SHOWN else f"'{text[:_MAX_SHOWN]}...'"
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


@cache
def _names() -> list[str]:
    """Names of fields of requests."""
    models = [each for each in vars(schemas).values() if isinstance(each, type) and issubclass(each, schemas.Strict)]
    return sorted({name for model in models for name in model.model_fields})
