"""Peers: what one cell asks another: an array's metadata and its bytes, in the name of the array's owner.

By the standard library's HTTP client, in threads: such a request is rare beside a job's work, large, and nothing that a
server without cells would load.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import ssl
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from gemmserve.wire import OCTET_STREAM
from gemmserve_service.errors import ArrayLost, CellAway, Gone, NotFound
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.tenancy.cells import PEER_HEADER

if TYPE_CHECKING:
    from gemmserve_service.tenancy.cells import Cells

PATH: Final = "/internal/cells/arrays/"

_SILENCE_S: Final = 60.0
_RETRY_AFTER_S: Final = 2.0
_PIECE: Final = 1 << 20
_MAX_JSON: Final = 1 << 20
_REFUSALS: Final = {kind.slug: kind for kind in (NotFound, Gone, ArrayLost)}


class Peers:
    """The other cells, as this one asks them."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._context: ssl.SSLContext | None = None

    async def info(self, cell: int, array_id: str, owner: str) -> ArrayInfo:
        """Return the metadata of an array that the cell made, as `owner` sees it.

        Raises NotFound, Gone, ArrayLost as the cell does; CellAway where it does not answer.
        """
        return await asyncio.to_thread(self._info, cell, array_id, owner)

    async def fetch(self, cell: int, array_id: str, owner: str, place: memoryview) -> None:
        """Read the array's bytes to `place`, which is of their length, and compare them with the cell's digest.

        Not to be cancelled: a thread writes to `place` until it ends. Raises what `info` raises.
        """
        await asyncio.to_thread(self._fetch, cell, array_id, owner, place)

    def _info(self, cell: int, array_id: str, owner: str) -> ArrayInfo:
        with closing(self._connection(cell)) as connection:
            answer = self._ask(connection, cell, PATH + array_id, owner)
            try:
                return ArrayInfo.model_validate_json(answer.read(_MAX_JSON))
            except (OSError, http.client.HTTPException, ValidationError) as error:
                raise _away(cell, error) from error

    def _fetch(self, cell: int, array_id: str, owner: str, place: memoryview) -> None:
        with closing(self._connection(cell)) as connection:
            answer = self._ask(connection, cell, f"{PATH}{array_id}/data", owner)
            digest, filled = hashlib.sha256(), 0
            try:
                while filled < len(place):
                    count = answer.readinto(place[filled : filled + _PIECE])
                    if not count:
                        break
                    digest.update(place[filled : filled + count])
                    filled += count
            except (OSError, http.client.HTTPException) as error:
                raise _away(cell, error) from error
            said = f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
            if filled < len(place) or answer.getheader("Repr-Digest") != said:
                raise CellAway(
                    f"array {array_id} came damaged from cell {cell}: {filled} of {len(place)} bytes, or another "
                    "digest than the cell's",
                    retry_after_s=_RETRY_AFTER_S,
                )

    def _connection(self, cell: int) -> http.client.HTTPConnection:
        parts = urlsplit(self._cells.urls[cell])
        assert parts.hostname is not None
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_SILENCE_S)
        if self._context is None:
            self._context = ssl.create_default_context(cafile=self._cells.ca_file)
        make = partial(http.client.HTTPSConnection, context=self._context)
        return make(parts.hostname, parts.port, timeout=_SILENCE_S)

    def _ask(
        self, connection: http.client.HTTPConnection, cell: int, path: str, owner: str
    ) -> http.client.HTTPResponse:
        """The answer, whose body is still to be read. Raises what `info` raises."""
        prefix = urlsplit(self._cells.urls[cell]).path
        headers = {PEER_HEADER: self._cells.token("GET", path, owner), "Accept-Encoding": "identity"}
        try:
            connection.request("GET", prefix + path, headers={**headers, "Accept": OCTET_STREAM})
            answer = connection.getresponse()
            if answer.status == http.client.OK:
                return answer
            problem: Any = json.loads(answer.read(_MAX_JSON))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _away(cell, error) from error
        slug = str(problem.get("type", "")).rpartition("/")[2] if isinstance(problem, dict) else ""
        kind = _REFUSALS.get(slug)
        if kind is None:
            raise _away(cell, f"status {answer.status}, {slug or 'no problem of its own'}")
        raise kind(f"cell {cell}: {problem.get('detail', '')}")


def _away(cell: int, error: Exception | str) -> CellAway:
    said = error if isinstance(error, str) else str(error) or type(error).__name__
    return CellAway(f"an operand is in cell {cell}, which does not answer: {said}", retry_after_s=_RETRY_AFTER_S)
