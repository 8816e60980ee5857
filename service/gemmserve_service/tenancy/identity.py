"""Identity of a request's sender, and what it permits. No HTTP framework: headers in, a caller or a refusal out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import Forbidden, Unauthorized
from gemmserve_service.tenancy.api_keys import KeyMalformed, Scope, key_id_of, matches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.tenancy.api_keys import KeyRecord
    from gemmserve_service.tenancy.keyring import Keyring

_EVERYTHING: Final = frozenset(Scope)

# What the world may know of a server that has keys: that it lives, and what its API is.
_PUBLIC: Final = frozenset({
    "/", "/healthz", "/livez", "/readyz", "/docs", "/openapi.json", "/problems", "/favicon.ico", "/favicon.svg",
    "/v2", "/v2/health/live", "/v2/health/ready",
})  # fmt: skip
STATIC: Final = "/static/"
"""Where the files lie that the pages load."""
_PUBLIC_BELOW: Final = ("/problems/", STATIC, "/internal/cells/")
"""Beginnings of paths that need no key; requests of other cells have a proof of their own (`cells`)."""
_LOOKING: Final = frozenset({"GET", "HEAD"})
_LOOKING_BY_POST: Final = frozenset({"/v2/repository/index", "/v1/job-states"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request."""

    key_id: str
    """"" while the server has no keys."""
    owner: str
    """Owner of the arrays and jobs that the caller makes and sees; "" while the server has no keys: everybody's."""
    name: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        """Whether the caller's scopes include that one; admin includes every other."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def need(self, scope: Scope) -> None:
        """Raises Forbidden without that scope."""
        if not self.may(scope):
            raise Forbidden(f"this needs the scope {scope.value}, and the key has {_listed(self.scopes)}", scope=scope)

    def view(self, *, everybody: bool) -> str:
        """The owner whose things are looked at: the caller's own, or "" for everybody's. Raises Forbidden."""
        if not everybody:
            return self.owner
        self.need(Scope.ADMIN)
        return ""


ANYONE: Final = Caller("", "", "", _EVERYTHING)
"""The caller of every request while there are no keys."""
NOBODY: Final = Caller("", "-", "", frozenset())
"""The caller of a request that needs no key, once there are keys. Owns nothing: no key's id is "-"."""
SCRAPER: Final = Caller("", "-", "", frozenset({Scope.READ}))
"""The caller of a request to the second port."""


def needed_scope(method: str, path: str) -> Scope | None:
    """Return the scope that a request needs beside a valid key; None: no key either. What is not listed needs a key."""
    if method in _LOOKING:
        if path in _PUBLIC or path.startswith(_PUBLIC_BELOW):
            return None
        return Scope.READ
    return Scope.READ if looks(method, path) else Scope.SUBMIT


def looks(method: str, path: str) -> bool:
    """Whether a request changes nothing."""
    return method in _LOOKING or (method == "POST" and path in _LOOKING_BY_POST)


def identify(keyring: Keyring, authorization: Sequence[str], api_key: Sequence[str]) -> Caller:
    """The caller behind the values of Authorization and X-API-Key. Raises Unauthorized."""
    if not keyring.closed:
        return ANYONE
    texts = {_bearer(value) for value in authorization} | {value.strip() for value in api_key}
    if not texts:
        raise Unauthorized(
            "this server wants an API key: Authorization: Bearer gs_... (Python and the command line take it from "
            "GEMMSERVE_API_KEY)",
            presented=False,
        )
    if len(texts) > 1:
        raise Unauthorized("the request carries several API keys")
    (text,) = texts
    try:
        key_id = key_id_of(text)
    except KeyMalformed as error:
        raise Unauthorized(str(error)) from None
    record = keyring.keys.get(key_id)
    if not matches(text, record) or record is None:
        raise Unauthorized("this API key is not known here")
    _check_state(record)
    return Caller(key_id, record.owner, record.name, record.scopes)


def still_valid(keyring: Keyring, caller: Caller) -> bool:
    """Whether a caller that was identified a while ago would be again, with the same rights."""
    if not keyring.closed:
        return not caller.key_id
    record = keyring.keys.get(caller.key_id)
    if record is None or record.state(time.time()) != "valid":
        return False
    return (record.owner, record.scopes) == (caller.owner, caller.scopes)


def _check_state(record: KeyRecord) -> None:
    """Check that the key is valid, after its secret: only who knows that learns that it is of no use any more."""
    state = record.state(time.time())
    if state != "valid":
        raise Unauthorized(f"this API key is {state}")


def _bearer(value: str) -> str:
    scheme, _, text = value.partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("Authorization has another scheme than Bearer")
    return text.strip()


def _listed(scopes: frozenset[Scope]) -> str:
    return ", ".join(sorted(scope.value for scope in scopes)) or "none"
