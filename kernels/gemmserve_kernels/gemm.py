"""gemm: D = alpha * op(A) op(B) + beta * C, on NumPy and CuPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.arrays import ArrayKey, check_out, native, overlaps, same_library
from gemmserve_kernels.caching import cached
from gemmserve_kernels.cpu import gemm as cpu
from gemmserve_kernels.device import DeviceSpec, device_errors
from gemmserve_kernels.dispatch import as_uniform, plan_gemm
from gemmserve_kernels.prepared import PreparedOperand, source_of
from gemmserve_kernels.problem import GemmProblem, Operand

if TYPE_CHECKING:
    from gemmserve_kernels.config import GemmConfig
    from gemmserve_kernels.dispatch import Plan


def gemm(
    a: Any,
    b: Any,
    c: Any | None = None,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    trans_a: str = "N",
    trans_b: str = "N",
    order: str = "C",
    layout: str = "interleaved",
    compute: str = "auto",
    config: GemmConfig | None = None,
    out: Any | None = None,
) -> Any:
    """D = alpha * op(A) op(B) + beta * C, an array of the library of `a`: NumPy on the CPU, CuPy on its GPU.

    `a` is (..., m, k) and `b` is (..., k, n) after `trans_a`, `trans_b`: "N", "T", "C" (conjugate transpose) or "R"
    (conjugate). Leading dimensions broadcast as in `numpy.matmul`; `c` broadcasts to (..., m, n) and is not read where
    `beta` is 0. dtypes: float16 (accumulates in float32), float32, float64, complex64, complex128; mixed ones give
    NumPy's result type. Any strides; big-endian arrays are converted. With layout="planar" all operands and the result
    are real arrays with a leading axis (re, im). `order` is the memory order of a fresh result; `out`, an array of the
    result's shape and dtype and any strides, takes the result instead. `compute` is a mode of the device
    (`DeviceSpec.compute_modes`), `config` overrides the choice of algorithm and tile. `a` and `b` may be what `prepare`
    made of them; what was prepared for another side, transposition or layout is not used. The bits are the same.

    Raises ShapeMismatch, DtypeUnsupported, ComputeUnsupported, ParameterInvalid, ConfigInfeasible, OutOfDeviceMemory,
    DeviceError.
    """
    on_cpu = same_library({"a": source_of(a), "b": source_of(b), "c": c, "out": out}) == "numpy"
    if on_cpu:
        a, b = source_of(a), source_of(b)
        a, b, c = native(a), native(b), native(c) if c is not None else None
    options = {
        "alpha": alpha,
        "beta": beta,
        "trans_a": trans_a,
        "trans_b": trans_b,
        "order": order,
        "layout": layout,
        "compute": compute,
        "config": config,
    }
    run = _on_cpu if on_cpu else _on_gpu
    return run(a, b, c, out, options)


def _planned(
    ordinal: int | None, a: ArrayKey, b: ArrayKey, c: ArrayKey | None, result: ArrayKey | None, **options: Any
) -> tuple[GemmProblem, Plan]:
    """The problem and its plan for the GPU of that number, or the CPU. Pure: cached by its callers."""
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), None if c is None else Operand.of(c), **options)
    spec = DeviceSpec.cpu() if ordinal is None else DeviceSpec.of(ordinal)
    return problem, plan_gemm(problem, spec, None if result is None else Operand.of(result))


def _on_cpu(a: Any, b: Any, c: Any, out: Any, options: dict[str, Any]) -> Any:
    key_c = None if c is None else ArrayKey.of(c)
    problem, _ = cached(_planned, None, ArrayKey.of(a), ArrayKey.of(b), key_c, None, **options)
    c = c if problem.beta != 0 else None
    result = _target(np, problem, a, b, c, out)
    cpu.run_gemm(problem, a, b, c, result)
    return _deliver(result, out)


def _on_gpu(a: Any, b: Any, c: Any, out: Any, options: dict[str, Any]) -> Any:
    import cupy

    from gemmserve_kernels.launch import CupyLauncher
    from gemmserve_kernels.simt import gemm as simt
    from gemmserve_kernels.vendor import gemm as vendor

    ordinal = a.device.id
    keys = ArrayKey.of(a), ArrayKey.of(b), None if c is None else ArrayKey.of(c)
    with a.device, device_errors():
        problem, plan = cached(_planned, ordinal, *keys, None, **options)
        c = c if problem.beta != 0 else None
        result = _target(cupy, problem, source_of(a), source_of(b), c, out)
        if result is out:
            problem, plan = cached(_planned, ordinal, *keys, ArrayKey.of(out), **options)
        if plan.blas is not None:
            vendor.run_gemm(problem, plan.blas, source_of(a), source_of(b), c, result)
        elif plan.algorithm == "simt":
            launcher = CupyLauncher(DeviceSpec.of(ordinal))
            simt.run_gemm(launcher, problem, plan.config, source_of(a), source_of(b), c, result)
        else:
            _run_own(problem, plan, ordinal, a, b, c, result)
        return _deliver(result, out)


def _run_own(problem: GemmProblem, plan: Plan, ordinal: int, a: Any, b: Any, c: Any, result: Any) -> None:
    """Runs an algorithm that has a module of its own, on operands of one dtype."""
    from gemmserve_kernels.launch import CupyLauncher

    if plan.uniform:
        problem = as_uniform(problem)[0]
        a, b = source_of(a).astype(problem.a.dtype, order="C"), source_of(b).astype(problem.b.dtype, order="C")
        c = c if c is None or problem.c is None else c.astype(problem.c.dtype, order="C")
    a, b = _taken(plan, a), _taken(plan, b)
    plan.module.run_gemm(CupyLauncher(DeviceSpec.of(ordinal)), problem, plan.config, a, b, c, result)


def _taken(plan: Plan, operand: Any) -> Any:
    """What the algorithm takes of an operand: all that was prepared, its residues, or the array alone."""
    if not isinstance(operand, PreparedOperand) or plan.arithmetic in {"3xfp16", "3xfp16-3m", "1xfp16"}:
        return operand
    residues = plan.algorithm == "ozaki" and isinstance(operand.payload, plan.module.OzakiOperand)
    return operand.payload if residues else operand.source


def _target(xp: Any, problem: GemmProblem, a: Any, b: Any, c: Any, out: Any) -> Any:
    """Where the result is computed: `out`, or a fresh array where there is none or it overlaps an operand."""
    if out is not None:
        check_out("out", out, problem.result_shape, problem.result_dtype)
        if not overlaps(xp, out, a, b, c):
            return out
    return xp.empty(problem.result_shape, problem.result_dtype, problem.order)


def _deliver(result: Any, out: Any) -> Any:
    """`out` where there is one, holding the result."""
    if out is None:
        return result
    if result is not out:
        out[...] = result
    return out
