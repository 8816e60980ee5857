"""Storage tiers of arrays: files for those that are stored, memory for those of one request; and who has how much."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gemmserve_service.errors import StoreFull, TooLarge
from gemmserve_service.runtime.open_files import OpenFiles
from gemmserve_service.runtime.tuning import host_memory
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store.extents.extents import Extent, ExtentPool, size_class
from gemmserve_service.store.extents.memfd import memory_extents_supported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_service.settings import Settings
    from gemmserve_service.store.extents.arena import Arena
    from gemmserve_service.store.quotas import Quotas
    from gemmserve_service.store.record import ArraySpec

log = logging.getLogger(__name__)


class Room:
    """An extent of one request, charged to its owner's bytes in flight until it is given back."""

    __slots__ = ("_held", "_space", "extent", "nbytes", "owner", "scratch")

    def __init__(self, space: Space, extent: Extent, nbytes: int, owner: str) -> None:
        self.extent = extent
        self.nbytes = nbytes
        self.owner = owner
        self.scratch = True
        self._space = space
        self._held = True

    def give_back(self, *, reusable: bool = True) -> None:
        """Ends it; idempotent. Not `reusable`: a lost process may still write to it."""
        if self._held:
            self._held = False
            self._space.free(self.extent, self, reusable=reusable)


