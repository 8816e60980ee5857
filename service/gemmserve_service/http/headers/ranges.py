"""Conditional and range requests on an immutable representation (RFC 9110, sections 8.8.3, 13 and 14).

Pure functions over header values. An array never changes, so its entity tags are strong and made of its id and the
media type chosen; a single byte range is served, several are answered with the whole, as section 14.2 permits.
"""

from __future__ import annotations

import re
from typing import Final

_RANGE: Final = re.compile(r"bytes\s*=\s*(?:(\d{1,19})-(\d{1,19})?|-(\d{1,19}))", re.IGNORECASE | re.ASCII)
_ETAG: Final = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')


class UnsatisfiableError(ValueError):
    """A well-formed range that no byte of the representation satisfies: 416."""


def parse_range(value: str | None, size: int) -> range | None:
    """The byte positions that `value` selects of `size` bytes; None where it is to be ignored.

    Ignored: no header, another unit, several ranges, or a form that section 14.1.1 calls invalid.
    Raises UnsatisfiableError.
    """
    match = _RANGE.fullmatch(value.strip()) if value else None
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        start, stop = max(size - int(suffix), 0), size
    else:
        start = int(first)
        stop = size if last is None else min(int(last) + 1, size)
        if last is not None and int(last) < start:
            return None
    if start >= stop:
        raise UnsatisfiableError(f"the range {value!r} selects nothing of {size} bytes")
    return range(start, stop)


def if_range_holds(value: str | None, etag: str) -> bool:
    """Whether Range applies: no If-Range, or one that names this very tag (strong comparison; dates never match)."""
    return value is None or value.strip() == etag


def none_match(value: str | None, etag: str) -> bool:
    """Whether If-None-Match lists `etag` (weak comparison) or is ``*``: answer 304."""
    if value is None:
        return False
    return value.strip() == "*" or etag in _ETAG.findall(value)
