"""Elements computed again, shared by NumPy, the CPU shim and the device: what must come out of any of them."""

from __future__ import annotations

import numpy as np
from freivalds_cases import build, rounded

from gemmserve_kernels.freivalds import sampled, sampled_device, sampled_host
from gemmserve_kernels.freivalds.finding import INPUT_ROUNDING, tiny_of
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.operand import real_dtype


def on_host(problem, a, b, c, d, seed):
    with np.errstate(all="ignore"):
        return sampled_host.figures(problem, a, b, c, d, seed)


def on(machine):
    """The elements as `machine` computes them."""

    def figures(problem, a, b, c, d, seed):
        held = [None if x is None else machine.put(x) for x in (a, b, c, d)]
        word = machine.put(np.array([seed], np.uint64))
        return machine.get(sampled_device.figures(machine.launcher, problem, *held, word))

    return figures


def places(problem, a, b, d, seed):
    """(products, elements) rows, and columns, that are looked at."""
    gather = sampled_host._Gather.of
    operands = gather(problem, a, problem.trans_a), gather(problem, b, problem.trans_b)
    with np.errstate(all="ignore"):
        return sampled_host.places(
            sampled.Choice.of(problem), operands, problem.k, gather(problem, d, "N"), seed, slice(0, problem.batch)
        )  # fmt: skip


def parts(x):
    return np.abs(x.real) + np.abs(x.imag)


def of_all(problem, a, b, c, d):
    """(products, m, n) excesses of every element, from the products themselves; finite data."""
    wide = np.complex128 if problem.dtype.kind == "c" else np.float64
    op_a, op_b = (
        reference._op(reference.logical(problem, x), trans).astype(wide)
        for x, trans in ((a, problem.trans_a), (b, problem.trans_b))
    )
    left = reference.logical(problem, d).astype(np.clongdouble if wide is np.complex128 else np.longdouble)
    left = left - reference.oracle_gemm(problem, a, b, c)
    size = parts(op_a) @ parts(op_b)
    if problem.compute == "3xfp16-3m":
        size = np.sqrt((parts(op_a) ** 2).sum(-1))[..., :, None] * np.sqrt((parts(op_b) ** 2).sum(-2))[..., None, :]
    weight = parts(np.complex128(problem.alpha)) * size
    if c is not None and problem.beta != 0:
        weight = weight + parts(np.complex128(problem.beta)) * parts(reference.logical(problem, c).astype(wide))
    terms = (op_a != 0).astype(float) @ (op_b != 0).astype(float) * (2 if problem.dtype.kind == "c" else 1)
    eps = float(np.finfo(real_dtype(problem.accumulate)).eps)
    unit = (np.sqrt(terms) + 2) * eps + float(np.finfo(real_dtype(problem.dtype)).eps)
    unit = unit + 2 * INPUT_ROUNDING.get(problem.compute, 0.0)
    error = np.maximum(np.abs(left.real), np.abs(left.imag)).astype(np.float64)
    ratio = error / (unit * weight + tiny_of(problem))
    return np.broadcast_to(ratio, (*problem.batch_shape, problem.m, problem.n)).reshape(-1, problem.m, problem.n)


def assert_elements(figures, a, b, c=None, *, d=None, seed=11, **options):
    """The worst element of each product is the one that the products themselves give; the figures."""
    problem = build(a, b, c, **options)
    d = rounded(problem, a, b, c) if d is None else d
    every = of_all(problem, a, b, c, d)
    rows, columns = places(problem, a, b, d, seed)
    assert ((rows >= 0) & (rows < problem.m)).all()
    assert ((columns >= 0) & (columns < problem.n)).all()
    found = figures(problem, a, b, c, d, seed)
    assert found.shape == (problem.batch, 4)
    of_products = np.arange(problem.batch)[:, None]
    # Of 64-bit data the reference has 11 bits more than the result.
    slack = {"rtol": 5e-3, "atol": 2e-4} if problem.accumulate.char in "dD" else {"rtol": 1e-6, "atol": 1e-7}
    np.testing.assert_allclose(found[:, 0], every[of_products, rows, columns].max(-1), **slack)
    at = tuple(found[:, 2:].astype(int).T)
    np.testing.assert_allclose(found[:, 0], every[of_products[:, 0], *at], **slack)
    return found
