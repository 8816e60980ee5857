"""The kernels of Gram matrices for the architectures that they run on: registers and spills, from NVRTC."""

from __future__ import annotations

import pytest
from kernel_sources import compiled

from gemmserve_kernels import GemmConfig
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import sources
from gemmserve_kernels.device.spec import KNOWN

pytestmark = pytest.mark.usefixtures("nvrtc")

REGISTERS = {"gram": 240, "gram_form": 168}
"""One block of 256 threads on a multiprocessor, three of 128."""
NARROW = 168
SPILLS = {"planar": {"gram_form": 96}}
"""Bytes: two addresses for each element of B, beside the sums. None elsewhere."""
CASES = {
    "complex64": {"k": 64},
    "complex64, narrow": {"k": 16, "axis": ("n",), "trans_a": "C"},
    "planar": {"k": 128, "layout": "planar"},
    "float32": {"k": 64, "dtype": "float32"},
    "float32, narrow": {"k": 17, "dtype": "float32"},
    "float16": {"k": 64, "dtype": "float16"},
}


def check(name, device, arch):
    options = {"m": 8192, "n": 2048, "reduce": ("sumsq",), "config": GemmConfig(algorithm="gram")} | CASES[name]
    case, spills = Case(op="gemm_reduce", **options), SPILLS.get(name, {})
    found = {source.name: source for source in sources(case, KNOWN[device])}
    assert {"gram", "gram_form", "reduce_fallback", "combine"} <= set(found)
    for kernel, most in REGISTERS.items():
        source = found[kernel]
        cubin = compiled(source, arch)
        narrow = kernel == "gram" and dict(source.defines)["BLOCK"] == "32"
        assert max(cubin.registers.values()) <= (NARROW if narrow else most), cubin.registers
        assert max(cubin.spill_bytes.values()) <= spills.get(kernel, 0), cubin.spill_bytes


@pytest.mark.parametrize("case", CASES)
def test_on_hopper(case):
    check(case, "H200", "sm_90a")


@pytest.mark.parametrize(("device", "arch"), [("A100", "sm_80"), ("B200", "sm_100a"), ("RTX5090", "sm_120")])
def test_elsewhere(device, arch):
    check("complex64", device, arch)
