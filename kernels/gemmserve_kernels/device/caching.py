"""Plans are pure functions of a job: the last few thousand are kept, so that a repeated product costs no planning."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

_KEPT: Final = 4096


def cached(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)`, remembered where every argument can be hashed. `function` must be pure."""
    try:
        return cast("T", _call(function, *args, **kwargs))  # type: ignore[arg-type]
    except TypeError:
        # Unhashable arguments, which the function itself may well accept (or refuse in its own words).
        return function(*args, **kwargs)


@lru_cache(_KEPT)
def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
