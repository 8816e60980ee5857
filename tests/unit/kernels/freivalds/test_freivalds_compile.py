"""The checks' kernels for every CUDA architecture, by NVRTC, without a device: registers and spills."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernel_sources import compiled

from gemmserve_kernels.device.replay import LaunchRecorder, RecordedLaunch
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.freivalds import device, sampled_device
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.usefixtures("nvrtc")

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
REGISTERS = {
    "freivalds_times": 128, "freivalds_judge": 128, "freivalds_fold": 40, "freivalds_signs": 32,
    "sampled_elements": 128, "sampled_worst": 40,
}  # fmt: skip
"""freivalds_times, sampled_elements: two blocks of 256 threads on a multiprocessor."""


def launched(dtype, order, *, planar=False, compute="auto"):
    """(source, entry) of what checks of large matrices launch."""
    if planar:
        x = Operand((2, 4096, 4096), np.dtype(dtype), (4096 * 4096, *((4096, 1) if order == "C" else (1, 4096))))
    else:
        x = Operand.contiguous((4096, 4096), np.dtype(dtype), order)
    problem = GemmProblem.build(x, x, x, beta=1, layout="planar" if planar else "interleaved", compute=compute)
    recorder = LaunchRecorder(KNOWN["H200"], 2**31 - 1, 0)
    strides = tuple(stride * x.dtype.itemsize for stride in x.strides)
    arrays = [recorder.argument(x.shape, x.dtype, strides) for _ in range(4)]
    device.figures(recorder, problem, *arrays, seed=1)
    sampled_device.figures(recorder, problem, *arrays, recorder.empty((1,), np.dtype(np.uint64)))
    return {(step.source, step.entry) for step in recorder.steps if isinstance(step, RecordedLaunch)}


def check(found, arch):
    assert {entry for _, entry in found} == set(REGISTERS)
    for source, entry in found:
        cubin = compiled(source, arch)
        assert cubin.registers[entry] <= REGISTERS[entry], (entry, cubin.registers)
        assert cubin.spill_bytes[entry] == 0, (entry, cubin.spill_bytes)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch, order):
    check(launched("complex64", order), arch)
    check(launched("float32", order), arch)


@pytest.mark.parametrize(("dtype", "order"), list(itertools.product(["float16", "float64", "complex128"], "CF")))
def test_every_dtype(dtype, order):
    check(launched(dtype, order), "sm_90a")


@pytest.mark.parametrize(("m", "n", "k"), [(3, 1, 100), (100, 1, 4), (2, 3, 5)])
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_narrow_sides(dtype, m, n, k):
    """Tiles of fewer columns than a block has warps."""
    x, y = Operand.contiguous((m, k), np.dtype(dtype), "F"), Operand.contiguous((k, n), np.dtype(dtype))
    problem, recorder = GemmProblem.build(x, y), LaunchRecorder(KNOWN["H200"], 2**31 - 1, 0)
    a, b, d = (
        recorder.argument(each.shape, each.dtype, tuple(stride * each.dtype.itemsize for stride in each.strides))
        for each in (x, y, Operand.contiguous((m, n), np.dtype(dtype)))
    )
    device.figures(recorder, problem, a, b, None, d, seed=1)
    sampled_device.figures(recorder, problem, a, b, None, d, recorder.empty((1,), np.dtype(np.uint64)))
    for step in recorder.steps:
        if isinstance(step, RecordedLaunch):
            assert compiled(step.source, "sm_90a").spill_bytes[step.entry] == 0


def test_norms():
    check(launched("complex64", "C", compute="3xfp16-3m"), "sm_90a")


@pytest.mark.parametrize(("dtype", "order"), list(itertools.product(["float32", "float64"], "CF")))
def test_planar(dtype, order):
    check(launched(dtype, order, planar=True), "sm_90a")
