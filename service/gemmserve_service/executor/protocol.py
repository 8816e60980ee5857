"""Protocol of the front and its workers: length-prefixed JSON, validated by pydantic; never pickle.

A frame is four bytes of length, big-endian, then a UTF-8 JSON object with a `kind`. Arrays do not travel: a message
names the extent that holds one, and both ends map it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gemmserve_kernels.problem.vocabulary import AlgorithmName  # noqa: TC001 (likewise)
from gemmserve_service.schemas import (  # noqa: TC001 (pydantic resolves them at run time)
    DeviceHealth,
    Elements,
    GemmParams,
    GemmReduceParams,
    ProgramParams,
    StepInfo,
    Timings,
)

_LENGTH: Final = 4
_MAX_FRAME: Final = 1 << 27  # thirty thousand paths of 4 KiB: a batch with every array in a file of its own


class ProtocolError(RuntimeError):
    """The other end sent something that is no message."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(slots=True, kw_only=True)
class ArrayRef:
    """An array's bytes: `nbytes` of the extent at `path`, from `offset` on. Made by a worker of what it was sent."""

    extent: str | None
    """Name that never comes back for other pages, and may be of several arrays; None for an empty array."""
    path: str
    capacity: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    cache_id: str | None = None
    """Id of an immutable array, which a device may keep a copy of."""
    offset: int = 0

    @property
    def placeless(self) -> bool:
        """Whether it has bytes, and no place in the store for them."""
        return self.extent is None and self.nbytes > 0


class Kind(_Message):
    """Kind of arrays: all but their bytes."""

    dtype: str
    shape: tuple[int, ...]
    order: Literal["C", "F"]


class Form(_Message):
    """Form of products, all but their data; or a program."""

    params: Annotated[GemmParams | GemmReduceParams | ProgramParams, Field(discriminator="op")]
    operands: dict[str, Kind]
    results: dict[str, Kind]


Places = list[tuple[int, int]]
"""Places of arrays of one kind, one a product: row of the extent in the table (-1: no bytes), and offset in it."""


@dataclass(slots=True)
class Part:
    """Products of one form: one in most tasks, many in a batch. Validated where it is read, not where it is made."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    form: Annotated[str, Field(description="a Form as JSON: the same one comes again and again, and is read once")]
    algorithm: Annotated[
        str, Field(description="that the device will use; the plan depends on the product and the device alone")
    ]
    operands: dict[str, Places]
    results: dict[str, Places]


ExtentRow = tuple[str, str, int, int, str | None]
"""An extent: name (which never comes back for other pages), path and bytes of the file that it lies in, where it begins
there, and the id of the immutable array that it holds, of which a device may keep a copy; null: it holds none.

An array that is on the worker's device alone and has no place in the store yet has a row of its own with an empty path
(`row_without_place`): a deferred task's result, which stays there until `Write` says where it goes; or an operand,
whose bytes are the device's. What needs an operand's bytes on the host then (a check there, too little memory) copies
them to memory of the worker's own."""


def row_without_place(array: str) -> ExtentRow:
    """Return the row of an array that is on a device alone: its id is all that it has."""
    return array, "", 0, 0, array


PARTIALS: Final = "partials"
"""Name of the partial results of a large reduction, among its blocks' results."""
BLOCKS_AHEAD: Final = 16
"""Blocks whose panels may come ahead: a third of a second of an H200, in which a link brings as many panels as a sweep
over a grid begins with."""


class BlockOf(_Message):
    """Block of a large product (`gemmserve_kernels.blocks.grid`): the task's operands are the whole product's, and of
    its results, which have places, the block's windows are written and nothing else. A reduction's block writes its
    partial results (`blocks.reduction`) into one more array of bytes, `PARTIALS`, which is the whole's too.
    """

    parent: str = Field(
        description="task of the whole product: panels of its operands stay until it is over (`Forget`)"
    )
    sides: tuple[int, int, int] = Field(description="rows, columns and matrices of a block: `Grid.sides`")
    index: int = Field(ge=0)
    algorithm: AlgorithmName | None = Field(None, description="that computes it; null: the worker plans")
    ahead: tuple[int, ...] = Field(
        (), description="blocks that will probably be sent next, in that order: their panels may come before them"
    )
    combine: bool = Field(
        default=False, description="no block, but a reduction's results from the partial ones of all its blocks"
    )


