"""Products in stages."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.device.interruption import interruptible
from gemmserve_service.errors import JobCancelled
from gemmserve_service.executor.worker.memory.write_queue import Result
from gemmserve_service.executor.worker.overlap.task import NoRoomBesideError, Task
from gemmserve_service.executor.worker.unpack import TINY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gemmserve_service.executor.worker.blocks.gridded import BlockWork
    from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
    from gemmserve_service.executor.worker.overlap.lane import Lane
    from gemmserve_service.executor.worker.overlap.staged import StagedProduct
    from gemmserve_service.executor.worker.unpack import Run
    from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams, Timings

_BRIEF: Final = 1 << 18
"""Bytes of results whose way to the host takes no longer than to wake the thread for it: some 20 us."""

_PROMPT: Final = 32 << 20
"""Bytes of operands and results up to which one thread enqueues a product and waits for it. Two, which take turns at
the interpreter, were slower with 512^3 (2,100 a second for 2,700) and faster with 4096^3 (424 for 396)."""

log = logging.getLogger(__name__)


class ProductTask(Task):
    """A product, in stages."""

    message: Run

    def __init__(self, lane: Lane, message: Run, params: GemmParams | GemmReduceParams) -> None:
        super().__init__(lane.runner, message)
        self._lane = lane
        self._backend = lane.backend
        self._write_queue: WriteQueue | None = getattr(lane.backend, "write_queue", None)
        self._params = params
        self._nbytes = sum([ref.nbytes for ref in (*message.operands.values(), *message.results.values())])
        self._came = time.perf_counter()
        self._waited_s = 0.0
        self._product: StagedProduct | None = None
        self._timings: Timings | None = None
        """Timings, once it was computed alone, all at once."""
        self._elements: Elements | None = None
        """Likewise."""

    @property
    def loaded(self) -> bool:
        """Whether the device has every operand. Blocks' panels are brought in the order of the blocks, one after the
        other: who waits for a slot waits for those before it.
        """
        if self.message.block is not None:
            return False
        resident = None if self._write_queue is None else self._write_queue.resident
        return resident is not None and all(
            ref.cache_id is not None and resident.holds(ref.cache_id) for ref in self.message.operands.values()
        )

    @property
    def prompt(self) -> bool:
        """Whether the device has little to do."""
        return self.message.block is None and self._nbytes <= _PROMPT

    @property
    def tiny(self) -> bool:
        """Whether the device has next to nothing to do, and the results have their places."""
        message = self.message
        return not message.verify and message.block is None and not message.deferred and self._nbytes <= TINY

    @property
    def brief(self) -> bool:
        """Whether there is little to store, and nothing to check."""
        if self.answered:
            return True
        unsettled = self.message.verify and (self._product is None or self._product.verdict is None)
        return not unsettled and sum(ref.nbytes for ref in self.message.results.values()) <= _BRIEF

    def load(self) -> None:
        """Brings the operands."""
        self._waited_s = time.perf_counter() - self._came
        self.arrays()
        check = f"task {self.name} by {self.message.algorithm}" if self.message.verify else None
        self._product = self._backend.product(
            self._params, self._operands, self._results, self._checkpoint, check=check
        )
        self._stage(self._product.load)

    def arrays(self) -> None:
        """Find operands and results, a block's parts of them."""
        self._operands, self._results = self.runner.arrays(self.message)
        if self.message.block is not None:
            gridded = self.runner.gridded(self.message, self._operands, self._results)
            assert gridded is not None
            self._take(self.runner.block(gridded, self.message.block))

    def _take(self, work: BlockWork) -> None:
        """Compute that block."""
        self._params, self._operands, self._results = work.params, work.operands, work.results
        self.message = replace(self.message, params=work.params)

    def compute(self) -> None:
        """Have the device compute, behind the product before."""
        assert self._product is not None
        self._stage(self._product.compute)

    def finish(self) -> None:
        """Wait until it has; that is all, where the results are to be written later. Waits for room for those."""
        product = self._product
        assert product is not None
        self._stage(product.finish)
        deferred = self.message.deferred
        whole = all(name in deferred for name, ref in self.message.results.items() if ref.nbytes)
        unsettled = self.message.verify and product.verdict is None
        if not deferred or not whole or unsettled or self._timings is not None or self._write_queue is None:
            return
        product.timings.queue_s = self._waited_s
        product.timings.compile_s += self.compile_s
        done = self.runner.answer(
            self.message,
            self._operands,
            self._results,
            product.timings,
            self._checkpoint,
            written=False,
            checked=product.verdict,
            counted=product.elements,
        )
        self._hold(product.made)
        self.answered = True
        self._lane.answer(done)

    def store(self) -> None:
        """Takes the result to its place, and checks it where that was asked for."""
        if self.answered:
            return
        assert self._product is not None
        # Alone it was computed all at once, and is checked in the store.
        checked = self._product.verdict if self._timings is None else None
        # A check may put another result in the place of this one.
        unsettled = self.message.verify and checked is None
        whole = self.message.block is None
        stays = whole and self._write_queue is not None and self._timings is None and not unsettled
        made = dict(self._product.made) if stays else {}
        self._stage(self._product.store)
        alone = self._timings is not None
        if not alone and self._write_queue is not None:
            for name, array in made.items():
                ref = self.message.results[name]
                if ref.cache_id is not None and not ref.placeless:
                    self._write_queue.resident.put(ref.cache_id, array, ref.nbytes)
        timings = self._product.timings if self._timings is None else self._timings
        timings.queue_s = self._waited_s
        counted = self._elements if alone else self._product.elements
        self.answer = self.runner.answer(
            self.message,
            self._operands,
            self._results,
            timings,
            self._checkpoint,
            written=not self.message.deferred,
            checked=checked,
            counted=counted,
        )
        # They are in memory of this process: too little was left on the device, or they were checked on the host.
        self._hold(self._results)

    def _hold(self, made: Mapping[str, Any]) -> None:
        """Have the results held that have no place yet; wait for room."""
        deferred = self.message.deferred
        if deferred and self._write_queue is not None:
            results = [Result(array, made[name]) for name, array in deferred.items()]
            self._write_queue.reserve(self.name, results, self._checkpoint)

    def release(self) -> None:
        """Lets go of what was loaded."""
        if self._product is not None:
            self._product.release()

    def _stage(self, step: Callable[[], None]) -> None:
        if self._timings is not None:
            return
        block = self.message.block if log.isEnabledFor(logging.DEBUG) else None
        began = time.perf_counter()
        try:
            with interruptible(self._checkpoint):
                step()
        except self._backend.out_of_memory as error:
            log.info("task %s waits for memory: %s", self.name, error)
        else:
            if block is not None:
                seconds = began, time.perf_counter()
                log.debug("block %s/%d: %s from %.4f to %.4f", block.parent, block.index, step.__name__, *seconds)
            return
        if self._lane.express:
            raise NoRoomBesideError
        self.release()  # what comes behind may wait for a panel's slot, and is waited for
        self._lane.pipeline.alone(self, self._whole)

    def _whole(self, behind: list[Task]) -> None:
        for task in (self, *behind):
            task.release()
        if not self._run_whole():
            with self._lane.alone_on_device(lambda: self.runner.is_cancelled(self.name)):
                self._run_whole(last=True)

    def _run_whole(self, *, last: bool = False) -> bool:
        """Run all at once; False: there is too little memory, which is raised where this is the `last` attempt."""
        before = self.runner.backend.read_counts()
        try:
            self._timings = self.runner.backend.run(self._params, self._operands, self._results, self._checkpoint)
        except self._backend.out_of_memory as error:
            if last:
                raise
            log.info("task %s waits for memory that tasks beside it have: %s", self.name, error)
            return False
        self._elements = self.runner.elements_since(before)
        return True

    def _checkpoint(self) -> None:
        if self.runner.is_cancelled(self.name):
            raise JobCancelled("the job was cancelled")
        self._lane.step()
