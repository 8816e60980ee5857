"""Server-sent events (WHATWG HTML, section 9.2) from the pieces of a stream: the JSON in each event's data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve import _errors
from gemmserve._transfer.bodies import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_EVENT: Final = 1 << 20


@dataclass(frozen=True)
class Event:
    """One event."""

    data: Any
    """The JSON in it."""
    id: str | None = None
    """Id that a client that comes back names as its Last-Event-ID; None: no event had one so far."""


class EventParser:
    """Parser, fed pieces in any division, that yields whole events; comments (keep-alives) and other fields pass by."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._id: str | None = None

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Raises ProtocolError for data that is no JSON or has no end."""
        self._rest += piece
        if len(self._rest) > _MAX_EVENT:
            raise _errors.ProtocolError(f"an event's line is longer than {_MAX_EVENT} bytes")
        # A final "\r" may be half of "\r\n": it waits for the next piece.
        end = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r", 0, -1)) + 1
        whole, self._rest = self._rest[:end], self._rest[end:]
        for line in whole.splitlines():
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"id:") and b"\0" not in line:
                self._id = line[3:].removeprefix(b" ").decode("utf-8", "replace")
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield Event(parse_json(data), self._id)
