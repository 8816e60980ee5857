"""SHA-256 of stored arrays, worked out in threads of low priority when it is first asked for, and kept on record."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import NotFound
from gemmserve_service.runtime.background import report
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store.database.database import load_sql
from gemmserve_service.store.record import npy_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.store.catalog import Catalog
    from gemmserve_service.store.database.database import Database
    from gemmserve_service.store.pin import Pinned

_SQL: Final = load_sql("arrays")
_SLICE: Final = 4 << 20  # bytes between two looks at whether anybody still wants the digest
_NICE: Final = 10


@dataclass(eq=False)
class _Computation:
    task: asyncio.Task[list[bytes]]
    askers: int = 0


class Digests:
    """Digests of one store's arrays: of the data, and of the .npy file as downloads have it.

    Those who ask while a digest is being worked out wait for the same computation; it ends early with the last of
    them, or when the array is deleted or expires. Belongs to the event loop's thread.
    """

    def __init__(self, catalog: Catalog, database: Database) -> None:
        self._catalog = catalog
        self._database = database
        # Two threads that yield to everything else of the process where the system allows it (Linux: nice per thread).
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="gemmserve-hash", initializer=_be_nice)
        self._running: dict[str, _Computation] = {}

    async def sha256(self, view: memoryview, prefixes: Sequence[bytes] = (b"",)) -> list[bytes]:
        """Return the SHA-256 of each prefix + `view`, in one pass. A cancelled caller's pass ends within one slice."""
        stop = threading.Event()
        try:
            return await asyncio.wrap_future(self._threads.submit(_hash, view, prefixes, stop))
        finally:
            stop.set()

    def known(self, array_id: str, *, npy: bool) -> str | None:
        """Return the digest (hex) of an array's .npy file, or of its data, where it is on record."""
        record = self._catalog.get(array_id)
        if record is None:
            return None
        return record.npy_sha256 if npy else record.info.sha256

    async def of(self, pinned: Pinned, *, npy: bool) -> str:
        """Return the digest (hex) of an array whose bytes are in the store; it is known from then on.

        Raises NotFound when the array is deleted or expires meanwhile.
        """
        array_id = pinned.info.id
        if (digest := self.known(array_id, npy=npy)) is not None:
            return digest
        computation = self._running.get(array_id)
        if computation is None:
            held = pinned.share()
            computation = self._running[array_id] = _Computation(asyncio.create_task(self._compute(held)))
            computation.task.add_done_callback(lambda _: held.release())
        computation.askers += 1
        try:
            await asyncio.wait([computation.task])
        finally:
            computation.askers -= 1
            if not computation.askers:
                computation.task.cancel()
                if self._running.get(array_id) is computation:
                    del self._running[array_id]
        if computation.task.cancelled():
            raise NotFound(f"no array {array_id}")
        return computation.task.result()[npy].hex()

    def record(self, array_id: str, *, data: bytes | None = None, npy: bytes | None = None) -> None:
        """Take digests of an array's data and .npy file down, in the catalog now and in the database soon."""
        record = self._catalog.get(array_id)
        if record is None or not isinstance(record.info, ArrayInfo):
            return
        if data is not None:
            record.info = record.info.model_copy(update={"sha256": data.hex()})
        if npy is not None:
            record.npy_sha256 = npy.hex()
        row = {"id": array_id, "sha256": record.info.sha256, "npy_sha256": record.npy_sha256}
        self._database.write_soon(lambda db: db.execute(_SQL["set_sha256"], row), rows=1).add_done_callback(report)

    def drop(self, array_id: str) -> None:
        """End the computation for an array that can no longer be seen."""
        if (computation := self._running.pop(array_id, None)) is not None:
            computation.task.cancel()

    async def stop(self) -> None:
        """End every computation, and the threads."""
        tasks = [computation.task for computation in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compute(self, pinned: Pinned) -> list[bytes]:
        """Return the digests of the data and of the .npy file."""
        info = pinned.info
        digests = await self.sha256(pinned.view, (b"", npy_header(info.dtype, info.shape, info.order)))
        self.record(info.id, data=digests[0], npy=digests[1])
        return digests


def _be_nice() -> None:
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _hash(view: memoryview, prefixes: Sequence[bytes], stop: threading.Event) -> list[bytes]:
    hashes = [hashlib.sha256(prefix) for prefix in prefixes]
    for start in range(0, len(view), _SLICE):
        if stop.is_set():
            break
        piece = view[start : start + _SLICE]
        for each in hashes:
            each.update(piece)
    return [each.digest() for each in hashes]
