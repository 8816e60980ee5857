"""Tasks of which one stage has everything: programs, batches, reductions from those of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service.errors import describe
from gemmserve_service.executor.worker.overlap.task import NoRoomBesideError, Task

if TYPE_CHECKING:
    from gemmserve_service.executor.protocol import Work
    from gemmserve_service.executor.worker.overlap.lane import Lane
    from gemmserve_service.executor.worker.unpack import Run


class WholeTask(Task):
    """A program, a batch, a reduction from its blocks': everything where others compute."""

    def __init__(self, lane: Lane, message: Run | Work) -> None:
        super().__init__(lane.runner, message)
        self._lane = lane

    def compute(self) -> None:
        """Compute all of it; again, alone, if what others hold left it too little memory."""
        self.answer = self.runner.attempt(self.message)
        if self.answer.kind == "failed" and self.answer.slug == describe(OutOfDeviceMemory("")).slug:
            if self._lane.express:
                raise NoRoomBesideError
            self._lane.pipeline.alone(self, self._again)

    def _again(self, behind: list[Task]) -> None:
        for task in behind:
            task.release()
        self.answer = self.runner.attempt(self.message)
