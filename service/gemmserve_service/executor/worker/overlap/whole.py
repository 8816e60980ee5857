"""Tasks of which one stage has everything: programs, batches, reductions from those of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service.errors import describe
from gemmserve_service.executor.worker.overlap.task import NoRoomBesideError, Task

if TYPE_CHECKING:
    from gemmserve_service.executor.protocol import Work
    from gemmserve_service.executor.worker.overlap.lane import Lane
    from gemmserve_service.executor.worker.unpack import Run

_OUT_OF_MEMORY: Final = describe(OutOfDeviceMemory("")).slug


class WholeTask(Task):
    """A program, a batch, a reduction from its blocks': everything where others compute."""

    def __init__(self, lane: Lane, message: Run | Work) -> None:
        super().__init__(lane.runner, message)
        self._lane = lane

    def compute(self) -> None:
        """Compute all of it; again, alone, if what others hold left it too little memory."""
        if not self._attempt():
            if self._lane.express:
                raise NoRoomBesideError
            self._lane.pipeline.alone(self, self._again)

    def _again(self, behind: list[Task]) -> None:
        for task in behind:
            task.release()
        if not self._attempt():
            with self._lane.alone_on_device(lambda: self.runner.is_cancelled(self.name)):
                self._attempt()

    def _attempt(self) -> bool:
        """Compute all of it; False: there is too little memory, as the answer says."""
        self.answer = self.runner.attempt(self.message)
        return not (self.answer.kind == "failed" and self.answer.slug == _OUT_OF_MEMORY)
