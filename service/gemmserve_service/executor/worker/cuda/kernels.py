"""Kernels that products and programs take on a device, by the shapes that they are asked with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels import GemmProblem, Operand
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.caching import cached
from gemmserve_kernels.dispatch.kernels import kernels_of
from gemmserve_kernels.freivalds.kernels import check_kernels_of
from gemmserve_service.products import build, build_step, outputs
from gemmserve_service.programs import described_operands, products_of, value_name
from gemmserve_service.schemas import ProgramParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gemmserve_kernels import DeviceSpec
    from gemmserve_kernels.device.compiler import KernelSource
    from gemmserve_service.executor.protocol import Kind
    from gemmserve_service.products import Product
    from gemmserve_service.schemas import GemmParams, GemmReduceParams


def missing_kernels(
    params: GemmParams | GemmReduceParams | ProgramParams,
    operands: Mapping[str, Kind],
    spec: DeviceSpec,
    *,
    checked: bool,
) -> list[KernelSource]:
    """Return the kernels that `spec` takes for this and that are neither in the cache nor shipped. Raises KernelError
    where it cannot run there. `checked`: with those of a check.
    """
    found: dict[KernelSource, None] = {}
    for product in _products(params, operands):
        found.update(dict.fromkeys(cached(_sources, product, spec, checked)))
    return [source for source in found if compiler.compiled_file(source, spec.arch) is None]


def _sources(product: Product, spec: DeviceSpec, checked: bool) -> tuple[KernelSource, ...]:
    launches: tuple[Any, ...] = kernels_of(product, spec)
    if checked and isinstance(product, GemmProblem):
        launches += check_kernels_of(product, spec)
    return tuple(dict.fromkeys(launch.source for launch in launches))


def _products(params: GemmParams | GemmReduceParams | ProgramParams, operands: Mapping[str, Kind]) -> Iterator[Product]:
    """Return the product, or those of a program in their order."""
    given = {name: Operand.contiguous(kind.shape, np.dtype(kind.dtype), kind.order) for name, kind in operands.items()}
    if not isinstance(params, ProgramParams):
        yield build(params, given)
        return
    for step in params.steps:
        computation = build_step(step, described_operands(step, given))
        yield from products_of(computation)
        for result, (shape, dtype, order) in outputs(computation).items():
            given[value_name(step, result)] = Operand.contiguous(shape, np.dtype(dtype), order)
