"""The portable gemm kernel on the device: the shim's cases, the tiles that dispatch uses, sizes that fill it."""

from __future__ import annotations

import numpy as np
import pytest
from simt_cases import GEMM_CASES, CupyMachine, Gemm, assert_within, check_gemm, run_gemm

from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.algorithms.simt.tile import _CANDIDATES
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.gpu


@pytest.fixture
def machine():
    return CupyMachine(CupyLauncher.current())


@pytest.mark.parametrize("case", GEMM_CASES.values(), ids=GEMM_CASES)
def test_every_case(machine, case):
    check_gemm(machine, case)


CHOSEN = [(dtype, candidate.tile) for dtype, candidates in _CANDIDATES.items() for candidate in candidates]


@pytest.mark.parametrize("extents", [(260, 391, 130), (512, 256, 96)], ids=["odd", "even"])
@pytest.mark.parametrize("trans", ["NN", "TN", "NC", "RT"])
@pytest.mark.parametrize(("dtype", "tile"), CHOSEN, ids=[f"{d}-{t.block_m}x{t.block_n}" for d, t in CHOSEN])
def test_every_tile_that_dispatch_uses(machine, dtype, tile, trans, extents):
    m, n, k = extents
    a = (k, m) if trans[0] in "TC" else (m, k)
    b = (n, k) if trans[1] in "TC" else (k, n)
    options = {"trans_a": trans[0], "trans_b": trans[1], "alpha": 2, "beta": -1}
    check_gemm(machine, Gemm(a, b, (m, n), (dtype,), config=tile, options=options))


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_the_same_bits_every_time(machine, dtype):
    case = Gemm((3, 300, 200), (3, 200, 270), dtypes=(dtype,), config=None)
    first, again = (run_gemm(machine, case)[-1] for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_subnormals_survive(machine):
    a, b = np.full((32, 1), 1e-25, np.float32), np.full((1, 32), 1e-15, np.float32)
    problem, *_, result = run_gemm(machine, Gemm(a.shape, b.shape, dtypes=("float32",)), (a, b, None))
    np.testing.assert_array_equal(result, np.full(problem.result_shape, np.float32(1e-25) * np.float32(1e-15)))
    assert (result > 0).all()


def test_an_array_past_four_gigabytes(machine):
    """2^33 bytes of A: offsets to the last rows need more than 32 bits."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    rows, k = 1 << 21, 512
    if free < 3 * rows * k * 8:
        pytest.skip(f"{free} bytes free on the device")
    a = cupy.random.default_rng(1).standard_normal((rows, k), dtype=cupy.float32).astype(cupy.complex64)
    b = cupy.random.default_rng(2).standard_normal((k, 8), dtype=cupy.float32).astype(cupy.complex64)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    out = cupy.full((rows, 8), cupy.nan, cupy.complex64)
    simt.run_gemm(machine.launcher, problem, None, a, b, None, out)
    for part in (slice(0, 64), slice(rows // 2, rows // 2 + 64), slice(rows - 64, rows)):
        head, tail = a[part].get(), b.get()
        shorter = GemmProblem.build(Operand.of(head), Operand.of(tail))
        assert_within(out[part].get(), reference.oracle_gemm(shorter, head, tail), reference.bound(shorter, head, tail))
