"""Double precision on tensor cores on the device: every layout, all tiles, no element beside the result."""

from __future__ import annotations

import numpy as np
import pytest
from dmma_cases import CASES, Case, excess, run

from gemmserve_kernels.launch import CupyLauncher

pytestmark = pytest.mark.gpu


@pytest.fixture
def launcher():
    made = CupyLauncher.current()
    if made.spec.kind != "cuda" or int("".join(filter(str.isdigit, made.spec.arch))) < 80:
        pytest.skip(f"mma.sync in double: this is {made.spec.arch}")
    return made


def on_device(launcher, case, tile, **options):
    import cupy

    def put(x):
        return cupy.asarray(x, order="F" if x.flags.f_contiguous and not x.flags.c_contiguous else "C")

    return run(launcher, case, tile, put, lambda x: x.get(), **options)


@pytest.mark.parametrize("size", ["large", "small"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_layout(launcher, case, size):
    tile = case.tiles()[size]
    if tile.shared_bytes(is_complex=case.dtype[0] == "c" or case.planar) > launcher.spec.shared_per_block:
        pytest.skip("the tile is larger than this device's shared memory")
    assert excess(*on_device(launcher, case, tile)) <= 1


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shape", [(2000, 1500, 700), (1, 3000, 5000), (3000, 1, 129), (257, 1025, 33)], ids=str)
def test_shapes(launcher, shape, dtype):
    m, n, k = shape
    case = Case((m, k), (k, n), dtype)
    problem, arrays, value = on_device(launcher, case, None)
    assert excess(problem, arrays, value) <= 1
    np.testing.assert_array_equal(on_device(launcher, case, None)[2], value)
