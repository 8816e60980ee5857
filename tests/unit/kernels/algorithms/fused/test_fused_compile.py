"""The fused kernel through NVRTC: registers and spills, without a device."""

from __future__ import annotations

import pytest
from kernel_sources import SourceRecorder, compiled, matrix

from gemmserve_kernels.algorithms.fused import gemm as fused
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.usefixtures("nvrtc")

KEPT_BYTES = {"NN": 8, "NT": 0, "TT": 0}
"""Bytes of what producers know all along, and read once for every chunk; of others `MOST_KEPT_BYTES`."""
MOST_KEPT_BYTES = 32


@pytest.mark.parametrize(
    ("dtype", "tile", "trans", "extent"),
    [
        pytest.param(dtype, tile, trans, extent, marks=() if trans == "NN" else pytest.mark.slow)
        for dtype, tile in (
            ("complex64", GemmConfig(block_m=64)),
            ("complex64", GemmConfig(block_m=128)),
            ("complex64", GemmConfig(block_m=128, promote=32)),
            ("complex64", GemmConfig(block_m=128, promote=64)),
            ("complex64", GemmConfig(cluster=2)),
            ("complex64", GemmConfig(cluster=2, promote=32)),
            ("float32", GemmConfig(block_m=64, promote=16)),
            ("float32", GemmConfig(block_m=64)),
            ("float32", GemmConfig(block_m=64, promote=64)),
        )
        for trans, extent in (("NN", 512), ("TN", 511), ("CT", 512), ("TN", 512), ("TN", 510))
    ],
)
def test_registers(dtype, tile, trans, extent):
    operand = matrix(dtype, rows=extent, columns=extent)
    problem = GemmProblem.build(Operand.of(operand), Operand.of(operand), trans_a=trans[0], trans_b=trans[1])
    recorder = SourceRecorder()
    fused.run_gemm(recorder, problem, tile, operand, operand, None, operand)
    kernels = {64: ["fused_gemm"], 128: ["fused_columns", "fused_tall"], None: ["fused_cluster"]}[tile.block_m]
    assert list(recorder.sources) == kernels
    for source, entry, options in recorder.launched:
        cubin = compiled(source, "sm_90a")
        blocks = fused.resolve(tile, problem, recorder.spec).blocks
        assert blocks * cubin.registers[entry] * options["block"] <= recorder.spec.registers_per_sm
        kept = entry == "fused_gemm" and dtype == "complex64"
        assert cubin.spill_bytes[entry] <= (KEPT_BYTES.get(trans, MOST_KEPT_BYTES) if kept else 0)
        assert "C75" not in cubin.log  # matrix instructions one after the other
