"""Who competes in a case of the suite: ours as dispatched, our algorithms by name, prepared operands, rivals."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import half
import newest_blas
import numpy as np
from suite import by_residues

from gemmserve_kernels import ConfigInfeasible, DeviceError, GemmConfig, gemm, prepare
from gemmserve_kernels.bench.targets import by_hand, reduced, run_case
from gemmserve_kernels.dispatch.routes import WITHOUT_PRODUCT, candidates, plan
from gemmserve_kernels.problem.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable

PREPARABLE = ("3xfp16", "3xfp16-3m", "1xfp16", "ozaki")
"""What the tensor cores multiply where operands can be prepared."""
RIVAL_COMPUTE = {"tf32": "tf32", "1xtf32": "tf32", "fp64": "fp64"}
"""What the vendor's BLAS is asked for beside a mode of ours; plain arithmetic beside the others."""
VENDOR = GemmConfig(algorithm="vendor")
BLAS_LIBRARIES = ("libcublas.so.13", "libcublas.so.12")


@dataclass(frozen=True)
class Contender:
    """One way to compute a case. `run(i)` uses the i-th set of operands and returns the results by name.

    `arithmetic` is what the tensor cores multiply, "plain", or "" where it is not ours to say. `case`: what it
    computes, where that is another case than everybody's. `bits`: those of the mantissa that its last product kept.
    """

    who: str
    algorithm: str
    arithmetic: str
    run: Callable[[int], dict[str, Any]]
    case: Any = None
    bits: Callable[[], int] | None = None


def contenders(case, sets, spec, *, forced=True, prepared=False, residues=False):
    """Ours first, then our other algorithms by name, with other numbers of residues, on prepared operands, the rivals.
    Raises KernelError.
    """
    if case.op != "gemm":
        return _reducers(case, sets, spec)
    chosen = plan(case.problem(), spec)
    found = [_ours(case, sets, "gemmserve", chosen)]
    if forced and case.config is None:
        others = {each.algorithm: each for each in candidates(case.problem(), spec)}
        found += [
            _ours(replace(case, config=GemmConfig(algorithm=name)), sets, name, each)
            for name, each in others.items()
            if name not in {chosen.algorithm, "vendor"}
        ]
    if residues:
        found += _by_residues(case, sets, spec)
    if prepared and chosen.arithmetic in PREPARABLE:
        found.append(_prepared(case, sets, chosen))
    return found + _rivals(case, sets, spec) + _newest(case, sets)


def _reducers(case, sets, spec):
    """Ours, the product made and reduced by us where ours does without it, and by the rival; our product alone, to see
    what the reduction adds to it.
    """
    chosen = plan(case.problem(), spec)
    found = [_ours(case, sets, "gemmserve", chosen)]
    if chosen.algorithm in WITHOUT_PRODUCT and case.config is None:
        whole = replace(case, config=GemmConfig(algorithm="product"))
        found.append(_ours(whole, sets, "product", plan(whole.problem(), spec)))
    else:
        alone = replace(case, op="gemm")
        found.append(replace(_ours(alone, sets, "our product", plan(alone.problem(), spec)), case=alone))
    found.append(_by_hand(case, sets))
    return [*found, *([_unrounded(case, sets)] if case.dtype == "float16" else []), *_newest(case, sets)]


def modes(case, sets, spec, computes):
    """Ours in each mode that the device and the data have, and the rivals: what the tables of errors compare."""
    found = []
    for compute in computes:
        named = replace(case, compute=compute)
        try:
            found.append(_ours(named, sets, compute, plan(named.problem(), spec)))
        except KernelError:
            continue
    return found + _rivals(case, sets, spec)


def _rivals(case, sets, spec):
    found = [_vendor(case, sets, spec, RIVAL_COMPUTE.get(case.compute, "auto"), "vendor BLAS")]
    if found == [None]:  # strides or conjugations that a BLAS call cannot express: CuPy copies instead
        found = [_by_hand(case, sets)]
    if case.compute in {"auto", "3xfp16"} and case.dtype in {"complex64", "float32"}:
        found.append(_vendor(case, sets, spec, "tf32", "cuBLAS FAST_TF32"))
    plain = case.batch == 1 and case.trans_a == case.trans_b == "N" and (case.alpha, case.beta) == (1, 0)
    if case.dtype == "complex128" and case.layout == "interleaved" and plain and spec.kind == "cuda":
        found.append(Contender("cuBLAS zgemm3m", "vendor", "", lambda i: zgemm3m(**sets[i % len(sets)])))
    return [each for each in found if each is not None]


