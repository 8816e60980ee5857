"""An array on its way into the store: space is reserved first, bytes land once in their final place."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from gemmserve_service.errors import BodyTooLong, BodyTooShort, DigestMismatch
from gemmserve_service.store.extents.extents import Place
from gemmserve_service.store.record import npy_header

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.record import ArraySpec

_SWAP_CHUNK: Final = 1 << 18  # elements; keeps a chunk in the second-level cache
_SWAP_INLINE: Final = 1 << 16  # bytes that are swapped faster than a thread is woken


class Body(Protocol):
    """Bytes of a request as they come, each read once."""

    async def piece(self) -> bytes | memoryview:
        """Return the next bytes, as many as are there; empty at the end."""

    def unread(self, piece: bytes | memoryview) -> None:
        """Give back the end of what `piece` returned last."""

    async def fill(self, view: memoryview, advance: Callable[[int], None], place: Place | None = None) -> bool:
        """Read into `view` until it is full, or the body has ended: then False. `advance(n)`: n more bytes came.

        `place`: where `view` begins, if a transfer process may fill it.
        """


class Upload:
    """A reservation that is being filled. `write` the bytes in order, then `commit`, or `abort` at any time.

    `view` is the writable memory itself, for those who fill it by other means and then set `filled`.
    """

    def __init__(
        self,
        store: ArrayStore,
        spec: ArraySpec,
        extent: Extent | None,
        *,
        byteswap: bool,
    ) -> None:
        self.spec = spec
        self.extent = extent
        self.filled = 0
        self._store = store
        self.byteswap = byteswap
        """Whether the bytes come big-endian."""
        self._view: memoryview | None = None
        self._open = True
        self._held = True
        self._info: ArrayInfo | ArraySpec | None = None
        self.on_insert: Callable[[sqlite3.Connection], object] = lambda _: None
        """Runs in the transaction that makes this an array."""
        self.named = False
        """Whether a row names the space already: then it serves no other array, for the row may outlive this."""
        self.tier: bytes | None = None
        """SHA-256 of the chunks of its object in the tier, once that is written."""
        self.jumped_s = 0.0
        """`Expiry.jumped_s` when its info was made."""

    @property
    def nbytes(self) -> int:
        """Bytes that must be written."""
        return self.spec.nbytes

    @property
    def info(self) -> ArrayInfo | ArraySpec:
        """Result of `commit`."""
        if self._info is None:
            raise ValueError("the upload is not committed")
        return self._info

    @property
    def view(self) -> memoryview:
        """The writable bytes of the array."""
        if not self._open:
            raise ValueError("the upload is closed: arrays are immutable")
        if self._view is None:
            self._view = memoryview(bytearray()) if self.extent is None else self.extent.view(self.nbytes)
        return self._view

    def take_place(self) -> None:
        """Take a file for a reservation that was made without one. Raises StoreFull, OSError."""
        if self.extent is None and self.nbytes:
            self.extent = self._store.place(self.nbytes)

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        """Copies the next piece into place. Raises BodyTooLong, having written nothing, past the array's end."""
        data = memoryview(piece).cast("B")
        end = self.filled + len(data)
        if end > self.nbytes:
            raise BodyTooLong(f"the body goes on after the {self.nbytes} bytes that its shape and dtype need")
        if not data:
            return
        self.view[self.filled : end] = data
        self.advance(len(data))

    def advance(self, count: int) -> None:
        """`count` more bytes lie in `view`, after those that were `filled`."""
        self.filled += count

    def place(self, position: int) -> Place | None:
        """Return where byte `position` of the array lies."""
        return None if self.extent is None else Place(self.extent, position)

    async def commit(self, expected_sha256: bytes | None = None, *, prefix: bytes = b"") -> ArrayInfo | ArraySpec:
        """Publishes the array; from here on it is immutable, and durable unless scratch.

        `expected_sha256`: digest of `prefix` and the bytes as they were written.
        Raises BodyTooShort, DigestMismatch, StoreFull; the reservation is gone after any of them.
        """
        try:
            await self._check(expected_sha256, prefix)
            if self.byteswap and self.nbytes:
                await _byteswap(self.view, self.spec.dtype)
            self._view = None
            self._open = False
            self._info = await self._store.publish(self)
            if expected_sha256 is not None and not self.byteswap and not self.spec.scratch:
                spec = self.spec
                if not prefix:
                    self._store.digests.record(spec.id, data=expected_sha256)
                elif prefix == npy_header(spec.dtype, spec.shape, spec.order):
                    self._store.digests.record(spec.id, npy=expected_sha256)
        except BaseException:
            self.abort()
            raise
        self._held = self.spec.scratch
        return self._info

    async def _check(self, expected_sha256: bytes | None, prefix: bytes) -> None:
        if self.filled < self.nbytes:
            raise BodyTooShort(f"the body ended after {self.filled} of {self.nbytes} bytes")
        if expected_sha256 is not None:
            (found,) = await self._store.digests.sha256(self.view, (prefix,))
            if found != expected_sha256:
                raise DigestMismatch(f"Content-Digest names sha-256 {expected_sha256.hex()}, the body has another")

    def abort(self) -> None:
        """Gives the space back; idempotent. A committed scratch array is released, a committed stored one stays."""
        self._release(reusable=not self.named)

    def discard(self) -> None:
        """Like `abort`, for when a process that may still write to the space has been lost track of."""
        self._release(reusable=False)

    def _release(self, *, reusable: bool) -> None:
        self._open = False
        self._view = None
        if self._held:
            self._held = False
            self._store.release(self, reusable=reusable)

    def seal(self) -> None:
        """End writing; the store keeps the space from here on (results, whose row belongs to their job)."""
        self._open = False
        self._view = None
        self._held = False


async def _byteswap(view: memoryview, dtype: str) -> None:
    """Reverses the bytes of every real or imaginary part, in place."""
    width = np.dtype(dtype).itemsize // (2 if dtype.startswith("complex") else 1)
    parts = np.frombuffer(view, dtype=f"u{width}")
    if len(view) <= _SWAP_INLINE:
        parts.byteswap(inplace=True)
    else:
        await asyncio.to_thread(_swap_chunks, parts)


def _swap_chunks(parts: np.ndarray) -> None:
    for start in range(0, len(parts), _SWAP_CHUNK):
        parts[start : start + _SWAP_CHUNK].byteswap(inplace=True)
