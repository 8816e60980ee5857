"""Products of float16 planes through the Hopper kernel, shared by the CPU shim and the device: operands and checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kernel_models import splits as plane_models
from simt_cases import random, strided

from gemmserve_kernels.algorithms.common.splits import PITCH, Planes, is_wide
from gemmserve_kernels.algorithms.wgmma import gemm as wgmma
from gemmserve_kernels.algorithms.wgmma.candidates import _CANDIDATES
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand

SCHEMES = tuple(key for key in _CANDIDATES if key[0] != "fp16")
"""Those of planes."""
IDS = [f"{scheme}-{'complex' if is_complex else 'real'}" for scheme, is_complex in SCHEMES]
LIMIT = {"3xfp16": 5e-7, "3xfp16-3m": 5e-7, "1xfp16": 1e-3, "3xbf16": 1e-4, "6xbf16": 5e-7, "9xbf16": 5e-7}


def planes_of(x, scheme, side, batch_shape, put):
    """`x`, (..., rows, k), as planes; axes of the batch that it lacks or that have length 1 are broadcast."""
    lead, (rows, k) = x.shape[:-2], x.shape[-2:]
    flat = np.ascontiguousarray(x).reshape(-1, rows, k)
    made = [plane_models.split(each, scheme, side) for each in flat]
    exponents = np.stack([each.exponents for each in made])
    stored = np.stack([each.planes for each in made])
    if is_wide(scheme):
        stored = (stored.view(np.uint32) >> 16).astype(np.uint16).view(np.float16)
    pitch = -(-k // PITCH) * PITCH
    data = np.zeros((*stored.shape[:-1], pitch), np.float16)
    data[..., :k] = stored
    lead = (1,) * (len(batch_shape) - len(lead)) + lead
    steps = [0 if extent == 1 else int(np.prod(lead[axis + 1 :])) for axis, extent in enumerate(lead)]
    return Planes(
        scheme, x.dtype.kind == "c", side, put(data), put(exponents),
        len(flat), rows, k, pitch, tuple(steps),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One product of m x k by k x n with batches `a` and `b`."""

    extents: tuple[int, int, int]
    a: tuple[int, ...] = ()
    b: tuple[int, ...] = ()
    c: tuple[int, ...] | None = None
    out: str = "plain"
    config: Any = None
    options: dict[str, Any] = field(default_factory=dict)


def run(machine, scheme, is_complex, case):
    """Runs `case` into an output full of NaN; (problem, a, b, c, result)."""
    m, n, k = case.extents
    planar = case.options.get("layout") == "planar"
    lead, dtype = ((2,), "float32") if planar else ((), "complex64" if is_complex else "float32")
    a, b = random(1, dtype, *lead, *case.a, m, k), random(2, dtype, *lead, *case.b, k, n)
    c = None if case.c is None else random(3, dtype, *lead, *case.c)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), None if c is None else Operand.of(c), **case.options)
    assert wgmma.supports(problem, machine.launcher.spec) is None
    tile = wgmma.resolve(case.config, problem, machine.launcher.spec, scheme)
    left = planes_of(reference.logical(problem, a), scheme, "a", problem.batch_shape, machine.put)
    right = planes_of(
        reference.logical(problem, b).swapaxes(-1, -2), scheme, "b", problem.batch_shape, machine.put
    )  # fmt: skip
    out = machine.put(strided(np.full(problem.result_shape, np.nan, problem.result_dtype), case.out))
    held = None if c is None else machine.put(c)
    wgmma.multiply(machine.launcher, problem, tile, left, right, held, out)
    return problem, a, b, c, machine.get(out)


def check(machine, scheme, is_complex, case):
    problem, a, b, c, result = run(machine, scheme, is_complex, case)
    d = reference.logical(problem, result)
    expected = reference.oracle_gemm(problem, a, b, c)
    assert np.isfinite(d).all()
    # Where every element is far from cancelling, so is their norm; single elements may lose what the products had.
    found = reference.errors(d, expected)
    assert found.rel_fro <= LIMIT[scheme], found
    worst = np.abs(d - expected).max() / np.abs(expected).max()
    assert worst <= 4 * LIMIT[scheme], worst
    return result
