"""JSON of the protocol, as it is sent and answered."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, WithJsonSchema

from gemmserve_service.schemas import Strict

_MAX_BYTES: Final = 1 << 62
_MAX_NDIM: Final = 32  # as .npy files have
_MAX_TENSORS: Final = 16  # more than any model has

Extent = Annotated[int, Field(ge=0, le=_MAX_BYTES)]
Name = Annotated[str, Field(max_length=256)]
Parameters = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": True})]
Data = Annotated[Any, WithJsonSchema({"type": "array", "items": {}})]


class SharedMemoryParameters(Strict):
    """Place of a tensor's bytes in a registered region."""

    shared_memory_region: Name | None = None
    shared_memory_byte_size: Extent | None = None
    shared_memory_offset: Extent = 0


class InputParameters(SharedMemoryParameters):
    """Place of an input's bytes: behind the JSON, or in a region."""

    binary_data_size: Extent | None = Field(None, description="bytes behind the JSON, row-major, little-endian")


class OutputParameters(SharedMemoryParameters):
    """Wish about one output."""

    binary_data: bool | None = Field(None, description="null: as binary_data_output says")


class InputTensor(Strict):
    """An input."""

    name: Name
    shape: list[Extent] = Field(max_length=_MAX_NDIM)
    datatype: Name
    parameters: InputParameters = InputParameters()
    data: Data = Field(None, description="elements, flat or nested; null: elsewhere, as the parameters say")


class OutputRequest(Strict):
    """An output that is wanted."""

    name: Name
    parameters: OutputParameters = OutputParameters()


class InferenceRequest(Strict):
    """An inference."""

    id: Name | None = Field(None, description="repeated in the answer")
    parameters: Parameters = Field(
        default_factory=dict,
        description="`complex`, `binary_data_output`, `priority` (1, the highest, to 201; 0: 101), `timeout` "
        "(microseconds), and the parameters of the product",
    )
    inputs: list[InputTensor] = Field(max_length=_MAX_TENSORS)
    outputs: list[OutputRequest] = Field(
        default_factory=list, max_length=_MAX_TENSORS, description="none: every one there is"
    )


class OutputTensor(BaseModel):
    """An output."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int | str] = Field(
        default_factory=dict, description="`binary_data_size`: it is behind the JSON; or its place in a region"
    )
    data: list[float] | None = None


class InferenceResponse(BaseModel):
    """Outputs of an inference."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class InferenceError(BaseModel):
    """An error."""

    error: str


class ServerMetadata(BaseModel):
    """Name of the server, and what it speaks."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """An input or output of a model."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """A model's inputs and outputs."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, str] = Field(
        description="what the protocol has no field for: other datatypes, complex tensors"
    )


class ConfigInput(BaseModel):
    """An input as Triton's model configuration has it."""

    name: str
    data_type: str
    dims: list[int]
    optional: bool


class ConfigOutput(BaseModel):
    """An output, likewise."""

    name: str
    data_type: str
    dims: list[int]


class ModelConfig(BaseModel):
    """Triton's model configuration, as far as it means anything here."""

    name: str
    platform: str
    backend: str
    max_batch_size: int = Field(description="0: dimensions are those of the matrices; leading ones are a batch")
    input: list[ConfigInput]
    output: list[ConfigOutput]
    parameters: dict[str, dict[str, str]]


class Duration(BaseModel):
    """Requests and the nanoseconds that they took together."""

    count: int
    ns: int


class InferenceStatistics(BaseModel):
    """Durations by phase; `success` and `fail` from a request's head to its result."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration = Field(description="operands to the device")
    compute_infer: Duration = Field(description="the product, its kernels' compilation, its check")
    compute_output: Duration = Field(description="results from the device")


class ModelStatistics(BaseModel):
    """Counts of a model since the server's start."""

    name: str
    version: str
    last_inference: int = Field(description="milliseconds since 1970; 0: none")
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[dict[str, Any]] = Field(description="none: every inference is a run of its own")


class Statistics(BaseModel):
    """Statistics of models."""

    model_stats: list[ModelStatistics]


class RepositoryEntry(BaseModel):
    """A model."""

    name: str
    version: str
    state: str
    reason: str


class RegionRegistration(Strict):
    """A region of POSIX shared memory."""

    key: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="as shm_open takes it")
    offset: Extent = 0
    byte_size: Extent


class RegionStatus(BaseModel):
    """A region that is registered."""

    name: str
    key: str
    offset: int
    byte_size: int
