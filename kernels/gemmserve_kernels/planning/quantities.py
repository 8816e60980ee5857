"""Sizes and rates as command lines write and print them: 6.4GB, 16GiB, 100Gb/s, 12.5GB/s."""

from __future__ import annotations

import re
from typing import Final

_PREFIXES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", re.IGNORECASE)
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([kmgtKMGT]?)(i?)([bB])(?:it|yte)?(?:/s|ps)")
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_STEP: Final = 1000
_DIGITS: Final = 3


def parse_bytes(text: str) -> int:
    """Return a number of bytes: 6.4GB, 16GiB, 512 (K, M, G, T; with an i by 1024). Raises ValueError."""
    found = _BYTES.fullmatch(text.strip())
    if not found:
        raise ValueError(f"a size is written 6.4GB or 16GiB, not {text!r}")
    number, prefix, binary, *_ = found.groups()
    return round(float(number) * (_BINARY if binary else _PREFIXES)[prefix.lower()])


def parse_rate(text: str) -> float:
    """Return bytes a second: 100Gb/s is bits, 12.5GB/s bytes. Raises ValueError."""
    found = _RATE.fullmatch(text.strip())
    if not found or not float(found[1]):
        raise ValueError(f"a rate is written 100Gb/s (bits) or 12.5GB/s (bytes), not {text!r}")
    number, prefix, binary, unit = found.groups()
    value = float(number) * (_BINARY if binary else _PREFIXES)[prefix.lower()]
    return value / 8 if unit == "b" else value


def bytes_text(nbytes: float) -> str:
    """Return bytes in powers of 1000, three digits: 6.40 GB."""
    value, unit = float(nbytes), 0
    while value >= _STEP and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{nbytes:.0f} B" if not unit else f"{digits(value)} {_UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """Return a time with three digits: 1.48 s, 86.0 ms, 12.0 us."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{digits(seconds / unit)} {name}"
    return f"{digits(seconds * 1e6)} us"


def digits(value: float) -> str:
    """Return a number with three digits, whole from 100 on."""
    if value >= 10 ** (_DIGITS - 1) or value == 0:
        return f"{value:,.0f}"
    return f"{value:#.{_DIGITS}g}".rstrip(".")
