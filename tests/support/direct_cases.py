"""Products of float16 operands on Hopper's tensor cores, shared by the CPU shim and the device: operands and checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from simt_cases import random, strided

from gemmserve_kernels.algorithms.wgmma.direct import gemm as direct
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand


def lying(array, how):
    """The same matrices in memory that the copy engine can read: an array, and the function that cuts them out."""
    *batch, rows, columns = array.shape
    pitch = -(-columns // 8) * 8
    if how == "plain":
        return array, lambda x: x
    if how == "columns":  # next to each other, and off any 16-byte boundary
        memory, cut = np.zeros((*batch, columns, -(-rows // 8) * 8 + 8), array.dtype), _columns(rows)
    elif how == "aligned":  # rows on 16-byte boundaries
        memory, cut = np.zeros((*batch, rows, pitch), array.dtype), lambda x: x[..., :columns]
    elif how == "shifted":  # every row begins 3 elements past one
        memory, cut = np.zeros((*batch, rows, pitch + 8), array.dtype), lambda x: x[..., 3 : 3 + columns]
    elif how == "backwards":  # the last matrix first
        memory, cut = np.zeros((*batch, rows, pitch), array.dtype), lambda x: x[::-1, ..., :columns]
    else:
        assert how == "between"  # rows of all matrices by turns
        memory, cut = np.zeros((rows, *batch, pitch), array.dtype), lambda x: x.swapaxes(0, 1)[..., :columns]
    cut(memory)[...] = array
    return memory, cut


def _columns(rows):
    return lambda x: x[..., 5 : 5 + rows].swapaxes(-1, -2)


@dataclass(frozen=True)
class Case:
    """One product of m x k by k x n with batches `a` and `b`, each stored as `trans` says and lying as `how` does."""

    extents: tuple[int, int, int]
    trans: str = "NN"
    a: tuple[int, ...] = ()
    b: tuple[int, ...] = ()
    c: tuple[int, ...] | None = None
    how: tuple[str, str] = ("aligned", "aligned")
    out: str = "plain"
    config: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def operands(self):
        """A and B, each as `lying` returns it."""
        m, n, k = self.extents
        shapes = [(*self.a, m, k), (*self.b, k, n)]
        made = [random(seed, "float16", *shape) for seed, shape in enumerate(shapes, 1)]
        stored = [x.swapaxes(-1, -2).copy() if t in "TC" else x for x, t in zip(made, self.trans, strict=True)]
        return [lying(x, how) for x, how in zip(stored, self.how, strict=True)]

    def problem(self, a, b, c=None):
        trans = {"trans_a": self.trans[0], "trans_b": self.trans[1]}
        operands = (Operand.of(a), Operand.of(b), None if c is None else Operand.of(c))
        return GemmProblem.build(*operands, **trans, **self.options)


def run(machine, case):
    """Runs `case` into an output full of NaN; (problem, a, b, c, result)."""
    (a, cut_a), (b, cut_b) = case.operands()
    held = [cut_a(machine.put(a)), cut_b(machine.put(b))]
    a, b = cut_a(a), cut_b(b)
    c = None if case.c is None else random(3, "float16", *case.c)
    problem = case.problem(a, b, c)
    assert direct.supports(problem, machine.launcher.spec) is None
    out = machine.put(strided(np.full(problem.result_shape, np.nan, np.float16), case.out))
    added = None if c is None else machine.put(c)
    direct.run_gemm(machine.launcher, problem, case.config, *held, added, out)
    return problem, a, b, c, machine.get(out)


def check(machine, case):
    """Every element is rounded to float16 once; its float32 sum lost a bit at each of k / 16 instructions at most."""
    problem, a, b, c, result = run(machine, case)
    assert_rounded_once(case, problem, a, b, c, result)
    return result


def assert_rounded_once(case, problem, a, b, c, result):
    expected = reference.oracle_gemm(problem, a, b, c)
    x, y = (np.abs(z.astype(np.float64)) for z in (a, b))
    x, y = (z.swapaxes(-1, -2) if t in "TC" else z for z, t in zip((x, y), case.trans, strict=True))
    sums = abs(problem.alpha) * (x @ y) + (0 if c is None else abs(problem.beta) * np.abs(c.astype(np.float64)))
    bound = 2.0**-11 * np.abs(expected) + 2.0**-25 + (case.extents[2] / 16 + 8) * 2.0**-23 * sums
    assert result.shape == expected.shape
    assert (np.abs(result - expected) <= bound).all(), (np.abs(result - expected) / bound).max()
