"""Ranges of the bytes that have come: a set of integers kept as the half-open spans that make it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Spans:
    """Disjoint spans [start, end), in order, none touching the next."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._spans: list[tuple[int, int]] = []
        for start, end in spans:
            self.add(start, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans)

    def __len__(self) -> int:
        """Spans."""
        return len(self._spans)

    def add(self, start: int, end: int) -> None:
        """Takes [start, end) in."""
        if start >= end:
            return
        apart = [span for span in self._spans if span[1] < start or end < span[0]]
        joined = [span for span in self._spans if not (span[1] < start or end < span[0])]
        low = min([start, *(span[0] for span in joined)])
        high = max([end, *(span[1] for span in joined)])
        self._spans = sorted([*apart, (low, high)])

    def remove(self, start: int, end: int) -> None:
        """Takes [start, end) out."""
        if start >= end:
            return
        kept: list[tuple[int, int]] = []
        for low, high in self._spans:
            kept += [(a, b) for a, b in ((low, min(high, start)), (max(low, end), high)) if a < b]
        self._spans = kept

    def meets(self, start: int, end: int) -> bool:
        """Whether some of [start, end) is in."""
        return any(low < end and start < high for low, high in self._spans)

    def missing(self, length: int) -> list[tuple[int, int]]:
        """Return what [0, length) lacks."""
        holes = Spans([(0, length)])
        for start, end in self._spans:
            holes.remove(start, end)
        return list(holes)
