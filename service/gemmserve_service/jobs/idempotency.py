"""Idempotency-Keys: the same request sent again, by the same owner, is answered with the job that it made before."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from gemmserve_service.errors import IdempotencyConflict, IdempotencyMismatch
from gemmserve_service.runtime import clock

if TYPE_CHECKING:
    from collections.abc import Iterable


class RememberedKey(NamedTuple):
    """An Idempotency-Key of an owner: the digest of its first request's body and the jobs that came of it."""

    owner: str
    key: str
    digest: str
    job_id: str
    """Id of the job; of several their ids, with commas in between."""
    created_at: float


class IdempotencyKeys:
    """The keys in memory: those on record, and those whose first request is being taken in."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._known: dict[tuple[str, str], RememberedKey] = {}
        self._arriving: dict[tuple[str, str], str] = {}

    def load(self, keys: Iterable[RememberedKey]) -> None:
        """Takes over what an earlier process recorded."""
        for key in keys:
            self.remember(key)

    def remember(self, key: RememberedKey) -> None:
        """Keep a key with its job."""
        self._known[key.owner, key.key] = key

    def jobs_of(self, owner: str, key: str, digest: str | None = None) -> list[str] | None:
        """The jobs that the key made before. Raises IdempotencyMismatch if that was for a request of another digest."""
        known = self._known.get((owner, key))
        if known is None or known.created_at <= clock.time() - self.ttl_s:
            return None
        if digest is not None and known.digest != digest:
            raise IdempotencyMismatch("this Idempotency-Key was used for another request")
        return known.job_id.split(",")

    def arrive(self, owner: str, key: str, digest: str) -> None:
        """Hold the key while its first request is taken in: until `arrived`.

        Raises IdempotencyConflict, IdempotencyMismatch.
        """
        held = self._arriving.get((owner, key))
        if held is not None:
            if held != digest:
                raise IdempotencyMismatch("this Idempotency-Key was used for another request")
            raise IdempotencyConflict("the first request with this key is being taken in", retry_after_s=1.0)
        self._arriving[owner, key] = digest

    def arrived(self, owner: str, key: str) -> None:
        """Hold the key no more."""
        del self._arriving[owner, key]

    def shift(self, seconds: float) -> None:
        """The clock was set by so much: what was an hour old still is."""
        self._known = {name: key._replace(created_at=key.created_at + seconds) for name, key in self._known.items()}

    def forget(self, before: float) -> None:
        """Drops the keys that were first used before that moment."""
        self._known = {name: key for name, key in self._known.items() if key.created_at >= before}


def digest_of(body: str) -> str:
    """Return the SHA-256 of a request's body, in hexadecimal."""
    return hashlib.sha256(body.encode()).hexdigest()
