"""The last form that came with a head: which product it asks for, and where in it the operands' elements lie.

A client that multiplies small matrices sends forms that differ in those elements alone. All bytes around them (the
delimiters, the parts' headers, the parameters, the .npy headers) are compared with those of the form before; where they
are the same nothing is searched or parsed. Elements are not searched for delimiters: a client has to choose one that is
not in them (RFC 2046, section 5.1.1), and .npy headers say how many bytes they have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_service.jobs.small.small_products import SmallProduct

Parts = dict[str, tuple[int, int]]
"""Offsets in a body at which each part's data begin and end, by name."""

_MOST_BYTES: Final = 4096
"""Bytes around the elements of a form that is remembered."""


class FormMemo:
    """Memory for one form."""

    __slots__ = ("_length", "_parts", "_pieces", "_product")

    def __init__(self) -> None:
        self._length = -1
        self._pieces: list[tuple[int, bytes]] = []
        """Offsets of the bytes around the elements, and those."""
        self._parts: Parts = {}
        self._product: SmallProduct | None = None

    def find(self, body: bytes) -> tuple[SmallProduct, Parts] | None:
        """The product and the parts of a form that is like the one before; None: another one. `body` as in `learn`."""
        product = self._product
        if product is None or len(body) != self._length:
            return None
        for offset, piece in self._pieces:
            if not body.startswith(piece, offset):
                return None
        return product, self._parts

    def learn(self, body: bytes, start: int, product: SmallProduct, parts: Parts) -> None:
        """`body`, from offset `start` on, is a whole form with those parts, and asks for the product."""
        names = [slot.name for slot in product.operands]
        elements = sorted((parts[name][0] + product.heads[name], parts[name][1]) for name in names)
        begins = [start, *(end for _, end in elements)]
        ends = [*(begin for begin, _ in elements), len(body)]
        if sum(ends) - sum(begins) > _MOST_BYTES:
            return
        self._length, self._product, self._parts = len(body), product, parts
        self._pieces = [(begin, body[begin:end]) for begin, end in zip(begins, ends, strict=True)]
