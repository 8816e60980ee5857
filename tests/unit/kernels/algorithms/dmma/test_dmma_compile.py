"""The kernels in double precision by NVRTC, without a device: no spills, in any direction of the operands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_sources import SourceRecorder, compiled, matrix

from gemmserve_kernels.algorithms.dmma import gemm as dmma
from gemmserve_kernels.algorithms.dmma import gemm_reduce as dmma_reduce
from gemmserve_kernels.algorithms.dmma.tile import TILES
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

pytestmark = pytest.mark.usefixtures("nvrtc")

ARCHITECTURES = {"sm_80": "A100", "sm_90a": "H200", "sm_100a": "B200", "sm_120": "RTX5090"}


def _source(dtype, trans, spec, *, tile=None, planar=False, flagged=False, odd=0):
    """That of a product of 8192 x 8192 matrices, `odd` elements off an aligned row length."""
    dtype, n = np.dtype(dtype), 8192
    shape, strides = (n, n), ((n + odd) * dtype.itemsize, dtype.itemsize)
    if planar:
        shape, strides = (2, *shape), (n * n * dtype.itemsize, *strides)
    x = np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)
    options = {"trans_a": trans[0], "trans_b": trans[1], "layout": "planar" if planar else "interleaved"}
    problem = GemmProblem.build(Operand.contiguous(shape, dtype), Operand.contiguous(shape, dtype), **options)
    recorder = SourceRecorder(spec)
    dmma.run_gemm(recorder, problem, tile, x, x, None, x)
    ((source, _, _),) = recorder.launched
    return compiler.KernelSource("dmma_tiles", source.defines) if flagged else source


def _check(source, arch):
    cubin = compiled(source, arch)
    assert cubin.spill_bytes[source.name] == 0, f"{source.name} for {arch}"
    assert cubin.registers[source.name] <= 255


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("trans", ["NN", "TN", "NT", "TT", "CR"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_on_hopper(dtype, trans, flagged):
    source = _source(dtype, trans, KNOWN["H200"], flagged=flagged)
    assert dict(source.defines)["ENGINE"] == "1"
    _check(source, "sm_90a")


@pytest.mark.parametrize("tile", [tile for tiles in TILES.values() for tile in tiles], ids=str)
def test_every_tile_on_hopper(tile):
    """By the copy engine, and of rows that are not aligned."""
    dtype = "complex128" if tile.kind == "complex128" else "float64"
    for odd in (0, 1):
        _check(_source(dtype, "NN", KNOWN["H200"], tile=tile, planar=tile.kind == "planar", odd=odd), "sm_90a")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", TILES)
def test_on_every_architecture(kind, arch):
    spec = KNOWN[ARCHITECTURES[arch]]
    if arch != "sm_90a":
        spec = replace(spec, arch=arch)
    dtype = "complex128" if kind == "complex128" else "float64"
    source = _source(dtype, "NN", spec, planar=kind == "planar")
    assert dict(source.defines)["ENGINE"] == str(int(arch == "sm_90a" and kind != "planar"))
    _check(source, arch)


def _reduction(kind, reduce, spec, *, tile=None, **options):
    """The source of reductions of a product of 8192 x 8192 matrices."""
    planar, dtype = kind == "planar", "complex128" if kind == "complex128" else "float64"
    x = matrix(dtype, rows=8192, columns=8192, planar=planar)
    operand = Operand.contiguous(x.shape, dtype)
    layout = "planar" if planar else "interleaved"
    problem = GemmReduceProblem.build(operand, operand, reduce=reduce, layout=layout, **options)
    recorder = SourceRecorder(spec)
    results = {name: np.empty(shape, dtype) for name, (shape, dtype) in problem.results.items() if name != "c"}
    dmma_reduce.run_gemm_reduce(recorder, problem, tile, x, x, results | ({"c": x} if problem.return_c else {}))
    return recorder.sources["dmma_reduce"]


@pytest.mark.parametrize("reduce", [["absmax"], ["max"], ["sum", "sumsq", "absmax"], ["argmax", "mean"]], ids="+".join)
@pytest.mark.parametrize("tile", [tile for tiles in TILES.values() for tile in tiles], ids=str)
def test_reductions_by_every_tile_on_hopper(tile, reduce):
    if tile.kind != "float64" and "max" in reduce:
        pytest.skip("no largest of complex numbers")
    _check(_reduction(tile.kind, reduce, KNOWN["H200"], tile=tile), "sm_90a")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", TILES)
def test_reductions_on_every_architecture(kind, arch):
    spec = replace(KNOWN[ARCHITECTURES[arch]], arch=arch)
    reduce = ["argmin", "sum", "sumsq"]
    _check(_reduction(kind, reduce, spec, pre_op="square"), arch)
    _check(_reduction(kind, ["sum"], spec, return_c=True, axis="n"), arch)
