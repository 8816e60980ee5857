"""Digests of what travels (RFC 9530): the fields' values, and which transfers are checked."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from gemmserve import _errors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    from gemmserve._transfer.bodies import Placing, Receiver

T = TypeVar("T")

Digests: TypeAlias = Literal["never", "known", "always"]

WANTED: Final = "sha-256=9"
"""The value of Want-Repr-Digest and Want-Content-Digest: SHA-256, with the highest preference."""

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


class CheckedReceiver:
    """Gives another receiver what comes, and compares its SHA-256 at the end."""

    def __init__(self, inner: Receiver[T], expected: bytes) -> None:
        self._inner = inner
        self._expected = expected
        self._hash = hashlib.sha256()

    def feed(self, piece: bytes | memoryview) -> None:
        self._hash.update(piece)
        self._inner.feed(piece)

    def finish(self) -> Any:
        """Return the other receiver's value. Raises CorruptAnswer."""
        if self._hash.digest() != self._expected:
            raise _errors.CorruptAnswer("the answer changed on its way: it has another SHA-256 than it says")
        return self._inner.finish()


class CheckedPlacing(CheckedReceiver):
    """The same for a receiver that knows where bytes belong."""

    def __init__(self, inner: Placing, expected: bytes) -> None:
        whole: Any = inner
        super().__init__(whole, expected)
        self._placing = inner
        self._place = memoryview(b"")

    def place(self) -> memoryview:
        """See `Placing`."""
        self._place = self._placing.place()
        return self._place

    def landed(self, count: int) -> None:
        """See `Placing`."""
        self._hash.update(self._place[:count])
        self._place = self._place[count:]
        self._placing.landed(count)
