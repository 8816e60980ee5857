"""One task: from `Work`, as the front sent it, to Done or Failed. An error of a task never ends the worker."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels import KernelError
from gemmserve_kernels.blocks.grid import DEFAULT_RULE
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_service.errors import JobCancelled, ServiceError, describe
from gemmserve_service.executor.protocol import Done, Failed
from gemmserve_service.executor.worker.backend import HostArray, ResidentBackend, TinyBackend
from gemmserve_service.executor.worker.batches import parts_of, run_parts, sum_of
from gemmserve_service.executor.worker.blocks.gridded import Gridded, grid_of
from gemmserve_service.executor.worker.checks import element_counts, verification
from gemmserve_service.executor.worker.memory.mappings import Mappings
from gemmserve_service.executor.worker.memory.write_queue import Result
from gemmserve_service.executor.worker.programs import run_program
from gemmserve_service.executor.worker.unpack import Form, Forms, Run, count_of
from gemmserve_service.schemas import ProgramParams, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_kernels.blocks.grid import Grid, GridRule
    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.protocol import ArrayRef, BlockOf, ExtentRow, Work
    from gemmserve_service.executor.worker.backend import DeviceBackend, ResidentProduct, TinyProduct
    from gemmserve_service.executor.worker.batches import Products
    from gemmserve_service.executor.worker.blocks.gridded import BlockWork
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
    from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MAX_CANCELLED: Final = 1 << 16
"""Cancellations that are remembered: those that come when their task has ended are nobody's."""
_SHORT_FLOPS: Final = 1 << 31
"""Operations that no product has for which a form has a function."""

log = logging.getLogger(__name__)