class Space:
    """The extents of one data directory."""

    def __init__(
        self,
        settings: Settings,
        quotas: Quotas,
        on_destroyed: Sequence[Callable[[str], None]],
        arena: Arena | None = None,
    ) -> None:
        """`on_destroyed`: called with the names of extents that are given back to the system. `arena`: where arrays may
        lie that have no file.
        """
        self.arena = arena
        self.used_bytes = 0
        """Bytes of stored arrays, of reservations for them, and of scratch arrays that went to files."""
        self.unplaced_bytes = 0
        """Bytes that files will take of arrays that have none yet: the disk has room for them."""
        self._settings = settings
        self._quotas = quotas
        keep_bytes = settings.recycle_bytes

        def on_destroy(name: str) -> None:
            for callback in on_destroyed:
                callback(name)

        self.files = ExtentPool(settings.data_dir / "extents", keep_bytes=keep_bytes, on_destroy=on_destroy)
        limit = settings.max_scratch_bytes
        if limit is None:
            limit = host_memory() // 4
        self.memory = (
            ExtentPool(
                None,
                keep_bytes=min(keep_bytes, limit),
                limit=limit,
                most=OpenFiles.of(settings).memory,
                on_destroy=on_destroy,
            )
            if memory_extents_supported()
            else None
        )

    def check(self, nbytes: int, *, scratch: bool = False, owner: str = "") -> None:
        """Raises TooLarge, StoreFull or QuotaExceeded if `nbytes` more could not be reserved now."""
        self._check_size(nbytes)
        if not scratch:
            self._check_files(nbytes)
        self._quotas.check_bytes(owner, nbytes, scratch=scratch)

    def check_all(self, nbytes: int, capacity: int, *, largest: int, owner: str, deferred: bool) -> None:
        """`check`, and what is asked before `take_file` and `promise`, for several stored arrays at once: of `nbytes`
        in all, `largest` at most, which take extents of `capacity` bytes. Raises TooLarge, StoreFull, QuotaExceeded.
        """
        self._check_size(largest)
        self._check_files(nbytes)
        self._quotas.check_bytes(owner, nbytes, scratch=False)
        if nbytes and (deferred or self.unplaced_bytes):
            self._check_room(capacity, nbytes)

    def check_limits(self, nbytes: int, *, owner: str) -> None:
        """Raises TooLarge or QuotaExceeded for a stored array that no room would help."""
        self._check_size(nbytes)
        self._quotas.check_bytes(owner, nbytes, scratch=False)

    def _check_size(self, nbytes: int) -> None:
        if nbytes > self._settings.max_array_bytes:
            raise TooLarge(f"an array of {nbytes} bytes; this server takes at most {self._settings.max_array_bytes}")

    def _check_files(self, nbytes: int) -> None:
        limit = self._settings.max_store_bytes
        if limit is not None and self.used_bytes + nbytes > limit:
            raise StoreFull(f"{nbytes} bytes do not fit: {self.used_bytes} of {limit} are taken")

    def take(self, nbytes: int, *, scratch: bool) -> Extent:
        """Room for `nbytes` > 0, not charged to anybody yet. Raises StoreFull."""
        if scratch and self.memory is not None:
            try:
                return self.memory.take(nbytes)
            except (StoreFull, OSError) as error:  # OSError: out of file descriptors or of memory for the mapping
                log.info("scratch goes to a file: %s", error)
        if scratch:  # where it counts like any other
            self._check_files(nbytes)
        if self.unplaced_bytes:
            self.check_disk(nbytes)
        return self.take_file(nbytes)

    def take_file(self, nbytes: int) -> Extent:
        """Room for `nbytes` > 0 in a file, whose limits have been asked. Raises StoreFull, OSError."""
        extent = self.files.take(nbytes)
        self.used_bytes += nbytes
        return extent

    def promise(self, nbytes: int) -> None:
        """Count `nbytes` > 0 of an array that has no file yet; `place` makes one."""
        self.promise_all(nbytes, size_class(nbytes))

    def promise_all(self, nbytes: int, capacity: int) -> None:
        """Count several such arrays, whose files will have `capacity` bytes."""
        self.used_bytes += nbytes
        self.unplaced_bytes += capacity

    def check_disk(self, nbytes: int) -> None:
        """Raise StoreFull if the disk could not hold `nbytes` > 0 beside all that has been promised a file."""
        self._check_room(size_class(nbytes), nbytes)

    def _check_room(self, capacity: int, nbytes: int) -> None:
        room = self.files.room() + self.files.free_bytes - self.unplaced_bytes
        if capacity > room:
            raise StoreFull(f"the disk has no room for {nbytes} bytes beside results that are not written yet")

    def place(self, nbytes: int) -> Extent:
        """Return a file for an array that was promised one. Raises StoreFull, OSError."""
        extent = self.files.take(nbytes)
        self.unplaced_bytes -= size_class(nbytes)
        return extent

    def displace(self, extent: Extent, nbytes: int, *, reusable: bool = True) -> None:
        """Take such a file back; the array is promised another."""
        self.unplaced_bytes += size_class(nbytes)
        self.files.give(extent, reusable=reusable)

    def adopt(self, name: str | None, nbytes: int, owner: str) -> Extent | None:
        """A file that an earlier process left, charged to its owner; None: it is missing or too short."""
        extent = None if name is None else self.files.adopt(name, nbytes)
        if extent is not None:
            self.used_bytes += nbytes
            self._quotas.charge_bytes(owner, nbytes, scratch=False)
        return extent

    def adopt_promise(self, nbytes: int, owner: str) -> None:
        """Count an array that an earlier process left without a file, charged to its owner."""
        self.promise(nbytes)
        self._quotas.charge_bytes(owner, nbytes, scratch=False)

    def free(self, extent: Extent | None, array: ArrayInfo | ArraySpec | Room, *, reusable: bool = True) -> None:
        """Takes an array's room back, or the promise of it; not `reusable`: somebody may still write to it."""
        if not array.nbytes:
            return
        scratch = not isinstance(array, ArrayInfo) and array.scratch
        self._quotas.charge_bytes(array.owner, -array.nbytes, scratch=scratch)
        if extent is None or (self.arena is not None and self.arena.owns(extent)):
            if extent is not None and self.arena is not None:
                self.arena.free(extent)
            self.used_bytes -= array.nbytes
            self.unplaced_bytes -= size_class(array.nbytes)
            return
        if extent.fd is not None:
            assert self.memory is not None  # it came from there
            self.memory.give(extent, reusable=reusable)
            return
        self.used_bytes -= array.nbytes
        self.files.give(extent, reusable=reusable)

    def give_up(self, extent: Extent, nbytes: int, *, reusable: bool = True) -> None:
        """Take the file of a stored array back whose bytes are elsewhere; its owner has it still."""
        self.used_bytes -= nbytes
        self.files.give(extent, reusable=reusable)

    def adopt_elsewhere(self, nbytes: int, owner: str) -> None:
        """Charge an owner with a stored array that has no file here."""
        self._quotas.charge_bytes(owner, nbytes, scratch=False)

    def free_elsewhere(self, nbytes: int, owner: str) -> None:
        """Take that back: the array is gone."""
        self._quotas.charge_bytes(owner, -nbytes, scratch=False)

    def trim(self) -> None:
        """Gives what is kept for reuse back to the system."""
        self.files.trim()
        if self.memory is not None:
            self.memory.trim()

    @property
    def scratch_bytes(self) -> int:
        """Memory in use for scratch arrays."""
        return self.memory.live_bytes if self.memory is not None else 0

    @property
    def recycled_bytes(self) -> int:
        """Freed extents kept for reuse."""
        return self.files.free_bytes + (self.memory.free_bytes if self.memory is not None else 0)