@dataclass(slots=True)
class Work:
    """Task, as a worker is sent it: its products are computed and answered together, each with the bits that it would
    have alone. Validated where it is read, not where it is made.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    task: str
    extents: list[ExtentRow]
    parts: list[Part]
    attempt: Annotated[int, Field(description="how often the task has been sent, this time included")] = 0
    verify: bool = False
    defer: Annotated[
        bool,
        Field(description="the task may end before its results are written, and must where they have no place yet"),
    ] = False
    express: Annotated[bool, Field(description="the task is short: it runs beside long ones, and before them")] = False
    block: Annotated[
        BlockOf | None,
        Field(description="the task is one block of its only product; null: all of it, large products by blocks too"),
    ] = None


@dataclass(slots=True, kw_only=True)
class RunBatch:
    """Front to worker: tasks, most often one, to be run in this order; each is answered for itself. Validated likewise
    where it is read.

    `prompt`: a client waits for these, which are short; a worker that runs several tasks at once runs them between
    those of messages that came before.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kind: Literal["run_batch"] = "run_batch"
    tasks: list[Work]
    prompt: bool = False


class Forget(_Message):
    """Front to worker: these extents are gone, or these arrays, or nobody wants blocks of these products any more; drop
    mappings and copies.
    """

    kind: Literal["forget"] = "forget"
    parents: list[str] = Field(default_factory=list, description="tasks of whole products: `BlockOf.parent`")
    extents: list[str] = Field(default_factory=list)
    arrays: list[str] = Field(default_factory=list)


class Cancel(_Message):
    """Front to worker: nobody wants this task's result; it answers as soon as it can, whatever it answers."""

    kind: Literal["cancel"] = "cancel"
    task: str


class Write(_Message):
    """Front to worker: where a task's results, which are on the device alone, go; `Written` follows. Sent again, it
    changes `urgent` and nothing else.
    """

    kind: Literal["write"] = "write"
    task: str
    places: dict[str, ExtentRow] = Field(description="by the array's id; empty arrays have none")
    urgent: bool = Field(
        default=False, description="somebody waits for them: they overtake those that nobody waits for"
    )


class Drop(_Message):
    """Front to worker: nobody needs the results of these tasks, written or not; `Written` follows for each."""

    kind: Literal["drop"] = "drop"
    tasks: list[str]


class Deliver(_Message):
    """Front to worker: copy an array from the device into a client's memory; `Delivered` follows, soon or once nothing
    writes there any more.
    """

    kind: Literal["deliver"] = "deliver"
    number: int
    array: str = Field(description="id of the array, of which the device should have a copy")
    nbytes: int
    memory: str = Field(description="name of the client's memory, by which the worker knows it again")
    path: str = Field(description="where it can be opened until this is answered")
    capacity: int = Field(description="bytes of it")


class Stop(_Message):
    """Front to worker: end after what was sent before this."""

    kind: Literal["stop"] = "stop"


class Hello(_Message):
    """Worker to front, once a product has been verified."""

    kind: Literal["hello"] = "hello"
    worker: str = Field(description="device name as in settings: cpu, cuda:0")
    pid: int
    spec: dict[str, Any]
    verified_error: float
    memory_used: int = 0
    interleaves: bool = Field(default=False, description="runs what comes meanwhile between the panels of a long task")
    ahead: int = Field(0, description="messages of tasks that it takes on before it has answered the first")
    express: bool = Field(default=False, description="runs short tasks beside long ones")
    result_bytes: int = Field(0, description="bytes of results that may be on the device alone; 0: none may")
    delivers: bool = Field(default=False, description="its device writes to memory of clients of this host")
    planned_bytes: int | None = Field(
        None,
        description="bytes of device memory that its plans of large products count on (`plan_memory`); null: unknown",
    )


