"""Large products, block after block between other tasks."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from gemmserve_kernels.device.interruption import interruptible
from gemmserve_service.errors import JobCancelled
from gemmserve_service.executor.protocol import BLOCKS_AHEAD, BlockOf, Done
from gemmserve_service.executor.worker.blocks.answers import whole_answer
from gemmserve_service.executor.worker.memory.write_queue import Result
from gemmserve_service.executor.worker.overlap.product import ProductTask
from gemmserve_service.executor.worker.overlap.task import Task
from gemmserve_service.schemas import ProgramParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_service.executor.worker.blocks.gridded import BlockWork, Gridded
    from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
    from gemmserve_service.executor.worker.overlap.lane import Lane
    from gemmserve_service.executor.worker.unpack import Run
    from gemmserve_service.schemas import GemmParams, GemmReduceParams


class BlockTask(ProductTask):
    """A block of a large product that came whole."""

    def __init__(
        self, lane: Lane, message: Run, params: GemmParams | GemmReduceParams, find: Callable[[], BlockWork]
    ) -> None:
        super().__init__(lane, message, params)
        self._find = find

    def arrays(self) -> None:
        """See `ProductTask`."""
        self._take(self._find())


class GridTask(Task):
    """A large product, block after block: each goes through the lane's stages as a product of its own, so that what
    came after this one is computed between them.
    """

    message: Run

    def __init__(
        self,
        lane: Lane,
        message: Run,
        grid: Grid,
        ended: Callable[[Task, BaseException | None], None],
        compile_s: float,
    ) -> None:
        super().__init__(lane.runner, message)
        self.compile_s = compile_s
        self._lane = lane
        self._tell = ended
        self._grid = grid
        self._gridded: Gridded | None = None
        self._order: deque[int] = deque()
        self._under_way = 0
        self._dones: list[Done] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Put the first blocks into the pipeline, as many as there is room for."""
        plan = self.runner.backend.plan_blocks(self._grid)
        self._order = deque(plan.order)
        for _ in range(plan.windows):
            self._put()

    def _put(self) -> None:
        """Put the next block into the pipeline, if there is one and none has failed."""
        with self._lock:
            if self._error is not None or not self._order:
                return
            index = self._order.popleft()
            ahead = tuple(islice(self._order, BLOCKS_AHEAD))
            self._under_way += 1
        block = BlockOf(parent=self.name, sides=self._grid.sides, index=index, ahead=ahead)
        message = replace(self.message, block=block)
        assert not isinstance(message.params, ProgramParams)
        task = BlockTask(self._lane, message, message.params, lambda: self._work(block))
        self._lane.pipeline.put(task, self._block_ended)

    def _work(self, block: BlockOf) -> BlockWork:
        """Return a block's work, of the arrays that the first one has found."""
        with self._lock:
            if self._gridded is None:
                arrays = self.runner.arrays(self.message)
                gridded = self.runner.gridded(self.message, *arrays)
                assert gridded is not None
                self._gridded = gridded
        return self.runner.block(self._gridded, block)

    def _block_ended(self, task: Task, error: BaseException | None) -> None:
        task.release()
        if error is None:
            assert isinstance(task.answer, Done)
            self._dones.append(task.answer)
        with self._lock:
            self._under_way -= 1
            self._error = self._error or error
        self._put()
        with self._lock:
            if self._under_way:
                return
        self.runner.backend.close_panels(self.name)
        error = self._error
        if error is None:
            try:
                self.answer = self._whole()
            except BaseException as raised:  # nobody wants it any more, while it waited for room
                error = raised
        self._tell(self, error)

    def _whole(self) -> Done:
        """Return the answer for all blocks. Waits for room for results that have no place yet."""
        deferred, gridded = self.message.deferred, self._gridded
        assert gridded is not None
        with interruptible(self._checkpoint):
            gridded.combine()
        write_queue: WriteQueue | None = getattr(self._lane.backend, "write_queue", None)
        if deferred and write_queue is not None:
            results = [Result(array, gridded.results[name]) for name, array in deferred.items()]
            write_queue.reserve(self.name, results, self._checkpoint)
        return whole_answer(self._dones).model_copy(
            update={"task": self.name, "algorithm": self.message.algorithm, "written": not deferred}
        )

    def _checkpoint(self) -> None:
        if self.runner.is_cancelled(self.name):
            raise JobCancelled("the job was cancelled")
        self._lane.step()
