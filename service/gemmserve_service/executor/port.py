"""The port between scheduler and executors."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter

from gemmserve_service.schemas import DeviceHealth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_service.executor.protocol import (
        Cancel,
        Compiling,
        Deliver,
        Delivered,
        Done,
        Drop,
        Failed,
        Forget,
        Hello,
        Kept,
        RunBatch,
        Write,
        Written,
    )

    ToOne = RunBatch | Cancel | Write | Drop | Deliver


@dataclass(eq=False, slots=True)
class NodeLink:
    """Link of a worker that joined over TCP, now or last."""

    host: str
    """Name of the node, for people."""
    address: str
    bytes_s: float | None
    """Rate that the node measured; None: not yet."""
    cache_bytes: int
    """Bytes of operands that the node may keep."""
    fetched_bytes: int = 0
    """Bytes of operands that it was sent."""
    returned_bytes: int = 0
    """Bytes of results that came from it."""
    stale_results: int = 0
    """Results that were refused: the work was somebody else's by then."""


@dataclass(eq=False, slots=True)
class Worker:
    """One device's worker as the front sees it; lives on across restarts of the process."""

    id: str
    link: NodeLink | None = None
    """How it is reached, where it joined from another host; None: its process is one of the supervisor's."""
    ready: bool = False
    spec: DeviceSpec | None = None
    """Device, as the first hello described it, None until then; kept while the worker restarts."""
    device_class: int = -1
    """Number of the class of its device: workers of equal devices share plans and estimates."""
    spec_fields: dict[str, Any] = field(default_factory=dict)
    verified_error: float | None = None
    memory_used: int = 0
    restarts: int = -1
    """Hellos after the first."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Tasks that it was sent and has not answered, oldest first; the scheduler's bookkeeping (`sent`, `answers`)."""
    express_tasks: dict[str, Any] = field(default_factory=dict)
    """Those of them that are express, where it runs such beside others."""
    interleaves: bool = False
    """Whether it lets a short task pass between the panels of a long one."""
    ahead: int = 0
    """Tasks that it may be sent before it has answered the first."""
    express: bool = False
    """Whether it runs short tasks beside long ones."""
    heard: float = 0.0
    """Time of its process's last sign of life (time.monotonic)."""
    progress: int = 0
    """Parts of its task that are done, as it said last."""
    moved: float = 0.0
    """Time at which its oldest task began or last made progress, or it answered one of that task's kind, express or not
    (time.monotonic)."""
    at: str | None = None
    """The task that it said it is at."""
    answered: float = 0.0
    """Time of its last answer to a task (time.monotonic)."""
    result_bytes: int = 0
    """Bytes of results that may be on its device alone; 0: it writes them before it answers."""
    planned_bytes: int | None = None
    """Bytes of device memory that its plans of large products count on; None: unknown."""
    delivers: bool = False
    """Whether its device writes to memory of clients of this host."""
    delivering: float | None = None
    """Time since which it has answered no delivery (time.monotonic); None: it has none."""
    asked: float | None = None
    """Time since which it has written no result that somebody waits for (time.monotonic); None: nobody waits."""
    registered_bytes: int = 0
    """Bytes of the host arena that its device copies to straight, as it said last."""
    prepares: bool = True
    """Whether kernels of likely products are still being loaded ahead, as it said last."""
    kept: Kept | None = None
    """State of the copies of arrays that its device has, as it reported it last."""
    health: DeviceHealth = field(default_factory=DeviceHealth)
    """Its device's sensors, as it reported them last."""

    @property
    def state(self) -> str:
        """State in a word: ready; starting; away, where it joined and its link has ended."""
        if self.ready:
            return "ready"
        return "starting" if self.link is None else "away"

    def greeted(self, hello: Hello) -> None:
        """Takes over what the process said about itself."""
        self.ready = True
        self.spec_fields = hello.spec
        self.spec, self.device_class = _device_class(spec_adapter().validate_python(hello.spec))
        self.verified_error = hello.verified_error
        self.memory_used = hello.memory_used
        self.interleaves = hello.interleaves
        self.ahead = hello.ahead
        self.express = hello.express
        self.result_bytes = hello.result_bytes
        self.planned_bytes = hello.planned_bytes
        self.delivers = hello.delivers
        self.asked = self.delivering = None
        self.registered_bytes = 0
        self.prepares = True
        self.kept = None
        self.health = DeviceHealth()
        self.restarts += 1
        self.heard = time.monotonic()

    def beat(self, task: str | None, progress: int) -> None:
        """Note a sign of life: so many parts of that task are done."""
        if task in self.tasks:
            if progress != self.progress or self.at not in {None, task}:
                self.moved = time.monotonic()
            self.progress, self.at = progress, task

    def keeps(self, kept: Kept) -> None:
        """Takes over what it said about its device's copies."""
        self.kept = kept
        self.memory_used = kept.memory_used

    @property
    def mixed(self) -> bool:
        """Whether it has express tasks and others at one time."""
        return 0 < len(self.express_tasks) < len(self.tasks)

    @property
    def other_tasks(self) -> Sequence[Any]:
        """Those of its tasks that are not express."""
        if len(self.express_tasks) == len(self.tasks):
            return ()
        return [task for name, task in self.tasks.items() if name not in self.express_tasks]

    def sent(self, task: Any) -> None:
        """Note that it has a task, and which of its tasks run beside others of another kind."""
        mixed = self.mixed
        self.tasks[task.id] = task
        if not self.express:
            return
        if task.express:
            self.express_tasks[task.id] = task
        if self.mixed:
            task.beside = True
            for other in () if mixed else self.tasks.values():
                other.beside = True

    def answers(self, task_id: str) -> Any:
        """Take a task back, which it answers; None: it has no such task."""
        self.express_tasks.pop(task_id, None)
        return self.tasks.pop(task_id, None)

    def lose_tasks(self) -> list[Any]:
        """Take all of its tasks back."""
        tasks = list(self.tasks.values())
        self.tasks.clear()
        self.express_tasks.clear()
        return tasks

    def began(self) -> None:
        """Note that it was sent tasks while it had none."""
        self.progress, self.at, self.moved = 0, None, time.monotonic()

    def ended(self, task: Any) -> None:
        """Note that it answered a task, which it has no more."""
        self.answered = time.monotonic()
        oldest = next(iter(self.tasks.values()), task)
        if not self.express or oldest.express == task.express:
            self.moved = self.answered


