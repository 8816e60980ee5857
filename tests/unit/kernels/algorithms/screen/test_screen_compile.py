"""The kernels that look for extremes, for Hopper: registers and spills, from NVRTC."""

from __future__ import annotations

import pytest
from kernel_sources import compiled

from gemmserve_kernels import GemmConfig
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import sources
from gemmserve_kernels.device.spec import KNOWN

pytestmark = pytest.mark.usefixtures("nvrtc")

REGISTERS = {"screen_round": {"float64": 72, "complex128": 64}, "screen_rows": {"float64": 64, "complex128": 80}}
"""Three blocks of 256 threads on a multiprocessor; of screen_rows of real numbers four."""
SPILLS = 0
CASES = {
    "complex128": {"dtype": "complex128", "reduce": ("absmax",), "axis": ("n",)},
    "float64": {"dtype": "float64", "reduce": ("max", "min"), "axis": ("n",)},
    "float64, argument": {"dtype": "float64", "reduce": ("argmax",), "trans_a": "T"},
    "planar": {"dtype": "complex128", "reduce": ("absmax", "argmax"), "layout": "planar", "trans_b": "C"},
}


@pytest.mark.parametrize("name", CASES)
def test_on_hopper(name):
    case = Case(op="gemm_reduce", batch=8, m=1024, n=1024, k=512, config=GemmConfig(algorithm="screen"), **CASES[name])
    found = sources(case, KNOWN["H200"])
    assert {"screen_round", "screen_rows", "wgmma_gemm", "dmma_reduce", "combine"} == {source.name for source in found}
    for source in found:
        if source.name in REGISTERS:
            cubin = compiled(source, "sm_90a")
            assert max(cubin.registers.values()) <= REGISTERS[source.name][case.dtype], cubin.registers
            assert max(cubin.spill_bytes.values()) <= SPILLS, cubin.spill_bytes
