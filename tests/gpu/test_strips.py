"""Strips of a result on the device: the bits of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from simt_cases import CupyMachine, random

from gemmserve_kernels import GemmConfig, GemmProblem, Operand
from gemmserve_kernels.algorithms.splits import gemm as product
from gemmserve_kernels.device.launch import CupyLauncher

pytestmark = pytest.mark.gpu

M, N, K = 1100, 1300, 700


@pytest.fixture(scope="module")
def machine():
    return CupyMachine(CupyLauncher.current())


def run(machine, config, a, b, **options):
    """Bytes of the result."""
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), **options)
    out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype))
    product.run_gemm(machine.launcher, problem, config, machine.put(a), machine.put(b), None, out)
    return np.ascontiguousarray(machine.get(out)).tobytes()


@pytest.mark.parametrize("compute", ["3xfp16", "tf32", "6xbf16"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_strips_have_the_bits_of_the_whole(machine, dtype, compute):
    if compute not in machine.launcher.spec.compute_modes:
        pytest.skip(f"this device has no {compute}")
    a, b = random(1, dtype, M, K), random(2, dtype, K, N)
    spread = a.copy()
    spread[1050] *= np.exp2(np.linspace(-30, 30, K)).astype("f4")
    spread[3, 7], spread[700] = np.inf, 1e-42
    config = None if machine.launcher.spec.kind == "rocm" else "mma"
    for left in (a, spread):
        for algorithm in {config, "wgmma" if machine.launcher.spec.has_wgmma else config}:
            whole, *cut = (
                run(machine, GemmConfig(algorithm=algorithm, strips=strips), left, b, compute=compute)
                for strips in (1, 2, 4, 16)
            )
            assert cut == [whole] * 3
