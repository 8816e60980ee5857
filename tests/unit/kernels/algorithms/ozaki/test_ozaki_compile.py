"""Every residue kernel by NVRTC, without a device: registers, spills, and the warnings that would cost speed."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_sources import SourceRecorder, compiled

from gemmserve_kernels.algorithms.ozaki import gemm as ozaki
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.usefixtures("nvrtc")

PORTABLE = ("sm_80", "sm_90a", "sm_100a", "sm_120")

# Registers of one thread at most. The multiplying kernel has 288 threads a block: 224 would do.
REGISTERS = {
    "ozaki_scale": 64,
    "ozaki_convert": 80,
    "ozaki_multiply": 168,
    "ozaki_combine": 104,
    "dmma_tiles": 255,
}
# Of products of single precision, beside those: the wide way in the place of tiles in double.
WIDE_REGISTERS = {"split": 128, "wgmma_gemm": 168, "dmma_fallback": 168}


def _sources(dtype, trans, planar=False, **config):
    dtype = np.dtype(dtype)
    n = 8192
    shape, strides = (n, n), (n * dtype.itemsize, dtype.itemsize)
    if planar:
        shape, strides = (2, *shape), (n * n * dtype.itemsize, *strides)
    x = np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)
    options = {"trans_a": trans[0], "trans_b": trans[1], "layout": "planar" if planar else "interleaved"}
    problem = GemmProblem.build(Operand.of(x), Operand.of(x), compute="ozaki", **options)
    recorder = SourceRecorder(KNOWN["H200"])
    ozaki.run_gemm(recorder, problem, GemmConfig(**config), x, x, None, x)
    return {(entry, source) for source, entry, _ in recorder.launched}


def _check(entry, source, arch):
    cubin, most = compiled(source, arch), (REGISTERS | WIDE_REGISTERS)[entry]
    assert cubin.spill_bytes[entry] == 0, f"{entry} for {arch} spills {cubin.spill_bytes[entry]} bytes"
    assert cubin.registers[entry] <= most, f"{entry} for {arch}: {cubin.registers[entry]} registers"
    assert "Performance Loss" not in cubin.log


@pytest.mark.parametrize(
    ("dtype", "trans"),
    [
        ("complex128", "NN"),
        ("complex128", "TT"),
        ("float64", "NN"),
        ("complex64", "NN"),
        ("complex64", "TT"),
        ("float32", "NN"),
    ],
)
def test_on_hopper(dtype, trans):
    sources = _sources(dtype, trans)
    entries = {entry for entry, _ in sources}
    if dtype in {"complex64", "float32"}:
        assert entries == set(REGISTERS) - {"dmma_tiles"} | set(WIDE_REGISTERS)
    else:
        assert entries == set(REGISTERS)
    for entry, source in sources:
        _check(entry, source, "sm_90a")


@pytest.mark.parametrize(
    ("dtype", "moduli"), [("complex128", 16), ("complex128", 17), ("float64", 14), ("float64", 16)]
)
@pytest.mark.parametrize("trans", ["NN", "TT"])
def test_other_numbers_of_moduli_on_hopper(dtype, moduli, trans):
    for entry, source in _sources(dtype, trans, moduli=moduli):
        _check(entry, source, "sm_90a")


@pytest.mark.parametrize("arch", PORTABLE)
def test_what_is_portable_compiles_everywhere(arch):
    for entry, source in _sources("float64", "NT", planar=True):
        if entry != "ozaki_multiply":
            _check(entry, source, arch)


def test_the_plain_multiplication_compiles():
    ((source,),) = ([s for entry, s in _sources("complex128", "NN") if entry == "ozaki_multiply"],)
    plain = compiler.KernelSource("ozaki_multiply_plain", source.defines)
    assert compiled(plain, "sm_80").spill_bytes["ozaki_multiply_plain"] == 0
