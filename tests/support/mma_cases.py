"""Checks of the mma.sync kernel, shared by the CPU shim and the device."""

from __future__ import annotations

import dataclasses

import numpy as np
from simt_cases import random

from gemmserve_kernels.algorithms.common.splits import PITCH, PLANES, Planes
from gemmserve_kernels.algorithms.mma import gemm as mma
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand

BOUNDS = {"3xtf32": 4e-7, "1xtf32": 5e-4, "3xfp16": 4e-7, "1xfp16": 5e-4}
"""Relative Frobenius error of normal data up to k = 4096."""


def build(a, b, c=None, *, compute, **options):
    operands = [Operand.of(x) if x is not None else None for x in (a, b, c)]
    return dataclasses.replace(GemmProblem.build(*operands, **options), compute=compute)


def run(machine, compute, a, b, c=None, *, config=None, order="C", **options):
    """The result on the host, into memory full of NaN."""
    problem = build(a, b, c, compute=compute, **options)
    out = np.full(problem.result_shape, np.nan, problem.result_dtype, order=order)
    on = [machine.put(x) if x is not None else None for x in (a, b, c, out)]
    mma.run_gemm(machine.launcher, problem, config, *on)
    return problem, machine.get(on[3])


def check(machine, compute, a, b, c=None, *, factor=1.0, **options):
    problem, result = run(machine, compute, a, b, c, **options)
    expected = reference.oracle_gemm(problem, a, b, c)
    errors = reference.errors(reference.logical(problem, result), expected)
    assert errors.rel_fro <= factor * BOUNDS[compute], errors
    return result


def planes_of(machine, x, scheme, side, batch_strides=()):
    """float16 planes of (matrices, rows, k) data by NumPy, where the machine's kernels can read them."""
    matrices, rows, k = x.shape
    is_complex = x.dtype.kind == "c"
    names = PLANES[scheme, is_complex, side]
    parts = [x.real, x.imag] if is_complex else [x]
    exponents = np.frexp(np.max([np.abs(part).max(axis=-1) for part in parts], axis=0))[1].astype(np.int32) - 15
    data = np.zeros((matrices, len(names), rows, -(-k // PITCH) * PITCH), np.float16)
    for number, part in enumerate(parts):
        scaled = np.ldexp(part, -exponents[..., None])
        high = scaled.astype(np.float16)
        data[:, number, :, :k] = high
        if len(names) > len(parts):
            data[:, len(parts) + number, :, :k] = scaled - high.astype(np.float32)
    device = [machine.put(array) for array in (data, exponents)]
    return Planes(scheme, is_complex, side, *device, matrices, rows, k, data.shape[-1], batch_strides)


def check_not_finite(machine, dtype, compute, config=None):
    """Infinities, NaN and the largest numbers come out as plain float32 has them."""
    a, b = random(1, dtype, 90, 100), random(2, dtype, 100, 80)
    b[3] = 1  # small parts of zero: infinity times them must not be NaN
    a[5, 3], a[6, 9], b[50, 7] = np.inf, np.nan, -np.inf
    a.view(np.uint32)[7, 0] = 0x7F800001  # NaN only by a bit that TF32 drops
    a[8], b[:, 9] = 0, 1
    a[8, 0], b[0, 9] = np.finfo(np.float32).max, 1  # would round up to infinity
    _, result = run(machine, compute, a, b, config=config)
    plain = np.zeros_like(result)
    with np.errstate(all="ignore"):
        for x, y in zip(a.T, b, strict=True):
            plain.real += np.outer(x.real, y.real)
            if dtype == "complex64":
                plain.real -= np.outer(x.imag, y.imag)
                plain.imag += np.outer(x.real, y.imag)
                plain.imag += np.outer(x.imag, y.real)
    for ours, theirs in [(result.real, plain.real), (result.imag, plain.imag)]:
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_array_equal(np.isinf(ours), np.isinf(theirs))


def check_planes(machine, dtype, scheme, order, config=None):
    """`multiply` on badly scaled rows and columns, a batch, alpha and beta."""
    a, b = random(1, dtype, 2, 70, 100), random(2, dtype, 100, 90)
    a[:, 3] *= 1e-30
    b[:, 5] *= 1e20
    c = random(3, dtype, 2, 70, 90)
    options = {"alpha": 2, "beta": -1}
    problem = build(a, b, c, compute="auto", **options)
    tile = mma.resolve_planes(config, problem, scheme, machine.launcher.spec)
    planes = planes_of(machine, a, scheme, "a", (1,)), planes_of(machine, b.T[None], scheme, "b", (0,))
    out = machine.put(np.full(problem.result_shape, np.nan, dtype, order=order))
    mma.multiply(machine.launcher, problem, tile, *planes, machine.put(c), out)
    expected = reference.oracle_gemm(problem, a, b, c)
    difference = np.abs(machine.get(out) - expected)
    norms = np.linalg.norm(a.astype("c16"), axis=-1), np.linalg.norm(b.astype("c16"), axis=0)
    size = 2 * norms[0][..., None] * norms[1] + np.abs(c)
    assert (difference <= 4 * BOUNDS[scheme] * size).all()
