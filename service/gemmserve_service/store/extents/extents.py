"""Extents: room for one array each in mapped files, recycled by size class.

A large one is a file of its own. Small ones share files of a megabyte, so that a million tiny arrays are some thousands
of files, and as many mappings in a worker that multiplies them all.

Fresh pages cost three times what copying into them does, so a freed extent keeps its pages and its mapping and serves
the next array of its class. What it held before is never shown: an array is published only when every byte of it was
written, and its views end at its last byte. An extent whose mapping is still referred to by anyone (a transport that
holds the end of a download, say) is not handed out until that reference is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import mmap
import os
import secrets
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import StoreFull
from gemmserve_service.runtime.mapping import Mapping, Part, most_mappings
from gemmserve_service.store.extents.memfd import create_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gemmserve_service.store.extents.shared_memory import Memory

_PAGE: Final = mmap.PAGESIZE
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}
_MAX_KEPT: Final = 512  # free extents; each costs a mapping, of which Linux allows a process 65,530 by default
_MAX_MAPPED: Final = most_mappings()  # mappings of live file extents that are kept, for the same reason
_SHARED_BYTES: Final = 1 << 20
"""Bytes of a file that small extents share."""
_LARGE: Final = 64 << 20
"""Bytes of an extent from which it may take long to make one."""
_BRIEF_S: Final = 5e-3
"""Seconds for which the event loop may be held up by that."""
_UNUSED_S: Final = 2.0
"""Seconds after which a file that was made ahead goes, if nobody has taken it and it is more than what is kept."""
_SMALL: Final = 1 << 16
"""Bytes of an extent, up to which it shares a file with fifteen others or more."""

_LEFT_BYTES: Final = 64 << 20
"""Bytes of a disk that new files leave, twice those of the database's log ..."""
_LEFT_PART: Final = 64
"""... and at most such a part of the disk."""


def size_class(nbytes: int) -> int:
    """Bytes allocated for an array of `nbytes` > 0: whole pages, at most an eighth more than asked for."""
    step = max(_PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


class Extent:
    """`capacity` bytes of a file (or memfd) from `start` on; at `path` another process of the same user opens it."""

    __slots__ = ("_failed", "_map", "capacity", "fd", "name", "path", "sealed", "shared", "start")

    def __init__(
        self,
        name: str,
        path: str,
        capacity: int,
        *,
        fd: int | None = None,
        sealed: bool = False,
        shared: MappedFile | None = None,
        start: int = 0,
    ) -> None:
        self.name = name
        self.path = path
        self.capacity = capacity
        self.fd = fd
        self.shared = shared
        """The file that it shares with others; None: it is all of one."""
        self.start = start
        self.sealed = sealed
        """Whether a client owns the memory too: it is never written, and serves no other array."""
        self._map: Mapping | Part | None = None
        self._failed = False

    @property
    def failed(self) -> bool:
        """Whether the disk did not take what was written to its file, once: what is there may be gone, though the next
        fsync may say nothing of it (Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020).
        """
        return self._failed if self.shared is None else self.shared.failed

    @property
    def file(self) -> tuple[str, int]:
        """Name and bytes of what another process maps: a name never comes back for another file."""
        return (self.name, self.capacity) if self.shared is None else (self.shared.name, self.shared.nbytes)

    def view(self, nbytes: int) -> memoryview:
        """A view of the first `nbytes`, writable unless sealed, mapping the file first if need be."""
        if self._map is None and self.shared is not None:
            self._map = Part(self.shared.mapping(), self.start, self.capacity)
        if self._map is None and self.sealed:
            self._map = map_sealed(self.path, self.capacity)
        if self._map is None:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC) if self.fd is None else self.fd
            try:
                self._map = Mapping(fd, self.capacity)
            finally:
                if self.fd is None:
                    os.close(fd)
        return self._map.view(nbytes)

    @property
    def mapped(self) -> bool:
        """Whether this process has it mapped."""
        return self._map is not None

    @property
    def quiescent(self) -> bool:
        """Whether nothing but this object refers to the mapping: no view, no NumPy array, no pending send."""
        return self._map is None or sys.getrefcount(self._map) <= _UNSHARED

    def unmap(self) -> None:
        """Drops the mapping; views that are still around keep it alive on their own."""
        self._map = None

    def flush(self) -> None:
        """Waits until a file's pages and its name are on the disk, whichever process wrote them. In any thread. Raises
        OSError; always, once it has `failed`: the bytes have to be written to another file.
        """
        if self.fd is not None:
            return
        shared, asked = self.shared, time.monotonic()
        # Who asks first hears of lost pages: with a file that others share nobody asks before that is noted.
        with shared.syncing if shared is not None else contextlib.nullcontext():
            if self.failed:
                raise OSError(errno.EIO, "the disk did not take all of the file before", self.path)
            began = time.monotonic()
            if shared is not None and shared.synced_from > asked:  # by another one, which began when this waited
                return
            self._sync()
            if shared is not None:
                shared.synced_from = began

    def _sync(self) -> None:
        for path in (self.path, str(Path(self.path).parent)):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError:
                self._failed = True
                if self.shared is not None:
                    self.shared.failed = True
                raise
            finally:
                os.close(fd)


