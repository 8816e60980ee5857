"""The fused reductions on the device: the shim's cases, and the tiles that dispatch uses."""

from __future__ import annotations

import numpy as np
import pytest
from simt_cases import COMPLEX_KINDS, REAL_KINDS, REDUCE_CASES, CupyMachine, Reduce, check_reduce, run_reduce

from gemmserve_kernels.algorithms.simt.tile import _CANDIDATES
from gemmserve_kernels.device.launch import CupyLauncher

pytestmark = pytest.mark.gpu


@pytest.fixture
def machine():
    return CupyMachine(CupyLauncher.current())


@pytest.mark.parametrize("case", REDUCE_CASES.values(), ids=REDUCE_CASES)
def test_every_case(machine, case):
    check_reduce(machine, case)


CHOSEN = [(dtype, candidate.tile) for dtype, candidates in _CANDIDATES.items() for candidate in candidates]


@pytest.mark.parametrize(("dtype", "tile"), CHOSEN, ids=[f"{d}-{t.block_m}x{t.block_n}" for d, t in CHOSEN])
def test_every_tile_that_dispatch_uses(machine, dtype, tile):
    kinds = COMPLEX_KINDS if dtype.startswith("c") else REAL_KINDS
    options = {"alpha": 0.5, "return_c": True}
    check_reduce(machine, Reduce((3, 391, 64), (64, 260), kinds, (dtype, dtype), config=tile, options=options))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_the_same_bits_every_time(machine, dtype):
    kinds = COMPLEX_KINDS if dtype.startswith("c") else REAL_KINDS
    case = Reduce((40, 300, 20), (20, 270), kinds, (dtype, dtype), axis=("m", "batch"), config=None)
    (*_, first), (*_, again) = run_reduce(machine, case), run_reduce(machine, case)
    for name in kinds:
        np.testing.assert_array_equal(first[name], again[name])
