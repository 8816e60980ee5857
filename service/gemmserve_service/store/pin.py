"""Pinned: a hold on an array's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from gemmserve_service.store import record as records

if TYPE_CHECKING:
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pending import PendingResults
    from gemmserve_service.store.record import Record


class Keeper(Protocol):
    """The store, as far as pins need it; called in the event loop's thread."""

    def touch(self, extent: Extent) -> None:
        """Note that an extent's bytes are used."""

    def settle(self, record: Record) -> None:
        """Free a hidden array once nothing holds it."""


class Pinned:
    """Keeps an array's bytes alive and unchanged until released; a context manager."""

    __slots__ = ("_record", "_store", "_view", "info")

    def __init__(self, store: Keeper, record: Record) -> None:
        self.info = record.info
        self._store = store
        self._record: Record | None = record
        self._view: memoryview | None = None
        record.pins += 1

    @property
    def extent(self) -> Extent | None:
        """Extent that holds the bytes; None for an array of zero bytes."""
        if self._record is None:
            raise ValueError("the pin is released")
        return self._record.extent

    @property
    def pending(self) -> PendingResults | None:
        """The pending results that the array is one of; None: its bytes are in the store."""
        return None if self._record is None else self._record.pending

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
        if self._record is None:
            raise ValueError("the pin is released")
        return Pinned(self._store, self._record)

    def release(self) -> None:
        """Lets go; idempotent. Views that are still around stay valid, their extent is not reused before they go."""
        record, self._record = self._record, None
        self._view = None
        if record is not None:
            record.pins -= 1
            self._store.settle(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