@dataclass(frozen=True, slots=True)
class Place:
    """Byte `offset` of an extent, as another process that moves bytes from or to it is told."""

    extent: Extent
    offset: int = 0

    def at(self, position: int) -> Place:
        """The place `position` bytes further on."""
        return Place(self.extent, self.offset + position)


class MappedFile:
    """A file that several extents lie in; its mapping lasts as long as somebody refers to it."""

    def __init__(self, name: str, path: str, nbytes: int) -> None:
        self.name = name
        self.path = path
        self.nbytes = nbytes
        self.failed = False
        """See `Extent.failed`."""
        self.syncing = threading.Lock()
        """Held while the disk is asked for its pages."""
        self.synced_from = -math.inf
        """Time at which the disk was asked last, and took all that there was then (time.monotonic)."""
        self._map: weakref.ref[Mapping] | None = None

    def mapping(self) -> Mapping:
        """Return the mapping of the whole file. Raises OSError."""
        found = None if self._map is None else self._map()
        if found is None:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                found = Mapping(fd, self.nbytes)
            finally:
                os.close(fd)
            self._map = weakref.ref(found)
        return found


class SharedFile(MappedFile):
    """A file of equal slots, an extent each."""

    def __init__(self, name: str, path: str, slot: int, count: int) -> None:
        super().__init__(name, path, slot * count)
        self.slot = slot
        """Bytes of each."""
        self.vacant: list[int] = []
        """Numbers of slots that are nobody's; the last goes next."""
        self.used = 0
        """Slots that are an extent's, live or kept for reuse."""

    def extent(self, number: int) -> Extent:
        """The one in that slot."""
        self.used += 1
        start = number * self.slot
        return Extent(f"{self.name}.{self.slot}.{number}", self.path, self.slot, shared=self, start=start)


def _parsed(name: str) -> tuple[str, int, int] | None:
    """Parse the name of an extent that shares a file: its file's name, bytes, number. None for another's name."""
    file, *numbers = name.split(".")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return None
    return file, int(numbers[0]), int(numbers[1])


def _unshared_refcount() -> int:
    """Return what sys.getrefcount says of a slot that nobody else refers to, on this interpreter."""
    probe = Extent("probe", "", _PAGE)
    with tempfile.TemporaryFile() as file:
        file.truncate(_PAGE)
        probe._map = Mapping(file.fileno(), _PAGE)
    return sys.getrefcount(probe._map)


_UNSHARED: Final = _unshared_refcount()


