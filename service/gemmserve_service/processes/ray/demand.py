"""Demand for workers, as the front tells it to the bridge twice a second: a line of JSON in the supervisor's pipe."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Final

PERIOD_S: Final = 0.5
_PIECE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Demand:
    """Jobs that wait and that run; `at` is the machine's monotonic clock, the same in every process."""

    at: float
    queued: int
    running: int


def tell(fd: int, demand: Demand) -> bool:
    """Write it, if the pipe has room: nobody waits for a bridge that does not read. Return whether it had."""
    try:
        os.write(fd, json.dumps(asdict(demand)).encode() + b"\n")  # shorter than PIPE_BUF: whole or not at all
    except BlockingIOError:
        return False
    return True


class Listener:
    """Reader of that pipe, which must not block: what was told last."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""
        self._last: Demand | None = None

    def last(self) -> Demand | None:
        """The newest line that has come; None before the first. Raises ValueError for what no front writes."""
        while True:
            try:
                piece = os.read(self._fd, _PIECE)
            except BlockingIOError:
                break
            if not piece:
                break
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if lines:
                self._last = Demand(**json.loads(lines[-1]))
        return self._last
