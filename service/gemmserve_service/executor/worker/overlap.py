"""Several tasks at once on a device whose products have stages: copies of one hide beneath the kernels of another."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service.errors import JobCancelled, describe
from gemmserve_service.executor.protocol import Done
from gemmserve_service.executor.worker.memory.prefetch import ArrayPrefetch, Prefetches
from gemmserve_service.executor.worker.memory.write_queue import Result
from gemmserve_service.executor.worker.pipeline import Pipeline
from gemmserve_service.executor.worker.runner import failed
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import ProgramParams, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from gemmserve_service.executor.protocol import ArrayRef, Failed, Prefetch, Work
    from gemmserve_service.executor.worker.backend import HostArray
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
    from gemmserve_service.executor.worker.runner import Runner
    from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams

_BRIEF: Final = 1 << 18
"""Bytes of results whose way to the host takes no longer than to wake the thread for it: some 20 us."""

log = logging.getLogger(__name__)


class StagedProduct(Protocol):
    """One product on its way through a device."""

    timings: Timings
    made: Mapping[str, Any]
    """The results on the device, from when they are computed until they are stored; of backends with a write_queue."""
    verdict: Verdict | None
    """Verdict on the results, if they were to be checked and the device could, from when they are computed."""
    elements: Elements | None
    """Counts of the ways in which their elements were computed, likewise, where that depends on the data."""

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
    """Device that computes in stages: its methods beyond `DeviceBackend`."""

    out_of_memory: tuple[type[BaseException], ...]

    def enter(self) -> None:
        """Makes the calling thread one that uses the device, on a stream of its own."""

    def product(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None],
        *,
        check: str | None,
    ) -> StagedProduct:
        """A product to be taken through its stages; `check`: what it is called, where it is to be checked on the
        device, if that can be.
        """


class Overlap:
    """The tasks of a worker, in the order in which they came; `answer` is told of each, in that order.

    What finds too little memory waits until it is alone with the device, and what was loaded ahead is let go.
    """

    def __init__(
        self,
        runner: Runner,
        backend: OverlappingBackend,
        answer: Callable[[Done | Failed], None],
        news: Callable[[], None],
    ) -> None:
        """`news` is called when the device has a copy that no task asked for."""
        self._news = news
        self._runner = runner
        self._backend = backend
        self._answer = answer
        self._pipeline: Pipeline[_Task] = Pipeline(
            backend.enter, loaded=lambda task: task.loaded, brief=lambda task: task.brief
        )
        self._steps = 0
        self._prefetches = Prefetches()
        self._write_queue: WriteQueue | None = getattr(backend, "write_queue", None)

    @property
    def at(self) -> tuple[str | None, int]:
        """The oldest task that is under way, and a number that grows as long as anything gets on."""
        oldest = next(iter(self._pipeline.under_way), None)
        return None if oldest is None else oldest.name, self._steps + self._runner.progress

    def start(self, message: Run | Work) -> None:
        """Takes a task on."""
        runner, backend = self._runner, self._backend
        if isinstance(message, Run) and not isinstance(message.params, ProgramParams):
            task: _Task = _ProductTask(
                runner, message, message.params, backend, self._pipeline, self._step, self._answer
            )
        else:
            task = _WholeTask(runner, message, self._pipeline)
        if isinstance(message, Run):
            self._prefetches.drop(ref.cache_id for ref in message.operands.values())
        self._pipeline.put(task, self._ended)

    def prefetch(self, message: Prefetch) -> None:
        """Takes a copy of an array when there is nothing else to do."""
        copies = getattr(self._backend, "copies", None)
        if copies is not None:
            ref = message.array
            self._prefetches.add(ArrayPrefetch(ref, lambda: self._runner.stored(ref), copies))
            self._use_the_pause(None)

    def gone(self, arrays: list[str]) -> None:
        """Drop prefetches of arrays that are gone."""
        self._prefetches.drop(arrays)

    def abandon(self) -> None:
        """Cancel what is under way; return when it has ended."""
        for task in self._pipeline.under_way:
            self._runner.cancel(task.name)
        self.close()

    def close(self) -> None:
        """Returns when what was taken on has ended."""
        self._prefetches.clear()
        self._pipeline.close()

    def _step(self) -> None:
        self._steps += 1

    def _use_the_pause(self, ended: _Task | None) -> None:
        """Goes on with a prefetch if nothing is under way but what has just ended."""
        if not self._prefetches or any(task is not ended for task in self._pipeline.under_way):
            return
        prefetch = self._prefetches.take()
        if prefetch is not None:
            task = _PrefetchTask(self._runner, prefetch, self._pipeline, self._backend.out_of_memory)
            self._pipeline.put(task, self._prefetched)

    def _prefetched(self, task: _Task, error: BaseException | None) -> None:
        run = cast("_PrefetchTask", task)
        if error is not None:
            log.warning("array %s was not brought ahead of its use: %s", run.prefetch.array, error)
        self._prefetches.stopped(run.prefetch, finished=run.finished or error is not None)
        if run.finished:
            self._news()
        self._use_the_pause(task)

    def _ended(self, task: _Task, error: BaseException | None) -> None:
        answer = task.answer
        if error is not None:
            if not isinstance(error, Exception):  # the interpreter's own end
                raise error
            if isinstance(error, JobCancelled):
                log.info("task %s stopped", task.name)
            answer = failed(cast("_WholeTask | _ProductTask", task).message, error)
        self._runner.over(task.name)
        if not task.answered:
            assert answer is not None
            self._answer(answer)
            if isinstance(answer, Done) and not answer.written and self._write_queue is not None:
                self._write_queue.start(task.name)
        self._use_the_pause(task)


class _Task:
    """One task of the pipeline."""

    def __init__(self, runner: Runner, name: str) -> None:
        self.runner = runner
        self.name = name
        self.answer: Done | Failed | None = None
        self.answered = False
        """Whether the front has been told already."""

    @property
    def loaded(self) -> bool:
        """Whether there is nothing to bring."""
        return False

    @property
    def brief(self) -> bool:
        """Whether little or nothing is to be stored."""
        return True

    def load(self) -> None:
        """Do nothing."""

    def compute(self) -> None:
        """Do nothing."""

    def store(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing: nothing is held."""


