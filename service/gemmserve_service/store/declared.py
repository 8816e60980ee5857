"""Declared type, shape and order of an array whose bytes are still to come, from a query or a .npy header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmserve.wire import NpyError, parse_npy_header
from gemmserve_service.store.record import NO_TAGS

if TYPE_CHECKING:
    import numpy as np

    from gemmserve_kernels.problem.vocabulary import Order
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.extents.shared_memory import Memory
    from gemmserve_service.store.record import Tags
    from gemmserve_service.store.upload import Body, Upload


@dataclass(frozen=True)
class Declared:
    """Declaration of a body's content, known before any of its data is accepted."""

    dtype: np.dtype
    shape: tuple[int, ...]
    order: Order
    nbytes: int
    header: bytes = b""
    """The .npy header as sent; empty for a bare body."""

    @property
    def byteswap(self) -> bool:
        """Whether the data are big-endian."""
        return self.dtype.newbyteorder("<") != self.dtype

    def reserve(
        self,
        store: ArrayStore,
        *,
        ttl_s: float | None = None,
        scratch: bool = False,
        owner: str = "",
        memory: Memory | None = None,
        tags: Tags = NO_TAGS,
    ) -> Upload:
        """Space for exactly the declared bytes; `memory`: a client's that holds them already.

        Raises TooLarge, StoreFull, QuotaExceeded.
        """
        return store.allocate(
            self.dtype.newbyteorder("<"),
            self.shape,
            self.order,
            ttl_s=ttl_s,
            byteswap=self.byteswap,
            scratch=scratch,
            owner=owner,
            memory=memory,
            tags=tags,
        )


class NpyHead:
    """Gathers a stream's first pieces until the .npy header is whole; bounded by `parse_npy_header`'s limit."""

    def __init__(self) -> None:
        self._head = bytearray()

    def feed(self, piece: bytes | memoryview) -> tuple[Declared, bytes] | None:
        """The declaration and the data bytes that came with it; None: more is needed. Raises NpyError."""
        self._head += piece
        header = parse_npy_header(self._head)
        if header is None:
            return None
        head = bytes(self._head)
        order: Order = "F" if header.fortran_order else "C"
        declared = Declared(header.dtype, header.shape, order, header.nbytes, head[: header.data_offset])
        return declared, head[header.data_offset :]

    def cut_short(self) -> NpyError:
        """The error of a stream that ended without a whole header."""
        return NpyError(f"the body ends after {len(self._head)} bytes, within the .npy header")


async def read_npy_head(body: Body) -> tuple[Declared, bytes]:
    """Return what the .npy header of `body` declares, and the data bytes that were read with it. Raises NpyError."""
    head = NpyHead()
    while piece := await body.piece():
        if found := head.feed(piece):
            return found
    raise head.cut_short()
