"""Amounts of work of a probe, and the time that is left to it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Amounts:
    """Seconds of all products and of one measurement; bytes of copies and of files; extents of products, those of the
    first dtype by themselves; threads.
    """

    seconds: float
    slice_s: float
    copied_bytes: int
    file_bytes: int
    first_extents: tuple[int, ...]
    extents: tuple[int, ...]
    threads: tuple[int, ...]


FULL: Final = Amounts(
    seconds=12.0,
    slice_s=0.4,
    copied_bytes=512 << 20,
    file_bytes=512 << 20,
    first_extents=(512, 1024, 2048, 4096, 8192, 16384),
    extents=(512, 2048, 8192),
    threads=(1, 4, 8),
)
QUICK: Final = Amounts(
    seconds=3.0,
    slice_s=0.1,
    copied_bytes=64 << 20,
    file_bytes=64 << 20,
    first_extents=(512, 2048, 8192),
    extents=(512, 4096),
    threads=(1, 8),
)
"""Amounts of `--quick`."""


class Deadline:
    """Moment by which a probe is to be over: whoever begins something that takes longer asks first."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def put_off(self, seconds: float) -> None:
        """Move it by so long, which went into what measures nothing."""
        self._end += seconds

    @property
    def left_s(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._end - time.perf_counter()

    def allows(self, seconds: float) -> bool:
        """Whether so much time is left."""
        return seconds <= self.left_s
