"""The reducing kernels on tensor cores and the sums, for the architectures they run on: registers and spills."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_sources import compiled

from gemmserve_kernels import GemmConfig, GemmReduceProblem, Operand
from gemmserve_kernels.algorithms.common.partials import written_dtype
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.planned_reduce import program_of
from gemmserve_kernels.dispatch.routes import plan_gemm_reduce
from gemmserve_kernels.problem.arrays import ArrayKey

pytestmark = pytest.mark.usefixtures("nvrtc")

EVERY = ("sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin")
REGISTERS = {"wgmma_reduce": 168, "mma_reduce": 255, "reduce_fallback": 160, "sums": 80, "combine": 56}
SPILLS = {"mma_reduce": 320}
"""Bytes; other kernels have none."""
CASES = {
    "every complex64": ("complex64", {"reduce": EVERY, "compute": "3xfp16"}),
    "every float32": ("float32", {"reduce": (*EVERY, "max", "min"), "compute": "3xfp16", "pre_op": "square"}),
    "complex64": ("complex64", {"reduce": ("absmax", "sum"), "compute": "3xfp16"}),
    "float32": ("float32", {"reduce": ("max",), "compute": "3xfp16"}),
    "3m with c": ("complex64", {"reduce": ("absmax",), "compute": "3xfp16-3m", "return_c": True}),
    "tf32": ("complex64", {"reduce": ("absmax", "sumsq"), "compute": "tf32", "axis": "n"}),
    "3xtf32": ("complex64", {"reduce": ("absmax", "sum"), "compute": "3xtf32"}),
    "max float16": ("float16", {"reduce": ("max",)}),
    "every float16 with c": ("float16", {"reduce": (*EVERY, "max", "min"), "axis": "n", "return_c": True}),
    "sum complex64": ("complex64", {"reduce": "sum"}),
    "sum float16": ("float16", {"reduce": "mean", "axis": "n"}),
}


def sources(case, device, config=None):
    """What a device would be asked to compile."""
    dtype, options = CASES[case]
    a = Operand.contiguous((2048, 1024), np.dtype(dtype))
    b = Operand.contiguous((1024, 2048), np.dtype(dtype))
    problem = GemmReduceProblem.build(a, b, config=config, **options)
    plan = plan_gemm_reduce(problem, KNOWN[device])
    itemsize = np.dtype(dtype).itemsize
    keys = [(ArrayKey(x.shape, x.dtype, tuple(s * itemsize for s in x.strides)), 0) for x in (a, b)]
    written = {
        name: (shape, kept if name == "c" else written_dtype(problem, name))
        for name, (shape, kept) in problem.results.items()
    }
    program = program_of(CupyLauncher(KNOWN[device]), problem, plan, tuple(keys), written)
    return {step.source for step in program.steps if hasattr(step, "source")}


def check(source, arch):
    cubin = compiled(source, arch)
    assert max(cubin.registers.values()) <= REGISTERS[source.name], cubin.registers
    assert max(cubin.spill_bytes.values()) <= SPILLS.get(source.name, 0), cubin.spill_bytes


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case.startswith("every") else [])
        for case in CASES
        if case != "3xtf32"
    ],
)
def test_on_hopper(case):
    found = [source for source in sources(case, "H200") if source.name in REGISTERS]
    assert {source.name for source in found} & {"wgmma_reduce", "sums"}
    for source in found:
        check(source, "sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("case", ["complex64", "float32", "3xtf32"])
def test_by_mma(case, arch):
    found = [x for x in sources(case, "A100", GemmConfig(algorithm="mma")) if x.name == "mma_reduce"]
    assert len(found) == (1 if case == "3xtf32" else 2), "of planes, tiles that are served, and the rest"
    for source in found:
        check(source, arch)
