"""Cells: whole servers behind one router. Which there are, by which name each is reached, and how they know each other.

A cell asks another one for an operand in its owner's name. What says that it may is a message authentication code over
the request, made with the secret that all cells share: the secret itself never travels, and what was read on the way
serves for that one request alone, for half a minute.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from gemmserve_service.errors import Unauthorized
from gemmserve_service.runtime.ids import cell_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_service.settings import Settings

MAX_CELL: Final = 255
PEER_HEADER: Final = "Gemmserve-Peer"
"""Header by which one cell says who it is, in whose name it asks, and until when."""

_MIN_SECRET: Final = 32
_VALID_S: Final = 30.0
_MAX_FILE_BYTES: Final = 1 << 20
_FIELDS: Final = {"cells", "secret", "ca_file"}


class CellsError(RuntimeError):
    """The file of cells cannot be read, or says something that makes no sense."""


@dataclass(frozen=True)
class Cells:
    """All cells, as one of them knows them."""

    number: int
    """Number of this one."""
    urls: Mapping[int, str] = field(default_factory=dict)
    """Each cell's own URL, by its number; none: this server stands alone."""
    secret: bytes = field(default=b"", repr=False)
    ca_file: str | None = None
    """File of the certificates by which this cell believes the others; None: the system's."""

    @property
    def url(self) -> str:
        """The URL of this one."""
        return self.urls[self.number]

    @property
    def others(self) -> list[int]:
        """Numbers of the other cells."""
        return [number for number in self.urls if number != self.number]

    @property
    def count(self) -> int:
        """Number of cells, by which quotas are divided; 1 for a server that stands alone."""
        return max(1, len(self.urls))

    def elsewhere(self, identifier: str) -> int | None:
        """Return the number of the other cell that made what has this id; None: this one, or none that is known."""
        cell = cell_of(identifier)
        return cell if cell != self.number and cell in self.urls else None

    def token(self, method: str, path: str, owner: str, *, clock: float | None = None) -> str:
        """Return the value of `PEER_HEADER` for a request that this cell sends in the name of `owner`."""
        expires = int((time.time() if clock is None else clock) + _VALID_S)
        return f"{self.number}:{expires}:{owner}:{self._code(self.number, expires, owner, method, path)}"

    def owner_of(self, token: str, method: str, path: str, *, clock: float | None = None) -> str:
        """Return the owner in whose name another cell asks. Raises Unauthorized."""
        number, expires, owner, code = (*token.split(":"), "", "", "", "")[:4]
        if not self.secret or token.count(":") != 3 or not (number.isdecimal() and expires.isdecimal()):
            raise Unauthorized("this is for other cells alone")
        wanted = self._code(int(number), int(expires), owner, method, path)
        if not hmac.compare_digest(wanted.encode(), code.encode()) or int(number) not in self.others:
            raise Unauthorized("this is for other cells alone")
        now = time.time() if clock is None else clock
        if not now - _VALID_S <= int(expires) <= now + 2 * _VALID_S:
            raise Unauthorized("the other cell's leave has expired: do their clocks agree?")
        return owner

    def _code(self, number: int, expires: int, owner: str, method: str, path: str) -> str:
        text = "\n".join(("gemmserve peer", str(number), str(expires), owner, method, path))
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()


def read_cells(settings: Settings) -> Cells:
    """Return the cells that the settings name; a server alone where they name no file. Raises CellsError."""
    path = settings.cells_file
    if path is None:
        return Cells(settings.cell)
    try:
        with path.open("rb") as file:
            document: Any = json.loads(file.read(_MAX_FILE_BYTES))
    except OSError as error:
        raise CellsError(f"the file of cells {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CellsError(f"the file of cells {path} is no JSON: {error}") from error
    try:
        return _parse(document, settings.cell)
    except ValueError as error:
        raise CellsError(f"the file of cells {path}: {error}") from error


def _parse(document: Any, number: int) -> Cells:
    """The cells that the document lists. Raises ValueError."""
    if not isinstance(document, dict) or not isinstance(document.get("cells"), dict):
        raise ValueError('it is no object with "cells": {"0": "https://..."}')  # noqa: TRY004 (a fault of the document)
    if unknown := document.keys() - _FIELDS:
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))}; there are {', '.join(sorted(_FIELDS))}")
    urls: dict[int, str] = {}
    for name, url in document["cells"].items():
        if not name.isdecimal() or str(int(name)) != name or int(name) > MAX_CELL:
            raise ValueError(f"{name!r} is no number from 0 to {MAX_CELL}")
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts is None or parts.scheme not in {"http", "https"} or not parts.hostname or parts.query:
            raise ValueError(f"cell {name}: {url!r} is no http:// or https:// URL")
        if parts.username is not None:
            raise ValueError(f"cell {name}: its URL says who asks; clients are told it, so it must not")
        urls[int(name)] = url.rstrip("/")
    if number not in urls:
        raise ValueError(f"it does not list cell {number}, which this server is (GEMMSERVE_CELL)")
    if len(set(urls.values())) < len(urls):
        raise ValueError("two cells have the same URL")
    secret, ca_file = document.get("secret"), document.get("ca_file")
    if not isinstance(secret, str) or len(secret) < _MIN_SECRET:
        raise ValueError(f"its secret is no text of {_MIN_SECRET} characters or more")
    if not isinstance(ca_file, str | None):
        raise ValueError("ca_file is no path")  # noqa: TRY004 (likewise)
    return Cells(number, dict(sorted(urls.items())), secret.encode(), ca_file)
