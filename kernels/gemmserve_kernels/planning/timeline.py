"""Time of a worker's way through blocks, from event to event: panels up, products, windows down, one of each at a time.
Pure.

A panel goes up once the block that had its slot is computed; a block is computed once its panels are there and the
block before is; its window then goes to the host, and with it the worker's answer, upon which it is sent another block.
Both directions of a link share what the host's memory gives them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.blocks.memory_plan import Upload
    from gemmserve_kernels.planning.rates import Way


@dataclass(frozen=True)
class Pace:
    """How blocks are sent to a worker: as many as `sent` at once, of which, and of `ahead` more, panels may come;
    `answer_s` from the end of one to the beginning of the one that is sent for it.
    """

    sent: int = 3
    ahead: int = 16
    answer_s: float = 0.0


def timeline(
    uploads: Sequence[Upload],
    blocks_s: Sequence[float],
    window_bytes: float,
    way: Way,
    *,
    both: float = math.inf,
    pace: Pace,
) -> float:
    """Return the seconds until the last window is at the host.

    `uploads`: of panels, in their order. `blocks_s`: of the product of each block, in the plan's order. `both`: bytes a
    second up and down together, at most.
    """
    walk = _Walk(uploads, blocks_s, window_bytes, way, both, pace)
    while walk.stored < len(blocks_s):
        walk.step()
    return walk.now


class _Walk:
    def __init__(
        self,
        uploads: Sequence[Upload],
        blocks_s: Sequence[float],
        window_bytes: float,
        way: Way,
        both: float,
        pace: Pace,
    ) -> None:
        self.now = 0.0
        self.stored = 0
        self._blocks_s, self._window_bytes = blocks_s, window_bytes
        self._way, self._both, self._pace = way, both, pace
        self._uploads = deque(uploads)
        self._up: float | None = None
        """Bytes left of the panel that goes up."""
        self._down: float | None = None
        """Likewise of the window that goes to the host."""
        self._end = math.inf
        """Time at which the block that is computed is."""
        self._begun = self._computed = 0
        self._sent = pace.sent
        self._answers: deque[float] = deque()
        """Times at which answers are followed by other blocks."""

    def step(self) -> None:
        """Begin what can begin, and go on to the next event."""
        while self._answers and self._answers[0] <= self.now:
            self._answers.popleft()
            self._sent += 1
        if self._up is None and self._uploads and self._may_come(self._uploads[0]):
            self._up = float(self._uploads[0].nbytes)
        if math.isinf(self._end) and self._may_begin():
            self._end = self.now + self._blocks_s[self._begun]
            self._begun += 1
        if self._down is None and self._computed > self.stored:
            self._down = self._window_bytes
        up, down = self._rates()
        events = [self._end, *list(self._answers)[:1]]
        events += [] if self._up is None else [self.now + self._up / up]
        events += [] if self._down is None else [self.now + self._down / down]
        later = min(events)
        passed, self.now = later - self.now, later
        if self._up is not None:
            self._up -= up * passed
            if self._up < 1:
                self._up = None
                self._uploads.popleft()
        if self._down is not None:
            self._down -= down * passed
            if self._down < 1:
                self._down = None
                self.stored += 1
                self._answers.append(self.now + self._pace.answer_s)
        if self._end <= self.now:
            self._end = math.inf
            self._computed += 1

    def _may_come(self, upload: Upload) -> bool:
        return upload.after < self._computed and upload.before < self._sent + self._pace.ahead

    def _may_begin(self) -> bool:
        there = not self._uploads or self._uploads[0].before > self._begun
        return there and self._begun < min(self._sent, len(self._blocks_s))

    def _rates(self) -> tuple[float, float]:
        """Return bytes a second up and down now."""
        up, down = self._way.up, self._way.down
        share = 1.0 if self._up is None or self._down is None else min(1.0, self._both / (up + down))
        return up * share, down * share
