"""One task: from `Work`, as the front sent it, to Done or Failed. An error of a task never ends the worker."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.device.interruption import interruptible
from gemmserve_service.errors import JobCancelled, ServiceError, describe
from gemmserve_service.executor.protocol import Done, Failed
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.batches import parts_of, run_parts
from gemmserve_service.executor.worker.checks import element_counts, verification
from gemmserve_service.executor.worker.memory.mappings import Mappings
from gemmserve_service.executor.worker.memory.write_queue import Result
from gemmserve_service.executor.worker.programs import run_program
from gemmserve_service.executor.worker.unpack import Forms, Run, count_of
from gemmserve_service.schemas import ProgramParams, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.protocol import ArrayRef, Work
    from gemmserve_service.executor.worker.backend import DeviceBackend
    from gemmserve_service.executor.worker.batches import Products
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
    from gemmserve_service.schemas import Elements

_MAX_CANCELLED: Final = 1 << 16
"""Cancellations that are remembered: those that come when their task has ended are nobody's."""

log = logging.getLogger(__name__)


class Runner:
    """Runs tasks on one backend, one after the other."""

    def __init__(self, backend: DeviceBackend) -> None:
        self.backend = backend
        self.look: Callable[[], object] = lambda: None
        """Called between panels: where word of a cancellation may come from. What it raises ends the task unanswered
        if it is an OSError."""
        self.task: str | None = None
        """The task that runs."""
        self.progress = 0
        """Its panels that are done."""
        self._paused_s = 0.0
        """Seconds for which the task has stood still while others passed."""
        self._mappings = Mappings()
        self._forms = Forms(backend)
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    def cancel(self, task: str) -> None:
        """Cancel a task. May be called from another thread; a task that has ended is forgotten in its time."""
        self._cancelled[task] = None
        if len(self._cancelled) > _MAX_CANCELLED:
            self._cancelled.popitem(last=False)

    def run(self, message: Work | Run) -> Done | Failed:
        """Computes and answers. Raises ConnectionError if the front is gone.

        May be called by `look`, in the middle of another task, which then stands still.
        """
        outer, began = (self.task, self.progress, self._paused_s), time.perf_counter()
        self.task, self.progress, self._paused_s = message.task, 0, 0.0
        try:
            if not isinstance(message, Run) and (short := self._run_small(message)) is not None:
                return short
            before = self.backend.read_counts()
            unpacked = self.unpacked(message)
            done = self._run(unpacked) if isinstance(unpacked, Run) else self._run_batch(unpacked)
            found = self.elements_since(before)
            return done if found is None else done.model_copy(update={"elements": found})
        except ConnectionError:
            raise
        except JobCancelled as error:
            log.info("task %s stopped after %d panels", message.task, self.progress)
            return failed(message, error)
        except Exception as error:
            return failed(message, error)
        finally:
            self._cancelled.pop(message.task, None)
            self.task, self.progress, self._paused_s = outer
            self._paused_s += time.perf_counter() - began

    def elements_since(self, before: Reading | None) -> Elements | None:
        """Return how the elements were computed that the device has made since that reading."""
        return None if before is None else element_counts.between(before, self.backend.read_counts())

    def _checkpoint(self) -> None:
        self.look()
        if self.task in self._cancelled:
            raise JobCancelled("the job was cancelled")
        self.progress += 1

    def is_cancelled(self, task: str) -> bool:
        """Whether nobody wants that task's result."""
        return task in self._cancelled

    def over(self, task: str) -> None:
        """Forget the cancellation of a task that has ended."""
        self._cancelled.pop(task, None)

    def arrays(self, message: Run) -> tuple[dict[str, HostArray], dict[str, np.ndarray[Any, Any]]]:
        """Operands and results, over the mappings themselves. Raises OSError if an extent is gone."""
        operands = {name: HostArray(self._mappings.array(ref), ref.cache_id) for name, ref in message.operands.items()}
        return operands, {name: self._mappings.array(ref, writable=True) for name, ref in message.results.items()}

    def stored(self, ref: ArrayRef) -> np.ndarray[Any, Any]:
        """Return one array, over its mapping. Raises OSError if its extent is gone."""
        return self._mappings.array(ref)

    def answer(
        self,
        message: Run,
        operands: dict[str, HostArray],
        results: dict[str, np.ndarray[Any, Any]],
        timings: Timings,
        checkpoint: Callable[[], None],
        *,
        written: bool = True,
        checked: Verdict | None = None,
        counted: Elements | None = None,
    ) -> Done:
        """Return the answer of a product that was computed; check it where that was requested. `checked`: it has been.
        `counted`: how its elements were computed.
        """
        done = Done(
            task=message.task,
            algorithm=message.algorithm,
            timings=timings,
            residual=None if checked is None else checked.residual,
            mismatch=None if checked is None else checked.mismatch,
            elements=counted,
            memory_used=self.backend.memory_used(),
            written=written,
        )
        if not message.verify or checked is not None:
            return done
        return self._verified(message, operands, results, done, checkpoint)

    def forget(self, extents: list[str], arrays: Sequence[str] = ()) -> None:
        """Drops mappings, and what the device keeps of arrays."""
        self._mappings.forget(extents)
        for array in arrays:
            self.backend.forget(array)

    def forget_all(self) -> None:
        """Drops every mapping, and what an earlier front wanted no more."""
        self._mappings.clear()
        self._cancelled.clear()

    def _run(self, message: Run) -> Done:
        operands, results = self.arrays(message)
        if isinstance(message.params, ProgramParams):
            return self._run_program(message, message.params, operands, results)
        timings = self.backend.run(message.params, operands, results, self._checkpoint)
        if self._paused_s:
            timings = timings.model_copy(update={"kernel_s": max(timings.kernel_s - self._paused_s, 0.0)})
        return self.answer(message, operands, results, timings, self._checkpoint)

    def unpacked(self, message: Work | Run) -> Run | Work:
        """Return a task of one product as a `Run`, others as they are. Raises ValueError for a form that is none."""
        if isinstance(message, Run) or len(message.parts) > 1 or count_of(message.parts[0]) > 1:
            return message
        return self._forms.of(message.parts[0].form).run(message)

    def _run_small(self, message: Work) -> Done | None:
        """Run a product whose arrays lie in one extent by the function that its form has for it; None: it has none."""
        if message.verify or len(message.extents) != 1 or len(message.parts) > 1 or count_of(message.parts[0]) > 1:
            return None
        ((name, path, capacity, start, _),), (part,) = message.extents, message.parts
        form = self._forms.of(part.form)
        mapping = self._mappings.of(name, path, capacity)
        row = form.row(part, mapping[start:] if start else mapping)
        product = form.product(row)
        if product is None:
            return None
        # Without a look at what has come meanwhile: that takes as long as the product.
        if message.task in self._cancelled:
            raise JobCancelled("the job was cancelled")
        began = time.perf_counter()
        product(*row)
        timings = Timings(kernel_s=time.perf_counter() - began)
        return Done(
            task=message.task, algorithm=part.algorithm, timings=timings, memory_used=self.backend.memory_used()
        )

    def _run_batch(self, message: Work) -> Done:
        """Return one answer for all products: with the largest residual, if they are checked."""
        parts = parts_of(message, self._forms, self._mappings)
        self.backend.flush(row[-1] for row in message.extents)  # it reads them where they lie together
        timings = run_parts(parts, self.backend, self._checkpoint)
        timings.kernel_s = max(timings.kernel_s - self._paused_s, 0.0)
        names = ", ".join(dict.fromkeys(part.algorithm for part in parts))
        done = Done(task=message.task, algorithm=names, timings=timings, memory_used=self.backend.memory_used())
        if not message.verify:
            return done
        began = time.perf_counter()
        verdicts: list[Verdict] = []
        for part in parts:
            there = part.verdicts  # of a backend that checks them where they are
            verdicts += [self._verdict(message, part, *each) for each in part] if there is None else there
        timings.verify_s += time.perf_counter() - began
        of_all = verification.worst(verdicts)
        return done.model_copy(update={"residual": of_all.residual, "mismatch": of_all.mismatch})

    def _verdict(
        self, message: Work, part: Products, operands: dict[str, HostArray], results: dict[str, Any]
    ) -> Verdict:
        self._checkpoint()
        with interruptible(self._checkpoint):
            return verification.on_host(
                part.params,
                {name: operand.data for name, operand in operands.items()},
                results,
                lambda plain: self.backend.run(plain, operands, results, self._checkpoint),
                f"a product of task {message.task} by {part.algorithm}",
            )

    def _run_program(
        self,
        message: Run,
        params: ProgramParams,
        operands: dict[str, HostArray],
        results: dict[str, np.ndarray[Any, Any]],
    ) -> Done:
        spec = self.backend.spec
        write_queue: WriteQueue | None = getattr(self.backend, "write_queue", None)
        left: dict[str, Any] | None = {} if message.defer and write_queue is not None else None
        ran = self.backend.run_program(
            lambda values: run_program(params, operands, results, values, spec, verify=message.verify, left=left),
            self._checkpoint,
        )
        kernel_s = max(ran.timings.kernel_s - self._paused_s, 0.0)
        written = True
        if left and write_queue is not None:
            began = time.perf_counter()
            made = [Result(message.results[name].cache_id or "", value, results[name]) for name, value in left.items()]
            # What replaced a doubtful result would not come out again.
            written = ran.replaced or not write_queue.reserve(message.task, made)
            if written:
                write_queue.write(made)
            ran.timings.d2h_s += time.perf_counter() - began
        return Done(
            task=message.task,
            algorithm=ran.algorithm,
            timings=ran.timings.model_copy(update={"kernel_s": kernel_s}),
            residual=ran.residual,
            mismatch=ran.mismatch,
            memory_used=self.backend.memory_used(),
            steps=ran.steps,
            written=written,
        )

    def _verified(
        self,
        message: Run,
        operands: dict[str, HostArray],
        results: dict[str, np.ndarray[Any, Any]],
        done: Done,
        checkpoint: Callable[[], None],
    ) -> Done:
        """The answer with the residual; after a second run in plain arithmetic where the first result was in doubt."""
        began = time.perf_counter()
        self.backend.flush(operand.cache_id for operand in operands.values())
        with interruptible(checkpoint):
            found = verification.on_host(
                message.params,  # type: ignore[arg-type]  # a program's steps are checked as it runs
                {name: operand.data for name, operand in operands.items()},
                results,
                lambda plain: self.backend.run(plain, operands, results, checkpoint),
                f"task {message.task} by {done.algorithm}",
            )
        timings = done.timings.model_copy(update={"verify_s": time.perf_counter() - began})
        return done.model_copy(update={"timings": timings, "residual": found.residual, "mismatch": found.mismatch})


def failed(message: Work | Run, error: Exception) -> Failed:
    description = describe(error)
    if description.slug == ServiceError.slug:
        log.error("task %s failed", message.task, exc_info=error)
    return Failed(
        task=message.task,
        slug=description.slug,
        status=description.status,
        title=description.title,
        detail=description.detail,
        extra=description.extra,
    )
