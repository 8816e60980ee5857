"""Places: where a request goes behind a router, to the router or straight to the cell that it is for.

A server may be one of several cells behind a router (docs/cells.md). What is small goes to the URL that the client was
given. What is large goes straight to its cell, whose own name `GET /v1/cells` tells: asked by that URL, of whoever has
the key already. A cell's name is believed on no other word: a Location (RFC 9110, section 15.4.8) only chooses among
the names in that list, and of those only what is no less safe than the URL that the client was given.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from gemmserve import _errors
from gemmserve.wire import CELLS_HEADER, EXCHANGE_HEADER, STRAIGHT_FROM

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gemmserve._calls.requests import Request

PATH: Final = "/v1/cells"
MOVED: Final = 307
HOPS: Final = 3
"""Times that one request is sent on: twice are the most that cells have reason for."""

SERVER_ERROR: Final = 500

_OTHER_CELL: Final = "/problems/other-cell"
_ITEM: Final = re.compile(r"/v1/(?:arrays|jobs|uploads)/[a-z]+_[0-9a-z]{26}(?:_([1-9][0-9]{0,2}))?(?:/|\Z)")
_OF_A_CELL: Final = re.compile(r"[a-z]+_[0-9a-z]{26}_([1-9][0-9]{0,2})")
_MAX_MOVED: Final = 1024


def by_cell(ids: Iterable[str]) -> list[list[str]]:
    """Return ids by the cell that made them, which they end in; each cell's in the order given, as are the cells."""
    found: dict[int, list[str]] = {}
    for each in ids:
        found.setdefault(cell_of(each), []).append(each)
    return list(found.values())


def cell_of(item: str) -> int:
    """Return the cell that made an array or job, which its id ends in; cell 0 leaves it out."""
    match = _OF_A_CELL.fullmatch(item)
    return 0 if match is None else int(match[1])


@dataclass(frozen=True)
class Elsewhere:
    """Answer that sends a request on."""

    location: str


class Places:
    """The cells behind a router as one client knows them. Threads may share it: each change is a single assignment."""

    def __init__(self, base: str) -> None:
        """`base`: the URL that the client was given."""
        self._base = base
        self._routed: bool | None = None
        """Whether there is a router, by the last answer; None: none has come."""
        self._urls: Mapping[int, str] | None = None
        """Cells' own URLs; None: not asked for."""
        self._mine: int | None = None
        """The cell that new work of this client goes to."""
        self._moved: dict[str, None] = {}
        """Paths of large downloads that were answered 307."""

    @property
    def urls(self) -> list[str]:
        """URLs to which requests may go besides."""
        return list((self._urls or {}).values())

    def heard(self, headers: Mapping[str, str]) -> None:
        """Take note of an answer that came by the URL that the client was given."""
        if CELLS_HEADER in headers:
            self._routed = True
        elif self._routed is None and EXCHANGE_HEADER in headers:
            self._routed = False

    def unknown(self, request: Request[Any]) -> bool:
        """Whether the cells are to be asked for before a request is sent: one whose body is large would have been sent
        for nothing, and one that was cut off while it sends may never see the 307.
        """
        return self._urls is None and self._routed is not False and _is_large(request)

    def learn(self, document: Any) -> None:
        """Take in the answer of `PATH`; what is no such answer says that there are no cells. Raises ProtocolError for a
        name that is less safe than the URL that the client was given: the key and arrays would go there.
        """
        urls: dict[int, str] = {}
        listed = document.get("cells") if isinstance(document, dict) else None
        for each in listed if isinstance(listed, list) else ():
            cell, url = (each.get("cell"), each.get("url")) if isinstance(each, dict) else (None, None)
            if not isinstance(cell, int) or not isinstance(url, str):
                raise _errors.ProtocolError("the list of cells has one without a number or a URL")
            scheme = urlsplit(url).scheme
            if scheme != "https" and scheme != urlsplit(self._base).scheme:
                raise _errors.ProtocolError(
                    f"cell {cell} is at {url}, and this client was given {self._base}: not less"
                )
            urls[cell] = url.rstrip("/")
        if not urls:
            self._routed = False
        self._mine = document.get("cell") if urls else None
        self._urls = urls

    def none(self) -> None:
        """Take note that the server knows of no cells."""
        self._routed, self._urls = False, {}

    def forget(self) -> None:
        """Take note that a cell could not be reached by its own name: ask anew, for work may go elsewhere by now."""
        self._urls = None

    def place_of(self, request: Request[Any]) -> str | None:
        """Return the cell's URL that the request goes to; None: the one that the client was given."""
        urls = self._urls
        if not urls:
            return None
        match = _ITEM.match(request.path)
        if match is not None:
            large = _is_large(request) or request.result_nbytes > STRAIGHT_FROM or request.path in self._moved
            return urls.get(int(match[1] or 0)) if large else None
        return urls.get(self._mine) if self._mine is not None and _is_large(request) else None

    def follow(self, request: Request[Any], location: str) -> str:
        """Return the URL of the cell that a 307 names. Raises ProtocolError for a name that is not in the list."""
        for url in self.urls:
            if location == url + request.path or location.startswith(f"{url}{request.path}?"):
                if request.method == "GET" and len(self._moved) < _MAX_MOVED:
                    self._moved[request.path] = None
                return url
        raise _errors.ProtocolError(f"the server sends this on to {location[:200]}, which is none of its cells")


def location_of(headers: Mapping[str, str], content: bytes) -> str | None:
    """Return where a cell's 307 sends a request; None: another kind of answer."""
    try:
        problem = json.loads(content)
    except ValueError:
        return None
    return headers.get("location") if isinstance(problem, dict) and problem.get("type") == _OTHER_CELL else None


def _is_large(request: Request[Any]) -> bool:
    return request.body is not None and request.body.nbytes > STRAIGHT_FROM
