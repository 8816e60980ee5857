"""gemm: D = alpha * op(A) op(B) + beta * C, on NumPy and CuPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gemmserve_kernels.algorithms.common.prepared_operand import source_of
from gemmserve_kernels.algorithms.cpu import gemm as cpu
from gemmserve_kernels.device.caching import cached
from gemmserve_kernels.device.spec import DeviceSpec, cupy_errors, device_error
from gemmserve_kernels.dispatch.interchange import interchanged
from gemmserve_kernels.dispatch.known_calls import PHASE, KnownCalls, Span, is_apart, place_key
from gemmserve_kernels.dispatch.planned_call import (
    Call,
    build_problem,
    operand_key,
    operand_outline,
    plan_call,
    whole_elements,
)
from gemmserve_kernels.dispatch.routes import plan_gemm
from gemmserve_kernels.problem.arrays import (
    ArrayKey,
    check_out,
    is_plain_cupy,
    library_of,
    native,
    on_elements,
    overlaps,
    same_library,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmProblem

_OUT: Final = frozenset({"out"})


def gemm(
    a: Any,
    b: Any,
    c: Any | None = None,
    *,
    alpha: complex = 1,
    beta: complex | None = None,
    trans_a: str = "N",
    trans_b: str = "N",
    order: str = "C",
    layout: str = "interleaved",
    compute: str = "auto",
    config: GemmConfig | None = None,
    out: Any | None = None,
) -> Any:
    """D = alpha * op(A) op(B) + beta * C, an array of the library of `a`: NumPy on the CPU, CuPy on its GPU, or another
    that shares its memory by DLPack or `__cuda_array_interface__` (torch, JAX), on its stream and without a copy.

    `a` is (..., m, k) and `b` is (..., k, n) after `trans_a`, `trans_b`: "N", "T", "C" (conjugate transpose) or "R"
    (conjugate). Leading dimensions broadcast as in `numpy.matmul`; `c` broadcasts to (..., m, n); it is added unless
    `beta` says otherwise (None: 1 where there is a c, else 0), and not read where that is 0. dtypes: float16
    (accumulates in float32), float32, float64, complex64, complex128; mixed ones give NumPy's result type. Any strides;
    big-endian arrays are converted. With layout="planar" all operands and the result are real arrays with a leading
    axis (re, im). `order` is the memory order of a fresh result; `out`, an array of the result's shape and dtype and
    any strides, takes the result instead. `compute` is a mode of the device (`DeviceSpec.compute_modes`), `config`
    overrides the choice of algorithm and tile. `a` and `b` may be what `prepare` made of them; what was prepared for
    another side, transposition or layout is not used. The bits are the same.

    Raises ShapeMismatch, DtypeUnsupported, ComputeUnsupported, ParameterInvalid, ConfigInfeasible, OutOfDeviceMemory,
    DeviceError.
    """
    options = (alpha, beta, trans_a, trans_b, order, layout, compute, config)
    if c is None and out is None and (result := _again(a, b, options)) is not None:
        return result
    if is_plain_cupy(source_of(a), source_of(b), c, out):
        return _on_gpu(a, b, c, out, options, plain=True)
    return _run(a, b, c, out, options)


def _run(a: Any, b: Any, c: Any, out: Any, options: tuple[Any, ...]) -> Any:
    whose = same_library({"a": source_of(a), "b": source_of(b), "c": c, "out": out})
    if whose == "foreign":
        with interchanged({"a": a, "b": b, "c": c, "out": out}, written=_OUT) as (arrays, give):
            result = _run(arrays["a"], arrays["b"], arrays["c"], arrays["out"], options)
            return give(result) if out is None else out
    if whose == "numpy":
        return _on_cpu(native(source_of(a)), native(source_of(b)), None if c is None else native(c), out, options)
    return _on_gpu(a, b, c, out, options)


def _on_cpu(a: Any, b: Any, c: Any, out: Any, options: tuple[Any, ...]) -> Any:
    key_c = None if c is None else ArrayKey.of(c)
    problem = cached(_for_cpu, ArrayKey.of(a), ArrayKey.of(b), key_c, options)
    c = c if problem.beta != 0 else None
    if out is not None:
        check_out("out", out, problem.result_shape, problem.result_dtype)
    if out is None or overlaps(np, out, a, b, c):
        result = np.empty(problem.result_shape, problem.result_dtype, problem.order)
    else:
        result = out
    cpu.run_gemm(problem, a, b, c, result)
    return _deliver(result, out)


def _for_cpu(a: ArrayKey, b: ArrayKey, c: ArrayKey | None, options: tuple[Any, ...]) -> GemmProblem:
    problem = build_problem(a, b, c, options)
    plan_gemm(problem, DeviceSpec.cpu())  # raises where the CPU lacks the mode or the algorithm
    return problem


def _on_gpu(a: Any, b: Any, c: Any, out: Any, options: tuple[Any, ...], *, plain: bool = False) -> Any:
    """CuPy's arrays, `a` and `b` perhaps prepared. `plain`: it is known that they are CuPy's."""
    import cupy

    try:
        ordinal = source_of(a).data.device_id
        if cupy.cuda.runtime.getDevice() == ordinal:
            return _on_device(ordinal, a, b, c, out, options, plain=plain)
        with cupy.cuda.Device(ordinal):
            return _on_device(ordinal, a, b, c, out, options, plain=plain)
    except cupy_errors() as error:
        raise device_error(error) from error


@dataclass(frozen=True)
class _Fresh:
    """A call without C whose operands have whole elements and whose result is fresh. `array`, `current`: CuPy's, to
    make one and to ask which device is current.
    """

    enqueue: Callable[[tuple[int, int, int]], None]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    array: Callable[..., Any]
    current: Callable[[], int]


_fresh: Final[KnownCalls[_Fresh]] = KnownCalls()


def _again(a: Any, b: Any, options: tuple[Any, ...]) -> Any | None:
    """The result of a call that is known, of CuPy's arrays on the current device; None of any other."""
    kind: Any = type(a)
    if library_of(kind) != "cupy" or type(b) is not kind:
        return None
    memory = a.data
    ordinal, at_a, at_b = memory.device_id, memory.ptr, b.data.ptr
    known = _fresh.find(
        (ordinal, at_a & PHASE, a.shape, a.strides, a.dtype, at_b & PHASE, b.shape, b.strides, b.dtype, options)
    )
    if known is None or known.current() != ordinal:
        return None
    try:
        into = known.array(known.shape, known.dtype, None, None, known.order)
        known.enqueue((at_a, at_b, into.data.ptr))
    except cupy_errors() as error:
        raise device_error(error) from error
    return into


