"""Models of what a request may say and an answer holds: the pydantic models of HTTP version 1.

Routes parse into these, the queue stores them, the worker protocol carries them. Shapes and dtypes are checked against
each other by `gemmserve_kernels.problem.problem`, not here.
"""

from __future__ import annotations

from collections.abc import Iterable  # noqa: TC003 (pydantic resolves it at run time)
from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 (pydantic resolves it at run time)
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    Tag,
    WithJsonSchema,
    computed_field,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from gemmserve.wire import MAX_DELETED, MAX_JOBS, MAX_STATES, decode_scalar, encode_scalar
from gemmserve_kernels.problem.problem import default_beta
from gemmserve_kernels.problem.view import MAX_NDIM, MAX_REACH
from gemmserve_kernels.problem.vocabulary import (
    AlgorithmName,
    Assumption,
    Axis,
    Compute,
    Dtype,
    Fill,
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
_DIGITS: Final = "[0-9a-z]{26}(_[1-9][0-9]{0,2})?"
"""Pattern of ids behind their prefix: the cell's number is at their end, but for cell 0."""

ARRAY_ID: Final = f"arr_{_DIGITS}".replace("(", "(?:")
"""Pattern of an array's id, without groups."""

_ARRAY: Final = rf"^arr_{_DIGITS}$"
ArrayId = Annotated[str, Field(pattern=_ARRAY, examples=["arr_01jd2w7m4h8k3n5p6q9r0s1t2v"])]
Owner = Annotated[SkipJsonSchema[str], Field(exclude=True)]
"""Id of the API key that something belongs to, "" where the server has none. Never in an answer."""
Share = Annotated[SkipJsonSchema[float], Field(exclude=True)]
"""Share of a running job that is done, 0 to 1; its `progress` says it."""
Traceparent = Annotated[SkipJsonSchema[str], Field(exclude=True)]
"""Name of the span that a job belongs to (W3C Trace Context), "" where it is not traced. Never in an answer."""
_WORD: Final = r"[A-Za-z0-9_][A-Za-z0-9_.:/@+-]"  # what needs no quoting in a shell, a URL's path or a JSON pointer
_NAME: Final = rf"^{_WORD}{{0,127}}$"
ArrayName = Annotated[str, Field(pattern=_NAME, examples=["weights", "run-7/weights"])]
"""Name of an array: up to 128 ASCII characters. Several arrays of an owner may have the same."""
_LABEL_KEY: Final = rf"^{_WORD}{{0,62}}$"
_LABEL_VALUE: Final = r"^[ -~]{0,128}$"
Labels = Annotated[
    dict[Annotated[str, Field(pattern=_LABEL_KEY)], Annotated[str, Field(pattern=_LABEL_VALUE)]],
    Field(max_length=16, examples=[{"run": "7"}]),
]
"""Labels of an array: up to 16 of them, keys as names of up to 63 characters, values up to 128 printable ASCII ones."""
_STEP: Final = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"
StepId = Annotated[str, Field(pattern=_STEP, examples=["x2"])]
_VALUE: Final = rf"^(arr_{_DIGITS}|\$[A-Za-z][A-Za-z0-9_-]{{0,63}}(\.[a-z]{{1,16}})?)$"
ValueId = Annotated[
    str,
    Field(
        pattern=_VALUE,
        examples=["$x2", "$y.absmax", "arr_01jd2w7m4h8k3n5p6q9r0s1t2v"],
        description="id of an array, or $id of a step before this one, or $id.name of one of its several results",
    ),
]
_KEPT: Final = r"^[A-Za-z][A-Za-z0-9_-]{0,63}(\.[a-z]{1,16})?$"
ValueName = Annotated[str, Field(pattern=_KEPT, examples=["x2", "y.absmax"])]
Whole = Annotated[int, Field(ge=-MAX_REACH, le=MAX_REACH)]
Extent = Annotated[int, Field(ge=0, le=MAX_REACH)]
_JOB: Final = rf"^job_{_DIGITS}$"
JobId = Annotated[str, Field(pattern=_JOB, examples=["job_01jd2w7m4h8k3n5p6q9r0s1t2v"])]

_OF_NAMES: Final = "letters, digits and _ . : / @ + -, of which the first is a letter, a digit or _"
PATTERNS: Final[dict[str, str]] = {
    _ARRAY: "the id of an array, arr_ and 26 digits and small letters",
    _JOB: "the id of a job, job_ and 26 digits and small letters",
    _NAME: f"1 to 128 {_OF_NAMES}",
    _LABEL_KEY: f"1 to 63 {_OF_NAMES}",
    _LABEL_VALUE: "up to 128 printable characters of ASCII",
    _STEP: "up to 64 letters, digits, _ and -, of which the first is a letter",
    _VALUE: "the id of an array, $ and the id of a step, or $id.name of a step with several results",
    _KEPT: "the id of a step, or id.name of a step with several results",
}
"""Words of messages for what the patterns ask for."""


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
    name: str | None = Field(None, description="as given when it was made")
    labels: dict[str, str] = Field(default_factory=dict, description="as given when it was made")
    owner: Owner = ""


class ArrayPage(Strict):
    """A page of a listing, newest first."""

    items: list[ArrayInfo]
    next_cursor: str | None = Field(None, description="of the next page; null on the last")


class Deletion(Strict):
    """Choice of arrays: by `ids`, or by whatever is given of the others."""

    ids: list[ArrayId] | None = Field(None, min_length=1, max_length=MAX_DELETED)
    name: ArrayName | None = Field(None, description="those of that name")
    labels: Labels = Field(default_factory=dict, description="those that have all of these labels")
    older_than_s: float | None = Field(None, ge=0, le=1e12, description="those made more than so many seconds ago")
    dry_run: bool = Field(default=False, description="nothing is deleted; the answer says what would be")


class Deleted(Strict):
    """Arrays that are deleted, or would be."""

    count: int
    nbytes: int = Field(description="bytes of them")
    missing: list[str] = Field(description="ids of which there is no array: deleted before, expired, unknown")
    elsewhere: list[str] = Field(
        description="ids that other cells made: nothing was done about them, ask again for each cell's alone"
    )
    more: bool = Field(description=f"more arrays were chosen than the {MAX_DELETED} of one request: ask again")


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
    outliers: int | None = Field(None, ge=0, le=64)
    rounding_big: Rounding | None = None
    rounding_small: Rounding | None = None
    algorithm: AlgorithmName | None = None


_TRANS: Final = "N: as it is, T: transposed, C: conjugate transpose, R: conjugate"


class _OperationFields(Strict):
    trans_a: Trans = Field("N", description=_TRANS)
    trans_b: Trans = Field("N", description=_TRANS)
    alpha: Scalar = Field(1 + 0j, json_schema_extra={"default": 1})
    layout: Layout = Field("interleaved", description="planar: real arrays with a leading axis of 2 (re, im)")
    compute: Compute = Field(
        "auto", description="how products are formed; GET /v1/devices lists the modes that a device has"
    )
    config: GemmConfigFields | None = Field(None, description="overrides of what is chosen for the device")


class GemmParams(_OperationFields):
    """D = alpha * op(A) * op(B) + beta * C."""

    op: Literal["gemm"] = "gemm"
    beta: Scalar | None = Field(None, description="null: 1 where there is a c, else 0")
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


class Submission(Strict):
    """Options of what is queued."""

    verify: bool = Field(
        default=False,
        description="check the result (norms by Freivalds, and some hundred elements; of reductions, sampled outputs) "
        "and report the residual",
    )
    priority: int = Field(0, ge=-100, le=100, description="higher runs first")
    timeout_s: float | None = Field(None, gt=0, le=86_400, description="covers queue and run")
    ttl_s: float | None = Field(
        None, gt=0, le=31_536_000, description="life of stored results; null: the server's default"
    )


class Tagged(Submission):
    """Options of what has stored results."""

    name: ArrayName | None = Field(
        None, description="of the result; of several results each is called by this name, a dot and its own"
    )
    labels: Labels = Field(default_factory=dict, description="of every result")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


VALUE, VIEW = "value", "view"
"""Tags of the two ways to name an operand, in errors of pydantic: no names of fields."""


class View(Strict):
    """An operand by view: elements of a value, wherever they lie in its memory. All of them must lie inside it."""

    id: ValueId
    offset: int = Field(0, ge=0, le=MAX_REACH, description="elements before the first one, in the value's memory order")
    shape: Annotated[tuple[Extent, ...], Field(max_length=MAX_NDIM), BeforeValidator(_as_tuple)] | None = Field(
        None, description="null, with strides: the whole value as it lies"
    )
    strides: Annotated[tuple[Whole, ...], Field(max_length=MAX_NDIM), BeforeValidator(_as_tuple)] | None = Field(
        None, description="elements from one to the next along each axis; negative ones and 0 are allowed"
    )
    conj: bool = Field(default=False, description="the elements' conjugates")
    part: Literal["real", "imag"] | None = Field(
        None, description="of a complex value: a real view; offset and strides count complex elements all the same"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.shape is None) != (self.strides is None):
            raise ValueError("shape and strides are given together or not at all")
        if self.conj and self.part is not None:
            raise ValueError("conj and part exclude each other")
        return self


class ArrayView(View):
    """An operand by view of a stored array."""

    id: ArrayId


# Not by a discriminator: its function costs each request more than the strings' own check, which comes first.
StepOperand = Annotated[Annotated[ValueId, Tag(VALUE)] | Annotated[View, Tag(VIEW)], Field(union_mode="left_to_right")]
JobOperand = Annotated[
    Annotated[ArrayId, Tag(VALUE)] | Annotated[ArrayView, Tag(VIEW)], Field(union_mode="left_to_right")
]


class _JobFields(Tagged):
    a: JobOperand
    b: JobOperand


class _GemmFields(GemmParams):
    """A gemm that names its operands: beta is a number once it has been read."""

    c: str | View | None = None

    @model_validator(mode="after")
    def _resolve_beta(self) -> Self:
        if self.beta is None:
            # Counts as given where it is not 0: `as_given` keeps what decides the result.
            object.__setattr__(self, "beta", complex(default_beta(self.c is not None)))
            if self.c is not None:
                self.model_fields_set.add("beta")
        return self


class GemmJob(_JobFields, _GemmFields):
    """A gemm on stored arrays."""

    op: Literal["gemm"]
    c: JobOperand | None = None


class GemmReduceJob(_JobFields, GemmReduceParams):
    """A gemm_reduce on stored arrays."""

    op: Literal["gemm_reduce"]


class StepFields(Strict):
    """Fields that every step of a program has; its operands, and how its results are named."""

    operands: ClassVar[tuple[str, ...]]
    """Fields that name values."""
    several: ClassVar[bool] = False
    """Whether it has several results, each with a name of its own."""
    turned: ClassVar[dict[str, str]] = {}
    """Fields that say how an operand is transposed and conjugated, by the operand."""

    id: StepId


class GemmStep(StepFields, _GemmFields):
    """A gemm within a program."""

    operands = ("a", "b", "c")
    turned = {"a": "trans_a", "b": "trans_b"}

    op: Literal["gemm"]
    a: StepOperand
    b: StepOperand
    c: StepOperand | None = None


class GemmReduceStep(StepFields, GemmReduceParams):
    """A gemm_reduce within a program."""

    operands = ("a", "b")
    turned = {"a": "trans_a", "b": "trans_b"}
    several = True

    op: Literal["gemm_reduce"]
    a: StepOperand
    b: StepOperand


class AddStep(StepFields):
    """D = alpha * a + beta * b + gamma, element by element, with NumPy's broadcasting. Without b: alpha * a + gamma, by
    default a copy of a.
    """

    operands = ("a", "b")

    op: Literal["add"]
    a: StepOperand
    b: StepOperand | None = None
    alpha: Scalar = Field(1 + 0j, json_schema_extra={"default": 1})
    beta: Scalar = Field(1 + 0j, json_schema_extra={"default": 1})
    gamma: Scalar = Field(0j, json_schema_extra={"default": 0})
    dtype: StoredDtype | None = Field(
        None,
        description="of the result, and of the arithmetic where it is wider than the operands'; null: NumPy's result "
        "type of a and b, complex where a scalar has an imaginary part",
    )
    order: Order = Field("C", description="memory order of the result")


class MultiplyStep(StepFields):
    """D = alpha * a * b, element by element, with NumPy's broadcasting."""

    operands = ("a", "b")

    op: Literal["multiply"]
    a: StepOperand
    b: StepOperand
    alpha: Scalar = Field(1 + 0j, json_schema_extra={"default": 1})
    order: Order = Field("C", description="memory order of the result")


class SumStep(StepFields):
    """D = alpha * sum of a over axes, which are gone from the result."""

    operands = ("a",)

    op: Literal["sum"]
    a: StepOperand
    axes: Annotated[
        tuple[int, ...],
        Field(max_length=MAX_NDIM, description="negative ones count from the last"),
        BeforeValidator(_as_tuple),
    ]
    alpha: Scalar = Field(1 + 0j, json_schema_extra={"default": 1})


class HerkStep(StepFields):
    """D = alpha * op(a) op(a)^H + beta * c, Hermitian; of c one triangle is read."""

    operands = ("a", "c")
    turned = {"a": "trans_a"}

    op: Literal["herk"]
    a: StepOperand
    c: StepOperand | None = None
    alpha: float = Field(1, description="real")
    beta: float | None = Field(None, description="real; null: 1 where there is a c, else 0")
    trans_a: Trans = "N"
    fill: Fill = Field("both", description="both triangles, or one: the other is zero")
    compute: Compute = "auto"


class SolveStep(StepFields):
    """X of op(a) X = b."""

    operands = ("a", "b")
    turned = {"a": "trans_a"}

    op: Literal["solve"]
    a: StepOperand
    b: StepOperand
    assume: Assumption = Field("general", description="positive: Hermitian positive definite; lower, upper: triangular")
    trans_a: Trans = "N"


class InvStep(StepFields):
    """Inverse of op(a)."""

    operands = ("a",)
    turned = {"a": "trans_a"}

    op: Literal["inv"]
    a: StepOperand
    assume: Assumption = Field("general", description="as of solve")
    trans_a: Trans = "N"


class CholeskyStep(StepFields):
    """Lower L of op(a) = L L^H; the lower triangle of op(a) is read."""

    operands = ("a",)
    turned = {"a": "trans_a"}

    op: Literal["cholesky"]
    a: StepOperand
    trans_a: Trans = "N"


class ExpmStep(StepFields):
    """Exponential of op(a)."""

    operands = ("a",)
    turned = {"a": "trans_a"}

    op: Literal["expm"]
    a: StepOperand
    trans_a: Trans = "N"


class TriangleStep(StepFields):
    """One triangle of a, or the Hermitian or symmetric matrix that it stands for; the other triangle is not read."""

    operands = ("a",)

    op: Literal["triangle"]
    a: StepOperand
    fill: Literal["lower", "upper"] = "lower"
    structure: Literal["triangular", "hermitian", "symmetric"] = "triangular"
    unit: bool = Field(default=False, description="of triangular matrices: ones on the diagonal, which is not read")


OperationStep = (
    AddStep | MultiplyStep | SumStep | HerkStep | SolveStep | InvStep | CholeskyStep | ExpmStep | TriangleStep
)
"""Steps that are no products: `gemmserve_kernels.operations` has them by their `op`."""
ProductParams = GemmParams | GemmReduceParams
"""Parameters of a product, be it a step or not."""
StepParams = ProductParams | OperationStep
"""Parameters of what a worker does in one go: products, and steps of programs of any kind."""
AnyStep = GemmStep | GemmReduceStep | OperationStep
Step = Annotated[AnyStep, Field(discriminator="op")]
STEP_OPS: Final[tuple[str, ...]] = tuple(get_args(kind.model_fields["op"].annotation)[0] for kind in get_args(AnyStep))
"""Names of the kinds of steps."""


class ProgramParams(Strict):
    """The steps of a program, as a worker is sent them; what was not given stays away, so that long ones stay short."""

    op: Literal["program"] = "program"
    steps: tuple[Step, ...]

    @model_serializer(mode="plain")
    def _as_given(self) -> dict[str, Any]:
        return {"op": self.op, "steps": as_given(self.steps)}


class ProgramJob(Tagged):
    """Several steps, each on stored arrays and on results of steps before it, run as one job."""

    op: Literal["program"]
    steps: Annotated[list[Step], Field(min_length=1, description="in the order in which they run")]
    keep: Annotated[list[ValueName], Field(min_length=1)] | None = Field(
        None,
        description="what becomes an array: ids of steps, or id.name for one result of several; null: every result "
        "that no step uses",
    )


def as_given(steps: Iterable[AnyStep]) -> list[dict[str, Any]]:
    """Steps as JSON values, without the fields that were left out."""
    return [step.model_dump(mode="json", exclude_unset=True) for step in steps]


JobRequest = Annotated[GemmJob | GemmReduceJob | ProgramJob, Field(discriminator="op")]


class SeveralJobs(Strict):
    """Several jobs, accepted together or not at all."""

    jobs: list[JobRequest] = Field(min_length=1, max_length=MAX_JOBS)


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
        return self is not JobState.QUEUED and self is not JobState.RUNNING


class Problem(BaseModel):
    """RFC 9457 problem details; `type` is a stable slug under /problems/."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["/problems/shape-mismatch"])
    title: str
    status: int
    detail: str | None = None
    instance: str | None = None


@dataclass(slots=True)
class Timings:
    """Seconds by phase; a phase that did not happen is 0."""

    __pydantic_config__: ClassVar = ConfigDict(extra="ignore", allow_inf_nan=False)

    queue_s: float = 0.0
    compile_s: Annotated[float, Field(description="waited for kernels that nobody had compiled yet")] = 0.0
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
    compiling: bool = Field(
        default=False, description="it runs, and waits for kernels that are being compiled; others pass it meanwhile"
    )
    estimated_s: float | None = Field(
        None,
        description="while it runs: seconds that it may take from started_at on, by a model that is corrected by what "
        "the device has shown; rough, for progress bars",
    )
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
    trace: Traceparent = ""
    share: Share = 0.0

    @computed_field(  # type: ignore[prop-decorator]
        description="share of it that is done, 0 to 1: of a program by steps, of a large product by its blocks, else 0 "
        "until it has succeeded, which is 1; null where it ended otherwise"
    )
    @property
    def progress(self) -> float | None:
        """Share of the work that is done."""
        if self.state is JobState.SUCCEEDED:
            return 1.0
        return None if self.state.final else self.share

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


class JobList(BaseModel):
    """Jobs that were submitted together, in the order of the request, each without its `request`."""

    jobs: list[JobInfo]


class StatesQuestion(Strict):
    """Jobs whose states are asked for."""

    ids: list[JobId] = Field(min_length=1, max_length=MAX_STATES)
    wait: float = Field(
        0, ge=0, le=86_400, description="seconds to wait for the first one to be final; the server's setting caps it"
    )
    final: bool = Field(default=False, description="of those behind the first, only those that are final are told of")


class JobStates(BaseModel):
    """States of jobs, in the order of the question, each without its `request`."""

    jobs: list[JobInfo]
    missing: list[str] = Field(description="ids of which there is no job: forgotten, or unknown")
    elsewhere: list[str] = Field(description="ids that other cells made: ask again for each cell's alone")


class DeviceHealth(BaseModel):
    """A device's sensors, as its worker read them in the last seconds; null is what it does not tell."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    utilisation: float | None = Field(
        None,
        description="share of time in which kernels ran, 0 to 1, as the driver says; of a processor, the worker's "
        "share of its cores",
    )
    memory_utilisation: float | None = Field(
        None, description="share of time in which device memory was read or written, 0 to 1"
    )
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    clock_hertz: float | None = Field(None, description="of the multiprocessors")
    warnings: tuple[str, ...] = Field(
        (), description="throttling, errors of memory and the driver's error events, in words; empty: none are known"
    )