class ExtentPool:
    """Extents of one kind: files under `folder`, or memory (`folder` None) of at most `limit` bytes in all, and at most
    `most` pieces, each of which holds a descriptor.

    `on_destroy` hears the names of files that are gone (`Extent.file`), so that workers drop their mappings.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        keep_bytes: int,
        limit: int | None = None,
        most: int | None = None,
        on_destroy: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = folder
        self.keep_bytes = keep_bytes
        self.limit = limit
        self.most = most
        self.live = 0
        """Extents that somebody has."""
        self.on_destroy = on_destroy
        self.live_bytes = 0
        self.free_bytes = 0
        self._free: OrderedDict[str, Extent] = OrderedDict()
        self._by_class: dict[int, list[Extent]] = {}
        self._mapped: OrderedDict[str, Extent] = OrderedDict()
        self._shared: dict[str, SharedFile] = {}
        self._with_room: dict[int, dict[str, SharedFile]] = {}
        """Files that have vacant slots, by the size of their slots."""
        self._rate = 0.0
        """Bytes a second at which the last large file was made."""

    def brief(self, nbytes: int) -> bool:
        """Whether `take` of so many bytes holds its caller up for no longer than some milliseconds."""
        capacity = size_class(nbytes)
        if self.folder is None or capacity < _LARGE or capacity <= _BRIEF_S * self._rate:
            return True
        return any(extent.quiescent and not extent.failed for extent in self._by_class.get(capacity, ()))

    async def stock(self, nbytes: int) -> None:
        """Have a thread make what the next `take` of `nbytes` > 0 will find. What fails here `take` meets again.

        A file system in memory looks for all pages of a file when room is reserved in it, 5 GB in a second; one that
        cannot reserve room has it written.
        """
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(None, self._made, size_class(nbytes))
        try:
            name, path = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_remove)
            raise
        except OSError:
            return
        extent = Extent(name, path, size_class(nbytes))
        self._keep(extent)
        loop.call_later(_UNUSED_S, self._drop_unused, extent)

    def take(self, nbytes: int) -> Extent:
        """An extent of at least `nbytes` > 0, recycled where possible. Raises StoreFull."""
        capacity = size_class(nbytes)
        extent = self._recycled(capacity) or self._create(capacity)
        self.live_bytes += capacity
        self.live += 1
        self.touch(extent)
        return extent

    def lend(self, memory: Memory, nbytes: int) -> Extent:
        """An extent in a client's sealed memory, of which it becomes the owner too. Raises StoreFull."""
        if self.limit is not None and self.live_bytes + nbytes > self.limit:
            raise StoreFull(f"no room for {nbytes} bytes of a client beside the {self.live_bytes} in use")
        self._check_pieces()
        self.live_bytes += nbytes
        self.live += 1
        fd = memory.lend()
        return Extent(secrets.token_hex(16), f"/proc/{os.getpid()}/fd/{fd}", nbytes, fd=fd, sealed=True)

    def give(self, extent: Extent, *, reusable: bool = True) -> None:
        """Takes an extent back; not `reusable`: a process that may still write to it must find its own pages only."""
        self._mapped.pop(extent.name, None)
        self.live_bytes -= extent.capacity
        self.live -= 1
        reusable = reusable and not extent.failed
        if not reusable or extent.sealed or extent.capacity > self.keep_bytes:
            self._destroy(extent, reusable=reusable)
            return
        self._keep(extent)
        while self.free_bytes > self.keep_bytes or len(self._free) > _MAX_KEPT:
            self._drop_oldest()

    def _keep(self, extent: Extent) -> None:
        self._free[extent.name] = extent
        self._by_class.setdefault(extent.capacity, []).append(extent)
        self.free_bytes += extent.capacity

    def _drop_unused(self, extent: Extent) -> None:
        if self._free.get(extent.name) is extent and self.free_bytes > self.keep_bytes:
            self._drop(extent)

    def touch(self, extent: Extent) -> None:
        """Marks a live extent as used now; the mappings of those longest unused are dropped past a bound."""
        if self.folder is None:
            return
        self._mapped[extent.name] = extent
        self._mapped.move_to_end(extent.name)
        for _ in range(len(self._mapped) - _MAX_MAPPED):
            _, oldest = self._mapped.popitem(last=False)
            if oldest.quiescent:
                oldest.unmap()
            else:  # later: without its mapping nobody could tell who still looks at it
                self._mapped[oldest.name] = oldest

    def adopt(self, name: str, nbytes: int) -> Extent | None:
        """An extent that an earlier process left, still unmapped; None: it is missing, or has less than `nbytes`."""
        if self.folder is None:
            raise ValueError("memory extents do not outlive their process")
        file, slot, number = _parsed(name) or (name, 0, 0)
        path = self.folder / file
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return None
        if size < (number + 1) * slot or (slot or size) < nbytes:
            return None
        if slot:
            shared = self._shared.get(file)
            if shared is None:
                shared = self._shared[file] = SharedFile(file, str(path), slot, size // slot)
            extent = shared.extent(number)
        else:
            extent = Extent(name, str(path), size)
        self.live_bytes += extent.capacity
        self.live += 1
        return extent

    def trim(self) -> None:
        """Gives every free extent back to the system."""
        while self._free:
            self._drop_oldest()

    def sweep(self, keep: Iterable[str]) -> int:
        """Deletes every file in the folder but those of the extents in `keep`; returns how many there were.

        In the files that are kept nothing becomes vacant: a worker of the earlier process may still write to what was
        for a result of its. That goes with the file, when nobody has any of it.
        """
        if self.folder is None:
            return 0
        kept = {(_parsed(name) or (name,))[0] for name in keep}
        orphans = [path for path in self.folder.iterdir() if path.name not in kept]
        for path in orphans:
            path.unlink()
        return len(orphans)

    def _recycled(self, capacity: int) -> Extent | None:
        stack = self._by_class.get(capacity, [])
        for index in range(len(stack) - 1, -1, -1):
            if stack[index].quiescent and not stack[index].failed:
                extent = stack.pop(index)
                del self._free[extent.name]
                self.free_bytes -= capacity
                return extent
        return None

    def _create(self, capacity: int) -> Extent:
        self._check_pieces()
        if self.limit is not None and self.live_bytes + self.free_bytes + capacity > self.limit:
            self.trim()
            if self.live_bytes + capacity > self.limit:
                raise StoreFull(f"no room for {capacity} bytes beside the {self.live_bytes} in use")
        if self.folder is None:
            return _create_memory(capacity)
        if capacity > _SMALL:
            name, path = self._create_file(capacity)
            return Extent(name, path, capacity)
        room = self._with_room.get(capacity)
        if room and next(reversed(room.values())).failed:
            room = self._with_room[capacity] = {name: file for name, file in room.items() if not file.failed}
        if room:
            shared = next(reversed(room.values()))
        else:
            shared = self._create_shared(capacity)
            room = self._with_room.setdefault(capacity, {})
            room[shared.name] = self._shared[shared.name] = shared
        extent = shared.extent(shared.vacant.pop())
        if not shared.vacant:
            del room[shared.name]
        return extent

    def _create_shared(self, slot: int) -> SharedFile:
        count = _SHARED_BYTES // slot
        try:
            name, path = self._made(count * slot)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            count = 1  # what there is room for, if anything
            name, path = self._create_file(slot)
        shared = SharedFile(name, path, slot, count)
        shared.vacant = list(reversed(range(count)))
        return shared

    @property
    def _folder(self) -> Path:
        assert self.folder is not None
        return self.folder

    def _create_file(self, nbytes: int) -> tuple[str, str]:
        try:
            return self._made(nbytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
        self.trim()
        try:
            return self._made(nbytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise StoreFull(f"the disk has no room for {nbytes} bytes") from error

    def _made(self, capacity: int) -> tuple[str, str]:
        """Return name and path of a new file. Called in any thread. Raises OSError."""
        began = time.perf_counter()
        if capacity > self.room():
            raise OSError(errno.ENOSPC, "what is left of the disk is the database's")
        made = _create_file(self._folder, capacity)
        if capacity >= _LARGE:
            self._rate = capacity / max(time.perf_counter() - began, 1e-9)
        return made

    def room(self) -> int:
        """Bytes of the disk that new files may take: all that is free but what is left to the database, without which
        no array could be deleted. Called in any thread.
        """
        disk = os.statvfs(self._folder)
        left = min(_LEFT_BYTES, disk.f_blocks * disk.f_frsize // _LEFT_PART)
        return disk.f_bavail * disk.f_frsize - left

    def _check_pieces(self) -> None:
        if self.most is not None and self.live + len(self._free) >= self.most:
            self.trim()
            if self.live >= self.most:
                raise StoreFull(f"{self.live} pieces of memory are in use, each of which is an open file")

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._free.values())))

    def _drop(self, extent: Extent) -> None:
        del self._free[extent.name]
        self._by_class[extent.capacity].remove(extent)
        self.free_bytes -= extent.capacity
        self._destroy(extent)

    def _destroy(self, extent: Extent, *, reusable: bool = True) -> None:
        shared = None if extent.shared is None else self._shared[extent.shared.name]
        # What somebody still looks at, or may write to, is nobody else's as long as its file exists.
        vacant = reusable and extent.quiescent
        extent.unmap()
        if shared is not None:
            shared.used -= 1
            if vacant:
                shared.vacant.append(extent.start // shared.slot)
                self._with_room.setdefault(shared.slot, {})[shared.name] = shared
            if shared.used:
                return
            self._with_room.get(shared.slot, {}).pop(shared.name, None)
            del self._shared[shared.name]
        if extent.fd is not None:
            os.close(extent.fd)
        else:
            Path(extent.path).unlink(missing_ok=True)
        if self.on_destroy is not None:
            self.on_destroy(extent.file[0])


def _remove(made: asyncio.Future[tuple[str, str]]) -> None:
    """Delete a file that nobody waits for any more."""
    if not made.cancelled() and made.exception() is None:
        Path(made.result()[1]).unlink(missing_ok=True)


def map_sealed(path: str, capacity: int) -> Mapping:
    """A mapping of sealed memory, for reading.

    By a descriptor for reading: before Linux 6.7 any other counts as one that may write. With all its pages at once:
    they are there already, and a fault for each sixteen of them costs more.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return Mapping(fd, capacity, writable=False, populate=True)
    finally:
        os.close(fd)


def _create_file(folder: Path, capacity: int) -> tuple[str, str]:
    """Name and path of a new file."""
    name = secrets.token_hex(16)
    path = str(folder / name)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _allocate(fd, capacity)
    except OSError:
        Path(path).unlink()
        raise
    finally:
        os.close(fd)
    return name, path


def _allocate(fd: int, capacity: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, capacity)
    else:  # macOS: space is not reserved, a full disk shows when it is written
        os.ftruncate(fd, capacity)


def _create_memory(capacity: int) -> Extent:
    # Not allocated ahead: memory is taken as bytes arrive, never by what a header claims.
    fd = create_memory(capacity)
    return Extent(secrets.token_hex(16), f"/proc/{os.getpid()}/fd/{fd}", capacity, fd=fd)
