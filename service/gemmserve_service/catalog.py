"""The index of arrays in memory: which ids there are, which are pinned, which expire next."""

from __future__ import annotations

import bisect
import heapq
import json
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from gemmserve_service.errors import Gone, NotFound
from gemmserve_service.schemas import ArrayInfo

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

    from gemmserve_service.extents import Extent
    from gemmserve_service.uploads import ScratchArray

State = Literal["live", "deleted", "expired"]

_MOST_TOMBSTONES: Final = 100_000  # expired ids remembered in memory, about 10 MB


@dataclass(slots=True)
class Record:
    """One array."""

    info: ArrayInfo | ScratchArray
    extent: Extent | None
    state: State = "live"
    pins: int = 0
    hidden: bool = False
    """Committed as deleted or expired: the extent may go with the last pin."""
    freed: bool = False

    def expired(self, clock: float | None = None) -> bool:
        """Whether its time has passed."""
        expires = self.info.expires_at
        return expires is not None and expires.timestamp() <= (time.time() if clock is None else clock)


class Catalog:
    """Records by id; of the live ones also the order by id, which is that of their making, and the expiries."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._ids: list[str] = []
        self._tombstones: OrderedDict[str, None] = OrderedDict()
        self._expiries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Arrays that can be seen."""
        return len(self._ids)

    def __iter__(self) -> Iterator[Record]:
        """Every record, hidden ones too."""
        return iter(list(self._records.values()))

    def get(self, array_id: str) -> Record | None:
        """The record, hidden or not."""
        return self._records.get(array_id)

    def live(self, array_id: str) -> Record:
        """The record of an array that can be seen. Raises Gone (expired), NotFound (unknown or deleted)."""
        record = self._records.get(array_id)
        if array_id in self._tombstones or (record is not None and record.state == "live" and record.expired()):
            raise Gone(f"array {array_id} has expired")
        if record is None or record.state != "live":
            raise NotFound(f"no array {array_id}")
        return record

    def page(self, limit: int, cursor: str | None) -> tuple[list[ArrayInfo], str | None]:
        """Infos below `cursor`, newest first, and the cursor of the next page."""
        end = len(self._ids) if cursor is None else bisect.bisect_left(self._ids, cursor)
        page: list[ArrayInfo] = []
        clock = time.time()
        while end > 0 and len(page) < limit:
            end -= 1
            record = self._records[self._ids[end]]
            if not record.expired(clock) and isinstance(record.info, ArrayInfo):
                page.append(record.info)
        return page, (page[-1].id if end > 0 and page else None)

    def add(self, record: Record) -> None:
        """Takes a record in; shows it if it is live."""
        self._records[record.info.id] = record
        if record.state == "live":
            self.show(record)

    def show(self, record: Record) -> None:
        """Makes a record visible."""
        record.state = "live"
        bisect.insort(self._ids, record.info.id)
        if record.info.expires_at is not None:
            heapq.heappush(self._expiries, (record.info.expires_at.timestamp(), record.info.id))

    def hide(self, record: Record, state: Literal["deleted", "expired"]) -> None:
        """Makes a record invisible."""
        record.state = state
        index = bisect.bisect_left(self._ids, record.info.id)
        if index < len(self._ids) and self._ids[index] == record.info.id:
            del self._ids[index]
        if state == "expired":
            self.bury(record.info.id)

    def bury(self, array_id: str) -> None:
        """Remembers that the id has expired."""
        self._tombstones[array_id] = None
        if len(self._tombstones) > _MOST_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def remove(self, record: Record) -> None:
        """Forgets a hidden record."""
        del self._records[record.info.id]

    def next_expiry(self) -> float | None:
        """The moment at which `due` has something to say."""
        return self._expiries[0][0] if self._expiries else None

    def due(self, clock: float) -> list[Record]:
        """Hides and returns what has expired by `clock`."""
        found: list[Record] = []
        while self._expiries and self._expiries[0][0] <= clock:
            record = self._records.get(heapq.heappop(self._expiries)[1])
            if record is not None and record.state == "live":
                self.hide(record, "expired")
                found.append(record)
        return found


def to_row(info: ArrayInfo, extent: Extent | None) -> dict[str, Any]:
    """The parameters of the statement `insert` of sql/arrays.sql."""
    return {
        "id": info.id,
        "dtype": info.dtype,
        "shape": json.dumps(info.shape),
        "memory_order": info.order,
        "nbytes": info.nbytes,
        "sha256": info.sha256,
        "created_at": info.created_at.timestamp(),
        "expires_at": None if info.expires_at is None else info.expires_at.timestamp(),
        "extent": None if extent is None else extent.name,
    }


def from_row(row: sqlite3.Row) -> ArrayInfo:
    """The info in a row of the table `arrays`."""
    return ArrayInfo(
        id=row["id"],
        dtype=row["dtype"],
        shape=tuple(json.loads(row["shape"])),
        order=row["memory_order"],
        nbytes=row["nbytes"],
        sha256=row["sha256"],
        created_at=datetime.fromtimestamp(row["created_at"], UTC),
        expires_at=None if row["expires_at"] is None else datetime.fromtimestamp(row["expires_at"], UTC),
    )
