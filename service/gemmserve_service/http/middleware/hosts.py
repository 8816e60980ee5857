"""Host and Origin values that are answered while there are no API keys. Pure functions.

A web page that the user visits can send requests to loopback addresses, and by DNS rebinding even under a name of its
own. Names that only this machine resolves to itself, and addresses, cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_service.settings import Settings

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+)(?::\d{1,5})?")
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(.+)")


class HostRule:
    """Whether a host is loopback, the one that the server listens on, or listed in `allowed_hosts` ("*": any)."""

    def __init__(self, settings: Settings) -> None:
        self._names = {name.lower().rstrip(".") for name in (*settings.allowed_hosts, settings.host)}
        bound = _address(settings.host)
        # Listening on every interface: any of this machine's addresses may be the one that was dialled.
        self._any_address = bound is not None and bound.is_unspecified
        self._accepted: dict[str, bool] = {}

    def host(self, value: str) -> bool:
        """Whether the Host header's value is answered."""
        known = self._accepted.get(value)
        if known is None:
            match = _HOST.fullmatch(value)
            known = match is not None and self._allows(match[1])
            if len(self._accepted) < 64:  # a client cannot make it grow
                self._accepted[value] = known
        return known

    def origin(self, value: str) -> bool:
        """Whether the Origin header's value is answered; "null" (sandboxed pages, local files) is not."""
        if "*" in self._names:
            return True
        match = _ORIGIN.fullmatch(value)
        return match is not None and self.host(match[1])

    def _allows(self, name: str) -> bool:
        name = name.lower().rstrip(".")
        bare = name.removeprefix("[").removesuffix("]")
        if "*" in self._names or bare in self._names or bare == "localhost" or bare.endswith(".localhost"):
            return True
        address = _address(bare)
        return address is not None and (address.is_loopback or self._any_address)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
