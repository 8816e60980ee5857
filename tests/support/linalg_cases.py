"""Matrices for the tests of linear algebra, and an operation run on NumPy arrays into a result of garbage."""

from __future__ import annotations

import numpy as np

from gemmserve_kernels import Operand

DTYPES = ["f4", "f8", "c8", "c16"]
TRANS = ["N", "T", "C", "R"]


def run(kind, arrays, **parameters):
    """(the operation, its result, what a check of it finds)."""
    operation = kind.build(**{name: Operand.of(array) for name, array in arrays.items()}, **parameters)
    shape, dtype, _ = operation.results["d"]
    out = np.full(shape, np.nan, dtype)
    operation.run(arrays, {"d": out})
    return operation, out, operation.find(arrays, {"d": out}, 5)


def random(rng, shape, dtype):
    made = rng.standard_normal(shape)
    return (made + 1j * rng.standard_normal(shape) if dtype[0] == "c" else made).astype(dtype)


def adjoint(a):
    return a.conj().swapaxes(-1, -2)


def positive(rng, shape, dtype):
    """Hermitian positive definite matrices of a moderate condition."""
    a = random(rng, shape, "c16" if dtype[0] == "c" else "f8")
    n = shape[-1]
    return (a @ adjoint(a) + n * np.eye(n)).astype(dtype)


def op(a, trans):
    a = a.swapaxes(-1, -2) if trans in "TC" else a
    return a.conj() if trans in "CR" else a


def eps(dtype):
    return float(np.finfo(dtype).eps)