@dataclass(frozen=True)
class _Known:
    """A call whose operands have whole elements. `spans`: of A, B and, if any, C; `of_out` of the caller's array, which
    takes the result as it is; None where there is none.
    """

    call: Call
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    spans: tuple[Span, ...]
    of_out: Span | None


_known: Final[KnownCalls[_Known]] = KnownCalls()


def _on_device(ordinal: int, a: Any, b: Any, c: Any, out: Any, options: tuple[Any, ...], *, plain: bool) -> Any:
    """The same on the current device, which is the one of that number."""
    import cupy

    key: tuple[Any, ...] | None = None
    of_pair = None
    source_a, source_b = source_of(a), source_of(b)
    prepared = source_a is not a or source_b is not b
    if plain:
        at_a, at_b = source_a.data.ptr, source_b.data.ptr
        of_pair = (
            *(ordinal, at_a & PHASE, source_a.shape, source_a.strides, source_a.dtype),
            *(at_b & PHASE, source_b.shape, source_b.strides, source_b.dtype, options),
        )
        key = (of_pair, None if c is None else place_key(c), None if out is None else place_key(out))
        if prepared:
            key = (*key, operand_outline(a), operand_outline(b))
        known = _known.find(key)
        if known is not None:
            if known.of_out is None:
                into = cupy.ndarray(known.shape, known.dtype, order=known.order)
                known.call.run(a, b, c, into)
                return into
            at = (at_a, at_b) if c is None else (at_a, at_b, c.data.ptr)
            if is_apart(out.data.ptr, known.of_out, at, known.spans):
                known.call.run(a, b, c, out)
                return out
    given = (a, b, c)
    a, b, c = whole_elements(a), whole_elements(b), None if c is None else on_elements(c)
    source_a, source_b = source_of(a), source_of(b)
    into = None
    if out is not None and on_elements(out) is out and not overlaps(cupy, out, source_a, source_b, c):
        into = out
    call = cached(
        plan_call,
        ordinal,
        (operand_key(source_a), operand_key(source_b), None if c is None else operand_key(c)),
        (operand_outline(a), operand_outline(b)),
        None if out is None else ArrayKey.of(out),
        None if into is None else operand_key(into),
        options,
    )
    problem = call.problem
    if key is not None and into is out and all(x is y for x, y in zip((a, b, c), given, strict=True)):
        result = problem.result_shape, problem.result_dtype, problem.order
        if c is None and out is None and not prepared and (enqueue := call.enqueue) is not None:
            _fresh.keep(of_pair, _Fresh(enqueue, *result, cupy.ndarray, cupy.cuda.runtime.getDevice))
        spans = tuple(Span.of(source_of(x)) for x in given if x is not None)
        _known.keep(key, _Known(call, *result, spans, None if out is None else Span.of(out)))
    if into is None:
        into = cupy.ndarray(problem.result_shape, problem.result_dtype, order=problem.order)
    call.run(a, b, c, into)
    return _deliver(into, out)


def _deliver(result: Any, out: Any) -> Any:
    """`out` where there is one, holding the result."""
    if out is None:
        return result
    if result is not out:
        out[...] = result
    return out
