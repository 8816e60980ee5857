"""The index of arrays in memory: which ids there are, which are pinned, which expire next."""

from __future__ import annotations

import bisect
import heapq
import json
from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from gemmserve_service.errors import Gone, NotFound
from gemmserve_service.runtime import clock
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store.record import NO_TAGS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence

    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.record import Record, Tags

_MAX_TOMBSTONES: Final = 100_000  # expired ids remembered in memory, about 10 MB


class Catalog:
    """Records by id; of the live ones also the order by id, which is that of their making, those of each name and
    label, and the expiries.
    """

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._ids: list[str] = []
        self._owned: dict[str, list[str]] = {}
        self._tagged: dict[tuple[str, str, str], list[str]] = {}
        """Ids in their order by owner ("": everybody), key and value of a label; the key "" is that of names."""
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._expiries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Arrays that can be seen."""
        return len(self._ids)

    def owners(self) -> set[str]:
        """Return the owners of arrays that can be seen."""
        return set(self._owned)

    def count(self, owner: str) -> int:
        """One owner's arrays that can be seen."""
        return len(self._owned.get(owner, ()))

    def __iter__(self) -> Iterator[Record]:
        """Every record, hidden ones too."""
        return iter(list(self._records.values()))

    def get(self, array_id: str) -> Record | None:
        """The record, hidden or not."""
        return self._records.get(array_id)

    def live(self, array_id: str, owner: str = "") -> Record:
        """The record of an array that `owner` can see ("": everybody's).

        Raises Gone (expired), NotFound (unknown, deleted or another owner's).
        """
        record = self._records.get(array_id)
        if record is not None and owner and record.info.owner != owner:
            raise NotFound(f"no array {array_id}")
        if owner and self._tombstones.get(array_id, owner) != owner:
            raise NotFound(f"no array {array_id}")
        if array_id in self._tombstones or (record is not None and record.state == "live" and record.expired()):
            raise Gone(f"array {array_id} has expired")
        if record is None or record.state != "live":
            raise NotFound(f"no array {array_id}")
        return record

    def page(
        self, limit: int, cursor: str | None, owner: str = "", tags: Tags = NO_TAGS
    ) -> tuple[list[ArrayInfo], str | None]:
        """Infos below `cursor`, newest first, and the cursor of the next page; of one owner, or of all (""). Those that
        have the name and all the labels of `tags`.
        """
        ids = self._listed(owner, tags)
        end = len(ids) if cursor is None else bisect.bisect_left(ids, cursor)
        page: list[ArrayInfo] = []
        now = clock.time()
        while end > 0 and len(page) < limit:
            end -= 1
            info = self.matching(ids[end], tags, now)
            if info is not None:
                page.append(info)
        return page, (page[-1].id if end > 0 and page else None)

    def ids(self, owner: str = "", tags: Tags = NO_TAGS) -> Sequence[str]:
        """Ids among which are those of all arrays of `owner` (or of all, "") with `tags`, oldest first."""
        return tuple(self._listed(owner, tags))

    def matching(self, array_id: str, tags: Tags, now: float | None = None) -> ArrayInfo | None:
        """The info of an array that can be seen and has the name and all the labels of `tags`."""
        record = self._records.get(array_id)
        if record is None or record.state != "live" or record.expired(now) or not isinstance(record.info, ArrayInfo):
            return None
        info = record.info
        if tags and not ((tags.name is None or tags.name == info.name) and tags.labels.items() <= info.labels.items()):
            return None
        return info

    def _listed(self, owner: str, tags: Tags) -> list[str]:
        """The shortest of the lists in which all arrays of `owner` with `tags` are."""
        if not tags:
            return self._owned.get(owner, []) if owner else self._ids
        return min((self._tagged.get((owner, *each), []) for each in _pairs(tags.name, tags.labels)), key=len)

    def add(self, record: Record) -> None:
        """Takes a record in; shows it if it is live."""
        self._records[record.info.id] = record
        if record.state == "live":
            self.show(record)

    def show(self, record: Record) -> None:
        """Makes a record visible."""
        record.state = "live"
        _put_in(self._ids, record.info.id)
        _put_in(self._owned.setdefault(record.info.owner, []), record.info.id)
        for place in _places(record):
            _put_in(self._tagged.setdefault(place, []), record.info.id)
        if record.info.expires_at is not None:
            heapq.heappush(self._expiries, (record.info.expires_at.timestamp(), record.info.id))

    def hide(self, record: Record, state: Literal["deleted", "expired"]) -> None:
        """Makes a record invisible."""
        record.state = state
        owned = self._owned.get(record.info.owner, [])
        for ids in (self._ids, owned):
            _take_out(ids, record.info.id)
        if not owned:
            self._owned.pop(record.info.owner, None)
        for place in _places(record):
            tagged = self._tagged.get(place, [])
            _take_out(tagged, record.info.id)
            if not tagged:
                self._tagged.pop(place, None)
        if state == "expired":
            self.bury(record.info.id, record.info.owner)

    def bury(self, array_id: str, owner: str) -> None:
        """Remembers that the id has expired, and whose it was."""
        self._tombstones[array_id] = owner
        if len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def remove(self, record: Record) -> None:
        """Forgets a hidden record."""
        del self._records[record.info.id]

    def next_expiry(self) -> float | None:
        """The moment at which `due` has something to say."""
        return self._expiries[0][0] if self._expiries else None

    def shift(self, seconds: float) -> None:
        """Moves every expiry: the clock was set."""
        self._expiries = []
        for record in self._records.values():
            expires = record.info.expires_at
            if record.state == "live" and expires is not None and isinstance(record.info, ArrayInfo):
                expires += timedelta(seconds=seconds)
                record.info = record.info.model_copy(update={"expires_at": expires})
                self._expiries.append((expires.timestamp(), record.info.id))
        heapq.heapify(self._expiries)

    def due(self, now: float) -> list[Record]:
        """Hides and returns what has expired by `now`."""
        found: list[Record] = []
        while self._expiries and self._expiries[0][0] <= now:
            record = self._records.get(heapq.heappop(self._expiries)[1])
            if record is not None and record.state == "live":
                self.hide(record, "expired")
                found.append(record)
        return found


