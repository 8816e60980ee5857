"""What the front and its workers say to each other: length-prefixed JSON, validated by pydantic; never pickle.

A frame is four bytes of length, big-endian, then a UTF-8 JSON object with a `kind`. Arrays do not travel: a message
names the extent that holds one, and both ends map it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gemmserve_service.schemas import (  # noqa: TC001 (pydantic resolves them at run time)
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

    extent: str | None = Field(description="name that never comes back for other pages; null for an empty array")
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


class ExtentTable(_Message):
    """The extents that the arrays of a batch lie in, as columns: there may be thousands."""

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
    tasks: list[Annotated[Run | RunBatch, Field(discriminator="kind")]]


class Forget(_Message):
    """Front to worker: these extents are gone, or these arrays; drop mappings and copies of them."""

    kind: Literal["forget"] = "forget"
    extents: list[str] = Field(default_factory=list)
    arrays: list[str] = Field(default_factory=list)


class Cancel(_Message):
    """Front to worker: nobody wants this task's result; it answers as soon as it can, whatever it answers."""

    kind: Literal["cancel"] = "cancel"
    task: str


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


class Beat(_Message):
    """Worker to front, every few seconds: the process lives; and how far its task is."""

    kind: Literal["beat"] = "beat"
    task: str | None = Field(None, description="that it is at")
    progress: int = Field(0, description="parts of the task that are done; grows")


class Done(_Message):
    """Worker to front: every byte of the results is written."""

    kind: Literal["done"] = "done"
    task: str
    algorithm: str
    timings: Timings
    residual: float | None = None
    mismatch: float | None = Field(None, description="residual of a first result that was thrown away")
    steps: list[StepInfo] | None = Field(None, description="of a program")
    memory_used: int = 0


class Failed(_Message):
    """Worker to front: the task failed, the worker did not."""

    kind: Literal["failed"] = "failed"
    task: str
    slug: str
    status: int
    title: str
    detail: str
    extra: dict[str, Any] = Field(default_factory=dict)


ToWorker = Annotated[Run | RunBatch | Group | Cancel | Forget | Stop, Field(discriminator="kind")]
ToFront = Annotated[Hello | Beat | Done | Failed, Field(discriminator="kind")]
TO_WORKER: Final[TypeAdapter[Run | RunBatch | Group | Cancel | Forget | Stop]] = TypeAdapter(ToWorker)
TO_FRONT: Final[TypeAdapter[Hello | Beat | Done | Failed]] = TypeAdapter(ToFront)


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
