"""Digest fields (RFC 9530): what the sender says the SHA-256 of a body is, and whether the other side wants to know."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from gemmserve_service.errors import InvalidRequest

# A dictionary of byte sequences in the words of RFC 8941: key=:base64:, parameters allowed and ignored.
_MEMBER: Final = re.compile(r"\s*([a-z*][a-z0-9_.*-]*)=:([A-Za-z0-9+/=]*):(?:;[^,]*)?\s*")


# The same of integers: key, or key=integer; what the value is decides whether it is wanted.
_WANTED: Final = re.compile(r"(?:^|,)\s*sha-256=0*([1-9]|10)\s*(?:;[^,]*)?(?=,|$)")


def digest_field(digest: bytes) -> str:
    """The value of Content-Digest or Repr-Digest for a SHA-256."""
    return f"sha-256=:{base64.b64encode(digest).decode('ascii')}:"


def wants_sha256(value: str | None) -> bool:
    """Whether a Want-Content-Digest or Want-Repr-Digest asks for it: by a preference from 1 to 10."""
    return value is not None and _WANTED.search(value) is not None


def parse_content_digest(value: str | None) -> bytes | None:
    """The sha-256 member, 32 bytes; None without the header or that member. Raises InvalidRequest."""
    if value is None:
        return None
    expected = None
    for member in value.split(","):
        match = _MEMBER.fullmatch(member)
        if match is None:
            raise InvalidRequest(
                f"Content-Digest {value[:120]!r} is malformed: expected sha-256=:base64: as in RFC 9530"
            )
        if match[1] == "sha-256":
            expected = _decode(match[2])
    return expected


def _decode(text: str) -> bytes:
    try:
        digest = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InvalidRequest("the sha-256 of Content-Digest is not base64") from error
    if len(digest) != 32:
        raise InvalidRequest(f"the sha-256 of Content-Digest has {len(digest)} bytes, not 32")
    return digest
