"""Query strings and the numbers in paths and queries: nothing in them may be read in two ways."""

from __future__ import annotations

import re
from typing import Annotated, Final
from urllib.parse import parse_qsl

from pydantic import BeforeValidator

from gemmserve_service.errors import InvalidParameters

_MAX: Final = 64  # parameters of a query; no route knows as many as ten, and an array has at most 16 labels
_REPEATED: Final = frozenset({"label"})
"""Parameters that may be given several times: each has its own meaning then."""
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def _as_json(value: object) -> object:
    """Refuses what int() and float() read besides numbers: signs, spaces, underscores, other scripts' digits."""
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        raise ValueError("a number is written as in JSON: 4, 0.5, 1e3")
    return value


Integer = Annotated[int, BeforeValidator(_as_json)]
"""A whole number in a path or a query."""
Number = Annotated[float, BeforeValidator(_as_json)]
"""A number in a query."""


def check_query(query: bytes) -> None:
    """Raises InvalidParameters for a name that is given twice, unless it may be, and for more parameters than there
    could be.
    """
    if not query:
        return
    if query.count(b"&") >= _MAX:
        raise InvalidParameters(f"a query has at most {_MAX} parameters")
    seen: set[str] = set()
    for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name in seen and name not in _REPEATED:
            message = "the parameter is given twice"
            raise InvalidParameters(f"{name[:120]}: {message}", [{"field": name[:120], "message": message}])
        seen.add(name)
