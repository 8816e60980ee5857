"""Content-Digest (RFC 9530): what the sender says the SHA-256 of the body is."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from gemmserve_service.errors import InvalidRequest

# A dictionary of byte sequences in the words of RFC 8941: key=:base64:, parameters allowed and ignored.
_MEMBER: Final = re.compile(r"\s*([a-z*][a-z0-9_.*-]*)=:([A-Za-z0-9+/=]*):(?:;[^,]*)?\s*")


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
