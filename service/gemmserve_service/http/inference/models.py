"""Models of the protocol: gemm and gemm_reduce, what they take and give, and that there are no others."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, Final

from fastapi import Path

from gemmserve_service.errors import NotFound
from gemmserve_service.http.inference.datatypes import OPERANDS, RESULTS
from gemmserve_service.http.inference.messages import (
    ConfigInput,
    ConfigOutput,
    ModelConfig,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from gemmserve_service.http.inference.paths import DEFAULT_PRIORITY, INPUTS, MODELS, PRIORITIES, VERSION

ModelPath = Annotated[str, Path(description="name of a model: gemm or gemm_reduce", examples=["gemm"])]
VersionPath = Annotated[str, Path(description="version of a model: there is 1", examples=[VERSION])]

PLATFORM: Final = "gemmserve"
SERVER: Final = ServerMetadata(
    name="gemmserve",
    version=version("gemmserve"),
    extensions=[
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "parameters",
        "schedule_policy",
        "statistics",
        "system_shared_memory",
    ],
)

_DATATYPE: Final = "FP32"  # what a client that asks no further sends
_MATRIX: Final = [-1, -1]
_OUTPUTS: Final = {"gemm": {"d": _MATRIX}, "gemm_reduce": {"sum": [-1]}}
_SAID: Final = {
    "datatypes": f"inputs: {', '.join(OPERANDS)}, all of one; outputs: {', '.join(RESULTS)}",
    "complex": "no datatype is complex: with the request's parameter complex=true every input is FP32 or FP64 with a "
    "trailing dimension of 2 (real part, imaginary part), and so is every output whose elements are complex",
    "shapes": "matrices; dimensions before the last two are a batch, and broadcast",
    "priority": f"1, the highest, to {PRIORITIES}; 0 is {DEFAULT_PRIORITY}; among the requests of one owner",
    "timeout": "microseconds, for queue and run",
}
_SAID_OF: Final = {
    "gemm": {"parameters": "alpha, beta, trans_a, trans_b, compute, config, layout: as of POST /v1/gemm"},
    "gemm_reduce": {
        "parameters": "reduce, axis, pre_op, return_c, reproducible, alpha, trans_a, trans_b, compute, config, layout: "
        "as of POST /v1/gemm-reduce",
        "outputs": "one for each reduction, of that name; c, the product, with return_c",
    },
}


def known_model(name: str, model_version: str = VERSION) -> str:
    """`name`, if it is a model's. Raises NotFound."""
    if name not in MODELS or model_version != VERSION:
        listed = " and ".join(MODELS)
        raise NotFound(f"no model {name[:40]!r} of version {model_version[:20]!r}; there are {listed}, of {VERSION}")
    return name


def metadata(model: str) -> ModelMetadata:
    """The protocol's metadata of a model."""
    return ModelMetadata(
        name=model,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[TensorMetadata(name=name, datatype=_DATATYPE, shape=_MATRIX) for name in INPUTS[model]],
        outputs=[TensorMetadata(name=name, datatype=_DATATYPE, shape=shape) for name, shape in _OUTPUTS[model].items()],
        parameters=_SAID | _SAID_OF[model],
    )


def config(model: str) -> ModelConfig:
    """Triton's configuration of a model."""
    kind = f"TYPE_{_DATATYPE}"
    said: dict[str, Any] = {name: {"string_value": text} for name, text in (_SAID | _SAID_OF[model]).items()}
    return ModelConfig(
        name=model,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=0,
        input=[ConfigInput(name=name, data_type=kind, dims=_MATRIX, optional=name == "c") for name in INPUTS[model]],
        output=[ConfigOutput(name=name, data_type=kind, dims=shape) for name, shape in _OUTPUTS[model].items()],
        parameters=said,
    )
