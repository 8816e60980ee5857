"""Recovery of what an earlier process stored: rows and files that belong together, and nothing else."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from gemmserve_service.store.catalog import Catalog, from_row
from gemmserve_service.store.database.database import load_sql
from gemmserve_service.store.pending import PendingResults, State, lost
from gemmserve_service.store.record import Record
from gemmserve_service.store.tier.cold import Cold

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from gemmserve_service.store.database.database import Database
    from gemmserve_service.store.extents.space import Space

_SQL: Final = load_sql("arrays")
_TIER: Final = load_sql("tier")

log = logging.getLogger(__name__)


async def take(database: Database, catalog: Catalog, space: Space, keep: Iterable[str]) -> dict[str, PendingResults]:
    """Fills the catalog; by job, the results that were not written. Files that neither a row nor `keep` names go."""
    rows = await database.read(lambda db: db.execute(_SQL["load"]).fetchall())
    found: dict[str, PendingResults] = {}
    missing = []
    live = {row["extent"] for row in rows if row["state"] == "live"} - {None}
    for row in rows:
        if row["state"] == "expired":
            catalog.bury(row["id"], row["owner"])
        # Where the disk was too full for a row to go, its space may have become another array's.
        outlived = row["state"] != "live" and row["extent"] in live
        if outlived or not _take_row(row, catalog, space, found):
            missing.append(row["id"])
    if gone := [{"id": row["id"]} for row in rows if row["extent"] and _is_cold(catalog.get(row["id"]))]:
        log.warning("recovery: %d arrays whose files are gone are in the tier", len(gone))
        await database.write(lambda db: db.executemany(_TIER["forget_extents"], gone))
    for array_id in missing:
        await database.write(partial(remove, array_id))
    stored = (record.extent.name for record in catalog if record.extent is not None)
    orphans = space.files.sweep([*stored, *keep])
    if orphans or missing:
        log.warning("recovery: removed %d orphaned extents, %d rows without their bytes", orphans, len(missing))
    return found


def _take_row(row: sqlite3.Row, catalog: Catalog, space: Space, found: dict[str, PendingResults]) -> bool:
    """Takes one row in. False: its bytes are missing or cut short."""
    unplaced = row["extent"] is None and row["nbytes"] > 0 and row["tier"] is None
    if unplaced and row["written"] == 1:
        return bool(row["state"] == "expired")
    extent = None
    if unplaced and row["written"] == 0:
        space.adopt_promise(row["nbytes"], row["owner"])
    if row["extent"] is not None:
        extent = space.adopt(row["extent"], row["nbytes"], row["owner"])
        if extent is None and row["tier"] is None:
            return False
    record = Record(from_row(row), extent, state=row["state"], hidden=row["state"] != "live")
    record.npy_sha256 = row["npy_sha256"]
    record.tier = row["tier"]
    if extent is None and record.tier is not None and row["nbytes"]:
        record.cold = Cold()
        space.adopt_elsewhere(row["nbytes"], row["owner"])
    catalog.add(record)
    if row["written"] != 1:
        job = row["job"] or ""
        record.pending = found.setdefault(job, PendingResults(job, State.FOUND))
        record.pending.records.append(record)
        record.pending.nbytes += row["nbytes"]
        if row["written"] < 0:
            record.lost = record.extent is None
            record.pending.state, record.pending.error = State.FAILED, lost(job)
    return True


def _is_cold(record: Record | None) -> bool:
    return record is not None and record.cold is not None


def remove(array_id: str, db: sqlite3.Connection) -> None:
    """Deletes one row."""
    db.execute(_SQL["remove"], {"id": array_id})
