"""Tiny products on a device that has a shorter way for them: one thread computes each in one go."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gemmserve_service.executor.protocol import Done
from gemmserve_service.executor.worker.overlap.task import NoRoomBesideError, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from gemmserve_service.executor.protocol import ExtentRow, Work
    from gemmserve_service.executor.worker.backend import TinyProduct
    from gemmserve_service.executor.worker.overlap.lane import Lane
    from gemmserve_service.executor.worker.unpack import Form

log = logging.getLogger(__name__)


class TinyTask(Task):
    """A tiny product of operands that the device has, or that are kept nowhere: one thread computes it in one go."""

    message: Work

    def __init__(self, lane: Lane, message: Work, form: Form, product: TinyProduct) -> None:
        """`message`: of one product of the form, which is not to be checked and no block."""
        super().__init__(lane.runner, message)
        self._lane = lane
        self._form = form
        self._product = product
        (self._part,) = message.parts
        self._copies: Sequence[Any] = ()

    def find(self) -> bool:
        """Find the operands that are kept. False: the device has not got all of them, or a result has no place."""
        extents, part = self.message.extents, self._part
        for (number, _), *_ in part.results.values():
            if number < 0 or not extents[number][1]:
                return False
        arrays = []
        for name in self._form.operands:
            number = part.operands[name][0][0]
            if number < 0:
                return False
            if (array := extents[number][4]) is not None:
                arrays.append(array)
        copies = self._product.resident(arrays)
        if copies is None:
            return False
        self._copies = copies
        return True

    def compute(self) -> None:
        """Compute it, and take the results to their places."""
        self._lane.step()
        try:
            self._compute()
        except self._lane.backend.out_of_memory as error:
            log.info("task %s waits for memory: %s", self.name, error)
            raise NoRoomBesideError from error

    def _compute(self) -> None:
        product, part, extents = self._product, self._part, self.message.extents
        copies = iter(self._copies)
        nbytes = self._form.nbytes
        operands = []
        for name in self._form.operands:
            number, offset = part.operands[name][0]
            row = extents[number]
            operands.append(self._memory(row, offset, nbytes[name]) if row[4] is None else next(copies))
        product.begin(operands)
        kept = {}
        try:  # while the device computes
            for name in self._form.results:
                number, offset = part.results[name][0]
                product.store(name, self._memory(extents[number], offset, nbytes[name]))
                if (array := extents[number][4]) is not None:
                    kept[name] = array
        except BaseException:
            product.finish({})  # nothing is left that may be under way
            raise
        timings, counted = product.finish(kept)
        memory_used = self.runner.backend.memory_used()
        self.answer = Done(
            task=self.name, algorithm=part.algorithm, timings=timings, elements=counted, memory_used=memory_used
        )

    def _memory(self, row: ExtentRow, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return the bytes of an array's place. Raises OSError if it is gone, ValueError if it is shorter."""
        start = row[3] + offset
        memory = self.runner.memory(row)[start : start + nbytes]
        if memory.size < nbytes:
            raise ValueError(f"{memory.size} bytes for an array of {nbytes}")
        return memory

    def release(self) -> None:
        """Let the operands go."""
        self._copies = ()
