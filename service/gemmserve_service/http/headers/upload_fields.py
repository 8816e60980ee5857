"""The header fields of draft-ietf-httpbis-resumable-upload: items of structured fields (RFC 9651)."""

from __future__ import annotations

import re
from typing import Final

PARTIAL_UPLOAD: Final = "application/partial-upload"

COMPLETE: Final = "Upload-Complete"
OFFSET: Final = "Upload-Offset"
LENGTH: Final = "Upload-Length"
LIMIT: Final = "Upload-Limit"

_PARAMETERS: Final = r"(?:\s*;[^,]*)?"
_BOOLEAN: Final = re.compile(rf"\s*\?([01]){_PARAMETERS}\s*")
_INTEGER: Final = re.compile(rf"\s*(\d{{1,15}}){_PARAMETERS}\s*", re.ASCII)


def parse_boolean(value: str | None) -> bool | None:
    """?0 or ?1; None for anything else: such a field is to be ignored."""
    found = None if value is None else _BOOLEAN.fullmatch(value)
    return None if found is None else found[1] == "1"


def parse_size(value: str | None) -> int | None:
    """A number of bytes; None for anything else, likewise."""
    found = None if value is None else _INTEGER.fullmatch(value)
    return None if found is None else int(found[1])


def boolean(value: bool) -> str:
    """Written form."""
    return "?1" if value else "?0"


def limits(**values: int | None) -> str:
    """Upload-Limit's dictionary; max_size is written max-size, None is left out."""
    present = {name.replace("_", "-"): value for name, value in values.items() if value is not None}
    return ", ".join(f"{name}={value}" for name, value in present.items())
