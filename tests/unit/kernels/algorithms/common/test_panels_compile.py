"""The pass over products in memory, for the architectures it runs on: registers and spills."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_sources import compiled

from gemmserve_kernels import GemmConfig, GemmReduceProblem, Operand
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("nvrtc")

EVERY = ("sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin")
REGISTERS = {"complex128": 96, "float64": 96, "complex64": 80, "float32": 80}
SPILLS = 16
"""Bytes, around the calls for magnitudes that are seldom needed; on sm_90a there are none."""
CASES = {
    "one": {"reduce": ("absmax",)},
    "every": {"reduce": EVERY},
    "square": {"reduce": EVERY, "pre_op": "square"},
    "over columns": {"reduce": EVERY, "axis": "n"},
    "returned": {"reduce": EVERY, "return_c": True},
}


def source(dtype, columns=4096, **options):
    a, b = Operand.contiguous((columns, 1024), np.dtype(dtype)), Operand.contiguous((1024, columns), np.dtype(dtype))
    problem = GemmReduceProblem.build(a, b, config=GemmConfig(algorithm="vendor"), **options)
    (found,) = {x.source for x in kernels_of(problem, KNOWN["H200"]) if x.entry == "stored_reduce"}
    return found


def check(found, dtype, arch):
    cubin = compiled(found, arch)
    assert cubin.spill_bytes["stored_reduce"] <= (0 if arch == "sm_90a" else SPILLS)
    assert cubin.registers["stored_reduce"] <= REGISTERS[dtype]


@pytest.mark.parametrize("dtype", list(REGISTERS))
@pytest.mark.parametrize("case", CASES)
def test_on_hopper(case, dtype):
    check(source(dtype, **CASES[case]), dtype, "sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120"])
@pytest.mark.parametrize("case", ["every", "returned"])
def test_elsewhere(case, arch):
    check(source("complex64", **CASES[case]), "complex64", arch)


def test_short_rows_have_fewer_lanes():
    lanes = {
        columns: dict(source("float32", columns, reduce="max").defines)["LANES"] for columns in (1, 5, 17, 64, 4096)
    }
    assert lanes == {1: "1", 5: "4", 17: "16", 64: "16", 4096: "32"}
    check(source("float32", 64, reduce=EVERY), "float32", "sm_90a")
