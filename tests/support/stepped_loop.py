"""An event loop whose clock a test may stop and move on by hand, so that no limit passes before the test lets it."""

from __future__ import annotations

import asyncio


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its time is the system's until `stop_clock`; from then on it is what `advance` makes of it.

    To be called in the loop's thread. Timers and timeouts of asyncio go by this clock, answers of other threads and
    sockets go on as ever.
    """

    def __init__(self) -> None:
        self._stopped_at: float | None = None
        self._behind = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() - self._behind if self._stopped_at is None else self._stopped_at

    def stop_clock(self) -> None:
        """Nothing is due any more."""
        self._stopped_at = self.time()

    def advance(self, seconds: float) -> None:
        """What is due by then is run in the loop's next turn."""
        assert self._stopped_at is not None
        self._stopped_at += seconds

    def start_clock(self) -> None:
        """Goes on from where it stands."""
        now, self._stopped_at = self.time(), None
        self._behind = super().time() - now
