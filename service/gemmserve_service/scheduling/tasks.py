"""Task: one product on its way through the scheduler, and who is told what becomes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from gemmserve_kernels import ComputeUnsupported, GemmProblem, KernelError, Operand
from gemmserve_kernels.dispatch.routes import compute_unsupported
from gemmserve_kernels.problem.vocabulary import COMPUTE_MODES
from gemmserve_service.executor.packing import ExtentTable, form_of
from gemmserve_service.executor.protocol import Part, Work
from gemmserve_service.programs import Program, plan_problem
from gemmserve_service.schemas import ArrayInfo, GemmParams, ProgramParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels import Plan
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_service.errors import ServiceError
    from gemmserve_service.executor.packing import ArrayKind
    from gemmserve_service.executor.port import Worker
    from gemmserve_service.executor.protocol import Done
    from gemmserve_service.products import Product
    from gemmserve_service.programs import Problem
    from gemmserve_service.runtime.tracing.spans import ProductTrace
    from gemmserve_service.scheduling.blocks.blocks import Blocks
    from gemmserve_service.scheduling.deadlines import Deadline
    from gemmserve_service.schemas import GemmReduceParams
    from gemmserve_service.store.pending import PendingResults
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.record import ArraySpec
    from gemmserve_service.store.upload import Upload


MIN_DEFERRED_BYTES: Final = 1 << 18
"""Bytes of results below which the copy takes no longer than the messages about it."""
_EXPRESS_S: Final = 5e-3
"""Estimated seconds of a device up to which a task is express: what a person who waits does not notice."""


class ServiceClass(IntEnum):
    """Class of service: who goes first among the tasks of one owner, and where on a device."""

    PROMPT = 0
    """Short single products that somebody waits for with an open connection: they go before their owner's express ones.
    """
    EXPRESS = 1
    """Short tasks: a device runs them beside its long ones, and before them."""
    INTERACTIVE = 2
    """Single products that somebody waits for with an open connection."""
    BULK = 3
    """Everything else."""
    LARGE = 4
    """Large products, block by block."""


ALL_CLASSES: Final = tuple(ServiceClass)
SHORT_CLASSES: Final = (ServiceClass.PROMPT, ServiceClass.EXPRESS)
"""Classes of tasks that run beside long ones."""


class Listener(Protocol):
    """Listener of a task, called in the event loop's thread."""

    def started(self, task: Task) -> None:
        """Called when a worker was sent it; `task.attempt` counts."""

    def compiling(self, task: Task, compiles: bool) -> None:
        """Called when it begins to wait for the compiler on its worker, and when it no longer does."""

    def progressed(self, task: Task, share: float) -> None:
        """Called while a worker has it, when so much of it is done, 0 to 1."""

    def requeued(self, task: Task) -> None:
        """Called when its worker was lost; it waits again."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Called once, at the end. On Done the listener takes `operands` and `results` over; otherwise they go."""


