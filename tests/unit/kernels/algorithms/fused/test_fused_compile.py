"""The fused kernel through NVRTC: registers and spills, without a device."""

from __future__ import annotations

import pytest
from kernel_sources import SourceRecorder, compiled, matrix

from gemmserve_kernels.algorithms.fused import gemm as fused
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.mark.parametrize(
    ("trans", "extent"),
    [
        pytest.param("NN", 512),
        pytest.param("TN", 511, marks=pytest.mark.slow),
        pytest.param("CT", 512, marks=pytest.mark.slow),
    ],
)
def test_registers(trans, extent):
    operand = matrix("complex64", rows=extent, columns=extent)
    problem = GemmProblem.build(Operand.of(operand), Operand.of(operand), trans_a=trans[0], trans_b=trans[1])
    recorder = SourceRecorder()
    fused.run_gemm(recorder, problem, None, operand, operand, None, operand)
    (source, entry, options), = recorder.launched  # fmt: skip
    assert entry == "fused_gemm"
    cubin = compiled(source, "sm_90a")
    assert cubin.registers["fused_gemm"] * options["block"] <= recorder.spec.registers_per_sm
    assert cubin.spill_bytes["fused_gemm"] == 0
