"""Checks of the MFMA kernels, shared by the CPU shim and the device."""

from __future__ import annotations

import numpy as np
from simt_cases import assert_within, strided

from gemmserve_kernels.algorithms.mfma import gemm as mfma
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

SMALL = GemmConfig(block_m=64, block_n=64, warp_m=32, warp_n=32)
SMALL_DOUBLE = GemmConfig(block_m=32, block_n=32, warp_m=16, warp_n=16)
"""Many tiles, and edges of every kind, from matrices of a few dozen rows."""
BOTH = {"alpha": 1.5 - 0.5j, "beta": -0.25 + 2j}


def config_of(dtype):
    return SMALL_DOUBLE if dtype in {"float64", "complex128"} else SMALL


def run(machine, a, b, c=None, *, out="plain", config=None, **options):
    """(problem, result); the output was full of NaN."""
    problem = GemmProblem.build(*(None if x is None else Operand.of(x) for x in (a, b, c)), **options)
    poison = np.full(problem.result_shape, np.nan, problem.result_dtype)
    into = machine.put(strided(poison, out))
    held = [None if x is None else machine.put(x) for x in (a, b, c)]
    mfma.run_gemm(machine.launcher, problem, config or config_of(problem.dtype.name), *held, into)
    return problem, machine.get(into)


def check(machine, a, b, c=None, **options):
    """Every part of every element is within the a-priori bound of the higher-precision reference."""
    problem, result = run(machine, a, b, c, **options)
    d = reference.logical(problem, result)
    assert_within(d, reference.oracle_gemm(problem, a, b, c), reference.bound(problem, a, b, c))
    return result
