"""Dispatch of large products: which are cut into blocks, which devices compute those, and who takes the next.

Blocks are this host's. Where another's worker is so much faster that bringing it the operands pays, it has all of the
product, which it computes by the same blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels import GemmProblem, GemmReduceProblem, KernelError, Plan
from gemmserve_kernels.blocks.grid import Grid
from gemmserve_service.scheduling.blocks.blocks import Blocks

if TYPE_CHECKING:
    from gemmserve_kernels.blocks.grid import GridRule
    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.scheduling.blocks.blocks import BlocksOwner, BlockTask
    from gemmserve_service.scheduling.estimates import Estimates
    from gemmserve_service.scheduling.fleet import Fleet
    from gemmserve_service.scheduling.placement import Placement
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.upload import Upload


AWAY_GAIN: Final = 1.2
"""Times as fast as this host's devices together that a worker of another is to be, its link included."""
_ASKED: Final = 16
"""Idle workers that are asked, at most, whether one of another host is so much faster."""


class BlockDispatch:
    """Large products of one scheduler, which is the `owner` of their blocks."""

    def __init__(
        self,
        rule: GridRule,
        executor: Executor,
        fleet: Fleet,
        placement: Placement,
        estimates: Estimates,
        store: ArrayStore,
        owner: BlocksOwner,
    ) -> None:
        self.rule = rule
        """Rule by which products are cut."""
        self._executor = executor
        self._fleet = fleet
        self._placement = placement
        self._estimates = estimates
        self._store = store
        self._owner = owner

    def divide(self, task: Task) -> Blocks | None:
        """Cut a product into blocks that is so large; return those that it has. Blocks are this host's: where all
        workers have joined from others, one of these has all of it, which computes it by the same blocks.
        """
        large = task.size[1] >= self.rule.min_flops
        if (
            large
            and any(each.link is None for each in self._executor.workers())
            and isinstance(task.problem, GemmProblem | GemmReduceProblem)
        ):
            grid = Grid.of(task.problem, self.rule)
            if grid is not None:
                task.blocks = Blocks(task, grid, self._owner, lambda nbytes: self._partials(task, nbytes))
        return task.blocks

    def _partials(self, task: Task, nbytes: int) -> Upload:
        """Reserve scratch memory for partial results, which the product's owner did not ask for and is not refused."""
        words = np.dtype(np.float64)
        return self._store.allocate(
            words, (nbytes // words.itemsize,), "C", ttl_s=None, scratch=True, owner=task.owner, granted=True
        )

    def suits(self, blocks: Blocks, worker: Worker) -> bool:
        """Return whether a worker may have one of those blocks now, or, where it joined, all of the product; blocks all
        go to the devices that are through first, which are chosen before the first of them, and again when there are
        none of these any more.
        """
        if worker.link is not None:
            return not blocks.begun and not worker.tasks and self._pays_away(blocks, worker)
        if not blocks.begun and self._is_for_others(blocks):
            return False
        known = [each for each in self._fleet.representatives if each.link is None]
        if blocks.device_class is None or not (
            blocks.under_way or any(each.device_class == blocks.device_class for each in known)
        ):
            able = [each for each in known if self._placement.able(blocks.task, each)]
            alike = Counter(each.device_class for each in self._executor.workers() if each.ready and each.link is None)

            def seconds(each: Worker) -> float:
                return self._estimates.seconds(blocks.typical, each) / max(alike[each.device_class], 1)

            if able:
                blocks.choose(min(able, key=seconds).device_class)
        return blocks.suits(worker)

    def _is_for_others(self, blocks: Blocks) -> bool:
        """Return whether an idle worker of another host is to have all of a product."""
        idle = islice(self._fleet.idle_workers, _ASKED)
        return any(each.link is not None and self._pays_away(blocks, each) for each in idle)

    def _pays_away(self, blocks: Blocks, worker: Worker) -> bool:
        """Return whether a worker of another host would be through with all of a product so much sooner."""
        task = blocks.task
        plans = (self._placement.plan(each, worker) for each in (task, blocks.typical))
        if task.crashes or not all(isinstance(plan, Plan) for plan in plans):
            return False
        here = [each for each in self._executor.workers() if each.ready and each.link is None]
        alike = Counter(each.device_class for each in here)
        count = blocks.grid.count
        of_class = {each.device_class: each for each in here}
        seconds = [
            count * self._estimates.seconds(blocks.typical, each) / alike[each.device_class]
            for each in of_class.values()
            if isinstance(self._placement.plan(blocks.typical, each), Plan)
        ]
        away_s = count * self._estimates.seconds(blocks.typical, worker) + self._placement.link_seconds(task, worker)
        return AWAY_GAIN * away_s < min(seconds, default=math.inf)

    def take(self, blocks: Blocks, worker: Worker) -> BlockTask | KernelError:
        """Take a block for a worker; the reason, and nothing is taken, where its device cannot compute it."""
        block = blocks.take(worker, self._executor.workers())
        plan = block.plans[worker.device_class]
        if isinstance(plan, KernelError):
            blocks.give_back(block)
            return plan
        return block
