"""What the front and its workers say to each other: length-prefixed JSON, validated by pydantic; never pickle.

A frame is four bytes of length, big-endian, then a UTF-8 JSON object with a `kind`. Arrays do not travel: a message
names the extent that holds one, and both ends map it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gemmserve_service.schemas import (  # noqa: TC001 (pydantic resolves them at run time)
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


class ArrayRef(_Message):
    """An array's bytes: `nbytes` of the extent at `path`, from `offset` on."""

    extent: str | None = Field(
        description="name that never comes back for other pages, and may be of several arrays; null for an empty array"
    )
    path: str
    capacity: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    cache_id: str | None = Field(None, description="id of an immutable array, which a device may keep a copy of")
    offset: int = 0


class Run(_Message):
    """Front to worker: compute `params` on the operands into the results' extents."""

    kind: Literal["run"] = "run"
    task: str
    params: Annotated[GemmParams | GemmReduceParams | ProgramParams, Field(discriminator="op")]
    algorithm: str = Field(description="that the device will use; the plan depends on the job and the device alone")
    operands: dict[str, ArrayRef]
    results: dict[str, ArrayRef]
    verify: bool = False
    defer: bool = Field(default=False, description="the task may end before its results are written")


class Placed(_Message):
    """An array in an extent that is named elsewhere."""

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    offset: int


class BundleForm(_Message):
    """What products whose arrays lie side by side in one extent have in common but for the extent and the data."""

    params: Annotated[GemmParams | GemmReduceParams, Field(discriminator="op")]
    operands: dict[str, Placed]
    results: dict[str, Placed]


class RunBundle(_Message):
    """Front to worker: `Run` of a product in one extent. The same form comes again and again, and is read once."""

    kind: Literal["run_bundle"] = "run_bundle"
    task: str
    form: str = Field(description="a BundleForm as JSON")
    algorithm: str
    extent: str
    path: str
    capacity: int
    offset: int = Field(0, description="where the form begins")
    verify: bool = False

    def spread(self, form: BundleForm) -> Run:
        """The same task as any other; `form` is this one's."""

        def refs(arrays: dict[str, Placed]) -> dict[str, ArrayRef]:
            place = {"extent": self.extent, "path": self.path, "capacity": self.capacity}
            return {
                name: ArrayRef(**place, **placed.model_dump() | {"offset": self.offset + placed.offset})
                for name, placed in arrays.items()
            }

        return Run(
            task=self.task,
            params=form.params,
            algorithm=self.algorithm,
            operands=refs(form.operands),
            results=refs(form.results),
            verify=self.verify,
        )


class ExtentTable(_Message):
    """The extents that the arrays of a batch lie in, as columns: there may be thousands. Several may have one name."""

    names: list[str]
    paths: list[str]
    capacities: list[int]
    cache_ids: list[str | None] = Field(description="of those that hold one immutable array alone")


class Stack(_Message):
    """Arrays of one kind, one a product."""

    dtype: str
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    places: list[tuple[int, int]] = Field(description="extent, by its number in the message, and offset; -1: no bytes")


class Part(_Message):
    """Products of a batch that differ in nothing but their data."""

    params: Annotated[GemmParams | GemmReduceParams, Field(discriminator="op")]
    algorithm: str
    operands: dict[str, Stack]
    results: dict[str, Stack]


class RunBatch(_Message):
    """Front to worker: many products, one task. Each has the bits that it would have alone."""

    kind: Literal["run_batch"] = "run_batch"
    task: str
    extents: ExtentTable
    parts: list[Part]
    verify: bool = False


class Group(_Message):
    """Front to worker: short tasks, to be run in this order. Each is answered for itself."""

    kind: Literal["group"] = "group"
    tasks: list[Annotated[Run | RunBundle | RunBatch, Field(discriminator="kind")]]


class Forget(_Message):
    """Front to worker: these extents are gone, or these arrays; drop mappings and copies of them."""

    kind: Literal["forget"] = "forget"
    extents: list[str] = Field(default_factory=list)
    arrays: list[str] = Field(default_factory=list)


class Cancel(_Message):
    """Front to worker: nobody wants this task's result; it answers as soon as it can, whatever it answers."""

    kind: Literal["cancel"] = "cancel"
    task: str


class WriteOrder(_Message):
    """Front to worker: tasks whose results, which are on the device alone, are to be written in another order."""

    kind: Literal["write_order"] = "write_order"
    first: list[str] = Field(default_factory=list, description="somebody waits for them")
    last: list[str] = Field(default_factory=list, description="nobody can see them")
    drop: list[str] = Field(default_factory=list, description="nobody needs them")


class Prefetch(_Message):
    """Front to worker: jobs may come for this array; a device that has nothing to do and room for it takes a copy."""

    kind: Literal["prefetch"] = "prefetch"
    array: ArrayRef


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
    ahead: int = Field(0, description="tasks, or groups, that it takes on before it has answered the first")
    defers: bool = Field(default=False, description="keeps copies of arrays, and results that are to be written later")


class Beat(_Message):
    """Worker to front, every few seconds: the process lives; and how far its task is."""

    kind: Literal["beat"] = "beat"
    task: str | None = Field(None, description="that it is at")
    progress: int = Field(0, description="parts of the task that are done; grows")


class Kept(_Message):
    """Worker to front, before other messages: of which arrays its device has copies, and how it fares with them."""

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


Work = Run | RunBundle | RunBatch
"""What a worker is sent to compute; each is answered for itself."""

ToWorker = Annotated[Work | Group | Cancel | Forget | WriteOrder | Prefetch | Stop, Field(discriminator="kind")]
ToFront = Annotated[Hello | Beat | Done | Failed | Written | Kept, Field(discriminator="kind")]
TO_WORKER: Final[TypeAdapter[Work | Group | Cancel | Forget | WriteOrder | Prefetch | Stop]] = TypeAdapter(ToWorker)
TO_FRONT: Final[TypeAdapter[Hello | Beat | Done | Failed | Written | Kept]] = TypeAdapter(ToFront)


def encode(message: BaseModel) -> bytes:
    """One frame."""
    body = message.model_dump_json().encode()
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
