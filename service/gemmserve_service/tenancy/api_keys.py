"""API keys: their form, and the records that stand for them. Pure; `keyring.py` keeps the records on the disk.

``gs_<id>_<secret><checksum>``: a prefix that secret scanners look for, the key's id (public: it names the key in logs
and listings), 256 random bits and the CRC-32 of everything before it, both in base 62. The checksum tells a mistyped or
cut key from a wrong one without a lookup; it protects nothing. What is kept is the SHA-256 of the whole text: with 256
random bits there is nothing to guess, so a slow password hash would cost every request and gain nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
import zlib
from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

_ID_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: nothing that is misread
_ID_LENGTH: Final = 10
_BASE62: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_BITS: Final = 256
_SECRET_LENGTH: Final = 43  # 62**43 > 2**256
_CHECKSUM_LENGTH: Final = 6  # 62**6 > 2**32
_KEY: Final = re.compile(
    rf"gs_([{_ID_ALPHABET}]{{{_ID_LENGTH}}})_[0-9A-Za-z]{{{_SECRET_LENGTH}}}([0-9A-Za-z]{{{_CHECKSUM_LENGTH}}})"
)
# What an unknown id is compared with, so that it takes as long as a known one.
_NO_DIGEST: Final = "0" * 64


class Scope(StrEnum):
    """Right that a key gives."""

    READ = "read"
    """Look at its owner's arrays and jobs, and download them."""
    SUBMIT = "submit"
    """Upload, multiply, cancel, delete."""
    ADMIN = "admin"
    """Both, and everybody's arrays and jobs where it asks for them."""
    WORKER = "worker"
    """Join as a worker, and nothing else: it is the only scope of its keys."""


class KeyMalformed(ValueError):  # noqa: N818 (says what is the case)
    """Text of another form than a key's, or mistyped or cut; the message says which, and never quotes it."""


class Quota(BaseModel):
    """Limits of one owner; None: none but the server's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stored_bytes: int | None = Field(None, ge=0, description="bytes of stored arrays and of results to come")
    inflight_bytes: int | None = Field(None, ge=0, description="bytes of bodies and one-shot operands at one time")
    queued_jobs: int | None = Field(None, ge=0, description="jobs that wait or run")
    device_seconds_per_day: float | None = Field(None, ge=0, description="device time from midnight to midnight, UTC")

    def part(self, count: int) -> Quota:
        """Return an equal part of every limit, for one of `count` cells; bytes and jobs are rounded up."""
        whole = {name: getattr(self, name) for name in ("stored_bytes", "inflight_bytes", "queued_jobs")}
        seconds = self.device_seconds_per_day
        return Quota(
            **{name: None if limit is None else -(-limit // count) for name, limit in whole.items()},
            device_seconds_per_day=None if seconds is None else seconds / count,
        )


class Owner(BaseModel):
    """Owner of arrays and jobs: one or several keys act for it. Its id is that of its first key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    weight: float = Field(1.0, gt=0, le=1000)
    """Its share of the devices beside others that wait: twice the weight, twice the share."""
    quota: Quota = Quota()


class KeyRecord(BaseModel):
    """A key without its secret. Times are seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    owner: str = Field(pattern=rf"^[{_ID_ALPHABET}]{{{_ID_LENGTH}}}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: frozenset[Scope]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def state(self, clock: float | None = None) -> str:
        """``valid``, ``expired`` or ``revoked``."""
        if self.revoked_at is not None:
            return "revoked"
        now = time.time() if clock is None else clock
        return "expired" if self.expires_at is not None and self.expires_at <= now else "valid"


def new_key() -> tuple[str, str]:
    """A fresh key: its id, and the whole text that is shown once."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    body = f"gs_{key_id}_{_base62(secrets.randbits(_SECRET_BITS), _SECRET_LENGTH)}"
    return key_id, body + _checksum(body)


def key_id_of(text: str) -> str:
    """The id in a key's text. Raises KeyMalformed."""
    match = _KEY.fullmatch(text)
    if match is None:
        raise KeyMalformed("this is no gemmserve API key: one begins with gs_ and has 63 characters")
    if not hmac.compare_digest(_checksum(text[:-_CHECKSUM_LENGTH]), match[2]):
        raise KeyMalformed("this API key was mistyped or cut: its checksum is wrong")
    return match[1]


def digest_of(text: str) -> str:
    """Return what is kept of a key."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def matches(text: str, record: KeyRecord | None) -> bool:
    """Whether the text is the record's key; takes the same time whichever it is, and for no record at all."""
    return hmac.compare_digest(digest_of(text), _NO_DIGEST if record is None else record.sha256) and record is not None


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode("ascii")), _CHECKSUM_LENGTH)


def _base62(value: int, length: int) -> str:
    digits = []
    for _ in range(length):
        value, digit = divmod(value, 62)
        digits.append(_BASE62[digit])
    return "".join(reversed(digits))
