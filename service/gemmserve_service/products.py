"""Translation of a request's fields into the arguments of the kernels: the one place that knows both vocabularies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gemmserve_kernels import GemmConfig, GemmProblem, GemmReduceProblem, Operand
from gemmserve_kernels.device.caching import cached
from gemmserve_kernels.operations.operation import Operation
from gemmserve_kernels.operations.table import OPERATIONS
from gemmserve_service.schemas import GemmParams, GemmReduceParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_service.schemas import GemmConfigFields, OperationStep, StepParams

Product = GemmProblem | GemmReduceProblem
Computation = Product | Operation
"""One step of a program, every check of it made."""


class Stored(Protocol):
    """Metadata of a stored array (`ArrayInfo`, `ArraySpec`)."""

    @property
    def dtype(self) -> str:
        """Name, as in `wire.DTYPES`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""

    @property
    def order(self) -> str:
        """Memory order, "C" or "F"."""


class StripGemmParams(GemmParams):
    """Product of a block of a larger one in strips (`GemmConfig.strips`), by the algorithm that `config` names."""

    strips: int


class PartialReduceParams(GemmReduceParams):
    """Reduction of one block of a larger product: results as `gemm_reduce(partial=True)` has them."""


def options(params: GemmParams | GemmReduceParams) -> dict[str, Any]:
    """Keyword arguments of `gemm` or `gemm_reduce`, and of the `build` of their problems."""
    common: dict[str, Any] = {
        "alpha": params.alpha,
        "trans_a": params.trans_a,
        "trans_b": params.trans_b,
        "layout": params.layout,
        "compute": params.compute,
        "config": _config(params.config),
    }
    if isinstance(params, StripGemmParams) and common["config"] is not None:  # plain arithmetic, in its stead, has none
        common["config"] = replace(common["config"], strips=params.strips)
    if isinstance(params, GemmParams):
        return common | {"beta": params.beta, "order": params.order}
    return common | {
        "reduce": params.reduce,
        "axis": params.axis,
        "pre_op": params.pre_op,
        "return_c": params.return_c,
        "reproducible": params.reproducible,
        "partial": isinstance(params, PartialReduceParams),
    }


def build(params: GemmParams | GemmReduceParams, operands: Mapping[str, Operand]) -> Product:
    """The problem, every check of it made. Raises KernelError."""
    if isinstance(params, GemmParams):
        return GemmProblem.build(operands["a"], operands["b"], operands.get("c"), **options(params))
    return GemmReduceProblem.build(operands["a"], operands["b"], **options(params))


def build_operation(step: OperationStep, operands: Mapping[str, Operand]) -> Operation:
    """The operation that a step is, every check of it made: its fields are the parameters. Raises KernelError."""
    taken = {"id", "op", *step.operands}
    parameters = {name: getattr(step, name) for name in type(step).model_fields if name not in taken}
    return OPERATIONS[step.op](**operands, **parameters)


def build_step(params: StepParams, operands: Mapping[str, Operand]) -> Computation:
    """`build` or `build_operation`. Raises KernelError."""
    if isinstance(params, GemmParams | GemmReduceParams):
        return build(params, operands)
    return build_operation(params, operands)


def build_stored(params: GemmParams | GemmReduceParams, operands: Mapping[str, Stored]) -> Product:
    """`build`, on arrays of the store; worked out once for products that come again. Raises KernelError."""
    arrays = tuple((name, array.shape, array.dtype, array.order) for name, array in operands.items())
    return cached(_build_alike, params, arrays)


def _build_alike(
    params: GemmParams | GemmReduceParams, arrays: tuple[tuple[str, tuple[int, ...], str, str], ...]
) -> Product:
    return build(
        params, {name: Operand.contiguous(shape, np.dtype(dtype), order) for name, shape, dtype, order in arrays}
    )


def operand_of(array: Stored) -> Operand:
    """The operand that an array of the store is to a plan."""
    return Operand.contiguous(array.shape, np.dtype(array.dtype), array.order)


def outputs(problem: Computation) -> dict[str, tuple[tuple[int, ...], np.dtype[Any], str]]:
    """Return shape, dtype and memory order of every result, by name."""
    if isinstance(problem, Operation):
        return {name: (result.shape, result.dtype, result.order) for name, result in problem.results.items()}
    if isinstance(problem, GemmProblem):
        return {"d": (problem.result_shape, problem.result_dtype, problem.order)}
    return {name: (shape, dtype, "C") for name, (shape, dtype) in problem.results.items()}


def _config(fields: GemmConfigFields | None) -> GemmConfig | None:
    return None if fields is None else GemmConfig(**fields.model_dump(exclude_none=True))
