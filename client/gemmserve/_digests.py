"""Digests of what travels (RFC 9530): the fields' values, and which transfers are checked."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING, Final, Literal, get_args

from gemmserve import _errors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

Digests: TypeAlias = Literal["never", "known", "always"]

WANTED: Final = "sha-256=9"
"""Of Want-Repr-Digest and Want-Content-Digest: this one, very much."""

# A dictionary of byte sequences in the words of RFC 8941, of which one member is read.
_SHA_256: Final = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):")


def check_digests(digests: str) -> None:
    """Raises ParameterInvalid for what is not known."""
    if digests not in get_args(Digests):
        raise _errors.ParameterInvalid(
            f'digests is "never", "known" or "always", not {digests!r}', problem={"parameter": "digests"}
        )


def field_value(pieces: Iterable[bytes | memoryview]) -> str:
    """The value of Content-Digest for these bytes."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"


def sha256_of(field: str | None) -> bytes | None:
    """The SHA-256 in a digest field, if it has one."""
    found = _SHA_256.search(field or "")
    return None if found is None else base64.b64decode(found[1])