def _pairs(name: str | None, labels: dict[str, str]) -> list[tuple[str, str]]:
    """Name and labels as keys and values; no label has the key "", which is the name's."""
    return [*([] if name is None else [("", name)]), *labels.items()]


def _places(record: Record) -> list[tuple[str, str, str]]:
    """Keys of `Catalog._tagged` under which the array is."""
    info = record.info
    if not isinstance(info, ArrayInfo) or (info.name is None and not info.labels):
        return []
    return [(owner, *each) for each in _pairs(info.name, info.labels) for owner in {"", info.owner}]


def _put_in(ids: list[str], array_id: str) -> None:
    if ids and array_id < ids[-1]:
        bisect.insort(ids, array_id)
    else:  # it has just been made
        ids.append(array_id)


def _take_out(ids: list[str], array_id: str) -> None:
    index = bisect.bisect_left(ids, array_id)
    if index < len(ids) and ids[index] == array_id:
        del ids[index]


def to_row(info: ArrayInfo, extent: Extent | None, job: str | None = None, tier: bytes | None = None) -> dict[str, Any]:
    """The parameters of the statement `insert` of sql/arrays.sql. `job`: of a result that is to be written later, whose
    row names no extent before its bytes are there. `tier`: digests of its object in the tier.
    """
    return {
        "id": info.id,
        "dtype": info.dtype,
        "shape": _shape_text(info.shape),
        "memory_order": info.order,
        "nbytes": info.nbytes,
        "sha256": info.sha256,
        "created_at": info.created_at.timestamp(),
        "expires_at": None if info.expires_at is None else info.expires_at.timestamp(),
        "extent": None if extent is None or job is not None else extent.name,
        "owner": info.owner,
        "written": int(job is None),
        "job": job,
        "name": info.name,
        "labels": json.dumps(info.labels) if info.labels else None,
        "tier": tier,
    }


@lru_cache(1024)
def _shape_text(shape: tuple[int, ...]) -> str:
    return json.dumps(shape)


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
        name=row["name"],
        labels=json.loads(row["labels"] or "{}"),
        owner=row["owner"],
    )
