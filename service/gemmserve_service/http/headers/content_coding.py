"""Content codings (RFC 9110, section 8.4.1): which there are, what a request has, what its answer may have.

Of arrays zstd alone (RFC 8878), where the standard library has it (Python 3.14) or `backports.zstd`, the same module
for older ones, is installed. Its window is at most 8 MiB, as RFC 9659 has it. Of inferences gzip and deflate, which the
clients of that protocol have.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from gemmserve_service.errors import UnsupportedCoding
from gemmserve_service.http.headers.preferences import weighted
from gemmserve_service.http.inference.paths import INFER

if TYPE_CHECKING:
    from collections.abc import Sequence

ZSTD: Final = "zstd"
GZIP: Final = "gzip"
DEFLATE: Final = "deflate"
"""zlib's format (RFC 1950), as RFC 9110 has it."""
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
    accepted = _accepted(path)
    if len(codings) != 1 or codings[0] not in accepted:
        refuse_coding(values, accepted)


def refuse_coding(values: Sequence[str], accepted: Sequence[str] = ()) -> None:
    """Raises UnsupportedCoding for anything but bytes as they are. `accepted`: what the answer names instead."""
    codings = _codings(values)
    if codings:
        name = ", ".join(codings)[:80]
        instead = f"as it is, or as {' or '.join(accepted)}" if accepted else "as it is"
        raise UnsupportedCoding(
            f"Content-Encoding is {name}; this body may come {instead}", ", ".join(accepted) or _IDENTITY
        )


def coding_of(values: Sequence[str]) -> str | None:
    """Coding of a body that passed `check_coding`; None: its bytes are as they are."""
    return next(iter(_codings(values)), None)


def chosen_coding(accept: str | None, coding: str = ZSTD) -> Literal["no", "may", "must"]:
    """Verdict of Accept-Encoding on `coding` (RFC 9110, section 12.5.3); `must`: the bytes as they are will not do."""
    if not accept or (coding == ZSTD and zstd() is None):
        return "no"
    weights = dict(weighted(entry) for entry in accept.split(",") if entry.strip())
    anything = weights.get("*", 0.0)
    identity = weights.get(_IDENTITY, weights.get("*", 1.0))
    coded = weights.get(coding, anything)
    if coded == 0 or coded < weights.get(_IDENTITY, 0.0):
        return "no"
    return "must" if identity == 0 else "may"


def _accepted(path: str) -> tuple[str, ...]:
    """Codings that a body sent to `path` may have."""
    if path in INFER:
        return (GZIP, DEFLATE)
    return (ZSTD,) if path == _TAKING and zstd() is not None else ()


def _codings(values: Sequence[str]) -> list[str]:
    found = [part.strip().lower() for value in values for part in value.split(",")]
    return [part for part in found if part not in {"", _IDENTITY}]