class Beat(_Message):
    """Worker to front, every few seconds: the process lives; and how far its task is."""

    kind: Literal["beat"] = "beat"
    task: str | None = Field(None, description="that it is at")
    progress: int = Field(0, ge=0, lt=1 << 63, description="parts of the task that are done; grows")
    share: float = Field(0.0, description="share of the task that is done, 0 to 1, where it has steps")
    registered: int = Field(0, description="bytes of the host arena that its device copies to straight")
    prepares: bool = Field(default=False, description="kernels of likely products are still being loaded ahead")
    health: DeviceHealth | None = Field(None, description="the device's sensors; null: as said before")


class Compiling(_Message):
    """Worker to front: a task waits for kernels that are being compiled, or no longer does."""

    kind: Literal["compiling"] = "compiling"
    task: str
    compiling: bool


class Kept(_Message):
    """Worker to front, before other messages but answers that were ready at once, which it follows: of which arrays its
    device has copies, and how it fares with them.
    """

    kind: Literal["kept"] = "kept"
    came: list[str] = Field(default_factory=list, description="ids of arrays that it has a copy of now")
    went: list[str] = Field(default_factory=list)
    used: int = Field(0, description="bytes of copies and prepared forms")
    budget: int = Field(0, description="bytes that they may take")
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    unwritten: int = Field(0, description="bytes of results that are not in the store yet")
    memory_used: int = 0


class Written(_Message):
    """Worker to front: the results of these tasks are in the store, or nothing will write to their place any more."""

    kind: Literal["written"] = "written"
    tasks: list[str] = Field(default_factory=list)
    lost: list[str] = Field(default_factory=list, description="whose results could not be written, and are gone")


class Delivered(_Message):
    """Worker to front: nothing writes to the memory of these deliveries any more."""

    kind: Literal["delivered"] = "delivered"
    numbers: list[int] = Field(default_factory=list, description="whose arrays are there")
    refused: list[int] = Field(default_factory=list, description="whose arrays are not, or not whole")


class Done(_Message):
    """Worker to front: every byte of the results is written, or will be."""

    kind: Literal["done"] = "done"
    task: str
    algorithm: str
    timings: Timings
    residual: float | None = None
    mismatch: float | None = Field(None, description="relative error of a first result that was thrown away")
    elements: Elements | None = Field(None, description="how they were computed, where that depends on the data")
    steps: list[StepInfo] | None = Field(None, description="of a program")
    memory_used: int = 0
    written: bool = Field(default=True, description="false: the results are on the device; `Written` follows")


class Failed(_Message):
    """Worker to front: the task failed, the worker did not."""

    kind: Literal["failed"] = "failed"
    task: str
    slug: str
    status: int
    title: str
    detail: str
    extra: dict[str, Any] = Field(default_factory=dict)


ToWorker = RunBatch | Cancel | Forget | Write | Drop | Deliver | Stop
ToFront = Hello | Beat | Compiling | Done | Failed | Written | Delivered | Kept
TO_WORKER: Final[TypeAdapter[ToWorker]] = TypeAdapter(Annotated[ToWorker, Field(discriminator="kind")])
TO_FRONT: Final[TypeAdapter[ToFront]] = TypeAdapter(Annotated[ToFront, Field(discriminator="kind")])


_RUN_BATCH: Final = TypeAdapter(RunBatch)


def encode(message: BaseModel | RunBatch) -> bytes:
    """Return the frame of a message. Raises ProtocolError if it is too long."""
    return frame_of(
        _RUN_BATCH.dump_json(message) if isinstance(message, RunBatch) else message.model_dump_json().encode()
    )


def frame_of(body: bytes) -> bytes:
    """Return the frame of a message that is JSON already. Raises ProtocolError if it is too long."""
    if len(body) > _MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes")
    return len(body).to_bytes(_LENGTH, "big") + body


class Decoder:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes. Raises ProtocolError for a frame of absurd length."""
        buffer = self._buffer
        buffer += data
        bodies = []
        start = 0
        while len(buffer) - start >= _LENGTH:
            length = int.from_bytes(buffer[start : start + _LENGTH], "big")
            if length > _MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes")
            end = start + _LENGTH + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + _LENGTH : end]))
            start = end
        del buffer[:start]
        return bodies
