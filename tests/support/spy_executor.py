"""The processor in a thread of this process, and a hand on what it is sent."""

from __future__ import annotations

import threading

from inline_executor import InlineExecutor

from gemmserve_service.executor.protocol import RunBatch


class SpyExecutor(InlineExecutor):
    """Remembers what it was sent; `hold` keeps tasks back until `release`, which any thread may call."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = []
        self.held = []
        self.hold = False
        self._gate = threading.Lock()

    def send(self, worker, message):
        if isinstance(message, RunBatch):
            self.sent.append(message)
            with self._gate:
                if self.hold:
                    self.held.append((worker, message))
                    return
        super().send(worker, message)

    def release(self):
        with self._gate:  # what is sent now either is in `held` or finds that nothing is held back any more
            self.hold = False
            held, self.held = self.held, []
        for worker, task in held:
            super().send(worker, task)
