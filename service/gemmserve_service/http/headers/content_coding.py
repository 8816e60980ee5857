"""Content codings (RFC 9110, section 8.4.1): which there are, what a request has, what its answer may have.

zstd alone (RFC 8878), where the standard library has it (Python 3.14) or `backports.zstd`, the same module for older
ones, is installed. Its window is at most 8 MiB, as RFC 9659 has it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from gemmserve_service.errors import UnsupportedCoding

if TYPE_CHECKING:
    from collections.abc import Sequence

ZSTD: Final = "zstd"
WINDOW_LOG: Final = 23  # 8 MiB

_IDENTITY: Final = "identity"
_TAKING: Final = "/v1/arrays"


@cache
def zstd() -> Any:
    """The module; None where there is none."""
    for name in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            return import_module(name)
    return None


@cache
def pool() -> ThreadPoolExecutor:
    """Threads that code and decode bodies: two, a piece at a time, so that many bodies take turns."""
    return ThreadPoolExecutor(2, thread_name_prefix="gemmserve-coding")


def check_coding(method: str, path: str, values: Sequence[str]) -> None:
    """Whether a request's body may have the Content-Encoding `values`. Raises UnsupportedCoding."""
    codings = _codings(values)
    if not codings or method not in {"POST", "PUT"} or (path == _TAKING and method != "POST"):  # a 405
        return
    takes = path == _TAKING and zstd() is not None
    if not takes or codings != [ZSTD]:
        refuse_coding(values, ZSTD if takes else _IDENTITY)


def refuse_coding(values: Sequence[str], accepted: str = _IDENTITY) -> None:
    """Raises UnsupportedCoding for anything but bytes as they are. `accepted`: what the answer names instead."""
    codings = _codings(values)
    if codings:
        name = ", ".join(codings)[:80]
        instead = "as it is" if accepted == _IDENTITY else f"as it is, or as {accepted}"
        raise UnsupportedCoding(f"Content-Encoding is {name}; this body may come {instead}", accepted)


def is_coded(values: Sequence[str]) -> bool:
    """Whether a body that passed `check_coding` is coded."""
    return bool(_codings(values))


def chosen_coding(accept: str | None) -> Literal["no", "may", "must"]:
    """Verdict of Accept-Encoding on zstd (RFC 9110, section 12.5.3); `must`: the bytes as they are will not do."""
    if not accept or zstd() is None:
        return "no"
    weights = dict(_weighted(entry) for entry in accept.split(",") if entry.strip())
    anything = weights.get("*", 0.0)
    identity = weights.get(_IDENTITY, weights.get("*", 1.0))
    coded = weights.get(ZSTD, anything)
    if coded == 0 or coded < weights.get(_IDENTITY, 0.0):
        return "no"
    return "must" if identity == 0 else "may"


def _codings(values: Sequence[str]) -> list[str]:
    found = [part.strip().lower() for value in values for part in value.split(",")]
    return [part for part in found if part not in {"", _IDENTITY}]


def _weighted(entry: str) -> tuple[str, float]:
    name, *parameters = (part.strip().lower() for part in entry.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                return name, 0.0
    return name, 1.0
