"""Several tasks at once on a device whose products have stages: copies of one hide beneath the kernels of another."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service.errors import JobCancelled, describe
from gemmserve_service.executor.protocol import BLOCKS_AHEAD, BlockOf, Done
from gemmserve_service.executor.worker.blocks.answers import whole_answer
from gemmserve_service.executor.worker.compilation import Compilation, CompilingBackend
from gemmserve_service.executor.worker.memory.write_queue import Result
from gemmserve_service.executor.worker.pipeline import Pipeline
from gemmserve_service.executor.worker.runner import failed
from gemmserve_service.executor.worker.unpack import TINY, Run, count_of
from gemmserve_service.schemas import GemmParams, ProgramParams, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_service.executor.protocol import ExtentRow, Failed, Work
    from gemmserve_service.executor.worker.backend import HostArray, TinyProduct
    from gemmserve_service.executor.worker.blocks.gridded import BlockWork, Gridded
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
    from gemmserve_service.executor.worker.runner import Runner
    from gemmserve_service.executor.worker.unpack import Form
    from gemmserve_service.schemas import Elements, GemmReduceParams

_BRIEF: Final = 1 << 18
"""Bytes of results whose way to the host takes no longer than to wake the thread for it: some 20 us."""

_PROMPT: Final = 32 << 20
"""Bytes of operands and results up to which one thread enqueues a product and waits for it. Two, which take turns at
the interpreter, were slower with 512^3 (2,100 a second for 2,700) and faster with 4096^3 (424 for 396)."""

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
        """Have the device compute; brings the operands first, if they are not there."""

    def finish(self) -> None:
        """Wait until it has; the operands are let go."""

    def store(self) -> None:
        """Takes the results to the host."""

    def release(self) -> None:
        """Lets go of operands that were loaded ahead."""


@runtime_checkable
class OverlappingBackend(Protocol):
    """Device that computes in stages: its methods beyond `DeviceBackend`."""

    out_of_memory: tuple[type[BaseException], ...]

    def enter(self, *, express: bool = False) -> None:
        """Makes the calling thread one that uses the device, on a stream of its own; of high priority for `express`."""

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


class NoRoomBesideError(Exception):
    """An express task found too little memory: it has to wait its turn among the others."""


class Overlap:
    """The tasks of a worker in two lanes: express ones, and all others, which they pass.

    In each they run in the order in which they came; `answer` is told of each, in that order. What finds too little
    memory waits until it is alone in the lane of the long ones, and what was loaded ahead there is let go. A task whose
    kernels are not compiled yet waits for them before it enters its lane; `tell(task, compiling)` hears of the
    beginning and the end of that. The thread that makes this and starts tasks computes tiny ones itself, while nothing
    else is under way: on a device with a shorter way for them (`TinyBackend`) all of them, else express ones.
    """

    def __init__(
        self,
        runner: Runner,
        backend: OverlappingBackend,
        answer: Callable[[Done | Failed], None],
        tell: Callable[[str, bool], None] = lambda _, __: None,
    ) -> None:
        self._runner = runner
        self._compilation = Compilation(backend, tell) if isinstance(backend, CompilingBackend) else None
        self._long = _Lane(runner, backend, answer, express=False)
        self._express = _Lane(runner.beside(), backend, answer, express=True)
        self._answer = answer
        self._owner = threading.get_ident()
        backend.enter(express=True)

    @property
    def at(self) -> tuple[str | None, int]:
        """The oldest task of the lane that has stood still for longest, and a number that grows while it gets on."""
        lanes = self._long, self._express
        for lane in lanes:
            lane.look()
        busy = [lane for lane in lanes if lane.oldest is not None]
        if not busy:
            return (None, self._long.steps) if self._compilation is None else self._compilation.at
        stillest = min(busy, key=lambda lane: lane.moved)
        return stillest.oldest, stillest.steps

    def start(self, message: Run | Work) -> None:
        """Takes a task on. Raises ValueError for a form that is none."""
        if isinstance(message, Run):
            self._enter(message, 0.0)
            return
        if threading.get_ident() == self._owner and self._at_once(message):
            return
        unpacked = self._runner.unpacked(message)
        if self._compilation is None:
            self._enter(unpacked, 0.0)
            return
        self._compilation.put(
            message.task,
            self._runner.forms(message),
            lambda compile_s: self._enter(unpacked, compile_s),
            checked=message.verify,
        )

    def _at_once(self, work: Work) -> bool:
        """Compute a tiny product in this thread, from beginning to end; False: it is none, its operands are yet to be
        brought to the device and kept there, or something else is under way, and nothing has happened.
        """
        if work.verify or work.block is not None or len(work.parts) != 1:
            return False
        (part,) = work.parts
        form = self._runner.form(part.form)
        if count_of(part) != 1 or not (self._compilation is None or False in form.compiled):
            return False
        product = self._runner.tiny(form)
        if product is None or not self._long.pipeline.idle or self._runner.is_cancelled(work.task):
            return False
        task = _TinyTask(self._express, work, form, product)
        return task.find() and self._express.pipeline.run(task, self._ended)

    def _enter(self, message: Run | Work, compile_s: float) -> None:
        lane = self._express if message.express else self._long
        here = message.express and threading.get_ident() == self._owner and self._long.pipeline.idle
        lane.start(message, self._ended, compile_s, here=here)

    def abandon(self) -> None:
        """Cancel what is under way; return when it has ended."""
        if self._compilation is not None:
            self._compilation.abandon()
        for lane in (self._express, self._long):
            lane.cancel()
        self.close()

    def close(self) -> None:
        """Returns when what was taken on has ended."""
        if self._compilation is not None:
            self._compilation.close()
        self._express.pipeline.close()  # first: what it has no room for goes to the other
        self._long.pipeline.close()

    def _ended(self, task: _Task, error: BaseException | None) -> None:
        answer = task.answer
        task.release()
        if error is not None:
            if not isinstance(error, Exception):  # the interpreter's own end
                raise error
            if isinstance(error, NoRoomBesideError):
                message = self._runner.unpacked(cast("_WholeTask | _ProductTask | _TinyTask", task).message)
                self._long.start(message, self._ended, task.compile_s)
                return
            if isinstance(error, JobCancelled):
                log.info("task %s stopped", task.name)
            answer = failed(cast("_WholeTask | _ProductTask | _TinyTask", task).message, error)
        self._runner.over(task.name)
        if not task.answered:
            assert answer is not None
            if isinstance(answer, Done) and task.compile_s:
                answer.timings.compile_s += task.compile_s
            self._answer(answer)


class _Lane:
    """A pipeline of tasks, and how far it is."""

    def __init__(
        self, runner: Runner, backend: OverlappingBackend, answer: Callable[[Done | Failed], None], *, express: bool
    ) -> None:
        self.express = express
        self.runner = runner
        self.backend = backend
        self.answer = answer
        self.moved = time.monotonic()
        """Time at which it began with something, or something got on (time.monotonic)."""
        self._steps = 0
        self._seen: tuple[str | None, int] = (None, 0)
        """Oldest task and steps when somebody looked last."""
        self.pipeline: Pipeline[_Task] = Pipeline(
            lambda: backend.enter(express=express),
            loaded=lambda task: task.loaded,
            prompt=lambda task: task.prompt,
            brief=lambda task: task.brief,
            short=lambda task: task.prompt,
            name="gemmserve-express" if express else "gemmserve",
        )

    @property
    def oldest(self) -> str | None:
        """The task that has been under way for longest."""
        oldest = next(iter(self.pipeline.under_way), None)
        return None if oldest is None else oldest.name

    @property
    def steps(self) -> int:
        """Steps that were taken here, or by the runner."""
        return self._steps + self.runner.progress

    def step(self) -> None:
        """Note that something gets on."""
        self._steps += 1
        self.moved = time.monotonic()

    def look(self) -> None:
        """Note what has got on by the runner alone since this was called last: programs and batches do."""
        at = self.oldest, self.steps
        if at != self._seen:
            self._seen = at
            self.moved = time.monotonic()

    def start(
        self,
        message: Run | Work,
        ended: Callable[[_Task, BaseException | None], None],
        compile_s: float = 0.0,
        *,
        here: bool = False,
    ) -> None:
        """Take a task on, which has waited for the compiler so long; `ended(task, error)` is called in one of the
        pipeline's threads. `here`: the calling thread may do a tiny product itself.
        """
        if self.pipeline.idle:
            self.moved = time.monotonic()
        combines = isinstance(message, Run) and message.block is not None and message.block.combine
        if isinstance(message, Run) and not isinstance(message.params, ProgramParams) and not combines:
            if message.block is None and (grid := self.runner.grid(message)) is not None:
                _GridTask(self, message, grid, ended, compile_s).begin()
                return
            task: _Task = _ProductTask(self, message, message.params)
        else:
            task = _WholeTask(self, message)
        task.compile_s = compile_s
        if not (here and task.tiny and self.pipeline.run(task, ended)):
            self.pipeline.put(task, ended)

    def cancel(self) -> None:
        """Cancel what is under way."""
        for task in self.pipeline.under_way:
            self.runner.cancel(task.name)


class _Task:
    """One task of the pipeline."""

    def __init__(self, runner: Runner, name: str) -> None:
        self.runner = runner
        self.name = name
        self.answer: Done | Failed | None = None
        self.answered = False
        """Whether the front has been told already."""
        self.compile_s = 0.0
        """Seconds for which it has waited for the compiler before it came here."""

    @property
    def loaded(self) -> bool:
        """Whether there is nothing to bring."""
        return False

    @property
    def prompt(self) -> bool:
        """Whether little or nothing is left to wait for."""
        return True

    @property
    def tiny(self) -> bool:
        """Whether it takes no longer than to wake a thread, and waits for nothing that the front has yet to say."""
        return False

    @property
    def brief(self) -> bool:
        """Whether little or nothing is to be stored."""
        return True

    def load(self) -> None:
        """Do nothing."""

    def compute(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def store(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing: nothing is held."""


