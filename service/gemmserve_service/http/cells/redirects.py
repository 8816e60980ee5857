"""Requests that are another cell's, or too large for the way by a router: 307 to the cell's own name.

Nothing is forwarded: a cell that passed requests on would carry others' bytes, and need their keys. A 307 costs the
client one more exchange, once, for it can remember whose name it was told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gemmserve.wire import ROUTED_HEADER, STRAIGHT_FROM
from gemmserve_service.errors import OtherCell

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence
    from collections.abc import Set as AbstractSet
    from typing import Any

    from starlette.datastructures import Headers
    from starlette.requests import Request

    from gemmserve_service.tenancy.cells import Cells

_ITEMS: Final = frozenset({"arrays", "jobs", "uploads"})


def check_cell(cells: Cells, scope: MutableMapping[str, Any], headers: Headers) -> None:
    """Raises OtherCell for a request about what another cell made, and for one whose body is too large for the router
    that it came by. Its Location is this very request's, at the cell's own name.
    """
    parts = scope["path"].split("/", 4)
    if len(parts) > 3 and parts[1] == "v1" and parts[2] in _ITEMS:
        other = cells.elsewhere(parts[3])
        if other is not None:
            raise OtherCell(f"cell {other} has {parts[3]}", _location(cells.urls[other], scope))
    length = headers.get("content-length", "")
    if ROUTED_HEADER in headers and length.isdecimal() and len(length) < 20 and int(length) > STRAIGHT_FROM:
        detail = f"a body of {length} bytes goes straight to cell {cells.number}; by the router {STRAIGHT_FROM} may"
        raise OtherCell(detail, _location(cells.url, scope))


def check_download(cells: Cells, request: Request, nbytes: int) -> None:
    """Raises OtherCell for the download, by a router, of an array of so many bytes."""
    if cells.urls and nbytes > STRAIGHT_FROM and ROUTED_HEADER in request.headers:
        raise OtherCell(f"{nbytes} bytes come straight from cell {cells.number}", _location(cells.url, request.scope))


def check_ids(cells: Cells, request: Request, ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the ids that are this cell's to answer for, those that other cells made), each in the order given.

    Raises OtherCell where all of them were made by one other cell.
    """
    away = {name: cell for name in ids if (cell := cells.elsewhere(name)) is not None}
    here = [name for name in ids if name not in away]
    check_makers(cells, request, {*away.values(), *([None] if here else [])})
    return here, list(away)


def check_makers(cells: Cells, request: Request, makers: AbstractSet[int | None]) -> None:
    """Raises OtherCell for a request about arrays that one other cell made, all of them.

    `makers`: what `Cells.elsewhere` says of the arrays.
    """
    cell = next(iter(makers)) if len(makers) == 1 else None
    if cell is not None:
        raise OtherCell(f"cell {cell} made all of these arrays", _location(cells.urls[cell], request.scope))


def _location(url: str, scope: MutableMapping[str, Any]) -> str:
    path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace")
    query = scope["query_string"].decode("ascii", "replace")
    return f"{url}{path}?{query}" if query else url + path
