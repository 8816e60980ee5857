"""Header fields of every answer, whichever way it goes: by ASGI, past it, or as a refusal of the connection's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gemmserve.wire import EXCHANGE_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping

EXCHANGE: Final = EXCHANGE_HEADER.lower().encode("ascii")
"""Name of the field that repeats what the client calls the exchange."""

SECURITY: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
POLICY: Final = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")


def request_fields(context: Mapping[str, str], exchange: bytes = b"") -> list[tuple[bytes, bytes]]:
    """Return the fields that differ by request: its id, and what its client calls the exchange, if it does."""
    fields = [(b"x-request-id", context["request_id"].encode("ascii"))]
    if exchange:
        fields.append((EXCHANGE, exchange))
    return fields
