"""Ids that sort by time and cannot be guessed: a ULID (48 bits of milliseconds, 80 random bits) behind a prefix."""

from __future__ import annotations

import secrets
import time
from typing import Final

# Crockford's base 32 in lower case: digits first, so that text order is number order.
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS: Final = [a + b for a in _ALPHABET for b in _ALPHABET]
_MASK: Final = len(_PAIRS) - 1
_TIME_MASK: Final = (1 << 48) - 1
_RANDOM_PAIRS: Final = range(70, -1, -10)
_AHEAD: Final = 4000  # random bytes that are had from the system at one time; ten an id

_last_ms = 0
_time = ""
"""Time part of the ids of that millisecond."""
_random = b""


def new_id(prefix: str) -> str:
    """``<prefix>_`` and 26 characters. Times within one process never run backwards, even if the clock does."""
    global _last_ms, _time, _random
    ms = time.time_ns() // 1_000_000
    if ms > _last_ms:
        _last_ms = ms
        _time = "".join([_PAIRS[(ms & _TIME_MASK) >> shift & _MASK] for shift in range(40, -1, -10)])
    if not _random:
        _random = secrets.token_bytes(_AHEAD)
    value, _random = int.from_bytes(_random[-10:], "big"), _random[:-10]
    return f"{prefix}_{_time}{''.join([_PAIRS[value >> shift & _MASK] for shift in _RANDOM_PAIRS])}"
