"""Preferences of clients: Accept (RFC 9110, section 12.5.1) and Prefer (RFC 7240). Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_WAIT: Final = re.compile(r'wait\s*=\s*"?(\d{1,9})"?', re.IGNORECASE | re.ASCII)


def choose_media_type(accept: str | None, offers: Sequence[str]) -> str | None:
    """The offer that `accept` likes best (the first of equals; no header: the first), or None: answer 406."""
    if not accept or not accept.strip():
        return offers[0]
    entries = [weighted(entry) for entry in accept.split(",") if entry.strip()]
    best: tuple[float, str | None] = (0.0, None)
    for offer in offers:
        quality = _quality(offer, entries)
        if quality > best[0]:
            best = (quality, offer)
    return best[1]


def weighted(entry: str) -> tuple[str, float]:
    """Name, in lower case, and quality value of one entry of a list (RFC 9110, section 12.4.2)."""
    media, *parameters = (part.strip().lower() for part in entry.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return media, min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                return media, 0.0
    return media, 1.0


def _quality(offer: str, entries: list[tuple[str, float]]) -> float:
    """Quality of the most specific entry that matches `offer`."""
    for pattern in (offer, offer.partition("/")[0] + "/*", "*/*"):
        matching = [quality for media, quality in entries if media == pattern]
        if matching:
            return max(matching)
    return 0.0


@dataclass(frozen=True)
class Preference:
    """The two preferences of RFC 7240 that jobs know."""

    respond_async: bool = False
    wait_s: int | None = None

    def applied(self, wait_s: float) -> str | None:
        """The value of Preference-Applied when up to `wait_s` seconds were granted; None: nothing was asked for."""
        waits = None if self.wait_s is None else f"wait={wait_s:.0f}"
        if not self.respond_async:
            return waits
        return "respond-async" if waits is None else f"respond-async, {waits}"


NO_PREFERENCE: Final = Preference()


def parse_prefer(values: Sequence[str]) -> Preference:
    """Reads every Prefer header; what is unknown or ill-formed is ignored, the first of repeated ones counts."""
    respond_async, wait_s = False, None
    for entry in (entry.split(";")[0].strip() for value in values for entry in value.split(",")):
        if entry.lower() == "respond-async":
            respond_async = True
        elif wait_s is None and (match := _WAIT.fullmatch(entry)):
            wait_s = int(match[1])
    return Preference(respond_async, wait_s)
