"""Blocks of a large product as tasks of their own: leased, tried again, cancelled and watched like any others.

The product itself stays in the queue while it has blocks that nobody was given; whoever has a worker for it takes one
of those. So it is one of its owner's tasks, charged by the block, and others come between its blocks as they would
between products of that length. Its result is whole when all blocks are, and is seen by nobody before.

Which worker gets which block is by panels, rows of op(A) and columns of op(B): the grid is cut into tiles, shares of
the rows for up to three workers and rectangles from four on. A worker goes through a tile in the order of its plan of
memory (`gemmserve_kernels.blocks.memory_plan`), so that little streams through it; one that is through takes from the
tile that has most left. Bits do not depend on it: a block's follow from the grid, and all blocks of a product are
computed by devices of one class.

Blocks of a reduction leave partial results in scratch memory that they share; when all are done, one more task, which
any worker of the class may have, makes the results of those.

Everything here happens in the event loop's thread, and takes as long with a thousand workers as with one.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from gemmserve_kernels import KernelError, Plan
from gemmserve_kernels.blocks.grid import shells
from gemmserve_kernels.blocks.memory_plan import LINK_RATE, plan_memory
from gemmserve_kernels.blocks.reduction import BlockReduction
from gemmserve_kernels.blocks.workspace import block_seconds
from gemmserve_service.executor.protocol import BLOCKS_AHEAD, PARTIALS, BlockOf, Done
from gemmserve_service.executor.worker.blocks.answers import whole_answer
from gemmserve_service.scheduling.tasks import ServiceClass, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from gemmserve_kernels import DeviceSpec
    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_kernels.blocks.memory_plan import MemoryPlan
    from gemmserve_service.errors import ServiceError
    from gemmserve_service.executor.port import Worker
    from gemmserve_service.executor.protocol import Work
    from gemmserve_service.store.upload import Upload

_ON_WORKER: Final = 2
"""Blocks that a worker has at once where nothing is known of its memory: one that it computes, and one whose panels are
there, or come meanwhile. What is sent to it then waits for these."""
MAX_ON_WORKER: Final = 3
"""Likewise where they are brief, and its memory has room for the result of one more, which goes to the host
meanwhile."""
_LOOKED_AT: Final = 64  # blocks of another's tile among which one that is through with its own chooses
_MIN_RECTANGLES: Final = 4  # workers from which tiles are cut along both axes; two were measured to do without


class BlocksOwner(Protocol):
    """The scheduler, as blocks know it."""

    def blocks_combine(self, task: Task) -> None:
        """Called when all blocks of a reduction are done, and its results are to be made of theirs."""

    def blocks_ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Called when the last block is done, with the answer of the whole, or with what a block failed by."""

    def blocks_gone(self, task: Task) -> None:
        """Called when it is over, and no worker is at a block of it any more."""


