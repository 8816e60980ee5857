"""Ids that sort by time and cannot be guessed: a ULID (48 bits of milliseconds, 80 random bits) behind a prefix.

What another cell than 0 makes has the cell's number behind it: ``arr_01jd2w7m4h8k3n5p6q9r0s1t2v_7``. So ids of one cell
look as they always did, those of all cells together sort by time, and a router reads the cell without asking anybody.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Final

# Crockford's base 32 in lower case: digits first, so that text order is number order.
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS: Final = [a + b for a in _ALPHABET for b in _ALPHABET]
_MASK: Final = len(_PAIRS) - 1
_TIME_MASK: Final = (1 << 48) - 1
_DIGITS: Final = bytes(_ALPHABET.encode() * (256 // len(_ALPHABET)))
"""Digit of each byte: of a random one each digit is as likely as any other."""
_RANDOM_DIGITS: Final = 16
_AHEAD: Final = 400  # ids for which random bytes are had from the system at one time

_OF_A_CELL: Final = re.compile(r"[a-z]+_[0-9a-z]{26}_([1-9][0-9]{0,2})")

_last_ms = 0
_time = ""
"""Time part of the ids of that millisecond."""
_random: list[str] = []
"""Random parts of the next ids."""


def new_id(prefix: str, cell: int = 0) -> str:
    """``<prefix>_`` and 26 characters, and ``_<cell>`` where that is not 0. Times within one process never run
    backwards, even if the clock does.
    """
    global _last_ms, _time
    ms = time.time_ns() // 1_000_000
    if ms > _last_ms:
        _last_ms = ms
        _time = _time_part(ms)
    if not _random:
        digits = secrets.token_bytes(_AHEAD * _RANDOM_DIGITS).translate(_DIGITS).decode()
        _random.extend([digits[low : low + _RANDOM_DIGITS] for low in range(0, len(digits), _RANDOM_DIGITS)])
    made = f"{prefix}_{_time}{_random.pop()}"
    return f"{made}_{cell}" if cell else made


def first_id(prefix: str, seconds: float) -> str:
    """Return what sorts before the ids that are made from that moment on (seconds since 1970), and after all before."""
    return f"{prefix}_{_time_part(min(max(int(1000 * seconds), 0), _TIME_MASK))}"


def _time_part(ms: int) -> str:
    return "".join([_PAIRS[(ms & _TIME_MASK) >> shift & _MASK] for shift in range(40, -1, -10)])


def cell_of(identifier: str) -> int:
    """Return the number of the cell that made what has this id; 0 for what is no id, too."""
    match = _OF_A_CELL.fullmatch(identifier)
    return 0 if match is None else int(match[1])