class _WholeTask(_Task):
    """A program, a batch, a reduction from its blocks': everything where others compute."""

    def __init__(self, lane: _Lane, message: Run | Work) -> None:
        super().__init__(lane.runner, message.task)
        self.message = message
        self._lane = lane

    def compute(self) -> None:
        """Compute all of it; again, alone, if what others hold left it too little memory."""
        self.answer = self.runner.attempt(self.message)
        if self.answer.kind == "failed" and self.answer.slug == describe(OutOfDeviceMemory("")).slug:
            if self._lane.express:
                raise NoRoomBesideError
            self._lane.pipeline.alone(self, self._again)

    def _again(self, behind: list[_Task]) -> None:
        for task in behind:
            task.release()
        self.answer = self.runner.attempt(self.message)


class _TinyTask(_Task):
    """A tiny product of operands that the device has, or that are kept nowhere: one thread computes it in one go."""

    def __init__(self, lane: _Lane, message: Work, form: Form, product: TinyProduct) -> None:
        super().__init__(lane.runner, message.task)
        self.message = message
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


class _ProductTask(_Task):
    """A product, in stages."""

    def __init__(self, lane: _Lane, message: Run, params: GemmParams | GemmReduceParams) -> None:
        super().__init__(lane.runner, message.task)
        self.message = message
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

    def _whole(self, behind: list[_Task]) -> None:
        for task in (self, *behind):
            task.release()
        before = self.runner.backend.read_counts()
        self._timings = self.runner.backend.run(self._params, self._operands, self._results, self._checkpoint)
        self._elements = self.runner.elements_since(before)

    def _checkpoint(self) -> None:
        if self.runner.is_cancelled(self.name):
            raise JobCancelled("the job was cancelled")
        self._lane.step()


class _BlockTask(_ProductTask):
    """A block of a large product that came whole."""

    def __init__(
        self, lane: _Lane, message: Run, params: GemmParams | GemmReduceParams, find: Callable[[], BlockWork]
    ) -> None:
        super().__init__(lane, message, params)
        self._find = find

    def arrays(self) -> None:
        """See `_ProductTask`."""
        self._take(self._find())


class _GridTask(_Task):
    """A large product, block after block: each goes through the lane's stages as a product of its own, so that what
    came after this one is computed between them.
    """

    def __init__(
        self,
        lane: _Lane,
        message: Run,
        grid: Grid,
        ended: Callable[[_Task, BaseException | None], None],
        compile_s: float,
    ) -> None:
        super().__init__(lane.runner, message.task)
        self.message = message
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
        task = _BlockTask(self._lane, message, message.params, lambda: self._work(block))
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

    def _block_ended(self, task: _Task, error: BaseException | None) -> None:
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