class _WholeTask(_Task):
    """A program or a batch: everything where others compute."""

    def __init__(self, runner: Runner, message: Run | Work, pipeline: Pipeline[_Task]) -> None:
        super().__init__(runner, message.task)
        self.message = message
        self._pipeline = pipeline

    def compute(self) -> None:
        """Compute all of it; again, alone, if what others hold left it too little memory."""
        self.answer = self.runner.run(self.message)
        if self.answer.kind == "failed" and self.answer.slug == describe(OutOfDeviceMemory("")).slug:
            self._pipeline.alone(self, self._again)

    def _again(self, behind: list[_Task]) -> None:
        for task in behind:
            task.release()
        self.answer = self.runner.run(self.message)


class _PrefetchTask(_Task):
    """An array that no task has asked for, or some pieces of it."""

    def __init__(
        self,
        runner: Runner,
        prefetch: ArrayPrefetch,
        pipeline: Pipeline[_Task],
        out_of_memory: tuple[type[BaseException], ...],
    ) -> None:
        super().__init__(runner, f"prefetch of {prefetch.array}")
        self.prefetch = prefetch
        self.finished = False
        self._pipeline = pipeline
        self._passing: tuple[type[BaseException], ...] = (*out_of_memory, OSError)

    def load(self) -> None:
        """Load as much of it as goes before a task comes."""
        try:
            self.finished = self.prefetch.go_on(lambda: len(self._pipeline.under_way) > 1)
        except self._passing as error:  # no room after all, or the array is gone
            log.info("array %s is not brought ahead of its use: %s", self.prefetch.array, error)
            self.finished = True


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
        tell: Callable[[Done | Failed], None],
    ) -> None:
        super().__init__(runner, message.task)
        self.message = message
        self._tell = tell
        self._write_queue: WriteQueue | None = getattr(backend, "write_queue", None)
        self._params = params
        self._backend = backend
        self._pipeline = pipeline
        self._step = step
        self._came = time.perf_counter()
        self._waited_s = 0.0
        self._product: StagedProduct | None = None
        self._timings: Timings | None = None
        """Timings, once it was computed alone, all at once."""
        self._elements: Elements | None = None
        """Likewise."""

    @property
    def loaded(self) -> bool:
        """Whether the device has every operand."""
        resident = None if self._write_queue is None else self._write_queue.resident
        return resident is not None and all(
            ref.cache_id is not None and resident.holds(ref.cache_id) for ref in self.message.operands.values()
        )

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
        self._operands, self._results = self.runner.arrays(self.message)
        check = f"task {self.name} by {self.message.algorithm}" if self.message.verify else None
        self._product = self._backend.product(
            self._params, self._operands, self._results, self._checkpoint, check=check
        )
        self._stage(self._product.load)

    def compute(self) -> None:
        """Computes; that is all, where the result may be written later and there is room for it."""
        assert self._product is not None
        self._stage(self._product.compute)
        write_queue = self._write_queue
        if write_queue is None or self._timings is not None or not self.message.defer:
            return
        verdict = self._product.verdict
        if self.message.verify and (verdict is None or verdict.replaced):
            return  # it is yet to be checked; or what replaced it would not come out again
        if write_queue.reserve(self.name, self._made()):
            timings = self._product.timings
            timings.queue_s = self._waited_s
            done = self.runner.answer(
                self.message,
                self._operands,
                self._results,
                timings,
                self._checkpoint,
                written=False,
                checked=verdict,
                counted=self._product.elements,
            )
            self.answered = True
            try:
                self._tell(done)
            finally:
                write_queue.start(self.name)

    def store(self) -> None:
        """Takes the result to its place, and checks it where that was asked for."""
        if self.answered:
            return
        assert self._product is not None
        # Alone it was computed all at once, and is checked in the store.
        checked = self._product.verdict if self._timings is None else None
        # A check may put another result in the place of this one.
        unsettled = self.message.verify and checked is None
        stays = self._write_queue is not None and self._timings is None and not unsettled
        made = self._made() if stays else []
        self._stage(self._product.store)
        if self._write_queue is not None and self._timings is None:
            self._write_queue.keep(made)
        alone = self._timings is not None
        timings = self._product.timings if self._timings is None else self._timings
        timings.queue_s = self._waited_s
        counted = self._elements if alone else self._product.elements
        self.answer = self.runner.answer(
            self.message, self._operands, self._results, timings, self._checkpoint, checked=checked, counted=counted
        )

    def _made(self) -> list[Result]:
        """The results that have a name, on the device and in the store."""
        assert self._product is not None
        refs: dict[str, ArrayRef] = self.message.results
        return [
            Result(array, self._product.made[name], self._results[name])
            for name, ref in refs.items()
            if (array := ref.cache_id) is not None
        ]

    def release(self) -> None:
        """Lets go of what was loaded."""
        if self._product is not None:
            self._product.release()

    def _stage(self, step: Callable[[], None]) -> None:
        if self._timings is not None:
            return
        try:
            with interruptible(self._checkpoint):
                step()
        except self._backend.out_of_memory as error:
            log.info("task %s waits for memory: %s", self.name, error)
        else:
            return
        self._pipeline.alone(self, self._whole)

    def _whole(self, behind: list[_Task]) -> None:
        for task in (self, *behind):
            task.release()
        before = self.runner.backend.read_counts()
        self._timings = self.runner.backend.run(self._params, self._operands, self._results, self._checkpoint)
        self._elements = self.runner.elements_since(before)

    def _checkpoint(self) -> None:
        if self.runner.is_cancelled(self.name):
            raise JobCancelled("the job was cancelled")
        self._step()
