"""Dispatch of large products: which of them are cut into blocks, which devices compute those, who has the next."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gemmserve_kernels import GemmProblem, KernelError, Plan
from gemmserve_kernels.blocks.grid import Grid
from gemmserve_service.scheduling.blocks.blocks import Blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.blocks.grid import GridRule
    from gemmserve_service.errors import ServiceError
    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.executor.protocol import Done
    from gemmserve_service.scheduling.blocks.blocks import BlockTask
    from gemmserve_service.scheduling.estimates import Estimates
    from gemmserve_service.scheduling.fleet import Fleet
    from gemmserve_service.scheduling.placement import Placement
    from gemmserve_service.scheduling.tasks import Task


class BlockDispatch:
    """Large products of one scheduler; `ended` and `gone` are what `Blocks` calls."""

    def __init__(
        self,
        rule: GridRule,
        executor: Executor,
        fleet: Fleet,
        placement: Placement,
        estimates: Estimates,
        ended: Callable[[Task, Done | ServiceError], None],
        gone: Callable[[Task], None],
    ) -> None:
        self.rule = rule
        """Rule by which products are cut."""
        self._executor = executor
        self._fleet = fleet
        self._placement = placement
        self._estimates = estimates
        self._ended = ended
        self._gone = gone

    def divide(self, task: Task) -> Blocks | None:
        """Cut a product into blocks that is so large; return those that it has. Blocks are this host's: where all
        workers have joined from others, one of these has all of it, which computes it by the same blocks.
        """
        large = isinstance(task.problem, GemmProblem) and task.size[1] >= self.rule.min_flops
        if large and any(each.link is None for each in self._executor.workers()):
            assert isinstance(task.problem, GemmProblem)
            grid = Grid.of(task.problem, self.rule)
            if grid is not None:
                task.blocks = Blocks(task, grid, self._ended, self._gone)
        return task.blocks

    def suits(self, blocks: Blocks, worker: Worker) -> bool:
        """Whether a worker may have one of those blocks now; all go to the devices that are through first, which are
        chosen before the first of them, and again when there are none of these any more.
        """
        if worker.link is not None:
            return False
        known = [each for each in self._fleet.representatives if each.link is None]
        if blocks.device_class is None or not (
            blocks.under_way or any(each.device_class == blocks.device_class for each in known)
        ):
            able = [each for each in known if isinstance(self._placement.plan(blocks.typical, each), Plan)]
            alike = Counter(each.device_class for each in self._executor.workers() if each.ready and each.link is None)

            def seconds(each: Worker) -> float:
                return self._estimates.seconds(blocks.typical, each) / max(alike[each.device_class], 1)

            if able:
                blocks.choose(min(able, key=seconds).device_class)
        return blocks.suits(worker)

    def take(self, blocks: Blocks, worker: Worker) -> BlockTask | KernelError:
        """Take a block for a worker; the reason, and nothing is taken, where its device cannot compute it."""
        block = blocks.take(worker, self._executor.workers())
        plan = block.plans[worker.device_class]
        if isinstance(plan, KernelError):
            blocks.give_back(block)
            return plan
        return block
