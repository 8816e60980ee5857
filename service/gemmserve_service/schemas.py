"""Models of what a request may say and an answer holds: the pydantic models of HTTP version 1.

Routes parse into these, the queue stores them, the worker protocol carries them. Shapes and dtypes are checked against
each other by `gemmserve_kernels.problem.problem`, not here.
"""

from __future__ import annotations

from collections.abc import Iterable  # noqa: TC003 (pydantic resolves it at run time)
from datetime import datetime  # noqa: TC003 (pydantic resolves it at run time)
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    computed_field,
    model_serializer,
)
from pydantic.json_schema import SkipJsonSchema

from gemmserve.wire import decode_scalar, encode_scalar
from gemmserve_kernels.problem.vocabulary import (
    AlgorithmName,
    Axis,
    Compute,
    Dtype,
    Layout,
    Order,
    PreOp,
    Reduction,
    Rounding,
    Trans,
)

StoredDtype = Literal[Dtype, "int64"]
"""argmax and argmin give int64; it is no operand's type."""

Scalar = Annotated[
    complex,
    # + 0j: zeros without a sign, for params that are equal are taken for the same.
    BeforeValidator(lambda value: (value if isinstance(value, complex) else complex(decode_scalar(value))) + 0j),
    PlainSerializer(encode_scalar, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number"},
                {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            ],
            "description": "a number, or [re, im]",
        }
    ),
]
ArrayId = Annotated[str, Field(pattern=r"^arr_[0-9a-z]{26}$", examples=["arr_01jd2w7m4h8k3n5p6q9r0s1t2v"])]
Owner = Annotated[SkipJsonSchema[str], Field(exclude=True)]
"""Id of the API key that something belongs to, "" where the server has none. Never in an answer."""
StepId = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$", examples=["x2"])]
StepOperand = Annotated[
    str,
    Field(
        pattern=r"^(arr_[0-9a-z]{26}|\$[A-Za-z][A-Za-z0-9_-]{0,63}(\.[a-z]{1,16})?)$",
        examples=["$x2", "$y.absmax", "arr_01jd2w7m4h8k3n5p6q9r0s1t2v"],
        description="id of an array, or $id of a step before this one, or $id.name of one of its several results",
    ),
]
ValueName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}(\.[a-z]{1,16})?$", examples=["x2", "y.absmax"])]
JobId = Annotated[str, Field(pattern=r"^job_[0-9a-z]{26}$", examples=["job_01jd2w7m4h8k3n5p6q9r0s1t2v"])]


