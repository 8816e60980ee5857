"""Pinned: a hold on an array's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, Self

from gemmserve_service.store import record as records
from gemmserve_service.store.pending import State

if TYPE_CHECKING:
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pending import PendingResults
    from gemmserve_service.store.record import Record
    from gemmserve_service.store.tier.cold import Cold


_MAX_READERS: Final = 64
"""Pins that are remembered before those that are released are sorted out."""


class Keeper(Protocol):
    """The store, as far as pins need it; called in the event loop's thread."""

    def touch(self, extent: Extent) -> None:
        """Note that an extent's bytes are used."""

    def settle(self, record: Record) -> None:
        """Free a hidden array once nothing holds it."""


class Pinned:
    """Keeps an array's bytes alive and unchanged until released; a context manager."""

    __slots__ = ("_arena_view", "_record", "_store", "_view", "info", "used")

    def __init__(self, store: Keeper, record: Record) -> None:
        self.info = record.info
        self._store = store
        self._record: Record | None = record
        self._view: memoryview | None = None
        self._arena_view: memoryview | None = None
        """View of what this was told of the host arena: it serves nobody else before this is released."""
        self.used = False
        """Whether somebody was told where the bytes are: they stay there until the pin is released."""
        record.pins += 1

    @property
    def extent(self) -> Extent | None:
        """Extent that holds the bytes, and does so until the pin is released; None for an array of zero bytes. Of
        pending results: where a worker was told to write them. Raises ValueError for those that have no place yet.
        """
        record = self.record
        if record.cold is not None:
            raise ValueError("the array's bytes are in the tier")
        if not self.used:
            self.used = True
            record.users += 1
        extent, pending = record.extent, record.pending
        if pending is not None and (extent is None or pending.state is State.HOST):
            extent = pending.places.get(self.info.id, extent)
            self._arena_view = None if extent is None else extent.view(1)
        if extent is None and self.info.nbytes:
            raise ValueError("the array has no place yet")
        return extent

    @property
    def record(self) -> Record:
        """The array's record. Raises ValueError if the pin is released."""
        if self._record is None:
            raise ValueError("the pin is released")
        return self._record

    @property
    def cold(self) -> Cold | None:
        """Set while the array's bytes are in the tier alone: `ArrayStore.bring_back` has them come."""
        return None if self._record is None else self._record.cold

    @property
    def at_hand(self) -> bool:
        """Whether the bytes are where everybody on this host reads them: neither `cold` nor `pending`."""
        record = self._record
        return record is None or (record.pending is None and record.cold is None)

    @property
    def pending(self) -> PendingResults | None:
        """The pending results that the array is one of; None: its bytes can be read."""
        pending = None if self._record is None else self._record.pending
        return None if pending is None or pending.readable else pending

    def read_on_device(self) -> None:
        """Note that a worker reads pending results where they are; once it has written them, this pin holds their
        place, too.
        """
        pending = self.pending
        if pending is not None:
            if len(pending.readers) > _MAX_READERS:
                pending.readers = [other for other in pending.readers if other.held]
            pending.readers.append(self)

    def hold_place(self) -> None:
        """Hold the array's place in the host arena, until the pin is released; nothing if it is."""
        if self._record is not None:
            _ = self.extent

    @property
    def held(self) -> bool:
        """Whether it is not released yet."""
        return self._record is not None

    @property
    def view(self) -> memoryview:
        """The bytes: read-only, little-endian, in `info.order`."""
        if self._view is None:
            if self.pending is not None:
                raise ValueError("the array's bytes are not in the store yet")
            extent = self.extent
            if extent is None:
                self._view = memoryview(b"")
            else:
                self._store.touch(extent)
                self._view = extent.view(self.info.nbytes).toreadonly()
        return self._view

    @property
    def npy_header(self) -> bytes:
        """Header of the array's .npy file."""
        return records.npy_header(self.info.dtype, self.info.shape, self.info.order)

    def npy_parts(self) -> tuple[bytes, memoryview]:
        """Return the array's .npy file: the header, and the data in place."""
        return self.npy_header, self.view

    def share(self) -> Pinned:
        """Another hold on the same array."""
        other = Pinned(self._store, self.record)
        if self.used:
            other.used = True
            self.record.users += 1
        return other

    def release(self) -> None:
        """Lets go; idempotent. Views that are still around stay valid, their extent is not reused before they go."""
        record, self._record = self._record, None
        self._view = self._arena_view = None
        if record is not None:
            record.pins -= 1
            record.users -= self.used
            self._store.settle(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
