"""gemm_reduce: reductions of alpha * op(A) op(B) over its rows or columns, in one pass, on NumPy and CuPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand, source_of
from gemmserve_kernels.algorithms.cpu import gemm_reduce as cpu_reduce
from gemmserve_kernels.device.caching import cached
from gemmserve_kernels.device.spec import DeviceSpec, cupy_errors, device_error
from gemmserve_kernels.dispatch.interchange import interchanged
from gemmserve_kernels.dispatch.known_calls import KnownCalls, Span, is_apart, pair_key, place_key
from gemmserve_kernels.dispatch.planned_call import operand_key, operand_outline, prepared_addresses, whole_elements
from gemmserve_kernels.dispatch.planned_reduce import build_problem, plan_reduce_call
from gemmserve_kernels.dispatch.routes import plan_gemm_reduce
from gemmserve_kernels.problem.arrays import (
    ArrayKey,
    check_out,
    is_plain_cupy,
    library,
    library_of,
    native,
    on_elements,
    overlaps,
    same_library,
)
from gemmserve_kernels.problem.errors import ParameterInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmReduceProblem


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
    partial: bool = False,
    out: Mapping[str, Any] | None = None,
) -> Any:
    """D[b, j] = reduce over i of pre_op(alpha * (op(A)[b] op(B)[b])[i, j]), without keeping the product.

    `reduce`: "sum", "max", "min", "mean", "sumsq" (sum of |c|^2), "absmax", "absmin", "argmax", "argmin" (by magnitude
    for complex; int64, the first index), or a list of them, evaluated in one pass. `axis`: "m" reduces rows, "n"
    columns; a list with "batch" reduces the batch too, and arguments then index (batch..., i) in C order. `pre_op`:
    "identity", "abs", "square". NaN propagates as in NumPy. `return_c` returns the product too, as "c" (alpha applied,
    pre_op not). Operands (prepared ones, too), ops, layout and compute are those of `gemm`, but for "ozaki"; complex
    results are planar where operands are. sum, mean and sumsq of float16 are float32. `reproducible=False` permits
    atomic sums. `partial=True` returns parts of a larger reduction's results, in the dtypes in which they are
    accumulated: sums and sums of squares in double, extremes as the product is (float32 for float16), no means.

    Sums and means alone are made without the product, (1^T A) B, unless config=GemmConfig(algorithm="product"). So are
    sums of squares of 32-bit products that are much larger than k, as b^H (A^H A) b with A^H A in double, on the CPU
    and on GPUs with fast double precision, where the bound of the error is below float32's rounding; on a GPU
    `algorithm="gram"` asks for that by name. Extremes of 64-bit products (max, min, argmax, argmin of real ones,
    absmax and argmax of magnitudes) are looked for in float16 on Hopper, where that is faster: only elements that may
    be one are made, in double (`algorithm="screen"`).

    Where the vendor's BLAS and a pass over its product, panel by panel, are estimated to be faster than all else,
    `auto`, `fp32`, `fp64` and `tf32` take them; `algorithm="vendor"` asks for that by name.

    Returns the array for one name without `return_c`, a dict by name for a list; arrays of the library of `a`. `out`
    may hold arrays for some or all of the names, of any strides.

    Raises ShapeMismatch, DtypeUnsupported, ComputeUnsupported, ParameterInvalid, ConfigInfeasible, OutOfDeviceMemory,
    DeviceError.
    """
    names = reduce if isinstance(reduce, str) else tuple(reduce)
    axes = axis if isinstance(axis, str) else tuple(axis)
    options = (names, axes, pre_op, alpha, trans_a, trans_b, layout, compute, config, return_c, reproducible, partial)
    results = _again(a, b, out, options) or _run(a, b, dict(out or {}), options)
    return results[reduce] if isinstance(reduce, str) and not return_c else results


def _run(a: Any, b: Any, given: dict[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    arrays = {"a": source_of(a), "b": source_of(b)} | {f"out[{name!r}]": array for name, array in given.items()}
    whose = same_library(arrays)
    if whose == "foreign":
        return _on_foreign(a, b, given, options)
    if whose == "numpy":
        return _on_cpu(native(source_of(a)), native(source_of(b)), given, options)
    return _on_gpu(a, b, given, options)


def _for_cpu(a: ArrayKey, b: ArrayKey, options: tuple[Any, ...]) -> GemmReduceProblem:
    problem = build_problem(a, b, options)
    plan_gemm_reduce(problem, DeviceSpec.cpu())  # raises where the CPU lacks the mode or the algorithm
    return problem


def _on_cpu(a: Any, b: Any, given: dict[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    problem = cached(_for_cpu, ArrayKey.of(a), ArrayKey.of(b), options)
    _check_out(problem, given)
    results = {
        name: given[name] if name in given and not overlaps(np, given[name], a, b) else np.empty(shape, dtype)
        for name, (shape, dtype) in problem.results.items()
    }
    cpu_reduce.run_gemm_reduce(problem, a, b, results)
    return _deliver(results, given)


def _on_foreign(a: Any, b: Any, given: dict[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    into = {f"out[{name!r}]": array for name, array in given.items()}
    with interchanged({"a": a, "b": b} | into, written=frozenset(into)) as (arrays, give):
        first, second, *outs = arrays.values()
        natives = dict(zip(given, outs, strict=True))
        same_library({"a": source_of(first), "b": source_of(second)} | dict(zip(into, outs, strict=True)))
        if library(source_of(first)) == "numpy":
            results = _on_cpu(native(source_of(first)), native(source_of(second)), natives, options)
        else:
            results = _on_gpu(first, second, natives, options)
        return {name: given[name] if name in given else give(result) for name, result in results.items()}


def _on_gpu(a: Any, b: Any, given: dict[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    """CuPy's arrays, `a` and `b` perhaps prepared."""
    import cupy

    try:
        ordinal = source_of(a).data.device_id
        if cupy.cuda.runtime.getDevice() == ordinal:
            return _on_device(ordinal, a, b, given, options)
        with cupy.cuda.Device(ordinal):
            return _again(a, b, given, options) or _on_device(ordinal, a, b, given, options)
    except cupy_errors() as error:
        raise device_error(error) from error