@dataclass(eq=False)
class Task:
    """Task: a problem, its operands and results; its owner, and how far it is."""

    id: str
    params: GemmParams | GemmReduceParams | ProgramParams
    problem: Problem
    operands: dict[str, Pinned]
    """Their pins are the task's until it has ended: the scheduler releases them after a failure, the listener after
    success, or the pending results that have taken them over."""
    results: dict[str, Upload]
    """Likewise."""
    listener: Listener
    owner: str = ""
    """Owner: the id of an API key, "" where the server has none."""
    priority: int = 0
    """Rank among the tasks of the same owner: the higher goes first."""
    timeout_s: float | None = None
    """Seconds after `submitted` at which it expires, wherever it is then."""
    verify: bool = False
    recomputes: bool = False
    """Whether it computes results once more whose device was lost (`recomputation`): they are written at once, and not
    checked unasked, for plain arithmetic in their place would have other bits than the first time."""
    algorithm: str | None = None
    """Algorithm by which it is to be computed; None: the one that its device takes. No other than that of a device that
    there is, if none of them has it."""
    durable: bool = True
    """Whether it starts again with the server; others are refused when it drains."""
    waited_for: bool = False
    """Whether a client waits for it, and for nothing else, with an open connection."""
    attempt: int = 0
    """Times that a worker has been sent it."""
    crashes: int = 0
    """Workers that were lost while they had it."""
    submitted: float = field(default_factory=time.monotonic)
    """Time at which its request had arrived (time.monotonic, which no change of the clock touches)."""
    cost_s: float = 0.0
    """Estimated seconds of a device."""
    service_class: ServiceClass = ServiceClass.BULK
    queue_s: float = 0.0
    began: float = 0.0
    """Time at which its worker was sent it (time.monotonic)."""
    products: int = 1
    """Number of products that it computes."""
    grouped: bool = False
    """Whether it was sent together with others."""
    expected_s: float = 0.0
    """Seconds of its worker's device, by a cautious estimate, with a check where there is one."""
    limit_s: float = 0.0
    """Seconds for which its worker may show no progress before it is taken for hung."""
    beside: bool = False
    """Whether its worker had express tasks and others at one time meanwhile: how long it then took says at most how
    long it keeps a device busy."""
    stalled: bool = False
    """Whether its worker was killed because it did not get on with this."""
    over: bool = False
    """The listener has been told; a worker may still be at it."""
    worker: Worker | None = None
    passed_over: float | None = None
    """Time since which it has waited for a device with its operands, while another one was idle (time.monotonic)."""
    pending: PendingResults | None = None
    """Its results, once it has ended and they are not in the store yet: they own the pins of its operands then."""
    order: tuple[int, int] = (0, 0)
    deadline: Deadline | None = None
    trace: ProductTrace | None = None
    """Trace of the request that wants it, where that is traced: told of each worker that has it, and of its end."""
    plans: dict[int, Plan | KernelError] = field(default_factory=dict)
    """Plan by which a device runs this, or why it cannot, by its class."""
    models: dict[int, tuple[object, Any]] = field(default_factory=dict)
    """Results of `estimates` for a plan, by the device's class."""
    file_made: bool | None = None
    """Whether there is a file for a result that takes long to make; False: it is being made, and the task waits for it.
    None: nobody has looked.
    """
    in_arena: bool = False
    """Whether its results have places in the host arena, to which its blocks are written."""
    blocks: Blocks | None = None
    """Blocks as which workers are sent it, where it is that large: `cost_s` is that of one."""

    def estimated(self, seconds: float) -> None:
        """Take over the estimate of its cost, and the service class that follows from it; before it is queued."""
        self.cost_s = seconds
        if self.blocks is not None:
            self.service_class = ServiceClass.LARGE
        elif seconds <= _EXPRESS_S:
            prompt = self.products == 1 and (self.waited_for or not self.durable)
            self.service_class = ServiceClass.PROMPT if prompt else ServiceClass.EXPRESS
        elif not self.durable and self.products == 1:
            self.service_class = ServiceClass.INTERACTIVE
        else:
            self.service_class = ServiceClass.BULK

    @property
    def whole(self) -> Task:
        """The task that its listener knows: of a block the product that it is a part of."""
        return self

    @property
    def duration_s(self) -> float:
        """Estimated seconds until it is done, once a worker has begun."""
        return self.cost_s if self.blocks is None else self.blocks.duration_s

    @property
    def may_be_grouped(self) -> bool:
        """Whether a worker may be sent it with others in one message: not if it has lost a worker, and should take
        nobody along if it was the cause; a batch is a group itself.
        """
        return not self.crashes and self.products == 1 and self.blocks is None

    @property
    def express(self) -> bool:
        """Whether it runs beside long tasks, where its worker can have that."""
        return self.service_class in SHORT_CLASSES and not self.crashes

    @cached_property
    def size(self) -> tuple[int, int]:
        """Bytes and operations of the problem."""
        return self.problem.nbytes(), self.problem.flops()

    @property
    def queued_bytes(self) -> int:
        """Bytes that count while it waits: of a job the results', for its operands are arrays in the store, whose bytes
        count there; of all else, operands and results.
        """
        if not self.durable or isinstance(self.problem, Program):
            return self.size[0]
        return sum([upload.spec.nbytes for upload in self.results.values()])

    @cached_property
    def form(self) -> str:
        """The product's `Form` as JSON."""
        return self.form_now()

    def form_now(self) -> str:
        """Return the `Form` of operands and results as they are now."""
        operands = {name: _kind_of(pinned.info) for name, pinned in self.operands.items()}
        return form_of(self.params, operands, {name: _kind_of(upload.spec) for name, upload in self.results.items()})

    @property
    def check_bytes(self) -> int:
        """Bytes that a check of the result reads."""
        return self.problem.step_nbytes() if isinstance(self.problem, Program) else self.size[0]

    def plan(self, spec: DeviceSpec) -> Plan | KernelError:
        """Return how that device would run it, or why it cannot."""
        return plan_of(self.problem, spec)

    def model_seconds(self, spec: DeviceSpec) -> float | None:
        """Return the seconds on that device, transfers included, by a finer model than that of `estimates`; None: there
        is none.
        """
        del spec
        return None

    def message(self, chosen: Plan, *, verify: bool) -> Work:
        """Return what a worker is sent, whose plan is `chosen`."""
        table = ExtentTable()
        # Scratch operands are gone after this task: a device need not keep copies of them.
        operands = {name: [(_operand_row(table, pinned), 0)] for name, pinned in self.operands.items()}
        results = {}
        for name, upload in self.results.items():
            spec = upload.spec
            if upload.extent is None and spec.nbytes:
                results[name] = [(table.number_without_place(spec.id), 0)]
            else:
                results[name] = [(table.number(upload.extent, None if spec.scratch else spec.id), 0)]
        part = Part(self.form, chosen.algorithm, operands, results)
        defer = self.worker is not None and self.may_be_deferred(self.worker)
        return Work(
            task=self.id,
            extents=table.rows,
            parts=[part],
            verify=verify,
            defer=defer,
            express=self.express,
        )

    def may_be_deferred(self, worker: Worker) -> bool:
        """Return whether the worker may answer it before its results are written."""
        if self.recomputes or not self.durable or worker.result_bytes < MIN_DEFERRED_BYTES:
            return False
        nbytes = sum([upload.spec.nbytes for upload in self.results.values()])
        return deferrable(self.params, nbytes, worker.result_bytes)

    def needs_place(self, worker: Worker, *, verify: bool) -> bool:
        """Return whether its results must have their places in the store before the worker is sent it: a check may put
        others in their stead, which would not come out again.
        """
        return self.placeless and (verify or not self.may_be_deferred(worker))

    @property
    def placeless(self) -> bool:
        """Whether some of its results have no place in the store yet."""
        for upload in self.results.values():
            if upload.extent is None and upload.spec.nbytes:
                return True
        return self.blocks is not None and self.blocks.lacks_partials

    def lacking(self) -> list[int]:
        """Return the bytes of each result that has no place in the store yet."""
        return [each.spec.nbytes for each in self.results.values() if each.extent is None and each.spec.nbytes]

    def take_places(self) -> None:
        """Take places in the store for results that have none. Raises StoreFull, OSError."""
        for upload in self.results.values():
            upload.take_place()

    def described(self) -> dict[str, str | int]:
        """Return what it computes, as attributes of a span."""
        fields: dict[str, str | int] = {"gemmserve.op": self.params.op}
        if self.durable:
            fields["gemmserve.job.id"] = self.id
        if isinstance(self.problem, Program):
            return fields | {"gemmserve.steps": len(self.problem), "gemmserve.dtype": self.problem.dtype.name}
        return fields | described(self.problem)

    def close(self, *, reusable: bool = True) -> None:
        """Gives operands and results back. Not `reusable`: a lost process may still write to the results."""
        for upload in self.results.values():
            if reusable:
                upload.abort()
            else:
                upload.discard()
        if self.blocks is not None:
            self.blocks.release(reusable=reusable)
        self.unpin()

    def unpin(self) -> None:
        """Lets the operands go."""
        for pinned in self.operands.values():
            pinned.release()


