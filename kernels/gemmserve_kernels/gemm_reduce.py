"""gemm_reduce: reductions of alpha * op(A) op(B) over its rows or columns, in one pass, on NumPy and CuPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.arrays import ArrayKey, check_out, native, overlaps, same_library
from gemmserve_kernels.caching import cached
from gemmserve_kernels.cpu import gemm_reduce as cpu_reduce
from gemmserve_kernels.device import DeviceSpec, device_errors
from gemmserve_kernels.dispatch import plan_gemm_reduce
from gemmserve_kernels.errors import ParameterInvalid
from gemmserve_kernels.problem import GemmReduceProblem, Operand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gemmserve_kernels.config import GemmConfig
    from gemmserve_kernels.dispatch import Plan


def gemm_reduce(
    a: Any,
    b: Any,
    *,
    reduce: str | Sequence[str] = "sum",
    axis: str | Sequence[str] = "m",
    pre_op: str = "identity",
    alpha: complex = 1,
    trans_a: str = "N",
    trans_b: str = "N",
    layout: str = "interleaved",
    compute: str = "auto",
    config: GemmConfig | None = None,
    return_c: bool = False,
    reproducible: bool = True,
    out: Mapping[str, Any] | None = None,
) -> Any:
    """D[b, j] = reduce over i of pre_op(alpha * (op(A)[b] op(B)[b])[i, j]), without keeping the product.

    `reduce`: "sum", "max", "min", "mean", "sumsq" (sum of |c|^2), "absmax", "absmin", "argmax", "argmin" (by magnitude
    for complex; int64, the first index), or a list of them, evaluated in one pass. `axis`: "m" reduces rows, "n"
    columns; a list with "batch" reduces the batch too, and arguments then index (batch..., i) in C order. `pre_op`:
    "identity", "abs", "square". NaN propagates as in NumPy. `return_c` returns the product too, as "c" (alpha applied,
    pre_op not). Operands, ops, layout and compute are those of `gemm`; complex results are planar where operands are.
    sum, mean and sumsq of float16 are float32. `reproducible=False` permits atomic sums.

    Returns the array for one name without `return_c`, else a dict by name; arrays of the library of `a`. `out` may hold
    arrays for some or all of the names, of any strides.

    Raises ShapeMismatch, DtypeUnsupported, ComputeUnsupported, ParameterInvalid, ConfigInfeasible, OutOfDeviceMemory,
    DeviceError.
    """
    given = dict(out or {})
    on_cpu = same_library({"a": a, "b": b} | {f"out[{name!r}]": array for name, array in given.items()}) == "numpy"
    if on_cpu:
        a, b = native(a), native(b)
    options = {
        "reduce": reduce if isinstance(reduce, str) else tuple(reduce),
        "axis": axis if isinstance(axis, str) else tuple(axis),
        "pre_op": pre_op,
        "alpha": alpha,
        "trans_a": trans_a,
        "trans_b": trans_b,
        "layout": layout,
        "compute": compute,
        "config": config,
        "return_c": return_c,
        "reproducible": reproducible,
    }
    run = _on_cpu if on_cpu else _on_gpu
    results = run(a, b, given, options)
    return results if len(results) > 1 else next(iter(results.values()))


def _planned(ordinal: int | None, a: ArrayKey, b: ArrayKey, **options: Any) -> tuple[GemmReduceProblem, Plan]:
    """The problem and its plan for the GPU of that number, or the CPU. Pure: cached by its callers."""
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), **options)
    return problem, plan_gemm_reduce(problem, DeviceSpec.cpu() if ordinal is None else DeviceSpec.of(ordinal))


def _on_cpu(a: Any, b: Any, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    problem, _ = cached(_planned, None, ArrayKey.of(a), ArrayKey.of(b), **options)
    results = _targets(np, problem, a, b, given)
    cpu_reduce.run_gemm_reduce(problem, a, b, results)
    return _deliver(results, given)


def _on_gpu(a: Any, b: Any, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    import cupy

    from gemmserve_kernels.launch import CupyLauncher
    from gemmserve_kernels.simt import gemm as simt

    ordinal = a.device.id
    with a.device, device_errors():
        problem, plan = cached(_planned, ordinal, ArrayKey.of(a), ArrayKey.of(b), **options)
        results = _targets(cupy, problem, a, b, given)
        simt.run_gemm_reduce(CupyLauncher(DeviceSpec.of(ordinal)), problem, plan.config, a, b, results)
        return _deliver(results, given)


def _targets(xp: Any, problem: GemmReduceProblem, a: Any, b: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Where each result is computed: the caller's array, or a fresh one where there is none or it overlaps."""
    for name, array in given.items():
        if name not in problem.results:
            raise ParameterInvalid(f"out has {name!r}, which is no result of this call", "out")
        check_out(f"out[{name!r}]", array, *problem.results[name])
    return {
        name: given[name] if name in given and not overlaps(xp, given[name], a, b) else xp.empty(shape, dtype)
        for name, (shape, dtype) in problem.results.items()
    }


def _deliver(results: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The caller's arrays where there are some, holding the results."""
    for name, array in given.items():
        if results[name] is not array:
            array[...] = results[name]
    return results | given
