"""Ids that sort by time and cannot be guessed: a ULID (48 bits of milliseconds, 80 random bits) behind a prefix."""

from __future__ import annotations

import secrets
import time
from typing import Final

# Crockford's base 32 in lower case: digits first, so that text order is number order.
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS: Final = [a + b for a in _ALPHABET for b in _ALPHABET]
_MASK: Final = len(_PAIRS) - 1

_last_ms = 0


def new_id(prefix: str) -> str:
    """``<prefix>_`` and 26 characters. Times within one process never run backwards, even if the clock does."""
    global _last_ms
    _last_ms = max(_last_ms, time.time_ns() // 1_000_000)
    value = (_last_ms & ((1 << 48) - 1)) << 80 | secrets.randbits(80)
    return prefix + "_" + "".join([_PAIRS[value >> shift & _MASK] for shift in range(120, -1, -10)])
