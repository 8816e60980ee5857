"""The multipart bodies that clients really send, where they are small: cut by searching, without a parser.

Only the plain form is read here: parts whose headers are Content-Disposition and perhaps Content-Type. Anything else
(also everything that is wrong) is left to `multipart.OneShotForm`, which reads the same bytes and says what is wrong.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from gemmserve_service.http.requests.multipart import MAX_PARAMS

MOST_BYTES: Final = 1 << 18
"""Of a small body: it is gathered before it is looked at, and several may be at one time."""

_MOST_HEAD: Final = 512
# A part's headers, in either order. The type of shared memory (wire.NPY_HEADER) means that the data are elsewhere.
_TYPE: Final = rb"(?i:Content-Type): (?!application/x-npy-header)[A-Za-z0-9.+/-]{1,80}"
_PART: Final = re.compile(
    rb"(?:" + _TYPE + rb"\r\n)?"
    rb'(?i:Content-Disposition): form-data; name="([a-z]{1,8})"(?:; filename="[^"\\\r\n]{0,200}")?'
    rb"(?:\r\n" + _TYPE + rb")?"
)
_FORM: Final = re.compile(r'multipart/form-data; ?boundary=(?:"([0-9A-Za-z\'()+_,./:=? -]{1,70})"|([!-~]{1,70}))')
_SPECIAL: Final = frozenset('"\\;,()<>@:/[]?=')  # of RFC 2045, section 5.1: they need quotes


def boundary_of(content_type: str) -> bytes | None:
    """The boundary that a plain Content-Type names."""
    match = _FORM.fullmatch(content_type)
    if match is None or (match[2] is not None and _SPECIAL & set(match[2])):
        return None
    return (match[1] or match[2]).encode("ascii")


def cut(body: bytes, boundary: bytes, begin: int = 0) -> dict[str, tuple[int, int]] | None:
    """Where in `body` each part's data begin and end, by name; None if it is not plain, or not whole.

    `begin`: of the first delimiter.
    """
    delimiter = b"\r\n--" + boundary
    if not body.startswith(delimiter[2:] + b"\r\n", begin):
        return None
    found: dict[str, tuple[int, int]] = {}
    position = begin + len(delimiter)
    while True:
        blank = body.find(b"\r\n\r\n", position, position + _MOST_HEAD)
        name = None if blank < 0 else _name(body[position:blank])
        end = body.find(delimiter, blank + 2)  # an empty part's delimiter begins with the end of the blank line
        start = blank + 4
        if name is None or name in found or end < start or (name == "params" and end - start > MAX_PARAMS):
            return None
        found[name] = (start, end)
        position = end + len(delimiter) + 2
        follows = body[position - 2 : position]
        if follows == b"--":
            return found if body[position:] in {b"\r\n", b""} else None
        if follows != b"\r\n":
            return None


@lru_cache(256)
def _name(head: bytes) -> str | None:
    """The name in a part's headers; the same come again and again."""
    match = _PART.fullmatch(head)
    return None if match is None else match[1].decode("ascii")
