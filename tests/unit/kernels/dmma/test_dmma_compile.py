"""The kernels in double precision by NVRTC, without a device: no spills, in any direction of the operands."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import pytest

from gemmserve_kernels import compiler
from gemmserve_kernels.device import KNOWN
from gemmserve_kernels.dmma import gemm as dmma
from gemmserve_kernels.dmma.tiles import SMALL, choose
from gemmserve_kernels.problem import GemmProblem, Operand

ARCHITECTURES = {"sm_80": "A100", "sm_90a": "H200", "sm_100a": "H200", "sm_120": "H200"}


@pytest.fixture(scope="module", autouse=True)
def _nvrtc():
    cupy = pytest.importorskip("cupy", reason="the CuPy wheel is not installed: no NVRTC")
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")


@dataclass
class Recorder:
    """A Launcher that notes the sources it is asked to run."""

    spec: object
    max_grid: int = 2**31 - 1
    sources: list = field(default_factory=list)

    def pointer(self, array):
        return array.ctypes.data // 256 * 256

    def launch(self, source, entry, **options):
        self.sources.append(source)


def _source(dtype, trans, spec, *, n=8192, planar=False, flagged=False):
    dtype = np.dtype(dtype)
    shape, strides = (n, n), (n * dtype.itemsize, dtype.itemsize)
    if planar:
        shape, strides = (2, *shape), (n * n * dtype.itemsize, *strides)
    x = np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)
    options = {"trans_a": trans[0], "trans_b": trans[1], "layout": "planar" if planar else "interleaved"}
    problem = GemmProblem.build(Operand.of(x), Operand.of(x), compute="fp64", **options)
    recorder = Recorder(spec)
    dmma.run_gemm(recorder, problem, None, x, x, None, x)
    (source,) = recorder.sources
    return compiler.KernelSource("dmma_tiles", source.defines) if flagged else source


@functools.cache
def _compiled(source, arch):
    return compiler.compile_cuda(source.text, arch, name=f"{source.name}.cu")


def _check(source, arch):
    cubin = _compiled(source, arch)
    assert cubin.spill_bytes[source.name] == 0, f"{source.name} for {arch}"
    assert cubin.registers[source.name] <= 255


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("trans", ["NN", "TN", "NT", "TT", "CR"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_on_hopper(dtype, trans, flagged):
    _check(_source(dtype, trans, KNOWN["H200"], flagged=flagged), "sm_90a")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float64", "complex128", "planar"])
@pytest.mark.parametrize("n", [512, 8192])
def test_on_every_architecture(n, dtype, arch):
    planar = dtype == "planar"
    source = _source("float64" if planar else dtype, "NN", KNOWN[ARCHITECTURES[arch]], n=n, planar=planar)
    _check(source, arch)


def test_stages_fit_the_device():
    for name in ("A100", "H200"):
        spec = KNOWN[name]
        for is_complex, planar in ((False, False), (True, False), (True, True)):
            tile = choose(8192, 8192, spec, is_complex=is_complex, planar=planar)
            assert tile.stages >= 2
            assert tile.shared_bytes(is_complex=is_complex) <= spec.shared_per_block
    assert all(2 * tile.shared_bytes(is_complex=kind != "float64") < 228 << 10 for kind, tile in SMALL.items())