class Strict(BaseModel):
    """Unknown fields are an error, values are immutable, JSON has no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ArrayInfo(Strict):
    """A stored array: immutable, so its id is also its ETag."""

    id: ArrayId
    dtype: StoredDtype
    shape: tuple[int, ...]
    order: Order = "C"
    nbytes: int
    sha256: str | None = Field(None, description="of the data bytes as stored (little-endian); null until known")
    created_at: datetime
    expires_at: datetime | None = Field(None, description="null: kept until deleted")
    owner: Owner = ""


class ArrayPage(Strict):
    """A page of a listing, newest first."""

    items: list[ArrayInfo]
    next_cursor: str | None = Field(None, description="of the next page; null on the last")


class GemmConfigFields(Strict):
    """Overrides of the dispatch; what is left out is chosen. An infeasible choice is a 422 that names the limit."""

    block_m: int | None = Field(None, ge=1, le=512)
    block_n: int | None = Field(None, ge=1, le=512)
    block_k: int | None = Field(None, ge=1, le=512)
    thread_m: int | None = Field(None, ge=1, le=64)
    thread_n: int | None = Field(None, ge=1, le=64)
    stages: int | None = Field(None, ge=1, le=16)
    split_k: int | None = Field(None, ge=1, le=1024)
    warp_m: int | None = Field(None, ge=1, le=512)
    warp_n: int | None = Field(None, ge=1, le=512)
    instruction_k: int | None = Field(None, ge=1, le=64)
    cluster: int | None = Field(None, ge=1, le=16)
    raster: int | None = Field(None, ge=1, le=1024)
    promote: int | None = Field(None, ge=1, le=1 << 20)
    moduli: int | None = Field(None, ge=1, le=32)
    rounding_big: Rounding | None = None
    rounding_small: Rounding | None = None
    algorithm: AlgorithmName | None = None


class _OperationFields(Strict):
    trans_a: Trans = "N"
    trans_b: Trans = "N"
    alpha: Scalar = Field(1 + 0j, json_schema_extra={"default": 1})
    layout: Layout = Field("interleaved", description="planar: real arrays with a leading axis of 2 (re, im)")
    compute: Compute = "auto"
    config: GemmConfigFields | None = None


class GemmParams(_OperationFields):
    """D = alpha * op(A) * op(B) + beta * C."""

    op: Literal["gemm"] = "gemm"
    beta: Scalar = Field(0j, json_schema_extra={"default": 0})
    order: Order = Field("C", description="memory order of the result")


def _known(names: Any, known: Any, what: str) -> Any:
    """`names`, one or a list; ValueError in one sentence, where pydantic would tell both sides of the union."""
    listed = names if isinstance(names, list | tuple) else [names]
    strange = [name for name in listed if name not in get_args(known)]
    if strange or not listed:
        said = f"{str(strange[0])[:40]!r} is no {what}" if strange else f"at least one {what} is wanted"
        raise ValueError(f"{said}; there are {', '.join(get_args(known))}")
    return names


class GemmReduceParams(_OperationFields):
    """D[b, j] = reduce over i of pre_op(alpha * op(A)[b] op(B)[b])[i, j]; the product never reaches global memory."""

    op: Literal["gemm_reduce"] = "gemm_reduce"
    reduce: Annotated[
        Reduction | Annotated[list[Reduction], Field(min_length=1)],
        BeforeValidator(lambda names: _known(names, Reduction, "reduction")),
    ] = "sum"
    axis: Annotated[
        Axis | Annotated[list[Axis], Field(min_length=1)], BeforeValidator(lambda names: _known(names, Axis, "axis"))
    ] = "m"
    pre_op: PreOp = "identity"
    return_c: bool = False
    reproducible: bool = True


class _Submission(Strict):
    verify: bool = Field(
        default=False,
        description="check the result (norms by Freivalds, and some hundred elements; of reductions, sampled outputs) "
        "and report the residual",
    )
    priority: int = Field(0, ge=-100, le=100, description="higher runs first")
    timeout_s: float | None = Field(None, gt=0, le=86_400, description="covers queue and run")
    ttl_s: float | None = Field(
        None, gt=0, le=31_536_000, description="life of the results; null: the server's default"
    )


class _JobFields(_Submission):
    a: ArrayId
    b: ArrayId


class GemmJob(_JobFields, GemmParams):
    """A gemm on stored arrays."""

    op: Literal["gemm"]
    c: ArrayId | None = None


class GemmReduceJob(_JobFields, GemmReduceParams):
    """A gemm_reduce on stored arrays."""

    op: Literal["gemm_reduce"]


class GemmStep(GemmParams):
    """A gemm within a program."""

    id: StepId
    op: Literal["gemm"]
    a: StepOperand
    b: StepOperand
    c: StepOperand | None = None


class GemmReduceStep(GemmReduceParams):
    """A gemm_reduce within a program."""

    id: StepId
    op: Literal["gemm_reduce"]
    a: StepOperand
    b: StepOperand


Step = Annotated[GemmStep | GemmReduceStep, Field(discriminator="op")]


class ProgramParams(Strict):
    """The steps of a program, as a worker is sent them; what was not given stays away, so that long ones stay short."""

    op: Literal["program"] = "program"
    steps: tuple[Step, ...]

    @model_serializer(mode="plain")
    def _as_given(self) -> dict[str, Any]:
        return {"op": self.op, "steps": as_given(self.steps)}


class ProgramJob(_Submission):
    """Several products, each of stored arrays and of results of steps before it, run as one job."""

    op: Literal["program"]
    steps: Annotated[list[Step], Field(min_length=1, description="in the order in which they run")]
    keep: Annotated[list[ValueName], Field(min_length=1)] | None = Field(
        None,
        description="what becomes an array: ids of steps, or id.name for one result of several; null: every result "
        "that no step uses",
    )


def as_given(steps: Iterable[GemmStep | GemmReduceStep]) -> list[dict[str, Any]]:
    """Steps as JSON values, without the fields that were left out."""
    return [step.model_dump(mode="json", exclude_unset=True) for step in steps]


JobRequest = Annotated[GemmJob | GemmReduceJob | ProgramJob, Field(discriminator="op")]


class JobState(StrEnum):
    """queued -> running -> succeeded | failed | cancelled | expired; running -> queued when a worker is lost."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def final(self) -> bool:
        """Whether no transition leaves this state."""
        return self not in {JobState.QUEUED, JobState.RUNNING}


