"""Every kernel for every CUDA architecture that is supported, by NVRTC, without a device: registers and spills.

The sources come from the host code itself: a launcher that runs nothing notes what it is asked to launch. So the test
sees each shipped tile in the very text that a device would get.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from kernel_sources import SourceRecorder, compiled, matrix

from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.algorithms.simt import tile as tiles
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

pytestmark = pytest.mark.usefixtures("nvrtc")

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
DTYPES = ("float16", "float32", "float64", "complex64", "complex128")

# Registers of one thread at most, by dtype and tile (block m x n x k / thread m x n): of gemm, and of gemm_reduce with
# every reduction. What NVRTC 13.0 takes on the hungriest architecture, rounded up to a multiple of 8, the unit in which
# they are handed out. A multiprocessor has 65536, a thread can have 255.
REGISTERS = {
    "float16 64x64x16/8x8": (168, 168),
    "float16 32x64x16/4x4": (96, 96),
    "float16 32x32x16/4x4": (96, 96),
    "float32 64x64x16/8x8": (208, 208),
    "float32 32x64x16/4x4": (96, 104),
    "float32 32x32x16/4x4": (112, 112),
    "float64 64x64x8/8x4": (168, 216),
    "float64 32x64x8/4x4": (128, 128),
    "complex64 64x64x8/8x4": (168, 168),
    "complex64 32x64x8/4x4": (128, 128),
    "complex64 32x32x8/4x2": (96, 96),
    "complex128 32x32x8/4x2": (144, 144),
}
COMBINE_REGISTERS = 64  # of gemm_reduce_combine and gemm_reduce_finish
REDUCTIONS = ["sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin"]


def _gemm_source(tile, a, b, c=None, **options):
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c) if c is not None else None, **options)
    recorder = SourceRecorder(KNOWN["H200"])
    out = matrix(problem.result_dtype, rows=problem.m, columns=problem.n, planar=problem.planar)
    simt.run_gemm(recorder, problem, tile, a, b, c, out)
    return recorder.sources["gemm"]


def _reduce_sources(tile, a, b, *, reduce, **options):
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce=reduce, **options)
    recorder = SourceRecorder(KNOWN["H200"])
    simt.run_gemm_reduce(recorder, problem, tile, a, b, {"c": matrix(problem.dtype)} if problem.return_c else None)
    return recorder.sources


def _label(dtype, tile):
    return f"{dtype} {tile.block_m}x{tile.block_n}x{tile.block_k}/{tile.thread_m}x{tile.thread_n}"


def _shipped():
    for dtype in DTYPES:
        accumulate = "float32" if dtype == "float16" else dtype
        for candidate in tiles._CANDIDATES[accumulate]:
            yield pytest.param(dtype, candidate.tile, id=_label(dtype, candidate.tile).replace(" ", "-"))


def _check(source, kernel, registers, arch):
    cubin = compiled(source, arch)
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.spill_bytes[kernel] == 0, f"{kernel} for {arch} spills {cubin.spill_bytes[kernel]} bytes"
    assert cubin.registers[kernel] <= registers, f"{kernel} for {arch}: {cubin.registers[kernel]} registers"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tile"), list(_shipped()))
def test_gemm_within_its_budget(dtype, tile, arch):
    x = matrix(dtype)
    _check(_gemm_source(tile, x, x), "gemm", REGISTERS[_label(dtype, tile)][0], arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tile"), list(_shipped()))
def test_gemm_reduce_within_its_budget(dtype, tile, arch):
    x = matrix(dtype)
    sources = _reduce_sources(tile, x, x, reduce=REDUCTIONS)
    _check(sources["gemm_reduce"], "gemm_reduce", REGISTERS[_label(dtype, tile)][1], arch)
    for kernel in ("gemm_reduce_combine", "gemm_reduce_finish"):
        _check(sources["gemm_reduce_finish"], kernel, COMBINE_REGISTERS, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tile"), list(_shipped()))
def test_small_products_have_runs_where_a_thread_has_registers(dtype, tile, arch):
    """Every dtype has a tile with them; none spills."""
    x = matrix(dtype, rows=160, columns=160)
    chosen = _gemm_source(None, x, x)
    assert dict(chosen.defines)["SUM_STEPS"] == "8"
    source, reduced = _gemm_source(tile, x, x), _reduce_sources(tile, x, x, reduce=REDUCTIONS)["gemm_reduce"]
    assert dict(source.defines)["SUM_STEPS"] == ("0" if tile.thread_m == 8 else "8")
    for each in (chosen, source, reduced):
        _check(each, each.name, 255, arch)


# ---- what the operands change in the text, on one architecture and the middle tile

TILE = tiles.SimtTile(64, 64, 8, 4, 4, min_blocks=2)
ARCH = "sm_90a"
VARIANTS = {
    "columns of A, rows of B": lambda: _gemm_source(TILE, matrix("c8", order="F"), matrix("c8")),
    "columns of both": lambda: _gemm_source(TILE, matrix("c8", order="F"), matrix("c8", order="F")),
    "conjugate transposes": lambda: _gemm_source(TILE, matrix("c8"), matrix("c8"), trans_a="R", trans_b="C"),
    "odd extents": lambda: _gemm_source(TILE, matrix("f4", columns=4095), matrix("f4", rows=4095)),
    "beta": lambda: _gemm_source(TILE, matrix("c8"), matrix("c8"), matrix("c8"), alpha=2j, beta=1 + 1j),
    "mixed types": lambda: _gemm_source(TILE, matrix("f2"), matrix("c8"), matrix("f4"), beta=1),
    "float32 as float64": lambda: _gemm_source(TILE, matrix("f4"), matrix("f4"), compute="fp64"),
    "planar": lambda: _gemm_source(
        TILE, matrix("f4", planar=True), matrix("f4", planar=True), layout="planar"
    ),
    "64-bit offsets": lambda: _gemm_source(
        TILE, matrix("f8", columns=1 << 27), matrix("f8", rows=1 << 27)
    ),
    "one stage": lambda: _gemm_source(replace(TILE, stages=1), matrix("f8"), matrix("f8")),
}  # fmt: skip
REDUCE_VARIANTS = {
    "max and min": lambda: _reduce_sources(TILE, matrix("f4"), matrix("f4"), reduce=["max", "min"]),
    "magnitudes": lambda: _reduce_sources(TILE, matrix("c8"), matrix("c8"), reduce=["max", "argmin"], pre_op="abs"),
    "squares": lambda: _reduce_sources(TILE, matrix("c8"), matrix("c8"), reduce=["sum"], pre_op="square"),
    "with the product": lambda: _reduce_sources(TILE, matrix("c8"), matrix("c8"), reduce=["absmax"], return_c=True),
    "over columns": lambda: _reduce_sources(TILE, matrix("f8"), matrix("f8"), reduce=["sum"], axis="n"),
    "atomic": lambda: _reduce_sources(TILE, matrix("c8"), matrix("c8"), reduce=["sum", "sumsq"], reproducible=False),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_gemm(variant):
    _check(VARIANTS[variant](), "gemm", 128, ARCH)


@pytest.mark.parametrize("variant", REDUCE_VARIANTS)
def test_variants_of_gemm_reduce(variant):
    sources = REDUCE_VARIANTS[variant]()
    _check(sources["gemm_reduce"], "gemm_reduce", 128, ARCH)
    for kernel in ("gemm_reduce_combine", "gemm_reduce_finish"):
        _check(sources["gemm_reduce_finish"], kernel, COMBINE_REGISTERS, ARCH)


def test_the_variants_differ():
    """Otherwise the list above compiles one text again and again."""
    assert len({make() for make in VARIANTS.values()}) == len(VARIANTS)
    assert len({make()["gemm_reduce"] for make in REDUCE_VARIANTS.values()}) == len(REDUCE_VARIANTS)


def test_every_budget_is_of_a_shipped_tile():
    assert set(REGISTERS) == {_label(*param.values) for param in _shipped()}


def test_a_source_that_does_not_compile():
    with pytest.raises(compiler.CompileError, match=r"bad\.cu\(1\): error: .*undeclared"):
        compiler.compile_cuda('extern "C" __global__ void k() { undeclared(); }', ARCH, name="bad.cu")