class ExecutorOwner(Protocol):
    """Owner of an executor (the scheduler), called in the event loop's thread."""

    def worker_ready(self, worker: Worker) -> None:
        """Called when a worker said hello: it takes tasks from now on."""

    def worker_gone(self, worker: Worker) -> None:
        """Called when a lost worker is no more among the executor's: nobody expects it back."""

    def worker_lost(self, worker: Worker) -> None:
        """Called when a worker's process is gone; what it had not answered will never be."""

    def task_ended(self, worker: Worker, answer: Done | Failed, *, more: bool = False) -> None:
        """Called when a worker answered a task. `more`: `answers_over` follows, and others before it perhaps."""

    def answers_over(self) -> None:
        """Called after the last of several answers that came together."""

    def task_compiles(self, worker: Worker, message: Compiling) -> None:
        """Called when a task begins to wait for the compiler, and when it no longer does."""

    def task_progressed(self, worker: Worker, task: str, share: float) -> None:
        """Called when a worker says that so much of a task is done, 0 to 1."""

    def results_written(self, worker: Worker, message: Written) -> None:
        """Called when results that were to be written later are, or never will be."""

    def arrays_delivered(self, worker: Worker, message: Delivered) -> None:
        """Called when arrays are in clients' memory, or nothing will write there."""

    def copies_changed(self, worker: Worker, kept: Kept) -> None:
        """Called when arrays came to a worker's device or went from there."""


class Executor(Protocol):
    """Runs tasks on workers. A worker runs what it is sent in order, and answers in that order, but for express tasks,
    which pass others where it runs several at once, and prompt messages, which pass those.
    """

    async def start(self, owner: ExecutorOwner) -> None:
        """Begins; workers show up through `owner`."""

    async def stop(self) -> None:
        """Ends without waiting for tasks."""

    def workers(self) -> Sequence[Worker]:
        """All that are known, ready or not."""

    def send(self, worker: Worker, message: ToOne) -> None:
        """Send a message to one worker. Tasks are answered through the owner, each for itself; a cancelled one stops at
        its next panel and is answered then. Only workers that defer results are sent Write and Drop.
        """

    def kill(self, worker: Worker, reason: str) -> None:
        """Ends the worker's process, which hangs; `owner.worker_lost` follows at once, a new process later."""

    def forget(self, message: Forget) -> None:
        """Tell every worker that extents or arrays are gone: it drops mappings and copies of them."""


_classes: dict[DeviceSpec, tuple[DeviceSpec, int]] = {}


def _device_class(spec: DeviceSpec) -> tuple[DeviceSpec, int]:
    """Return a device, the same object for equal ones, and the number of its class."""
    return _classes.setdefault(spec, (spec, len(_classes)))


@cache
def spec_adapter() -> TypeAdapter[DeviceSpec]:
    """DeviceSpec to and from JSON-able mappings."""
    from gemmserve_kernels.device.spec import DeviceSpec

    return TypeAdapter(DeviceSpec)
