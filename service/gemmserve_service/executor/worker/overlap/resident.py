"""Products of operands that the device has, whose results stay there: one thread begins and answers them."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import JobCancelled
from gemmserve_service.executor.protocol import Done
from gemmserve_service.executor.worker.memory.write_queue import Result
from gemmserve_service.executor.worker.overlap.task import NoRoomBesideError, Task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gemmserve_service.executor.protocol import Work
    from gemmserve_service.executor.worker.backend import BegunProduct, ResidentProduct
    from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
    from gemmserve_service.executor.worker.overlap.lane import Lane
    from gemmserve_service.executor.worker.unpack import Form

_SHORT: Final = 128 << 20
"""Bytes of operands and results up to which messages wait while the thread that reads them waits for the device: 2048^3
of complex64 are 96 MiB. Express products take milliseconds at most, if their estimates are right."""

log = logging.getLogger(__name__)


def resident_task(lane: Lane, work: Work, form: Form, product: ResidentProduct) -> ResidentTask | None:
    """Return the task for a product whose results stay on the device; None: one of them has a place, an operand is kept
    nowhere or is not there, or there is no room for the results.
    """
    write_queue: WriteQueue | None = getattr(lane.backend, "write_queue", None)
    (part,), extents = work.parts, work.extents
    if write_queue is None or not work.defer:
        return None
    deferred = {}
    for name, ((number, _), *_) in part.results.items():
        if number < 0 or extents[number][1] or (array := extents[number][4]) is None:
            return None
        deferred[name] = array
    arrays = []
    for name in form.operands:
        number = part.operands[name][0][0]
        if number < 0 or (array := extents[number][4]) is None:
            return None
        arrays.append(array)
    nbytes = sum([form.nbytes[name] for name in deferred])
    if not write_queue.expect(nbytes):
        return None
    if (operands := product.resident(arrays)) is None:
        write_queue.release(nbytes)
        return None
    return ResidentTask(lane, work, form, product, operands, deferred, write_queue)


class ResidentTask(Task):
    """A product that the device is given behind others, before they are over."""

    message: Work

    def __init__(
        self,
        lane: Lane,
        message: Work,
        form: Form,
        product: ResidentProduct,
        operands: Sequence[Any],
        deferred: dict[str, str],
        write_queue: WriteQueue,
    ) -> None:
        """`deferred`: the results' ids by name, which the write queue expects."""
        super().__init__(lane.runner, message)
        self._lane = lane
        (self._part,) = message.parts
        self._product = product
        self._operands = operands
        self._deferred = deferred
        self._write_queue = write_queue
        self._nbytes = sum(form.nbytes.values())
        self._expected = sum([form.nbytes[name] for name in deferred])
        self._came = time.perf_counter()
        self._begun: BegunProduct | None = None

    @property
    def short(self) -> bool:
        """Whether the device is at it for a moment only: messages may wait for that."""
        return self._nbytes <= _SHORT

    @property
    def loaded(self) -> bool:
        """See `Task`."""
        return True

    @property
    def light(self) -> bool:
        """See `Task`: its operands are there for others, too."""
        return True

    @property
    def prompt(self) -> bool:
        """See `Task`: others are given to the device meanwhile."""
        return False

    @property
    def over(self) -> bool:
        """See `Task`."""
        return self._begun is None or self._begun.over

    def compute(self) -> None:
        """Have the device compute, behind the products before."""
        if self.runner.is_cancelled(self.name):
            raise JobCancelled("the job was cancelled")
        self._lane.step()
        try:
            self._begun = self._product.begin(self._operands)
        except self._lane.backend.out_of_memory as error:
            log.info("task %s waits for memory: %s", self.name, error)
            raise NoRoomBesideError from error

    def finish(self) -> None:
        """Wait until it has. The results are held: there has been room for them since it came."""
        begun = self._begun
        assert begun is not None
        timings, counted = begun.finish()
        timings.queue_s = max(time.perf_counter() - self._came - timings.kernel_s - timings.compile_s, 0.0)
        self._lane.step()
        self._write_queue.take(self.name, [Result(array, begun.made[name]) for name, array in self._deferred.items()])
        self.answer = Done(
            task=self.name,
            algorithm=self._part.algorithm,
            timings=timings,
            elements=counted,
            memory_used=self.runner.backend.memory_used(),
            written=False,
        )

    def release(self) -> None:
        """Let operands and results go, and the room for these."""
        self._begun, self._operands = None, ()
        self._write_queue.release(self._expected)
        self._expected = 0