class BlockTask(Task):
    """One block of `whole`, on its way through a worker. Operands and results are those of the whole, and stay its.

    An `index` behind the last block's: what makes a reduction's results of those of its blocks.
    """

    def __init__(self, whole: Task, blocks: Blocks, index: int) -> None:
        grid = blocks.grid
        super().__init__(
            f"{whole.id}/{index}",
            whole.params,
            grid.block_problem(index if index < grid.count else 0),
            whole.operands,
            whole.results,
            blocks,
            owner=whole.owner,
            priority=whole.priority,
            verify=whole.verify,
            algorithm=whole.algorithm,
            recomputes=whole.recomputes,
            durable=whole.durable,
        )
        self.index = index
        self.combines = index == grid.count
        """Whether it is no block, but makes the results of all of them."""
        self.ahead: tuple[int, ...] = ()
        """Blocks that its worker will probably be sent next."""
        self.service_class = ServiceClass.LARGE
        self._whole = whole
        self._blocks = blocks

    @property
    def whole(self) -> Task:
        """The product that it is a part of."""
        return self._whole

    @property
    def blocks_of_whole(self) -> Blocks:
        """All blocks of that."""
        return self._blocks

    @property
    def may_be_grouped(self) -> bool:
        """See `Task`: it goes alone."""
        return False

    def may_be_deferred(self, worker: Worker) -> bool:
        """See `Task`: it writes a part of an array, which is not on any device."""
        del worker
        return False

    @property
    def check_bytes(self) -> int:
        """See `Task`."""
        return 0 if self.combines else super().check_bytes

    @property
    def size(self) -> tuple[int, int]:
        """See `Task`."""
        return (self._blocks.partial_bytes, 0) if self.combines else super().size

    @property
    def queued_bytes(self) -> int:
        """See `Task`."""
        return self.size[0] if self.combines else super().queued_bytes

    @property
    def form(self) -> str:
        """See `Task`; partial results are among the results, once there are any."""
        return self.form_now()

    def model_seconds(self, spec: DeviceSpec) -> float | None:
        """See `Task`: the kernels' own estimate, and both panels and the window over a link."""
        if self.combines or spec.kind == "cpu":
            return None
        try:
            return block_seconds(self.problem, spec) + self.size[0] / LINK_RATE
        except KernelError:  # no device of that kind computes it
            return None

    def plan(self, spec: DeviceSpec) -> Plan | KernelError:
        """See `Task`; what blocks have left is put together in the host's memory."""
        return Plan("numpy", reduces=True) if self.combines else super().plan(spec)

    @property
    def placeless(self) -> bool:
        """See `Task`: partial results, too."""
        return super().placeless or self._blocks.lacks_partials

    def take_places(self) -> None:
        """See `Task`."""
        super().take_places()
        self._blocks.take_partials()

    def message(self, chosen: Plan, *, verify: bool) -> Work:
        """See `Task`."""
        partials = self._blocks.partials
        self.results = self._whole.results if partials is None else self._whole.results | {PARTIALS: partials}
        work = super().message(chosen, verify=verify and not self.combines)
        block = BlockOf(
            parent=self._whole.id,
            sides=self._blocks.grid.sides,
            index=0 if self.combines else self.index,
            algorithm=None if self.combines else chosen.algorithm,
            ahead=self.ahead,
            combine=self.combines,
        )
        return replace(work, task=self.id, defer=False, express=False, block=block)

    def close(self, *, reusable: bool = True) -> None:
        """Tell the whole that no worker is at this block any more. Not `reusable`: a lost process may be."""
        self._blocks.closed(self, reusable=reusable)

    def unpin(self) -> None:
        """Do nothing: the operands are the whole's."""


