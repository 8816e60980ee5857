"""Tokens by which workers join, and secrets of their links.

A link's secret is made of a random number and its authenticator under a key of the data directory: one that was a
link's can be told from one that never was, by the next front too, and nothing is kept of links that have ended.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmserve_service.tenancy.api_keys import KeyMalformed, Scope, key_id_of, matches

if TYPE_CHECKING:
    from gemmserve_service.tenancy.keyring import Keyring

FILE: Final = "join.key"
_KEY_BYTES: Final = 32
_NONCE: Final = 16  # hexadecimal digits
_SECRET: Final = 32


class TokenRefused(ValueError):  # noqa: N818 (says what is the case)
    """A worker's token is none that may join; the message says why, and never quotes it."""


def token_key(keyring: Keyring, token: str | None, *, open_without_keys: bool) -> str:
    """Return the id of the key whose text `token` is, "" where there are no keys. Raises TokenRefused.

    `open_without_keys`: whether anybody may join while the server has no keys.
    """
    if not keyring.closed:
        if not open_without_keys:
            raise TokenRefused("the server has no keys, and its join port can be reached by others")
        return ""
    if token is None:
        raise TokenRefused("a worker token is needed: `gemmserve keys create --scope worker`")
    try:
        key_id = key_id_of(token)
    except KeyMalformed:
        raise TokenRefused("the token is no key of this service") from None
    record = keyring.keys.get(key_id)
    if not matches(token, record) or record is None:
        raise TokenRefused("the token is not known here")
    if (state := record.state(time.time())) != "valid":
        raise TokenRefused(f"the token is {state}")
    if Scope.WORKER not in record.scopes:
        raise TokenRefused("the token's key has not the scope worker")
    return key_id


def still_joined(keyring: Keyring, key_id: str) -> bool:
    """Whether the key by which a link was joined would be taken again; "" where there were no keys."""
    if not key_id:
        return not keyring.closed
    record = keyring.keys.get(key_id)
    return record is not None and record.state(time.time()) == "valid" and Scope.WORKER in record.scopes


class LinkSecrets:
    """Secrets of the links of one data directory."""

    def __init__(self, data_dir: Path) -> None:
        """Read the directory's key, or make it. Raises OSError, and ValueError for a file that holds none."""
        self._key = _read_key(data_dir / FILE)
        self.server = hashlib.sha256(b"server" + self._key).hexdigest()[:16]
        """Name of the data directory: what a node keeps of its arrays is of use to no other."""

    def new(self) -> str:
        """Return the secret of another link: 32 hexadecimal digits."""
        nonce = secrets.token_hex(_NONCE // 2)
        return nonce + self._seal(nonce)

    def made(self, secret: str) -> bool:
        """Whether the secret was some link's, once."""
        if len(secret) != _SECRET or not secret.isascii():
            return False
        return hmac.compare_digest(self._seal(secret[:_NONCE]), secret[_NONCE:])

    def _seal(self, nonce: str) -> str:
        return hmac.new(self._key, nonce.encode(), hashlib.sha256).hexdigest()[: _SECRET - _NONCE]


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = secrets.token_bytes(_KEY_BYTES)
        fd, temporary = tempfile.mkstemp(prefix=FILE, suffix=".new", dir=path.parent)  # mode 0600
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(key)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{path} holds no key of {_KEY_BYTES} bytes")
    return key