class Problem(BaseModel):
    """RFC 9457 problem details; `type` is a stable slug under /problems/."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["/problems/shape-mismatch"])
    title: str
    status: int
    detail: str | None = None
    instance: str | None = None


class Timings(BaseModel):
    """Seconds by phase; a phase that did not happen is 0."""

    queue_s: float = 0.0
    h2d_s: float = 0.0
    kernel_s: float = 0.0
    d2h_s: float = 0.0
    verify_s: float = 0.0


class Elements(BaseModel):
    """Elements of results by the way in which they were computed; of products that the data may keep from the planned
    one.
    """

    planned: int = Field(0, description="as planned: from float16 planes, residues or Gram matrices")
    wide: int = Field(0, description="from three bfloat16 parts, where float16 planes are not proved accurate")
    plain: int = Field(0, description="in plain arithmetic, where there is no wide way or it does not reach")

    def share(self, count: int) -> float | None:
        """`count` of all of them, 0 to 1; None where there are none."""
        total = self.planned + self.wide + self.plain
        return count / total if total else None


class StepInfo(BaseModel):
    """Outcome of one step of a program."""

    id: str
    algorithm: str
    kernel_s: float = Field(0.0, description="seconds on the device")
    residual: float | None = Field(None, description="relative error that the check found, where there was one")
    mismatch: float | None = Field(None, description="relative error of a first result that was wrong")


class JobInfo(BaseModel):
    """A job as its owner sees it."""

    id: JobId
    state: JobState
    op: Literal["gemm", "gemm_reduce", "program"]
    attempt: int = Field(0, description="how often a worker has taken it")
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    result: dict[str, ArrayId] | None = Field(
        None, description='{"d": id} for gemm; one entry a reduction, and "c"; by step for a program'
    )
    error: Problem | None = None
    timings: Timings | None = None
    algorithm: str | None = None
    residual: float | None = Field(None, description="relative error that the check found, where the job was checked")
    mismatch: float | None = Field(
        None, description="relative error of a first result that was wrong; it was computed again in plain arithmetic"
    )
    elements: Elements | None = Field(
        None,
        description="elements of results by the way in which they were computed; null where no product of the job has "
        "another way than the planned one, as on a processor",
    )
    steps: list[StepInfo] | None = Field(None, description="of a program that has succeeded; not in listings")
    request: dict[str, Any] | None = Field(None, description="as it was sent; of a program not in listings")
    owner: Owner = ""

    @computed_field(description="share of `elements` that took the wide way because of the data, 0 to 1")  # type: ignore[prop-decorator]
    @property
    def wide_share(self) -> float | None:
        """Share of the result's elements."""
        return None if self.elements is None else self.elements.share(self.elements.wide)

    @computed_field(description="share of `elements` that took plain arithmetic because of the data, 0 to 1")  # type: ignore[prop-decorator]
    @property
    def fallback_share(self) -> float | None:
        """Likewise."""
        return None if self.elements is None else self.elements.share(self.elements.plain)


class JobPage(BaseModel):
    """A page of a listing, newest first."""

    items: list[JobInfo]
    next_cursor: str | None = Field(None, description="of the next page; null on the last")


class Device(BaseModel):
    """A device and the worker process that owns it."""

    id: str = Field(examples=["cpu", "cuda:0"])
    state: str = Field(description="ready, or starting (also after a crash)")
    spec: dict[str, Any] = Field(description="name, architecture, limits; empty until the worker has answered")
    compute_modes: tuple[str, ...]
    memory_total: int = Field(description="bytes")
    memory_used: int = Field(description="bytes")
    jobs_running: int
    verified_error: float | None = Field(
        None, description="relative error of the product checked at the worker's start"
    )
    restarts: int = Field(0, description="how often the worker had to be started again")


class DeviceList(BaseModel):
    """Every device."""

    devices: list[Device]


class BatchItem(BaseModel):
    """One product. Fields of `params` may follow that differ for this one."""

    model_config = ConfigDict(extra="allow")

    a: ArrayId
    b: ArrayId
    c: ArrayId | None = None


class BatchRequest(Strict):
    """Many products of stored arrays. What is wrong with one of them is told of it; the others are computed."""

    params: GemmParams | GemmReduceParams = Field(GemmParams(), description="of every product", discriminator="op")
    items: list[BatchItem] = Field(min_length=1)
    results: Literal["inline", "packed", "each"] = Field(
        "inline",
        description="inline: in the answer, as .npy or .npz; packed: one stored array, the products along its first "
        "axis, if their results have one shape; each: a stored array for every product",
    )
    verify: bool = Field(default=False, description="check every product, and report the largest residual")
    priority: int = Field(0, ge=-100, le=100, description="higher runs first")
    timeout_s: float | None = Field(None, gt=0, le=86_400, description="covers queue and run")
    ttl_s: float | None = Field(
        None, gt=0, le=31_536_000, description="life of stored results; null: the server's default"
    )
