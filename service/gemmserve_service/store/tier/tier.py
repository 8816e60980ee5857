"""Tier: cold arrays go to objects and come back, and the store's files have room.

Where an array's bytes are is said by its row, and follows from two columns:

    state   extent    tier       bytes
    ------  --------  ---------  --------------------------------------------
    local   a name    NULL       in a file
    both    a name    digests    in a file, and in an object of the same bytes
    tier    NULL      digests    in an object

    local -> both   the object and the record beside it are written; then the row says so
    both  -> tier   the row loses the extent; then the extent is given back
    tier  -> both   a file has every byte, each chunk compared with its digest; then the row names it

So a process that is killed leaves bytes that no row names, in a file or in the tier, and never a row whose bytes are
nowhere. Files that no row names go at the next start as ever, objects likewise (`_collect`); those of arrays that are
deleted are on a list in the database, which the transaction that removes the row adds to.

An array leaves only while nobody uses it: a pin that has asked for the extent or the bytes (`Pinned.used`) keeps it.
Those that were used longest ago leave first. Everything here happens in the event loop's thread; bytes are moved and
digests worked out in threads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from gemmserve_service.errors import ArrayCorrupt, Draining, JobTimeout, ServiceError, StoreFull, TierUnavailable
from gemmserve_service.runtime.background import Background, report
from gemmserve_service.store.database.database import load_sql
from gemmserve_service.store.pin import Pinned
from gemmserve_service.store.record import Record
from gemmserve_service.store.tier.beside import read_record, record_of
from gemmserve_service.store.tier.cold import Cold, TierUnusableError
from gemmserve_service.store.tier.objects import CHUNK, Objects
from gemmserve_service.store.tier.wanted import Wanted

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence

    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.upload import Upload

_T = TypeVar("_T")

_SQL: Final = load_sql("tier")
_THREADS: Final = 8
_WRITES_AT_ONCE: Final = 4
_MIN_RETRY_S: Final = 0.5
_MAX_RETRY_S: Final = 30.0
_LOOK_S: Final = 0.05  # between two looks at whether there is room, for those who wait for it
_ROOM_WAIT_S: Final = 10.0
"""Seconds that a request waits for room while nothing leaves, but something may soon."""
_LONGEST_WAIT_S: Final = 300.0
"""Seconds that it waits for arrays which are leaving."""
_LOW_WATER: Final = 0.9
"""Share of the high-water mark down to which arrays leave, once it is passed."""

log = logging.getLogger(__name__)


class Tier:
    """The tier of one store."""

    def __init__(self, store: ArrayStore, objects: Objects, threads: ThreadPoolExecutor | None = None) -> None:
        self.used_bytes = 0
        """Bytes of arrays of which there is an object."""
        self.arrays = 0
        """Arrays of which there is an object."""
        self.bytes_out = 0
        """Bytes written to the tier by this process."""
        self.bytes_in = 0
        """Bytes read from it."""
        self.failures = 0
        """Reads, writes and deletions that failed."""
        self._store = store
        self._settings = store.settings
        self._objects = objects
        self._threads = threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="gemmserve-tier")
        self._recent: OrderedDict[str, Record] = OrderedDict()
        """Arrays that have an extent, those used longest ago first."""
        self._leaving: dict[str, Record] = {}
        self._leaving_bytes = 0
        self._writing: set[str] = set()
        """Ids of arrays of which an object is being written."""
        self._touched: set[str] = set()
        """Ids of arrays of which there may be an object though no row says so: a write of it failed."""
        self._wanted: dict[Hashable, Wanted] = {}
        """Requests by who made them, in their order."""
        self._asked: list[int] = []
        """Bytes that those need who wait for room."""
        self._garbage: dict[str, None] = {}
        """Ids of arrays whose objects are to go."""
        self._collected = False
        """Whether objects that no row names are among them."""
        self._confirmed: set[str] = set()
        """Ids of arrays whose objects this process has read, while the tier is not known to be this directory's."""
        self._claimed: TierUnusableError | bool = False
        """Whether the tier is known to be this data directory's; the error: it is not."""
        self._refused: tuple[float, ServiceError] | None = None
        """Time until which nothing is tried again (time.monotonic), and what went wrong."""
        self._delay_s = _MIN_RETRY_S
        self._background = Background()
        self._stopping = asyncio.Event()
        self._wake = asyncio.Event()
        """Set when there is something to delete, or the server stops."""
        self._looking = False
        self._timer: asyncio.TimerHandle | None = None
        self._arrived: list[Callable[[], object]] = []
        self._again: asyncio.TimerHandle | None = None
        """Timer after which tasks may ask for arrays again that could not be brought back; None: they may now."""

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up what an earlier process left, once the store knows its arrays. Raises TierUnusableError with
        `tier_adopt` alone; else a tier that cannot be reached, or is another's, takes nothing, and the server runs.
        """
        database = self._store.database
        rows = await database.read(lambda db: db.execute(_SQL["server"]).fetchall())
        name = rows[0]["name"] if rows else secrets.token_hex(8)
        if not rows:
            await database.write(lambda db: db.execute(_SQL["set_server"], {"name": name}))
        rows = await database.read(lambda db: db.execute(_SQL["garbage"]).fetchall())
        self._garbage = dict.fromkeys(row["id"] for row in rows)
        if self._settings.tier_adopt:
            await self._in_thread(lambda: self._objects.claim(name, adopt=True))
            await self._adopt()  # before anything leaves: rows may say of objects that are not there that they are
            self._claimed = self._collected = True  # what could not be adopted is not to be deleted by the same start
            self.look()
        self._background.spawn(self._run(name))

    async def stop(self) -> None:
        """Refuse whoever waits; what is being put on record is finished first."""
        self._stopping.set()
        self._wake.set()
        for timer in (self._timer, self._again):
            if timer is not None:
                timer.cancel()
        for wanted in list(self._wanted.values()):
            _end(wanted, Draining("the server is shutting down", retry_after_s=1.0))
        await self._background.wait()
        self._threads.shutdown()

    def on_arrival(self, callback: Callable[[], object]) -> None:
        """`callback()` runs when arrays have come back, or could not."""
        self._arrived.append(callback)

    @property
    def waiting(self) -> int:
        """Requests that wait for arrays to come back, and arrays that are leaving."""
        return sum(not wanted.done.done() for wanted in self._wanted.values()) + len(self._leaving)

    @property
    def error(self) -> str | None:
        """Why the tier takes nothing now."""
        if isinstance(self._claimed, TierUnusableError):
            return str(self._claimed)
        return None if self._refused is None else self._refused[1].detail

    # -- what the store tells ----------------------------------------------------------------------------------------

    def add(self, record: Record, *, found: bool = False) -> None:
        """Take an array in that has become visible, or was `found` at the start."""
        self._touched.discard(record.info.id)
        if found and record.tier is not None:
            self.used_bytes += record.info.nbytes
            self.arrays += 1
        if record.cold is None and record.info.nbytes:
            self._recent[record.info.id] = record
        self.look()

    def used(self, record: Record) -> None:
        """Note that an array was used until now."""
        if record.info.id in self._recent:
            self._recent.move_to_end(record.info.id)
        if self._wanted or self._asked:
            self.look()

    def removed(self, record: Record) -> bool:
        """Forget an array. Return whether there may be an object: then the transaction that removes the row adds it to
        the list of what is to go.
        """
        array_id = record.info.id
        self._recent.pop(array_id, None)
        self._confirmed.discard(array_id)
        if record.tier is not None:
            self.used_bytes -= record.info.nbytes
            self.arrays -= 1
        elif array_id not in self._touched:
            return False
        self._touched.discard(array_id)
        self._throw_away(array_id)
        return True

    def abandon(self, array_id: str) -> None:
        """Delete the object of an array that came to nothing, if there may be one."""
        if array_id in self._touched:
            self._touched.discard(array_id)
            self._throw_away(array_id)
            self._store.database.write_soon(
                lambda db: db.execute(_SQL["add_garbage"], {"id": array_id})
            ).add_done_callback(report)

    def _throw_away(self, array_id: str) -> None:
        self._garbage[array_id] = None
        self._wake.set()

    # -- room ---------------------------------------------------------------------------------------------------------

    async def make_room(self, nbytes: int) -> None:
        """Return when `nbytes` more fit into the store's files, in the turn of the event loop in which they do.

        Raises StoreFull, TierUnavailable.
        """
        limit = self._settings.max_store_bytes
        if limit is None or self._store.used_bytes + nbytes <= limit:
            return
        if nbytes > limit:
            raise StoreFull(f"{nbytes} bytes do not fit: the server keeps {limit} at one time")
        began = time.monotonic()
        ends = began + _ROOM_WAIT_S
        self._asked.append(nbytes)
        try:
            while self._store.used_bytes + nbytes > limit:
                self._evict()
                if not self._leaving and (refusal := self._refusal()) is not None:
                    raise refusal
                if self._stopping.is_set():
                    raise Draining("the server is shutting down", retry_after_s=1.0)
                if self._leaving:
                    ends = min(time.monotonic() + _ROOM_WAIT_S, began + _LONGEST_WAIT_S)
                if time.monotonic() > ends and self._claimed is not True:
                    raise TierUnavailable("the tier has not answered yet", retry_after_s=_MIN_RETRY_S)
                if time.monotonic() > ends:
                    raise StoreFull(
                        f"{nbytes} bytes do not fit: {self._store.used_bytes} of {limit} are taken, by arrays in use "
                        "and by results that are still to be made",
                        retry_after_s=5.0,
                    )
                await asyncio.sleep(_LOOK_S)
        finally:
            self._asked.remove(nbytes)

    def _refusal(self) -> ServiceError | None:
        """Return why nothing can be written now."""
        if isinstance(self._claimed, TierUnusableError):
            return TierUnavailable(str(self._claimed), retry_after_s=_MAX_RETRY_S)
        if self._refused is not None and time.monotonic() < self._refused[0]:
            return self._refused[1]
        return None

    def _check_tier(self, nbytes: int) -> None:
        limit = self._settings.max_tier_bytes
        if limit is not None and self.used_bytes + nbytes > limit:
            raise StoreFull(
                f"the tier is full: {self.used_bytes} of {limit} bytes are taken", retry_after_s=_MAX_RETRY_S
            )

    def _excess(self) -> int:
        """Bytes that are to leave beside those that are leaving."""
        limit = self._settings.max_store_bytes
        if limit is None:
            return 0
        used = self._store.used_bytes - self._leaving_bytes
        mark = limit * self._settings.tier_high_water
        needed = sum(self._asked) + next(
            (self._missing(wanted)[1] for wanted in self._wanted.values() if not wanted.granted and wanted.held), 0
        )
        excess = used + needed - limit
        if used > mark:
            excess = max(excess, used - int(mark * _LOW_WATER))
        return excess

    def _evict(self) -> bool:
        """Begin to write arrays out as far as there are too many bytes. Return whether some leave, or could."""
        if (excess := self._excess()) <= 0 or self._stopping.is_set():
            return True
        ours = self._claimed is True  # else objects that it had here may be gone, but for those that have been read
        writable = ours and self._refusal() is None
        protected = {
            pinned.info.id
            for wanted in self._wanted.values()
            if wanted.granted and wanted.held
            for pinned in wanted.pins
        }
        chosen: list[Record] = []
        for array_id, record in self._recent.items():
            if excess <= 0 or len(self._leaving) + len(chosen) >= _WRITES_AT_ONCE:
                break
            known = writable if record.tier is None else ours or array_id in self._confirmed
            if not known or array_id in protected or not self._may_leave(record):
                continue
            chosen.append(record)
            excess -= record.info.nbytes
        for record in chosen:
            del self._recent[record.info.id]
            self._leaving[record.info.id] = record
            self._leaving_bytes += record.info.nbytes
            self._background.spawn(self._leave(record))
        return bool(self._leaving)

    def _may_leave(self, record: Record) -> bool:
        extent = record.extent
        return (
            record.pending is None
            and not record.hidden
            and not record.users
            and not record.lost
            and extent is not None
            and self._store.is_file(extent)
        )

    async def _leave(self, record: Record) -> None:
        """Have an array leave the store's files, unless somebody uses it meanwhile."""
        with Pinned(self._store, record):
            try:
                if record.tier is None:
                    await self.replicate(record)
                    if record.hidden or not await self._set_tier(record, gone=False):
                        return
                if not record.users and not record.hidden:
                    await self._drop_extent(record)
            except StoreFull as error:
                self._failed(error)
            except TierUnavailable as error:
                log.debug("array %s stays: %s", record.info.id, error.detail)  # `replicate` has counted it
            finally:
                del self._leaving[record.info.id]
                self._leaving_bytes -= record.info.nbytes
                if record.cold is None and not record.freed:
                    self._recent[record.info.id] = record
        self.look()

    async def _set_tier(self, record: Record, *, gone: bool) -> bool:
        row = {"id": record.info.id, "tier": record.tier, "gone": gone}
        try:
            await self._store.database.write(lambda db: db.execute(_SQL["set_tier"], row))
        except Exception as error:
            log.warning("array %s: where it is could not be put on record (%s)", record.info.id, error)
            return False
        return True

    async def _drop_extent(self, record: Record) -> None:
        leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        record.cold = Cold(leaving)  # from here on nobody begins to use the extent
        gone = await self._set_tier(record, gone=True)
        extent = record.extent
        assert extent is not None
        if gone:
            record.extent, record.cold.leaving = None, None
            self._store.give_extent_back(record, extent)
        else:
            record.cold = None
        leaving.set_result(None)

    async def replicate(self, array: Record | Upload, view: memoryview | None = None) -> None:
        """Write an array's object; `array.tier` has its digests then. Idempotent. Raises TierUnavailable, StoreFull."""
        if array.tier is not None:
            return
        info = array.info if isinstance(array, Record) else array.spec
        if isinstance(self._claimed, TierUnusableError):
            raise TierUnavailable(str(self._claimed), retry_after_s=_MAX_RETRY_S)
        if not self._claimed:
            raise TierUnavailable("the tier has not answered yet", retry_after_s=_MIN_RETRY_S)
        self._check_tier(info.nbytes)
        if view is None:
            view = memoryview(b"") if array.extent is None else array.extent.view(info.nbytes).toreadonly()
        described = record_of(info)
        work = partial(self._objects.put, info.id, view, described, self._stopping.is_set)
        del view
        self._writing.add(info.id)
        self._touched.add(info.id)
        self.used_bytes += info.nbytes
        self.arrays += 1
        put = asyncio.get_running_loop().run_in_executor(self._threads, work)
        put.add_done_callback(partial(self._put_ended, info.id))
        kept = False
        try:
            digests = await asyncio.shield(put)  # a thread writes on, whoever hangs up
            kept = not (isinstance(array, Record) and array.freed)
        except TierUnavailable as error:
            self._failed(error)
            raise
        finally:
            if not kept:
                self.used_bytes -= info.nbytes
                self.arrays -= 1
        self.bytes_out += info.nbytes
        self._succeeded()
        if kept:  # else it was deleted meanwhile, and its object goes
            array.tier = digests
            if isinstance(array, Record):  # an upload is known from `add` on
                self._touched.discard(info.id)

    def _put_ended(self, array_id: str, done: asyncio.Future[bytes]) -> None:
        self._writing.discard(array_id)
        if not done.cancelled():
            done.exception()  # told to whoever waits, if anybody does
        if array_id in self._garbage:
            self._wake.set()

    def forget_upload(self, upload: Upload) -> None:
        """Delete the object of an upload that came to nothing."""
        if upload.tier is not None:
            self.used_bytes -= upload.nbytes
            self.arrays -= 1
            upload.tier = None
            self._touched.add(upload.spec.id)
        self.abandon(upload.spec.id)

    # -- back ---------------------------------------------------------------------------------------------------------

    def request(self, key: Hashable, pins: Iterable[Pinned]) -> Wanted:
        """Have arrays come back that somebody needs together; asked again by the same `key`, it is one request."""
        wanted = self._wanted.get(key)
        if wanted is None or wanted.done.done():
            wanted = self._wanted[key] = Wanted([pinned for pinned in pins if pinned.info.nbytes])
            wanted.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits
            for pinned in wanted.pins:
                if pinned.cold is not None:
                    pinned.cold.error = None
            self.look()
        return wanted

    def ask(self, key: Hashable, pins: Iterable[Pinned]) -> None:
        """`request` of a task that waits in the queue: not again while its arrays are on their way, or nothing comes.
        Callbacks of `on_arrival` run when it may ask again.
        """
        if key in self._wanted or self._again is not None:
            return
        if self._refusal() is None:
            self.request(key, pins)
        else:
            self._refuse_for_now()

    def _refuse_for_now(self) -> None:
        """Let tasks ask again after a while: when the tier is no longer refused, as far as is known now. A loop's timer
        may come before that, and meanwhile it may have been refused for longer: who asks then waits on.
        """
        unusable = isinstance(self._claimed, TierUnusableError)  # for good
        if self._again is None and not unusable and not self._stopping.is_set():
            until = time.monotonic() + _MIN_RETRY_S if self._refused is None else self._refused[0]
            delay_s = max(until - time.monotonic(), _LOOK_S)
            self._again = asyncio.get_running_loop().call_later(delay_s, self._ask_again)

    def _ask_again(self) -> None:
        self._again = None
        for callback in self._arrived:
            callback()

    async def bring_back(self, pins: Sequence[Pinned], timeout_s: float | None) -> None:
        """Return when all of these are in files, and stay there until each pin is used or released.

        Raises TierUnavailable, ArrayCorrupt, JobTimeout, Draining.
        """
        key = object()
        wanted = self.request(key, pins)
        try:
            await asyncio.wait((wanted.done,), timeout=timeout_s)
        except BaseException:
            self._wanted.pop(key, None)
            raise
        if wanted.done.done() and wanted.done.exception() is None:
            return
        self._wanted.pop(key, None)
        if not wanted.done.done():
            raise JobTimeout(f"the array's bytes were not back from the tier within {timeout_s:g} s")
        wanted.done.result()

    def _missing(self, wanted: Wanted) -> tuple[list[Pinned], int]:
        """Pins of arrays that nobody brings back yet, one an array, and their bytes."""
        found = {pinned.info.id: pinned for pinned in wanted.pins if (cold := pinned.cold) and cold.fetch is None}
        return list(found.values()), sum(pinned.info.nbytes for pinned in found.values())

    def look(self) -> None:
        """Look, soon, at what may leave and who can have arrays back."""
        if not self._looking and not self._stopping.is_set():
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if self._stopping.is_set():
            return
        for key, wanted in list(self._wanted.items()):
            if not wanted.held:
                del self._wanted[key]
        self._grant()
        self._evict()
        if any(not wanted.granted for wanted in self._wanted.values()) or self._excess() > 0:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self.look)

    def _grant(self) -> None:
        """Begin to bring back what there is room for, in the order in which it was asked for."""
        limit = self._settings.max_store_bytes
        for wanted in list(self._wanted.values()):
            if wanted.granted:
                continue
            pins, nbytes = self._missing(wanted)
            if limit is not None and pins and self._store.used_bytes + nbytes > limit:
                others = any(other.granted and other.held for other in self._wanted.values())
                if self._evict() or others:
                    return  # and whoever came later, so that it is not passed for ever
                # Nothing can leave: room that is kept for results of tasks which wait, for these operands maybe.
                log.info("%d bytes come back beyond max_store_bytes: nothing else gets on", nbytes)
            wanted.granted = True
            for pinned in pins:
                self._begin(pinned)
            fetches = [cold.fetch for pinned in wanted.pins if (cold := pinned.cold) and cold.fetch]
            self._background.spawn(self._complete(wanted, fetches))  # one that failed is no longer its array's by then

    def _begin(self, pinned: Pinned) -> None:
        cold = pinned.cold
        assert cold is not None
        cold.fetch = asyncio.get_running_loop().create_future()
        cold.fetch.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._background.spawn(self._fetch(pinned.share(), cold, cold.fetch))

    async def _complete(self, wanted: Wanted, fetches: Iterable[asyncio.Future[None]]) -> None:
        """End a request when all of its arrays have come, or one could not."""
        error: Exception | None = None
        for fetch in fetches:
            try:
                await asyncio.shield(fetch)
            except ServiceError as failed:
                error = failed
        _end(wanted, error)
        if error is not None:
            for key in [key for key, other in self._wanted.items() if other is wanted]:
                del self._wanted[key]
        if error is not None and not isinstance(error, ArrayCorrupt):  # of which no more is asked
            self._refuse_for_now()
        for callback in self._arrived:
            callback()
        self.look()

    async def _fetch(self, pinned: Pinned, cold: Cold, done: asyncio.Future[None]) -> None:
        with pinned:
            try:
                if cold.leaving is not None:
                    await cold.leaving
                if pinned.cold is cold:  # it left
                    await self._bring(pinned)
            except ServiceError as error:
                cold.fetch = None
                if isinstance(error, ArrayCorrupt):
                    log.error("%s", error.detail)  # noqa: TRY400 (not a fault of the program)
                    self.failures += 1
                    cold.error = error
                elif isinstance(error, TierUnavailable):
                    self._failed(error)  # not the disk's: for it to have room arrays are to leave
                done.set_exception(error)
            except Exception as error:
                cold.fetch = None
                log.exception("array %s could not be brought back", pinned.info.id)
                done.set_exception(TierUnavailable(f"the array could not be brought back: {type(error).__name__}"))
            else:
                done.set_result(None)

    async def _bring(self, pinned: Pinned) -> None:
        """Bring an array back, and put on record where it is. Raises TierUnavailable, ArrayCorrupt, StoreFull."""
        record = pinned.record
        array_id, nbytes = record.info.id, record.info.nbytes
        extent = self._store.take_extent(nbytes)
        kept = False
        try:
            view = extent.view(nbytes)
            digests = record.tier
            assert digests is not None
            loop = asyncio.get_running_loop()

            def copy(number: int, view: memoryview) -> None:
                if self._stopping.is_set():
                    raise Draining("the server is shutting down", retry_after_s=1.0)
                found = self._objects.read(array_id, digests, nbytes, number)
                view[number * CHUNK : number * CHUNK + len(found)] = found

            work = [loop.run_in_executor(self._threads, copy, number, view) for number in range(-(-nbytes // CHUNK))]
            outcomes = await asyncio.gather(*work, return_exceptions=True)  # none writes any more
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            del view
            if self._store.secures:
                await asyncio.to_thread(extent.flush)
            row = {"id": array_id, "extent": extent.name}
            await self._store.database.write(lambda db: db.execute(_SQL["set_extent"], row))
            kept = True
        finally:
            if not kept:
                self._store.give_extent_back(record, extent)
        record.extent, record.cold = extent, None
        if self._claimed is not True:
            self._confirmed.add(array_id)
        self.bytes_in += nbytes
        self._recent[array_id] = record
        self._succeeded()

    async def read_range(self, pinned: Pinned, start: int, stop: int) -> AsyncIterator[memoryview]:
        """Give bytes [start, stop) of a cold array, of which no more is read than the chunks that they are in.

        Raises TierUnavailable, ArrayCorrupt.
        """
        record = pinned.record
        digests, nbytes = record.tier, record.info.nbytes
        assert digests is not None
        for number in range(start // CHUNK, -(-stop // CHUNK)):
            try:
                found = await self._in_thread(partial(self._objects.read, record.info.id, digests, nbytes, number))
            except TierUnavailable as error:
                self._failed(error)
                raise
            except ArrayCorrupt as error:
                log.error("%s", error.detail)  # noqa: TRY400 (not a fault of the program)
                self.failures += 1
                raise
            self.bytes_in += len(found)
            first = number * CHUNK
            yield found[max(start - first, 0) : stop - first]

    # -- behind --------------------------------------------------------------------------------------------------------

    async def _run(self, name: str) -> None:
        """Claim the tier, collect what no row names, and delete what is to go, until the server stops."""
        delay_s = _MIN_RETRY_S
        while not self._stopping.is_set():
            try:
                if self._claimed is False:
                    used = any(record.tier for record in self._store.records())
                    await self._in_thread(partial(self._objects.claim, name, adopt=False, used=used))
                    self._claimed = True
                    self._confirmed.clear()
                    self.look()
                if not self._collected:
                    await self._collect()
                    self._collected = True
                if self._garbage:
                    await self._delete()
                delay_s = _MIN_RETRY_S
                self._wake.clear()
                if self._writing.issuperset(self._garbage) and not self._stopping.is_set():
                    await self._wake.wait()
                continue
            except TierUnusableError as error:
                self._claimed = error
                log.error("%s", error)  # noqa: TRY400 (not a fault of the program)
                return
            except TierUnavailable as error:
                self._failed(error)
                delay_s = min(2 * delay_s, _MAX_RETRY_S)
            except Exception:
                log.exception("objects that are not needed stay in the tier")
                delay_s = _MAX_RETRY_S
            await self._stops_within(delay_s)

    async def _stops_within(self, seconds: float) -> None:
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((stopping,), timeout=seconds)
        finally:
            stopping.cancel()

    async def _collect(self) -> None:
        """Put objects on the list of what is to go that no row names, nor anything that is being written."""
        found = 0
        pages = self._objects.ids()
        while (page := await self._in_thread(lambda: next(pages, None))) is not None:
            for array_id in page:
                busy = array_id in self._writing or array_id in self._touched or array_id in self._garbage
                if busy or self._store.knows(array_id) or array_id > self._store.began:
                    continue
                self._garbage[array_id] = None
                found += 1
        if found:
            log.warning("recovery: %d objects in the tier that no array has", found)

    async def _delete(self) -> None:
        for array_id in list(self._garbage):
            if self._stopping.is_set():
                return
            if array_id in self._writing:
                continue  # what is not there yet cannot be deleted; the end of the write wakes this
            if not self._store.knows(array_id):
                await self._in_thread(partial(self._objects.delete, array_id))
                await self._store.database.write(partial(_forget_garbage, array_id))
            self._garbage.pop(array_id, None)

    async def _adopt(self) -> None:
        """Take arrays in that the tier has and no row names, by the records beside them."""
        pages, taken = self._objects.ids(), 0
        there: set[str] = set()
        while (page := await self._in_thread(lambda: next(pages, None))) is not None:
            there |= page
            for array_id in sorted(page):
                if self._store.knows(array_id) or array_id in self._garbage:
                    continue
                beside = await self._in_thread(partial(self._objects.record, array_id))
                found = None if beside is None else read_record(beside)
                if found is not None and found[0].id == array_id:
                    await self._store.adopt_cold(*found)
                    taken += 1
        log.warning("%d arrays were taken over from the tier", taken)
        for record in list(self._store.records()):
            if record.tier is not None and record.extent is not None and record.info.id not in there:
                self.used_bytes -= record.info.nbytes
                self.arrays -= 1
                record.tier = None  # its file is all that there is
                await self._set_tier(record, gone=False)

    def _failed(self, error: ServiceError) -> None:
        self.failures += 1
        if self._refused is None or self._refused[1].detail != error.detail:
            log.warning("tier: %s", error.detail)
        self._refused = time.monotonic() + self._delay_s, error
        self._delay_s = min(2 * self._delay_s, _MAX_RETRY_S)

    def _succeeded(self) -> None:
        self._refused, self._delay_s = None, _MIN_RETRY_S

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _forget_garbage(array_id: str, db: sqlite3.Connection) -> None:
    db.execute(_SQL["remove_garbage"], {"id": array_id})


def _end(wanted: Wanted, error: Exception | None) -> None:
    if not wanted.done.done():
        if error is None:
            wanted.done.set_result(None)
        else:
            wanted.done.set_exception(error)