@dataclass(frozen=True)
class _Known:
    """A call of operands with whole elements, whose results are as kernels write them. `fresh`: for each result its
    name and what makes an array for it. `spans`: of A and B; `of_out`: of the caller's arrays, by name. `current` asks
    CuPy which device that is.
    """

    enqueue: Callable[[tuple[int, ...]], None]
    takes: tuple[bool, bool]
    fresh: tuple[tuple[str, Callable[[], Any]], ...]
    spans: tuple[Span, Span]
    of_out: dict[str, Span]
    current: Callable[[], int]


_known: Final[KnownCalls[_Known]] = KnownCalls()


def _again(a: Any, b: Any, out: Mapping[str, Any] | None, options: tuple[Any, ...]) -> dict[str, Any] | None:
    """Return the results of a call that is known, of CuPy's arrays on the current device; None of any other."""
    kind: Any = type(a)
    source_a, source_b, others = a, b, None
    if out or kind is PreparedOperand or type(b) is PreparedOperand:
        source_a, source_b = source_of(a), source_of(b)
        if not is_plain_cupy(source_a, source_b, *(out or {}).values()):
            return None
        others = (_places(out), operand_outline(a), operand_outline(b))
    elif library_of(kind) != "cupy" or type(b) is not kind:
        return None
    memory = source_a.data
    ordinal, at_a, at_b = memory.device_id, memory.ptr, source_b.data.ptr
    key = pair_key(ordinal, at_a, source_a, at_b, source_b, options)
    known = _known.find(key if others is None else (key, others))
    if known is None or known.current() != ordinal:
        return None
    try:
        results, addresses = {}, [at_a, at_b]
        for name, fresh in known.fresh:
            array = out.get(name) if out else None
            if array is None:
                array = fresh()
            elif not is_apart(array.data.ptr, known.of_out[name], (at_a, at_b), known.spans):
                return None
            results[name] = array
            addresses.append(array.data.ptr)
        if others is not None:
            addresses += prepared_addresses(a, b, known.takes)
        known.enqueue(tuple(addresses))
    except cupy_errors() as error:
        raise device_error(error) from error
    return results


def _places(out: Mapping[str, Any] | None) -> tuple[Any, ...]:
    return () if out is None else tuple([(name, place_key(array)) for name, array in out.items()])


def _on_device(ordinal: int, a: Any, b: Any, given: dict[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    """The same on the current device, which is the one of that number."""
    import cupy

    whole_a, whole_b = whole_elements(a), whole_elements(b)
    source_a, source_b = source_of(whole_a), source_of(whole_b)
    outlines = operand_outline(whole_a), operand_outline(whole_b)
    call = cached(plan_reduce_call, ordinal, (operand_key(source_a), operand_key(source_b)), outlines, options)
    _check_out(call.problem, given)
    # CuPy finds what it wants to know of a scalar type sooner than of a dtype.
    fresh = {name: partial(cupy.ndarray, shape, dtype.type) for name, (shape, dtype) in call.written.items()}
    targets: dict[str, Any] = {}
    for name, (_, dtype) in call.written.items():
        array = given.get(name)
        direct = array is not None and array.dtype == dtype and array.flags.c_contiguous
        if direct and on_elements(array) is array and not overlaps(cupy, array, source_a, source_b):
            targets[name] = array
        else:
            targets[name] = fresh[name]()
    known = whole_a is a and whole_b is b and all(targets[name] is array for name, array in given.items())
    enqueue = call.enqueue if call.is_written_as_returned else None
    if known and enqueue is not None and is_plain_cupy(source_a, source_b, *given.values()):
        key = pair_key(ordinal, source_a.data.ptr, source_a, source_b.data.ptr, source_b, options)
        if given or source_a is not a or source_b is not b:
            key = (key, (_places(given), *outlines))
        spans = Span.of(source_a), Span.of(source_b)
        of_out = {name: Span.of(array) for name, array in given.items()}
        current = cupy.cuda.runtime.getDevice
        _known.keep(key, _Known(enqueue, call.takes, tuple(fresh.items()), spans, of_out, current))
    call.run(whole_a, whole_b, targets)
    results: dict[str, Any] = {}
    for name, (shape, dtype) in call.problem.results.items():
        target = results[name] = targets[name]
        if target.dtype != dtype:
            results[name] = cupy.ndarray(shape, dtype)
            results[name][0], results[name][1] = target.real, target.imag
    return _deliver(results, given)


def _check_out(problem: GemmReduceProblem, given: dict[str, Any]) -> None:
    for name, array in given.items():
        if name not in problem.results:
            raise ParameterInvalid(f"out has {name!r}, which is no result of this call", "out")
        check_out(f"out[{name!r}]", array, *problem.results[name])


def _deliver(results: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The caller's arrays where there are some, holding the results."""
    for name, array in given.items():
        if results[name] is not array:
            array[...] = results[name]
    return results | given
