"""Content-Digest's grammar; that it is checked against bodies is in test_arrays."""

from __future__ import annotations

import base64
import hashlib

import pytest

from gemmserve_service.errors import InvalidRequest
from gemmserve_service.http.headers.digests import parse_content_digest

DIGEST = hashlib.sha256(b"x").digest()
MEMBER = f"sha-256=:{base64.b64encode(DIGEST).decode()}:"


@pytest.mark.parametrize("value", [MEMBER, f" {MEMBER} ", f"sha-512=:AAAA:, {MEMBER}", f"{MEMBER};a=1, md5=:AA==:"])
def test_sha256_is_found(value):
    assert parse_content_digest(value) == DIGEST


@pytest.mark.parametrize("value", [None, "sha-512=:AAAA:", "unixsum=:AAAA:"])
def test_absent_or_unknown_is_ignored(value):
    assert parse_content_digest(value) is None


@pytest.mark.parametrize(
    "value",
    ["", "sha-256", "sha-256=abc", "sha-256=:abc:", "sha-256=:AAAA:", "sha-256=:****:", f"{MEMBER},", "=:AAAA:"],
)
def test_malformed(value):
    with pytest.raises(InvalidRequest):
        parse_content_digest(value)
