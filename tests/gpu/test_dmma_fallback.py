"""The fallback in double on tensor cores on the device: every layout, flags, counters, programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dmma_cases import Case
from fallback_cases import ALIGNED, CASES, HALF_WIDE, SOME_GROUPS, Marks, check, run, tiles
from simt_cases import CupyMachine

from gemmserve_kernels import GemmConfig, gemm, read_element_counts
from gemmserve_kernels.bench import kinds
from gemmserve_kernels.device.launch import CupyLauncher

pytestmark = pytest.mark.gpu

EVERY = CASES | ALIGNED


@pytest.fixture
def launcher():
    made = CupyLauncher.current()
    if made.spec.arch != "sm_90a":
        pytest.skip(f"this is {made.spec.arch}")
    return made


def on_device(launcher, case, **options):
    """What `run` returns, and the elements that were counted."""
    before = read_element_counts()
    found = run(launcher, case, CupyMachine(launcher).put, lambda x: x.get(), **options)
    return *found, read_element_counts().counts() - before.counts()


@pytest.mark.parametrize("marks", [Marks.random, Marks.every], ids=["mixed", "all"])
@pytest.mark.parametrize("name", EVERY)
def test_every_layout(launcher, name, marks):
    case = EVERY[name]
    for tile in tiles(case):
        *found, counts = on_device(launcher, case, marks=marks, tile=tile)
        check(*found)
        assert counts.plain == found[2].unfit.sum()


@pytest.mark.parametrize("shape", [(2000, 1500, 700), (1, 3000, 5000), (3000, 1, 128), (257, 1025, 33)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_shapes(launcher, shape, dtype):
    """Many tiles a block, of which some have a few flagged elements: the same bits, however they are copied."""
    m, n, k = shape
    case = Case((m, k), (k, n), dtype)

    def few(problem):
        found, rng = Marks.none(problem), np.random.default_rng(8)
        found.rows[rng.integers(0, m, 5)] = 3
        found.columns[rng.integers(0, n, 5)] = 3
        found.rows[rng.integers(0, m, 7)] |= 1
        found.columns[rng.integers(0, n, 7)] |= 2
        return found

    *found, counts = on_device(launcher, case, marks=few)
    check(*found)
    assert counts.plain == found[2].unfit.sum()
    for again in ({}, {"copied": True}, {"marks": Marks.every}):
        value = on_device(launcher, case, **{"marks": few, **again})[3]
        np.testing.assert_array_equal(value[found[2].unfit], found[3][found[2].unfit])


@pytest.mark.parametrize("widened", [False, True])
def test_tiles_that_deficits_name(launcher, widened):
    def marks(problem):
        found = Marks.random(problem) if widened else Marks.none(problem)
        return replace(found, groups=SOME_GROUPS, widened=widened)

    *found, counts = on_device(launcher, HALF_WIDE, marks=marks)
    check(*found)
    marked = found[2]
    assert counts.wide % 2**64 == (-int((marked.unfit & marked.rest).sum()) if widened else 0) % 2**64
    assert counts.plain == marked.unfit.sum()


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_products_in_a_row(launcher, dtype):
    """By the recorded launches: other arrays every time, some with bad rows, each right."""
    import cupy

    m, n, k = 700, 900, 4096
    for turn in range(6):
        a, b = kinds.operands(cupy, "normal", m, n, k, dtype, turn)
        if turn % 2:
            for side in (a[turn * 100 : turn * 100 + 3], b.T[turn * 50 : turn * 50 + 2]):
                side[...] = 0
                side[:, turn], side[:, turn + 9] = 2.0**60, 2.0**-50
        before = read_element_counts()
        d = gemm(a, b, config=GemmConfig(algorithm="wgmma"))
        plain = (read_element_counts().counts() - before.counts()).plain
        assert plain == (3 * n + 2 * m - 6 if turn % 2 else 0)
        wide = np.complex128 if dtype == "complex64" else np.float64
        exact, size = a.astype(wide) @ b.astype(wide), abs(a).astype(float) @ abs(b).astype(float)
        assert bool((abs(d - exact) <= 8 * 2.0**-24 * size).all())
    assert launcher.spec.arch == "sm_90a"
