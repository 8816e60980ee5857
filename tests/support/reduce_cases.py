"""Reductions on tensor cores, shared by the CPU shim and the device: what must come out of any of their kernels."""

from __future__ import annotations

import numpy as np
from simt_cases import random

from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmReduceProblem, Operand

COMPLEX = ("sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin")
REAL = (*COMPLEX, "max", "min")
ELEMENT = {"3xtf32": 2e-6, "3xfp16": 2e-6, "6xbf16": 2e-6, "9xbf16": 2e-6, "auto": 2e-6, "1xtf32": 2e-3, "tf32": 2e-3}
"""Error of an element of the product, relative to the norms of its row and column: a few roundings of each mode."""


def build(a, b, **options):
    return GemmReduceProblem.build(Operand.of(a), Operand.of(b), **options)


def run(machine, algorithm, a, b, *, config=None, order="C", **options):
    """(problem, results on the host); they were full of NaN before."""
    problem = build(a, b, **options)
    results = {}
    for name, (shape, dtype) in problem.results.items():
        filler = np.full(shape, -7 if dtype.kind == "i" else np.nan, dtype, order=order)
        results[name] = machine.put(filler)
    algorithm(machine.launcher, problem, config, machine.put(a), machine.put(b), results)
    return problem, {name: machine.get(array) for name, array in results.items()}


def logical(array, planar):
    return array[0] + 1j * array[1] if planar else array


def check(machine, algorithm, a, b, *, config=None, order="C", **options):
    """Every result against NumPy's reduction of the float64 product."""
    problem, results = run(machine, algorithm, a, b, config=config, order=order, **options)
    assert_results(problem, a, b, results)
    return results


def assert_results(problem, a, b, results):
    product = reference.oracle_product(problem, a, b)  # alpha op(A) op(B), complex128 or float64
    wide = [logical(x, problem.planar).astype(np.complex128) for x in (a, b)]
    rows, columns = (
        np.linalg.norm(x, axis=-2 if (trans in "TC") == (side == 0) else -1)
        for side, (x, trans) in enumerate(zip(wide, (problem.trans_a, problem.trans_b), strict=True))
    )
    element = np.abs(problem.alpha) * ELEMENT[problem.compute] * rows[..., :, None] * columns[..., None, :]
    element = np.broadcast_to(element, product.shape)
    value, slack = product, element
    if problem.pre_op == "abs":
        value = np.abs(product)
    elif problem.pre_op == "square":
        value, slack = product * product, 2 * np.abs(product) * element + element**2
    axes = [-2 if problem.over_rows else -1]
    if problem.over_batch:
        axes = [*range(len(problem.batch_shape)), *axes]
    axis = tuple(a % product.ndim for a in axes)
    count = np.prod([product.shape[a] for a in axis])
    size = np.abs(value)
    rounding = 2.0**-11 if problem.dtype == np.float16 else 1e-6  # of what is returned in the operands' width
    summed = slack.sum(axis) + 1e-6 * size.sum(axis)
    for name, found in results.items():
        if name == "c":
            assert (np.abs(logical(found, problem.planar) - product) <= element + rounding * np.abs(product)).all()
            continue
        planar = problem.planar and name in {"sum", "mean"} and problem.value_dtype.kind == "c"
        found = logical(found, planar)  # noqa: PLW2901
        worst = slack.max(axis) + 1e-6 * size.max(axis)
        if name in {"sum", "mean"}:
            over = count if name == "mean" else 1
            assert (np.abs(found - value.sum(axis) / over) <= summed / over).all(), name
        elif name == "sumsq":
            spread = (2 * size * slack + slack**2).sum(axis)
            assert (np.abs(found - (size**2).sum(axis)) <= spread + 1e-6 * (size**2).sum(axis)).all()
        elif name.startswith("arg"):
            _check_argument(name, found, size if value.dtype.kind == "c" else value.real, axis, worst)
        else:
            of = size if name.startswith("abs") else value.real
            best = of.max(axis) if name.endswith("max") else of.min(axis)
            assert (np.abs(found - best) <= slack.max(axis) + rounding * size.max(axis)).all(), name


def _check_argument(name, found, of, axis, worst):
    kept = [a for a in range(of.ndim) if a not in axis]
    flat = np.transpose(of, (*kept, *axis)).reshape(*[of.shape[a] for a in kept], -1)
    assert ((found >= 0) & (found < flat.shape[-1])).all()
    taken = np.take_along_axis(flat, found[..., None], -1)[..., 0]
    best = flat.max(-1) if name == "argmax" else flat.min(-1)
    assert (np.abs(taken - best) <= 2 * worst).all(), name


def exact(seed, dtype, *shape):
    """Small integers: products are exact in every mode, ties abound, and so indices and NaN can be compared."""
    values = np.round(2 * random(seed, dtype, *shape).view(np.finfo(dtype).dtype)).clip(-3, 3)
    return values.view(dtype)


def check_exact(machine, algorithm, a, b, *, config=None, **options):
    """Against NumPy, element for element, of data whose products are exact: first indices, signed zeros aside."""
    problem, results = run(machine, algorithm, a, b, config=config, **options)
    with np.errstate(all="ignore"):
        expected = reference.oracle_gemm_reduce(problem, a, b)
    for name, found in results.items():
        if name in {"absmax", "absmin"} and np.asarray(a).dtype.kind == "c":
            np.testing.assert_allclose(found, expected[name], rtol=1e-6)
        elif name != "c":
            np.testing.assert_array_equal(found, expected[name].astype(found.dtype), err_msg=name)
    return results