def first_of(algorithms: str) -> str:
    """Return the first of the names by which a large product was computed: that of its whole blocks."""
    return algorithms.partition(", ")[0]


def described(problem: Product) -> dict[str, str | int]:
    """Return a product's extents, dtype and compute mode, as attributes of a span."""
    return {
        **{f"gemmserve.{name}": getattr(problem, name) for name in ("m", "n", "k", "batch", "compute")},
        "gemmserve.dtype": problem.dtype.name,
    }


def deferrable(params: GemmParams | GemmReduceParams | ProgramParams, nbytes: int, room: int) -> bool:
    """Return whether a device that has room for so many bytes of results may keep those of a task for a while: not if
    they could differ when they are computed again.
    """
    if not MIN_DEFERRED_BYTES <= nbytes <= room:
        return False
    if isinstance(params, GemmParams):  # at once: asked for what they have not, models look for long
        return True
    steps = params.steps if isinstance(params, ProgramParams) else (params,)
    return all(getattr(step, "reproducible", True) for step in steps)


def _kind_of(array: ArrayInfo | ArraySpec) -> ArrayKind:
    return array.dtype, array.shape, array.order


def _operand_row(table: ExtentTable, pinned: Pinned) -> int:
    info = pinned.info
    pending = None if pinned.at_hand else pinned.pending
    if pending is not None and not pending.ordered:
        pinned.read_on_device()
        return table.number_without_place(info.id)
    return table.number(pinned.extent, info.id if isinstance(info, ArrayInfo) else None)


def plan_of(problem: Problem, spec: DeviceSpec) -> Plan | KernelError:
    """Return how a device would run a problem, or why it cannot; worked out once for products that come again."""
    try:
        # A program knows what it found, and no other is equal to it: here it would only be kept for longer.
        return plan_problem(problem, spec) if isinstance(problem, Program) else _plan(problem, spec)
    except KernelError as error:
        return error


def refusal(problem: Problem, errors: Sequence[KernelError]) -> KernelError:
    """Return the error of a problem that no device can run, given each device's: the first, which names the compute
    modes of all devices where it is about one.
    """
    first = errors[0]
    if isinstance(problem, Program) or not isinstance(first, ComputeUnsupported):
        return first
    there = {mode for error in errors if isinstance(error, ComputeUnsupported) for mode in error.available}
    return compute_unsupported(problem.compute, problem.dtype, [mode for mode in COMPUTE_MODES if mode in there])


@lru_cache(4096)
def _plan(product: Product, spec: DeviceSpec) -> Plan:
    """Return the plan, cached: choosing among the algorithms of an accelerator takes up to a millisecond."""
    return plan_problem(product, spec)


def load_plans(spec: DeviceSpec) -> None:
    """Load what plans for that device are made from, algorithms and tables: otherwise a first product waits for them,
    which takes 50 ms and more.
    """
    square = Operand.contiguous((64, 64), "complex64")
    plan_of(GemmProblem.build(square, square), spec)
