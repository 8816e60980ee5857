"""Kernels that think in warps of 32 lanes on waves of 64: shuffles and votes stay in the half they begin in."""

from __future__ import annotations

import numpy as np
import pytest
import reduce_cases
from simt_cases import ShimMachine, random
from simt_shim import ShimLauncher, compile_source

from gemmserve_kernels.algorithms.sums.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.spec import KNOWN

PROBE = """
extern "C" __global__ void probe(int* neighbour, int* any, int* all, int* joined) {
    const int lane = static_cast<int>(threadIdx.x);
    neighbour[lane] = __shfl_xor_sync(0xffffffffu, lane, 16);
    any[lane] = __any_sync(0xffffffffu, lane == 40);
    all[lane] = __all_sync(0xffffffffu, lane < 32);
    joined[lane] = -1;
    if (lane >= 32) {
        __syncwarp();
        joined[lane] = __shfl_xor_sync(0xffffffffu, lane, 1);
    }
}
"""


@pytest.mark.parametrize("warp_size", [32, 64])
def test_what_lanes_ask_of_each_other_stays_in_their_half(warp_size):
    source = compiler._flatten("common/platform.cuh", set()) + PROBE
    found = np.full((4, 64), -7, np.int32)
    compile_source(source, warp_size=warp_size, optimize="-O0").launch("probe", (1,), (64,), tuple(found))
    lanes = np.arange(64)
    np.testing.assert_array_equal(found[0], lanes ^ 16)
    np.testing.assert_array_equal(found[1] != 0, lanes >= 32)
    np.testing.assert_array_equal(found[2] != 0, lanes < 32)
    np.testing.assert_array_equal(found[3], np.where(lanes < 32, -1, lanes ^ 1))


@pytest.mark.parametrize("axis", ["m", "n"])
def test_sums_without_the_product_on_waves_of_64(axis):
    machine = ShimMachine(ShimLauncher(KNOWN["MI300X"]))
    a, b = random(1, "complex64", 2, 70, 45), random(2, "complex64", 45, 80)
    reduce_cases.check(machine, run_gemm_reduce, a, b, reduce=["sum", "mean"], axis=axis, alpha=2)