class DeviceLink(BaseModel):
    """How a device is reached whose worker joined from another host, and what went over that since it joined."""

    host: str = Field(description="name of the host, as it says")
    address: str = Field(description="address that its link comes from")
    bytes_s: float | None = Field(description="rate in bytes/s, as the host measured it; null: not yet")
    cache_bytes: int = Field(description="bytes of operands that the host may keep")
    fetched_bytes: int = Field(description="bytes of operands that it was sent")
    returned_bytes: int = Field(description="bytes of results that came from it")
    stale_results: int = Field(description="results that were refused: the work was somebody else's by then")


class Device(BaseModel):
    """A device and the worker process that owns it."""

    id: str = Field(examples=["cpu", "cuda:0", "node7/cuda:0"])
    state: str = Field(
        description="ready, or starting (also after a crash), or away: the link of a worker that joined has ended"
    )
    spec: dict[str, Any] = Field(description="name, architecture, limits; empty until the worker has answered")
    compute_modes: tuple[str, ...]
    memory_total: int = Field(description="bytes")
    memory_used: int = Field(description="bytes")
    jobs_running: int
    verified_error: float | None = Field(
        None, description="relative error of the product checked at the worker's start"
    )
    restarts: int = Field(0, description="how often the worker had to be started again")
    health: DeviceHealth = DeviceHealth()
    link: DeviceLink | None = Field(None, description="null: a device of the server's own host")


class DeviceList(BaseModel):
    """Every device."""

    devices: list[Device]


class BatchItem(BaseModel):
    """One product. Fields of `params` may follow that differ for this one."""

    model_config = ConfigDict(extra="allow")

    a: ArrayId
    b: ArrayId
    c: ArrayId | None = None


class BatchOptions(Submission):
    """Options of a batch, beside its products."""

    results: Literal["inline", "packed", "each"] = Field(
        "inline",
        description="inline: in the answer, as .npy or .npz; packed: one stored array, the products along its first "
        "axis, if their results have one shape; each: a stored array for every product",
    )
    verify: bool = Field(default=False, description="check every product, and report the largest residual")


class BatchRequest(BatchOptions):
    """Many products of stored arrays. What is wrong with one of them is told of it; the others are computed."""

    params: GemmParams | GemmReduceParams = Field(GemmParams(), description="of every product", discriminator="op")
    items: list[BatchItem] = Field(min_length=1)
