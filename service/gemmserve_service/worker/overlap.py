"""Several tasks at once on a device whose products have stages: copies of one hide beneath the kernels of another."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from gemmserve_kernels.errors import OutOfDeviceMemory
from gemmserve_service.errors import JobCancelled, describe
from gemmserve_service.executor.protocol import Done, Run
from gemmserve_service.schemas import ProgramParams, Timings
from gemmserve_service.worker.pipeline import Pipeline
from gemmserve_service.worker.runner import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from gemmserve_service.executor.protocol import Failed, RunBatch
    from gemmserve_service.schemas import GemmParams, GemmReduceParams
    from gemmserve_service.worker.device import HostArray
    from gemmserve_service.worker.runner import Runner

log = logging.getLogger(__name__)


class StagedProduct(Protocol):
    """One product on its way through a device."""

    timings: Timings

    def load(self) -> None:
        """Brings the operands."""

    def compute(self) -> None:
        """Computes; brings the operands first, if they are not there."""

    def store(self) -> None:
        """Takes the results to the host."""

    def release(self) -> None:
        """Lets go of operands that were loaded ahead."""


@runtime_checkable
class OverlappingBackend(Protocol):
    """What a device offers beyond `DeviceBackend`."""

    out_of_memory: tuple[type[BaseException], ...]

    def enter(self) -> None:
        """Makes the calling thread one that uses the device, on a stream of its own."""

    def product(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None],
    ) -> StagedProduct:
        """A product to be taken through its stages."""


class Overlap:
    """The tasks of a worker, in the order in which they came; `answer` is told of each, in that order.

    What finds too little memory waits until it is alone with the device, and what was loaded ahead is let go.
    """

    def __init__(self, runner: Runner, backend: OverlappingBackend, answer: Callable[[Done | Failed], None]) -> None:
        self._runner = runner
        self._backend = backend
        self._answer = answer
        self._pipeline: Pipeline[_Task] = Pipeline(backend.enter)
        self._steps = 0

    @property
    def at(self) -> tuple[str | None, int]:
        """The oldest task that is under way, and a number that grows as long as anything gets on."""
        oldest = next(iter(self._pipeline.under_way), None)
        return None if oldest is None else oldest.message.task, self._steps + self._runner.progress

    def start(self, message: Run | RunBatch) -> None:
        """Takes a task on."""
        runner, backend = self._runner, self._backend
        if isinstance(message, Run) and not isinstance(message.params, ProgramParams):
            task: _Task = _ProductTask(runner, message, message.params, backend, self._pipeline, self._step)
        else:
            task = _WholeTask(runner, message, self._pipeline)
        self._pipeline.put(task, self._ended)

    def abandon(self) -> None:
        """Nobody wants what is under way; returns when it has ended."""
        for task in self._pipeline.under_way:
            self._runner.cancel(task.message.task)
        self.close()

    def close(self) -> None:
        """Returns when what was taken on has ended."""
        self._pipeline.close()

    def _step(self) -> None:
        self._steps += 1

    def _ended(self, task: _Task, error: BaseException | None) -> None:
        answer = task.answer
        if error is not None:
            if not isinstance(error, Exception):  # the interpreter's own end
                raise error
            if isinstance(error, JobCancelled):
                log.info("task %s stopped", task.message.task)
            answer = failed(task.message, error)
        assert answer is not None
        self._runner.over(task.message.task)
        self._answer(answer)


class _Task:
    """One task of the pipeline."""

    def __init__(self, runner: Runner, message: Run | RunBatch) -> None:
        self.runner = runner
        self.message = message
        self.answer: Done | Failed | None = None

    def load(self) -> None:
        """Nothing."""

    def compute(self) -> None:
        """Nothing."""

    def store(self) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing is held."""


class _WholeTask(_Task):
    """A program or a batch: everything where others compute."""

    def __init__(self, runner: Runner, message: Run | RunBatch, pipeline: Pipeline[_Task]) -> None:
        super().__init__(runner, message)
        self._pipeline = pipeline

    def compute(self) -> None:
        """All of it; again, alone, if what others hold left it too little memory."""
        self.answer = self.runner.run(self.message)
        if self.answer.kind == "failed" and self.answer.slug == describe(OutOfDeviceMemory("")).slug:
            self._pipeline.alone(self, self._again)

    def _again(self, behind: list[_Task]) -> None:
        for task in behind:
            task.release()
        self.answer = self.runner.run(self.message)


class _ProductTask(_Task):
    """A product, in stages."""

    def __init__(
        self,
        runner: Runner,
        message: Run,
        params: GemmParams | GemmReduceParams,
        backend: OverlappingBackend,
        pipeline: Pipeline[_Task],
        step: Callable[[], None],
    ) -> None:
        super().__init__(runner, message)
        self._run = message
        self._params = params
        self._backend = backend
        self._pipeline = pipeline
        self._step = step
        self._came = time.perf_counter()
        self._waited_s = 0.0
        self._product: StagedProduct | None = None
        self._timings: Timings | None = None
        """Once it was computed alone, all at once."""

    def load(self) -> None:
        """Brings the operands."""
        self._waited_s = time.perf_counter() - self._came
        self._operands, self._results = self.runner.arrays(self._run)
        self._product = self._backend.product(self._params, self._operands, self._results, self._checkpoint)
        self._stage(self._product.load)

    def compute(self) -> None:
        """Computes."""
        assert self._product is not None
        self._stage(self._product.compute)

    def store(self) -> None:
        """Takes the result to its place, and checks it where that was asked for."""
        assert self._product is not None
        self._stage(self._product.store)
        timings = self._product.timings if self._timings is None else self._timings
        timings.queue_s = self._waited_s
        self.answer = self.runner.answer(self._run, self._operands, self._results, timings, self._checkpoint)

    def release(self) -> None:
        """Lets go of what was loaded."""
        if self._product is not None:
            self._product.release()

    def _stage(self, step: Callable[[], None]) -> None:
        if self._timings is not None:
            return
        try:
            step()
        except self._backend.out_of_memory as error:
            log.info("task %s waits for memory: %s", self.message.task, error)
        else:
            return
        self._pipeline.alone(self, self._whole)

    def _whole(self, behind: list[_Task]) -> None:
        for task in (self, *behind):
            task.release()
        self._timings = self.runner.backend.run(self._params, self._operands, self._results, self._checkpoint)

    def _checkpoint(self) -> None:
        if self.runner.is_cancelled(self.message.task):
            raise JobCancelled("the job was cancelled")
        self._step()
