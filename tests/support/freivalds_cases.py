"""Freivalds' check, shared by NumPy, the CPU shim and the device: what must come out of any of them."""

from __future__ import annotations

import numpy as np

from gemmserve_kernels.freivalds import device, finding, host
from gemmserve_kernels.freivalds.signs import VECTORS, signs
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand


def build(a, b, c=None, **options):
    return GemmProblem.build(Operand.of(a), Operand.of(b), None if c is None else Operand.of(c), **options)


def rounded(problem, a, b, c=None):
    """The exact result as it is stored."""
    d = reference.oracle_gemm(problem, a, b, c)
    with np.errstate(all="ignore"):
        if problem.planar:
            return np.stack([d.real, d.imag]).astype(problem.result_dtype)
        return np.asarray(d, order=problem.order).astype(problem.result_dtype, order="K")


def of_rows(problem, a, b, c, d, seed):
    """(error, norm, ratio) of each row, from the products themselves."""
    wide = np.complex128 if problem.dtype.kind == "c" else np.float64

    def op(array, trans="N"):
        return reference._op(reference.logical(problem, array), trans).astype(wide)

    of_a, of_b = op(a, problem.trans_a), op(b, problem.trans_b)
    expected = problem.alpha * (of_a @ of_b)
    size = abs(problem.alpha) ** 2 * ((abs(of_a) ** 2) @ (abs(of_b) ** 2))
    if c is not None and problem.beta != 0:
        expected, size = expected + problem.beta * op(c), size + abs(problem.beta * op(c)) ** 2
    x = signs(seed, problem.n)
    wrong, right = (op(d) - expected) @ x, expected @ x
    size = (size + abs(op(d)) ** 2).sum(-1) + finding.floor_of(problem)
    error = (abs(wrong) ** 2).sum(-1)
    ratio = np.divide(error, VECTORS * size, out=np.zeros_like(error), where=error != 0)
    return error, (abs(right) ** 2).sum(-1), ratio


def on_host(problem, a, b, c, d, seed):
    with np.errstate(all="ignore"):
        return host.figures(problem, a, b, c, d, seed)


def on(machine):
    """The check as `machine` computes it."""

    def figures(problem, a, b, c, d, seed):
        held = [None if x is None else machine.put(x) for x in (a, b, c, d)]
        return machine.get(device.figures(machine.launcher, problem, *held, seed))

    return figures


def assert_figures(figures, a, b, c=None, *, d=None, seed=11, **options):
    """The same numbers as the products themselves give, up to the roundings of double precision; the finding."""
    problem = build(a, b, c, **options)
    d = rounded(problem, a, b, c) if d is None else d
    with np.errstate(all="ignore"):
        error, norm, ratio = (x.reshape(problem.batch, problem.m) for x in of_rows(problem, a, b, c, d, seed))
    found = figures(problem, a, b, c, d, seed)
    assert found.shape[0] == problem.batch
    assert found.shape[2] == 3
    # Cancellation leaves the rounding of double precision: of n and k terms, relative to the row's size.
    slack = (2 * (problem.n + problem.k) * 2.0**-53) ** 2 * norm.sum(-1).max(initial=1.0)
    np.testing.assert_allclose(found[..., 0].sum(-1), error.sum(-1), rtol=1e-5, atol=slack * problem.m)
    np.testing.assert_allclose(found[..., 1].sum(-1), norm.sum(-1), rtol=1e-9)
    np.testing.assert_allclose(found[..., 2].max(-1), ratio.max(-1), rtol=1e-5, atol=1e-28)
    return finding.judged(problem, found)