class Blocks:
    """The blocks of `task`: which are done, on a worker, and left. The listener (`tasks.Listener`) of their tasks.

    `reserve` reserves scratch memory of so many bytes for a reduction's partial results; it raises StoreFull, OSError.
    """

    def __init__(self, task: Task, grid: Grid, owner: BlocksOwner, reserve: Callable[[int], Upload]) -> None:
        self.task = task
        self.grid = grid
        self._owner = owner
        self._reserve = reserve
        self.partial_bytes = 0 if grid.reduction is None else BlockReduction(grid).nbytes
        """Bytes of a reduction's partial results; 0 of a product."""
        self.partials: Upload | None = None
        """Their place, from when the first block is sent."""
        self._released = False
        """Whether that is over."""
        self._partials_tainted = False
        """Whether a lost worker may still write there."""
        self.device_class: int | None = None
        """Class of the devices that compute it; None: not chosen yet."""
        self.under_way: dict[int, BlockTask] = {}
        self._lost: dict[int, BlockTask] = {}
        """Blocks that have lost a worker, and wait again."""
        self._answers: dict[int, Done] = {}
        self._done_flops = 0
        self._reusable = True
        self._order = grid.order
        """Every block, in the order in which devices of that class move least, or the grid's where nothing is known."""
        self._on_worker = _ON_WORKER
        """Blocks that a worker has at most: no more than there are windows of the result in their plan."""
        self._shape: tuple[int, int] | None = None
        """Tiles along the grid's rows and columns; None before the first block."""
        self._tiles: list[deque[int]] = [deque(grid.order)]
        """Blocks that nobody has, by tile, each in that order."""
        self._left = grid.count
        self._owned: dict[str, int] = {}
        """Tiles by the worker that goes through them."""
        self._panels: dict[tuple[str, int], tuple[set[int], set[int]]] = {}
        """Panels of A and B that workers were sent blocks of, by worker and its process."""
        self.typical = BlockTask(task, self, grid.order[0])
        """A block like most: what the queue charges for one."""

    # -- for the scheduler ------------------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """Blocks that nobody has."""
        return self._left

    @property
    def begun(self) -> bool:
        """Whether a worker was given one."""
        return self._shape is not None

    @property
    def duration_s(self) -> float:
        """Seconds that all of it may take, by the estimate of a block, with as many workers as it was begun for."""
        return self.task.cost_s * math.ceil(self.grid.count / len(self._tiles))

    def choose(self, device_class: int) -> None:
        """Have devices of that class compute it from now on. If it was begun on others, which are gone, it begins
        again: the bits of a result are those of one class.
        """
        if self._shape is not None:
            self._begin_again()
        self.device_class = device_class

    def suits(self, worker: Worker) -> bool:
        """Whether that worker may have a block now."""
        if worker.device_class != self.device_class:
            return False
        return sum(isinstance(each, BlockTask) for each in worker.tasks.values()) < self._on_worker

    def take(self, worker: Worker, workers: Collection[Worker]) -> BlockTask:
        """Take a block for a worker to compute, with its device's plan or what keeps that from it. There is one `left`.

        `workers`: all of them; how many there are of that class now decides how the grid is cut into tiles.
        """
        if self._shape is None:
            plan = _plan(self.grid, worker)
            self._order = self.grid.order if plan is None else plan.order
            self._on_worker = _ON_WORKER if plan is None else min(plan.windows, MAX_ON_WORKER)
            alike = sum(each.ready and each.device_class == worker.device_class for each in workers)
            self._cut(alike, None if plan is None else plan.slots)
        index = self.grid.count if self._all_done else self._next(worker)
        self._left -= 1
        if index < self.grid.count:
            rows, columns = self._panels.setdefault((worker.id, worker.restarts), (set(), set()))
            rows.add(self.grid.row_panel(index))
            columns.add(self.grid.column_panel(index))
        block = self._lost.pop(index, None) or BlockTask(self.task, self, index)
        block.ahead = self._ahead(worker)
        block.cost_s = self.task.cost_s  # with which its owner was charged
        if worker.spec is not None and worker.device_class not in block.plans:
            block.plans[worker.device_class] = block.plan(worker.spec)
        self.under_way[index] = block
        return block

    def give_back(self, block: BlockTask) -> None:
        """Take back a block whose worker was lost, or could not begin with it: it goes before the others."""
        del self.under_way[block.index]
        self._lost[block.index] = block
        self._partials_tainted = self._partials_tainted or block.crashes > 0
        if not block.combines:
            self._tiles[self._tile_of(block.index)].appendleft(block.index)
        self._left += 1
        self._suspect()

    def closed(self, block: BlockTask, *, reusable: bool) -> None:
        """Note that no worker is at a block any more that nobody wants; the whole is closed with the last of them."""
        self.under_way.pop(block.index, None)
        self._reusable = self._reusable and reusable
        if self.task.over and not self.under_way:
            self.task.close(reusable=self._reusable)
            self._owner.blocks_gone(self.task)

    # -- partial results of a reduction -----------------------------------------------------------------------------

    @property
    def lacks_partials(self) -> bool:
        """Whether partial results have no place yet, and need one."""
        return self.partials is None and self.partial_bytes > 0 and not self._released

    def take_partials(self) -> None:
        """Take the place that they need. Raises StoreFull, OSError."""
        if self.lacks_partials:
            self.partials = self._reserve(self.partial_bytes)

    def release(self, *, reusable: bool = True) -> None:
        """Give that place back; nobody is at a block any more, or it is not `reusable`."""
        partials, self.partials, self._released = self.partials, None, True
        if partials is None:
            return
        if reusable and not self._partials_tainted:
            partials.abort()
        else:
            partials.discard()

    # -- tasks.Listener ---------------------------------------------------------------------------------------------

    def started(self, task: Task) -> None:
        """Tell the listener of the whole when its first block was sent."""
        whole = self.task
        if not whole.began:
            whole.attempt += 1
            whole.began = task.began
            whole.queue_s = task.began - whole.submitted
            if whole.trace is not None and task.worker is not None:
                whole.trace.started(task.worker.id, task.began)
            whole.listener.started(whole)

    def compiling(self, task: Task, compiles: bool) -> None:
        """Tell the listener of the whole."""
        del task
        self.task.listener.compiling(self.task, compiles)

    def progressed(self, task: Task, share: float) -> None:
        """Do nothing: the whole gets on by blocks."""

    def requeued(self, task: Task) -> None:
        """Do nothing: the others go on."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Take in a block's end: the whole's, if it is the last one, or failed."""
        assert isinstance(task, BlockTask)
        if not isinstance(outcome, Done):
            self._owner.blocks_ended(self.task, outcome)
            return
        del self.under_way[task.index]
        self._answers[task.index] = outcome
        if task.crashes:
            self._suspect()
        if not task.combines:
            self._done_flops += self.grid.flops(task.index)
        if len(self._answers) == self.grid.count + (self.partial_bytes > 0):
            self.release()
            self._owner.blocks_ended(self.task, _whole(self.task, [self._answers[at] for at in sorted(self._answers)]))
            self._owner.blocks_gone(self.task)
        elif self._all_done:
            self._left = 1
            self._owner.blocks_combine(self.task)
        else:
            self.task.listener.progressed(self.task, self._done_flops / self.task.size[1])

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _all_done(self) -> bool:
        """Whether every block is, so that a reduction's results can be made of them."""
        return len(self._answers) == self.grid.count

    def _suspect(self) -> None:
        """Have the whole go alone while a block of it is not done that has lost a worker."""
        blocks = (*self._lost.values(), *self.under_way.values())
        self.task.crashes = max((block.crashes for block in blocks), default=0)

    def _begin_again(self) -> None:
        self._shape = None
        self._answers.clear()
        self._lost.clear()
        self._done_flops = 0
        self._tiles = [deque(self.grid.order)]
        self._left = self.grid.count
        self._owned.clear()
        self._panels.clear()

    def _cut(self, workers: int, slots: tuple[int, int] | None) -> None:
        """Cut the grid into a tile for each worker, as far as it goes. A tile whose panels all have `slots` is gone
        through as a wavefront of its own: what is left of the grid's begins with a panel for every block in tiles off
        its corner. (None: nothing is known of slots.) Tiles that share panels take them in turns, each beginning with
        other ones, so that each comes from the host for one of them just before the others want it: devices that keep
        step find it there, which in the same order would ask for the same panel at once. The first block needs one
        panel of each operand in any order.
        """
        rows, columns = self._extents
        self._shape = _tiles(workers, rows, columns)
        self._tiles = [deque() for _ in range(math.prod(self._shape))]
        for index in self._order:
            self._tiles[self._tile_of(index)].append(index)
        if len(self._tiles) > 1 and len(self.grid.runs) == 1:
            down, across = self._shape
            self._tiles = [
                deque(_wavefront(self.grid, tile, slots, (at % across, across), (at // across, down)))
                for at, tile in enumerate(self._tiles)
            ]

    @property
    def _extents(self) -> tuple[int, int]:
        """Rows and columns of blocks, those of one run of matrices below those of another."""
        return len(self.grid.runs) * self.grid.down, self.grid.across

    def _tile_of(self, index: int) -> int:
        down, across = self._shape or (1, 1)
        rows, columns = self._extents
        run, row, column = self.grid.place(index)
        return (run * self.grid.down + row) * down // rows * across + column * across // columns

    def _ahead(self, worker: Worker) -> tuple[int, ...]:
        """Return the blocks that come next in a worker's tile; those that it takes from others are not foreseen."""
        own = self._owned.get(worker.id)
        return () if own is None else tuple(itertools.islice(self._tiles[own], BLOCKS_AHEAD))

    def _next(self, worker: Worker) -> int:
        """Take the number of the next block for a worker: of its tile, else of that which has most left."""
        own = self._owned.get(worker.id)
        if own is None and len(self._owned) < len(self._tiles):
            own = self._owned[worker.id] = len(self._owned)
        if own is not None and self._tiles[own]:
            return self._tiles[own].popleft()
        longest = max(self._tiles, key=len)
        rows, columns = self._panels.get((worker.id, worker.restarts), ((), ()))
        # From behind: what its owner comes to last.
        near = range(len(longest) - 1, max(len(longest) - 1 - _LOOKED_AT, -1), -1)
        grid = self.grid

        def missing(at: int) -> int:
            index = longest[at]
            return (grid.row_panel(index) not in rows) + (grid.column_panel(index) not in columns)

        best = min(near, key=missing)
        index = longest[best]
        del longest[best]
        return index


def _plan(grid: Grid, worker: Worker) -> MemoryPlan | None:
    """Return the way of a worker's device through all blocks; None where its memory is not known, or nothing of the
    product can be planned for it.
    """
    if worker.spec is None or worker.planned_bytes is None:
        return None
    try:
        return plan_memory(grid, worker.spec, worker.planned_bytes)
    except KernelError:  # whoever computes a block will say so
        return None


def _wavefront(
    grid: Grid,
    tile: Collection[int],
    slots: tuple[int, int] | None,
    row_turn: tuple[int, int],
    column_turn: tuple[int, int],
) -> Collection[int]:
    """Return the blocks of a tile of one run of matrices as a wavefront, or as they are where `slots` do not hold all
    of its panels. `row_turn`, `column_turn`: number of the tile among those that have the same rows (columns), and how
    many have.
    """
    _, rows, columns = (sorted(set(places)) for places in zip(*map(grid.place, tile), strict=True))
    if slots is not None and (len(rows) > slots[0] or len(columns) > slots[1]):
        return tile
    rows, columns = _in_turns(rows, *row_turn), _in_turns(columns, *column_turn)
    return [grid.at(0, rows[row], columns[column]) for row, column in shells(len(rows), len(columns))]


def _in_turns(numbers: list[int], turn: int, count: int) -> list[int]:
    """Return numbers by turns of `count` parts of them, each turn beginning with the part of that number."""
    parts = [numbers[len(numbers) * at // count : len(numbers) * (at + 1) // count] for at in range(count)]
    parts = parts[turn:] + parts[:turn]
    return [each for some in itertools.zip_longest(*parts) for each in some if each is not None]


def _tiles(workers: int, rows: int, columns: int) -> tuple[int, int]:
    """Return into how many tiles a grid is cut along its rows and its columns, for so many workers.

    Of the factors whose tiles are no smaller than a block, those with the shortest edges together: each edge is a panel
    that a worker has to be sent.
    """
    if workers < _MIN_RECTANGLES:
        return (min(workers, rows), 1) if rows >= min(workers, columns) else (1, min(workers, columns))
    for count in range(workers, 0, -1):
        fits = [(down, count // down) for down in range(1, count + 1) if count % down == 0]
        fits = [(down, across) for down, across in fits if down <= rows and across <= columns]
        if fits:
            return min(fits, key=lambda each: rows / each[0] + columns / each[1])
    return 1, 1


def _whole(task: Task, answers: Sequence[Done]) -> Done:
    """Return the answer of a product from those of its blocks, in the grid's numbering."""
    done = whole_answer(answers)
    done.timings.queue_s = task.queue_s
    names = dict.fromkeys(answer.algorithm for answer in answers[: task.blocks.grid.count if task.blocks else None])
    return done.model_copy(update={"task": task.id, "algorithm": ", ".join(names)})