class Runner:
    """Runs tasks on one backend, one after the other."""

    def __init__(self, backend: DeviceBackend, rule: GridRule = DEFAULT_RULE) -> None:
        """`rule`: by which large products are computed in blocks."""
        self.backend = backend
        self.rule = rule
        self.look: Callable[[], object] = lambda: None
        """Called between panels: where word of a cancellation may come from. What it raises ends the task unanswered
        if it is an OSError."""
        self.task: str | None = None
        """The task that runs."""
        self.progress = 0
        """Its panels that are done."""
        self.share = 0.0
        """Share of it that is done, 0 to 1, where it has steps."""
        self._paused_s = 0.0
        """Seconds for which the task has stood still while others passed."""
        self._mappings = Mappings(getattr(backend, "arena", None), getattr(backend, "registered", None))
        self._write_queue: WriteQueue | None = getattr(backend, "write_queue", None)
        self._forms = Forms(backend)
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    def beside(self) -> Runner:
        """Return one for a second thread: what the front tells either of them, both know."""
        other = Runner(self.backend, self.rule)
        other._mappings, other._forms, other._cancelled = self._mappings, self._forms, self._cancelled
        return other

    def cancel(self, task: str) -> None:
        """Cancel a task. May be called from another thread; a task that has ended is forgotten in its time."""
        self._cancelled[task] = None
        if len(self._cancelled) > _MAX_CANCELLED:
            self._cancelled.popitem(last=False)

    def run(self, message: Work | Run) -> Done | Failed:
        """Computes and answers, for the last time: its cancellation is forgotten. Raises ConnectionError if the front
        is gone.

        May be called by `look`, in the middle of another task, which then stands still.
        """
        try:
            return self.attempt(message)
        finally:
            self.over(message.task)

    def attempt(self, message: Work | Run) -> Done | Failed:
        """Compute and answer; another attempt may follow, where this one found too little memory. Raises what `run`
        raises.
        """
        outer, began = (self.task, self.progress, self.share, self._paused_s), time.perf_counter()
        self.task, self.progress, self.share, self._paused_s = message.task, 0, 0.0, 0.0
        try:
            self._stop_cancelled()
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
            self.task, self.progress, self.share, self._paused_s = outer
            self._paused_s += time.perf_counter() - began

    def share_of(self, task: str | None) -> float:
        """Return the share of a task that is done, 0 to 1; 0 where it is not known. May be called from any thread."""
        share = self.share
        return share if task is not None and self.task == task else 0.0

    def _done(self, share: float) -> None:
        self.share = share

    def elements_since(self, before: Reading | None) -> Elements | None:
        """Return how the elements were computed that the device has made since that reading."""
        return None if before is None else element_counts.between(before, self.backend.read_counts())

    def _checkpoint(self) -> None:
        self.look()
        self._stop_cancelled()
        self.progress += 1

    def _stop_cancelled(self) -> None:
        if self.task in self._cancelled:
            raise JobCancelled("the job was cancelled")

    def is_cancelled(self, task: str) -> bool:
        """Whether nobody wants that task's result."""
        return task in self._cancelled

    def over(self, task: str) -> None:
        """Forget the cancellation of a task that has ended."""
        self._cancelled.pop(task, None)

    def arrays(self, message: Run) -> tuple[dict[str, HostArray], dict[str, np.ndarray[Any, Any]]]:
        """Operands and results, over the mappings themselves; in memory of this process, not touched yet, what has no
        place. Raises OSError if an extent is gone.
        """
        operands = {name: self._operand(ref) for name, ref in message.operands.items()}
        return operands, {name: self._mappings.array(ref, writable=True) for name, ref in message.results.items()}

    def _operand(self, ref: ArrayRef) -> HostArray:
        data = self._mappings.array(ref)
        array, queue = ref.cache_id, self._write_queue
        if array is None or queue is None or not ref.nbytes:
            return HostArray(data, array)

        def fetch() -> np.ndarray[Any, Any]:
            found = queue.read(array) if ref.placeless else queue.unwritten(array)
            return data if found is None else np.ndarray(ref.shape, ref.dtype, found, order=ref.order)

        return HostArray(data, array, fetch)

    def place(self, row: ExtentRow) -> Bytes:
        """Return the bytes from where an extent begins, to be written. Raises OSError if it is gone, or ValueError if
        it is shorter.
        """
        name, path, capacity, start, _ = row
        return self._mappings.of(name, path, capacity)[start:]

    def locate(self, row: ExtentRow) -> Bytes:
        """Return the bytes from where an extent begins, to be read: those of a result that is not all there yet from
        where they are. Raises what `place` raises.
        """
        _, path, _, _, array = row
        if array is not None and self._write_queue is not None:
            found = self._write_queue.unwritten(array) if path else self._write_queue.read(array)
            if found is not None:
                return found
        return self.place(row)

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

    def forget(self, extents: list[str], arrays: Sequence[str] = (), parents: Sequence[str] = ()) -> None:
        """Drops mappings, and what the device keeps of arrays and of large products."""
        self._mappings.forget(extents)
        for parent in parents:
            self.backend.close_panels(parent)
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
        gridded = self.gridded(message, operands, results)
        if gridded is None:
            timings = self.backend.run(message.params, operands, results, self._checkpoint)
        elif message.block is not None and message.block.combine:
            return self._combine(message, gridded)
        elif message.block is not None:
            work = self.block(gridded, message.block)
            message, operands, results = replace(message, params=work.params), work.operands, work.results
            timings = self.backend.run(work.params, operands, results, self._checkpoint)
        else:
            timings = self._run_blocks(message.task, gridded)
        if self._paused_s:
            timings = replace(timings, kernel_s=max(timings.kernel_s - self._paused_s, 0.0))
        return self.answer(message, operands, results, timings, self._checkpoint)

    def grid(self, message: Run) -> Grid | None:
        """Return the grid of a product that came whole, if it has one that can be planned; of what cannot, whoever
        computes it will say why.
        """
        if isinstance(message.params, ProgramParams):
            return None
        try:
            grid = grid_of(message.params, message.operands, self.rule)
            if grid is not None:
                self.backend.plan_blocks(grid)
        except KernelError:
            return None
        return grid

    def gridded(
        self, message: Run, operands: dict[str, HostArray], results: dict[str, np.ndarray[Any, Any]]
    ) -> Gridded | None:
        """Return the product with its grid, if it has one. Raises ValueError for a block that is none."""
        if isinstance(message.params, ProgramParams):
            return None
        return Gridded.of(message.params, operands, results, rule=self.rule, block=message.block)

    def block(self, gridded: Gridded, block: BlockOf) -> BlockWork:
        """Return one block of a product."""
        slots = self.backend.open_panels(block.parent, gridded.grid)
        if slots is not None:
            self.backend.bring_ahead(slots, (block.index, *block.ahead), gridded.panel)
        return gridded.work(block.index, slots, block.algorithm)

    def _run_blocks(self, task: str, gridded: Gridded) -> Timings:
        """Run all blocks, in the order in which least has to be moved; the seconds of all."""
        slots = self.backend.open_panels(task, gridded.grid)
        spent = []
        try:
            for index in self.backend.plan_blocks(gridded.grid).order:
                work = gridded.work(index, slots)
                spent.append(self.backend.run(work.params, work.operands, work.results, self._checkpoint))
            gridded.combine()
        finally:
            self.backend.close_panels(task)
        return sum_of(spent)

    def _combine(self, message: Run, gridded: Gridded) -> Done:
        """Write a large reduction's results from its blocks', in the host's memory: each was checked by itself."""
        began = time.perf_counter()
        with interruptible(self._checkpoint):
            gridded.combine()
        timings = Timings(kernel_s=time.perf_counter() - began)
        return self.answer(replace(message, verify=False), {}, {}, timings, self._checkpoint)

    def unpacked(self, message: Work | Run) -> Run | Work:
        """Return a task of one product as a `Run`, others as they are. Raises ValueError for a form that is none."""
        if isinstance(message, Run) or len(message.parts) > 1 or count_of(message.parts[0]) > 1:
            return message
        return self._forms.of(message.parts[0].form).run(message)

    def form(self, text: str) -> Form:
        """Return the form. Raises ValueError for a text that is none."""
        return self._forms.of(text)

    def tiny(self, form: Form) -> TinyProduct | None:
        """Return what computes products of a form at once; None: they are not tiny, have blocks, or the device has no
        shorter way for them. For one thread.
        """
        return form.once("tiny", self._find_tiny)

    def _find_tiny(self, form: Form) -> TinyProduct | None:
        backend, params = self.backend, form.params
        if isinstance(params, ProgramParams) or not form.tiny or not isinstance(backend, TinyBackend):
            return None
        return None if self._has_blocks(form, params) else backend.tiny(params, form.operands, form.results)

    def resident(self, form: Form) -> ResidentProduct | None:
        """Return what computes products of a form whose operands are on the device and whose results stay there; None:
        they have blocks or empty arrays, or the device has nothing of that kind. For one thread.
        """
        return form.once("resident", self._find_resident)

    def _find_resident(self, form: Form) -> ResidentProduct | None:
        backend, params = self.backend, form.params
        if isinstance(params, ProgramParams) or not form.whole or not isinstance(backend, ResidentBackend):
            return None
        return None if self._has_blocks(form, params) else backend.resident(params, form.operands, form.results)

    def _has_blocks(self, form: Form, params: GemmParams | GemmReduceParams) -> bool:
        """Whether products of a form have blocks, or none can be planned."""
        try:
            return grid_of(params, form.operands, self.rule) is not None
        except KernelError:
            return True

    def memory(self, row: ExtentRow) -> Bytes:
        """Return the mapping of the extent of a row. Raises OSError if it is gone, ValueError if it is shorter."""
        return self._mappings.of(row[0], row[1], row[2])

    def forms(self, message: Work) -> list[Form]:
        """Return the forms of a task's products, in any thread. Raises ValueError for one that is none."""
        return [self._forms.of(part.form) for part in message.parts]

    def _run_small(self, message: Work) -> Done | None:
        """Run a product whose arrays lie in mapped extents by the function that its form has for it; None: it has none.

        One of a single request, whose arrays are in one extent, without a look at what has come meanwhile: that takes
        as long as the product.
        """
        if message.block is not None or self._write_queue is not None or self.rule.min_flops <= _SHORT_FLOPS:
            return None
        if message.verify or len(message.parts) > 1 or count_of(message.parts[0]) > 1:
            return None
        (part,) = message.parts
        form = self._forms.of(part.form)
        stored = len(message.extents) > 1
        if form.long or (stored and self.backend.read_counts() is not None):
            return None
        extents = []
        for name, path, capacity, start, _ in message.extents:
            if not path:
                return None
            extents.append((self._mappings.of(name, path, capacity), start))
        row = form.row(part, extents)
        product = None if row is None else form.product(row)
        if row is None or product is None:
            return None
        if stored:
            self._checkpoint()
        began = time.perf_counter()
        product(*row)
        timings = Timings(kernel_s=time.perf_counter() - began)
        if stored:
            self._checkpoint()
        return Done(
            task=message.task, algorithm=part.algorithm, timings=timings, memory_used=self.backend.memory_used()
        )

    def _run_batch(self, message: Work) -> Done:
        """Return one answer for all products: with the largest residual, if they are checked."""
        parts = parts_of(message, self._forms, self.locate)
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
                {name: operand.read() for name, operand in operands.items()},
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
        spec, write_queue = self.backend.spec, self._write_queue
        deferred = message.deferred
        left: dict[str, Any] = dict.fromkeys(deferred)
        ran = self.backend.run_program(
            lambda values: run_program(
                params, operands, results, values, spec, verify=message.verify, left=left, done=self._done
            ),
            self._checkpoint,
        )
        kernel_s = max(ran.timings.kernel_s - self._paused_s, 0.0)
        if deferred and write_queue is not None:
            # Where the program found too little memory on the device, its results were made in that of this process.
            made = [
                Result(array, results[name] if left[name] is None else left[name]) for name, array in deferred.items()
            ]
            write_queue.reserve(message.task, made, self._checkpoint)
        return Done(
            task=message.task,
            algorithm=ran.algorithm,
            timings=replace(ran.timings, kernel_s=kernel_s),
            residual=ran.residual,
            mismatch=ran.mismatch,
            memory_used=self.backend.memory_used(),
            steps=ran.steps,
            written=not deferred,
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
        with interruptible(checkpoint):
            found = verification.on_host(
                message.params,  # type: ignore[arg-type]  # a program's steps are checked as it runs
                {name: operand.read() for name, operand in operands.items()},
                results,
                lambda plain: self.backend.run(plain, operands, results, checkpoint),
                f"task {message.task} by {done.algorithm}",
            )
        timings = replace(done.timings, verify_s=time.perf_counter() - began)
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
