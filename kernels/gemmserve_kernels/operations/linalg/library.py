"""Libraries behind this room's operations, NumPy with LAPACK and CuPy with cuSOLVER; parts of stacks of matrices."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.device.spec import device_errors
from gemmserve_kernels.operations.operation import module_of
from gemmserve_kernels.problem.errors import DeviceError, DtypeUnsupported, ShapeMismatch
from gemmserve_kernels.problem.operand import DTYPES, Operand
from gemmserve_kernels.problem.validation import check_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Index = tuple[slice, ...]
"""Part of a stack of matrices: a slice for every leading axis."""

_BATCHED_LIMIT: Final = 256
"""Rows up to which cuBLAS's batched factorizations are faster than one matrix after the other (CuPy's own limit)."""
_PART_BYTES: Final = 1 << 28
"""Bytes that a part's matrices take while they are worked on, unless one takes more."""
_PART_FLOPS: Final = 1 << 31
"""Operations of a part on the host, about: what a cancellation waits for."""


@contextlib.contextmanager
def computing(out: Any) -> Iterator[Any]:
    """Give the module of an array, numpy or cupy, on its device; what vendor libraries raise becomes DeviceError."""
    xp = module_of(out)
    if xp is np:
        with np.errstate(all="ignore"):
            yield xp
        return
    with out.device, device_errors(), _vendor_errors():
        yield xp


@contextlib.contextmanager
def _vendor_errors() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DeviceError(f"cuSOLVER cannot be used: {error}") from error
    except RuntimeError as error:
        if type(error).__name__ in {"CUBLASError", "CUSOLVERError"}:
            raise DeviceError(f"the vendor's library: {error}") from error
        raise


def check_matrix(name: str, operand: Operand, function: str) -> None:
    """Check a stack of matrices of single precision at least. Raises ShapeMismatch, DtypeUnsupported."""
    if operand.dtype not in DTYPES or operand.dtype == np.float16:
        raise DtypeUnsupported(
            f"{function} takes float32, float64, complex64 and complex128, and {name} is {operand.dtype.name}"
        )
    if operand.ndim < 2:
        raise ShapeMismatch(f"{name} {operand.shape} has {operand.ndim} dimensions; a matrix has at least 2")
    check_size(name, operand.shape, operand.dtype)


def check_square(name: str, operand: Operand, function: str) -> None:
    """Check a stack of square matrices likewise."""
    check_matrix(name, operand, function)
    if operand.shape[-1] != operand.shape[-2]:
        raise ShapeMismatch(f"{name} {operand.shape} must be square, or a stack of square matrices (..., n, n)")


def operated(xp: Any, a: Any, trans: str) -> Any:
    """Return op(a): a view, or a copy where it is conjugated."""
    if trans in {"T", "C"}:
        a = a.swapaxes(-1, -2)
    return xp.conjugate(a) if trans in {"C", "R"} and a.dtype.kind == "c" else a


def adjoint(xp: Any, a: Any) -> Any:
    """Return the conjugate transposes of a stack of matrices."""
    return operated(xp, a, "C")


def diagonals(xp: Any, a: Any) -> Any:
    """Return the diagonals of a stack of matrices; CuPy's function takes no negative axes."""
    return xp.diagonal(a, axis1=a.ndim - 2, axis2=a.ndim - 1)


def stack_parts(xp: Any, shape: tuple[int, ...], flops: float, nbytes: float) -> Iterator[Index]:
    """Parts of a stack with leading axes `shape` whose matrices take `flops` and `nbytes` each; `checkpoint` is called
    before every one.
    """
    yield from _halves([(0, extent) for extent in shape], _matrices(xp is np, flops, nbytes))


def scratch_of_parts(batch: int, flops: float, nbytes: int) -> int:
    """Return the most bytes that a part of such a stack takes on a device."""
    return min(batch, _matrices(False, flops, nbytes)) * nbytes


def _matrices(on_host: bool, flops: float, nbytes: float) -> int:
    most = _PART_BYTES / max(nbytes, 1)
    return max(1, int(min(most, _PART_FLOPS / max(flops, 1)) if on_host else most))


def _halves(ranges: list[tuple[int, int]], most: int) -> Iterator[Index]:
    sizes = [stop - start for start, stop in ranges]
    if math.prod(sizes) <= most:
        if math.prod(sizes):
            checkpoint()
            yield tuple(slice(*each) for each in ranges)
        return
    axis = max(range(len(sizes)), key=sizes.__getitem__)
    start, stop = ranges[axis]
    middle = start + sizes[axis] // 2
    for half in ((start, middle), (middle, stop)):
        yield from _halves([*ranges[:axis], half, *ranges[axis + 1 :]], most)


def failing(run: Callable[[Index], object], part: Index) -> tuple[int, ...]:
    """Return the index of a matrix of `part` for which `run` raises LinAlgError, where it does so for the part."""
    ranges = [(each.start, each.stop) for each in part]
    while any(stop - start > 1 for start, stop in ranges):
        checkpoint()
        axis = max(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][0])
        start, stop = ranges[axis]
        middle = start + (stop - start) // 2
        lower = [*ranges[:axis], (start, middle), *ranges[axis + 1 :]]
        try:
            run(tuple(slice(*each) for each in lower))
        except np.linalg.LinAlgError:
            ranges = lower
        else:
            ranges[axis] = (middle, stop)
    return tuple(start for start, _ in ranges)


def vendor_solve(xp: Any, a: Any, b: Any) -> Any:
    """Return X of A X = B by LU with partial pivoting, stacks of equal leading axes. Raises LinAlgError where a pivot
    is zero.
    """
    if xp is np:
        return np.linalg.solve(a, b)
    return _raising(lambda: _each(xp, xp.linalg.solve, b, a, b))


def vendor_cholesky(xp: Any, a: Any) -> Any:
    """Return lower L of A = L L^H, of the lower triangles of a stack. Raises LinAlgError where one is not positive
    definite.
    """
    factor = np.linalg.cholesky(a) if xp is np else _raising(lambda: _each(xp, xp.linalg.cholesky, a, a))
    # NaN is no positive pivot, whatever a library makes of it.
    if not bool((diagonals(xp, factor).real > 0).all()):
        raise np.linalg.LinAlgError("Matrix is not positive definite")
    return factor


def _raising(run: Callable[[], Any]) -> Any:
    """Run what CuPy computes with the libraries' own verdict looked at, which costs a wait for the device."""
    import cupyx

    with cupyx.errstate(linalg="raise"):
        return run()


def _each(xp: Any, run: Callable[..., Any], like: Any, *stacks: Any) -> Any:
    """`run` on stacks of small matrices at once, on others one after the other."""
    if like.ndim == 2 or stacks[0].shape[-1] <= _BATCHED_LIMIT:
        return run(*stacks)
    made = xp.empty(like.shape, like.dtype)
    for index in np.ndindex(like.shape[:-2]):
        checkpoint()
        made[index] = run(*(stack[index] for stack in stacks))
    return made
