"""Every kernel for every CUDA architecture that is supported, by NVRTC, without a device: registers and spills.

The sources come from the host code itself: a launcher that runs nothing notes what it is asked to launch. So the test
sees each shipped tile in the very text that a device would get.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import pytest
from gemmserve_kernels import compiler, config, simt
from gemmserve_kernels.device import KNOWN
from gemmserve_kernels.problem import GemmProblem, GemmReduceProblem, Operand

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
DTYPES = ("float16", "float32", "float64", "complex64", "complex128")

# Registers of one thread at most: (gemm, gemm_reduce) by dtype and tile, the largest over the architectures, rounded up
# to a multiple of 8, as they are handed out. 65536 registers a multiprocessor / 256 threads a block: 128 and fewer let
# two blocks share it, 80 and fewer three.
REGISTERS = {
    "float16 128x128x8": (128, 128),
    "float16 64x64x16": (128, 128),
    "float16 32x32x16": (128, 128),
    "float32 128x128x8": (128, 128),
    "float32 64x64x16": (128, 128),
    "float32 32x32x16": (128, 128),
    "float64 128x64x8": (128, 128),
    "float64 64x64x8": (128, 128),
    "float64 32x32x16": (128, 128),
    "complex64 128x64x8": (128, 128),
    "complex64 64x64x8": (128, 128),
    "complex64 32x32x8": (128, 128),
    "complex128 64x64x8": (192, 192),
    "complex128 32x32x8": (128, 128),
}
COMBINE_REGISTERS = 48  # gemm_reduce_combine and gemm_reduce_finish: bound by memory, many blocks wanted
REDUCTIONS = ["sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin"]


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
    sources: dict[str, compiler.KernelSource] = field(default_factory=dict)

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    zeros = empty

    def pointer(self, array):
        return array.ctypes.data // 256 * 256 if array.flags.aligned else 1  # as a device allocates

    def launch(self, source, entry, **options):
        self.sources[entry] = source


def _matrix(dtype, *, rows=4096, columns=4096, order="C", planar=False):
    """A large matrix that takes no memory."""
    dtype = np.dtype(dtype)
    strides = (columns * dtype.itemsize, dtype.itemsize) if order == "C" else (dtype.itemsize, rows * dtype.itemsize)
    shape = (rows, columns)
    if planar:
        shape, strides = (2, *shape), (rows * columns * dtype.itemsize, *strides)
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)


def _gemm_source(tile, a, b, c=None, **options):
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c) if c is not None else None, **options)
    recorder = Recorder(KNOWN["H200"])
    out = _matrix(problem.result_dtype, planar=problem.planar)
    simt.run_gemm(recorder, problem, tile, a, b, c, out)
    return recorder.sources["gemm"]


def _reduce_source(tile, a, b, *, reduce, **options):
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce=reduce, **options)
    recorder = Recorder(KNOWN["H200"])
    simt.run_gemm_reduce(recorder, problem, tile, a, b, {"c": _matrix(problem.dtype)} if problem.return_c else None)
    return recorder.sources["gemm_reduce"]


@functools.cache
def _compiled(source, arch):
    return compiler.compile_cuda(source.text, arch, name=f"{source.name}.cu")


def _label(dtype, tile):
    return f"{dtype} {tile.block_m}x{tile.block_n}x{tile.block_k}"


def _shipped():
    for dtype in DTYPES:
        accumulate = "float32" if dtype == "float16" else dtype
        for candidate in config._CANDIDATES[accumulate]:
            yield pytest.param(dtype, candidate.tile, id=_label(dtype, candidate.tile).replace(" ", "-"))


def _check(cubin, kernel, registers, arch):
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.spill_bytes[kernel] == 0, f"{kernel} for {arch} spills {cubin.spill_bytes[kernel]} bytes"
    assert cubin.registers[kernel] <= registers, f"{kernel} for {arch}: {cubin.registers[kernel]} > {registers}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tile"), _shipped())
def test_gemm_within_its_budget(dtype, tile, arch):
    matrix = _matrix(dtype)
    cubin = _compiled(_gemm_source(tile, matrix, matrix), arch)
    _check(cubin, "gemm", REGISTERS[_label(dtype, tile)][0], arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tile"), _shipped())
def test_gemm_reduce_within_its_budget(dtype, tile, arch):
    matrix = _matrix(dtype)
    cubin = _compiled(_reduce_source(tile, matrix, matrix, reduce=REDUCTIONS), arch)
    _check(cubin, "gemm_reduce", REGISTERS[_label(dtype, tile)][1], arch)
    _check(cubin, "gemm_reduce_combine", COMBINE_REGISTERS, arch)
    _check(cubin, "gemm_reduce_finish", COMBINE_REGISTERS, arch)
