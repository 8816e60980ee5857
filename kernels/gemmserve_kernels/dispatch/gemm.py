"""gemm: D = alpha * op(A) op(B) + beta * C, on NumPy and CuPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand, source_of
from gemmserve_kernels.algorithms.cpu import gemm as cpu
from gemmserve_kernels.device.caching import cached
from gemmserve_kernels.device.spec import DeviceSpec, cupy_errors, device_error
from gemmserve_kernels.dispatch.interchange import interchanged
from gemmserve_kernels.dispatch.known_calls import KnownCalls, Span, is_apart, pair_key, place_key
from gemmserve_kernels.dispatch.planned_call import (
    Call,
    build_problem,
    operand_key,
    operand_outline,
    plan_call,
    prepared_addresses,
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
    result = _again(a, b, c, out, options)
    return _run(a, b, c, out, options) if result is None else result


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


def _on_gpu(a: Any, b: Any, c: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """CuPy's arrays, `a` and `b` perhaps prepared."""
    import cupy

    try:
        ordinal = source_of(a).data.device_id
        if cupy.cuda.runtime.getDevice() == ordinal:
            return _on_device(ordinal, a, b, c, out, options)
        with cupy.cuda.Device(ordinal):
            result = _again(a, b, c, out, options)
            return _on_device(ordinal, a, b, c, out, options) if result is None else result
    except cupy_errors() as error:
        raise device_error(error) from error


@dataclass(frozen=True)
class _Known:
    """A call whose operands have whole elements. `fresh` makes the array that the result is written to, `of_out` is the
    span of the caller's, which takes it as it is, where there is one. `spans`: of A, B and, if any, C. `current` asks
    CuPy which device that is.
    """

    call: Call
    enqueue: Callable[[tuple[int, ...]], None] | None
    reads_c: bool
    fresh: Callable[[], Any]
    spans: tuple[Span, ...]
    of_out: Span | None
    current: Callable[[], int]


_known: Final[KnownCalls[_Known]] = KnownCalls()


def _again(a: Any, b: Any, c: Any, out: Any, options: tuple[Any, ...]) -> Any | None:
    """The result of a call that is known, of CuPy's arrays on the current device; None of any other."""
    kind: Any = type(a)
    source_a, source_b, others = a, b, None
    if c is not None or out is not None or kind is PreparedOperand or type(b) is PreparedOperand:
        source_a, source_b = source_of(a), source_of(b)
        if not is_plain_cupy(source_a, source_b, c, out):
            return None
        others = (place_key(c), place_key(out), operand_outline(a), operand_outline(b))
    elif library_of(kind) != "cupy" or type(b) is not kind:
        return None
    memory = source_a.data
    ordinal, at_a, at_b = memory.device_id, memory.ptr, source_b.data.ptr
    key = pair_key(ordinal, at_a, source_a, at_b, source_b, options)
    known = _known.find(key if others is None else (key, others))
    if known is None or known.current() != ordinal:
        return None
    try:
        if out is None:
            into = known.fresh()
        else:
            into = out
            at = [at_a, at_b] if c is None else [at_a, at_b, c.data.ptr]
            if known.of_out is None or not is_apart(out.data.ptr, known.of_out, at, known.spans):
                return None
        if known.enqueue is None:
            known.call.run(a, b, c, into)
        elif others is None:
            known.enqueue((at_a, at_b, into.data.ptr))
        else:
            of_c = (c.data.ptr,) if known.reads_c else ()
            known.enqueue((at_a, at_b, into.data.ptr, *of_c, *prepared_addresses(a, b, known.call.takes)))
    except cupy_errors() as error:
        raise device_error(error) from error
    return into


def _on_device(ordinal: int, a: Any, b: Any, c: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """The same on the current device, which is the one of that number."""
    import cupy

    given = (a, b, c)
    a, b, c = whole_elements(a), whole_elements(b), None if c is None else on_elements(c)
    source_a, source_b = source_of(a), source_of(b)
    into = None
    if out is not None and on_elements(out) is out and not overlaps(cupy, out, source_a, source_b, c):
        into = out
    outlines = operand_outline(a), operand_outline(b)
    call = cached(
        plan_call,
        ordinal,
        (operand_key(source_a), operand_key(source_b), None if c is None else operand_key(c)),
        outlines,
        None if out is None else ArrayKey.of(out),
        None if into is None else operand_key(into),
        options,
    )
    problem = call.problem
    # CuPy finds what it wants to know of a scalar type sooner than of a dtype.
    fresh = partial(cupy.ndarray, problem.result_shape, problem.result_dtype.type, None, None, problem.order)
    known = into is out and all(x is y for x, y in zip((a, b, c), given, strict=True))
    if known and is_plain_cupy(source_a, source_b, c, out):
        key = pair_key(ordinal, source_a.data.ptr, source_a, source_b.data.ptr, source_b, options)
        if c is not None or out is not None or source_a is not a or source_b is not b:
            key = (key, (place_key(c), place_key(out), *outlines))
        reads_c = c is not None and problem.beta != 0
        spans = tuple(Span.of(source_of(x)) for x in given if x is not None)
        of_out = None if out is None else Span.of(out)
        current = cupy.cuda.runtime.getDevice
        _known.keep(key, _Known(call, call.enqueue(reads_c=reads_c), reads_c, fresh, spans, of_out, current))
    if into is None:
        into = fresh()
    call.run(a, b, c, into)
    return _deliver(into, out)


def _deliver(result: Any, out: Any) -> Any:
    """`out` where there is one, holding the result."""
    if out is None:
        return result
    if result is not out:
        out[...] = result
    return out