def _ours(case, sets, who, chosen):
    return Contender(who, chosen.algorithm, chosen.arithmetic, lambda i: run_case(case, sets[i % len(sets)]))


def _by_hand(case, sets):
    import cupy

    return Contender("cupy", "cupy", "", lambda i: by_hand(cupy, case, sets[i % len(sets)]))


def _unrounded(case, sets):
    """The vendor's float16 product with a float32 result, reduced by CuPy."""
    import cupy

    def run(i):
        arrays = sets[i % len(sets)]
        return reduced(cupy, case, half.product(arrays["a"], arrays["b"], case.trans_a, case.trans_b))

    return Contender("cuBLAS to float32", "vendor", "", run)


def _by_residues(case, sets, spec):
    found = []
    for count, named in by_residues(case):
        try:
            found.append(_ours(named, sets, f"ozaki {count}", plan(named.problem(), spec)))
        except KernelError:  # a device without the algorithm
            continue
    return found


def _newest(case, sets):
    """A newer version of the vendor's library, where one has been named; it multiplies, and CuPy reduces."""
    import cupy

    if case.op == "gemm":
        return [
            Contender(mode.name, "vendor", "", lambda i, run=run: {"d": run(i)}, bits=bits if mode.emulated else None)
            for mode, run, bits in newest_blas.rivals(case, sets)
        ]
    return [
        Contender(mode.name, "vendor", "", lambda i, run=run: reduced(cupy, case, run(i)))
        for mode, run, _ in newest_blas.rivals(case, sets)
        if not mode.emulated
    ]


def _vendor(case, sets, spec, compute, who):
    named = replace(case, compute=compute, config=VENDOR)
    try:
        chosen = plan(named.problem(), spec)
    except (ConfigInfeasible, KernelError):
        return None
    return Contender(who, "vendor", "", _ours(named, sets, who, chosen).run)


def _prepared(case, sets, chosen):
    """The sets' first few: planes or residues are larger than what they are made of."""
    kept = [
        {
            side: prepare(arrays[side], side, case.compute, trans=getattr(case, f"trans_{side}"), layout=case.layout)
            for side in "ab"
        }
        for arrays in sets[:4]
    ]
    options = case.options()
    arguments = [(pair["a"], pair["b"], arrays.get("c")) for pair, arrays in zip(kept, sets, strict=False)]
    return Contender(
        "prepared",
        chosen.algorithm,
        chosen.arithmetic,
        lambda i: {"d": gemm(*arguments[i % len(arguments)], **options)},
    )


# ---- cuBLAS's Gauss variant, which CuPy does not wrap


def zgemm3m(a, b):
    """A B of complex128 matrices in C order."""
    import cupy

    (m, k), n = a.shape, b.shape[1]
    d = cupy.empty((m, n), np.complex128)
    library, handle = _blas()
    _check(library.cublasSetStream_v2(handle, ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)))
    left, right, result = (ctypes.c_void_p(x.data.ptr) for x in (b, a, d))
    one, zero = (ctypes.byref(_factors(), offset) for offset in (0, 16))
    _check(library.cublasZgemm3m(handle, 0, 0, n, m, k, one, left, n, right, k, zero, result, n))
    return {"d": d}


@cache
def _factors():
    return (ctypes.c_double * 4)(1, 0, 0, 0)


@cache
def _blas():
    """The library and a handle of its own: it may be another copy than CuPy's."""
    for name in BLAS_LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        handle = ctypes.c_void_p()
        _check(library.cublasCreate_v2(ctypes.byref(handle)))
        return library, handle
    raise DeviceError("cuBLAS cannot be loaded")


def _check(status):
    if status:
        raise DeviceError(f"cuBLAS: status {status}")
