"""The fused kernel on the CPU shim, which plays the matrix instructions: the unmodified source and host code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_cases import (
    CASES,
    HOSTILE,
    SERVED,
    SPLITS,
    TILES,
    WHOLE,
    check_case,
    check_dominant_term,
    check_elements,
    check_long_promotion,
    check_not_finite,
    elementwise,
    run,
)
from simt_cases import ShimMachine, random
from simt_shim import Order, ShimLauncher

from gemmserve_kernels.algorithms.fused import gemm as fused
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig

SPEC = KNOWN["H200"]


tiles = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)


def machine(spec=SPEC, **options):
    return ShimMachine(ShimLauncher(spec, **options))


@tiles
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case(case, tile):
    check_case(machine(), case, tile)


@tiles
@pytest.mark.parametrize(("case", "config"), SPLITS.values(), ids=SPLITS)
def test_parts_of_k_of_several_blocks(case, config, tile):
    check_case(machine(), case, replace(config or GemmConfig(), block_m=tile.block_m))


@tiles
def test_blocks_go_from_tile_to_tile(tile):
    """Three blocks, seventeen tiles of which some have one chunk and some rows that planes do not serve."""
    on = machine(replace(SPEC, sm_count=3))
    a, b = random(1, "complex64", 17, 50, 100), random(2, "complex64", 17, 100, 40)
    a[::5, 3, 7] *= 1e9
    check_elements(on, a, b, config=tile)
    assert on.launcher.counts().plain == 4 * {64: 50, 128: 16}[tile.block_m] * 40


@tiles
@pytest.mark.parametrize("kind", HOSTILE)
def test_every_element_is_as_accurate_as_plain_float32s(kind, tile):
    on = machine()
    a, b = HOSTILE[kind]
    result = check_elements(on, a, b, config=tile)
    counts = on.launcher.counts()
    assert (counts.plain == 0) == (kind in SERVED)
    if kind in {"identity", "small integers"}:
        np.testing.assert_array_equal(result, a.astype("c16") @ b.astype("c16"))


@pytest.mark.parametrize("kind", ["normal", "positive", "a few spikes", "imaginary parts that cancel"])
def test_sums_may_leave_the_tensor_core_once_for_each_chunk(kind):
    """Fewer roundings of a long k make up for what truncation takes; some rows are not served."""
    a, b = (
        np.concatenate([x] * 11, axis) for x, axis in zip(HOSTILE.get(kind, HOSTILE["normal"]), (1, 0), strict=True)
    )
    if kind == "a few spikes":
        a[::9, 100] *= 1e9
    on = machine()
    whole = check_elements(on, a, b, config=WHOLE)
    assert (on.launcher.counts().plain > 0) == (kind == "a few spikes")
    _, halves = run(machine(), a, b, config=replace(WHOLE, promote=32))
    assert elementwise(a, b, whole) <= 2 * elementwise(a, b, halves) + 1
    check_case(machine(), CASES["CR 70"], WHOLE)


@tiles
@pytest.mark.parametrize("k", [64, 128, 256])
def test_sums_of_32_steps_are_no_worse_than_plain_float32s(k, tile):
    check_long_promotion(machine(), tile, k)


@tiles
@pytest.mark.parametrize("promote", [16, 32])
def test_a_dominant_term_keeps_its_bound(promote, tile):
    """A batch, of which a BLAS does not cut k; then each sum among several chunks of zeros."""
    config = replace(tile, promote=promote)
    check_dominant_term(machine(), config)
    check_dominant_term(machine(), config, (64, 64, 192))


@tiles
def test_what_is_not_finite_is_what_plain_float32_makes_of_it(tile):
    check_not_finite(machine(), tile)


@tiles
@pytest.mark.parametrize("order", [Order("reverse"), Order("shuffled", 3)], ids=["reverse", "shuffled"])
def test_sums_of_several_blocks_have_the_same_bits_in_any_order(order, tile):
    """Two levels of blocks that add up others' sums; a tile of which only one part of k is served."""
    a, b = random(1, "complex64", 40, 520), random(2, "complex64", 520, 36)
    a[:, 7] *= 1e6
    config = replace(tile, split_k=6)
    _, first = run(machine(), a, b, config=config)
    on = machine(order=order)
    _, second = run(on, a, b, config=config)
    np.testing.assert_array_equal(first.view(np.uint64), second.view(np.uint64))
    assert on.launcher.counts().plain == 40 * 36


@tiles
def test_a_launch_whose_workspace_is_too_small_is_cut(monkeypatch, tile):
    a, b = random(1, "complex64", 5, 33, 192), random(2, "complex64", 5, 192, 34)
    config = replace(tile, split_k=3)
    _, whole = run(machine(), a, b, config=config)
    monkeypatch.setattr(fused, "_WORKSPACE_BYTES", 2 * 3 * tile.block_m * 64 * 8)
    on = machine()
    _, cut = run(on, a, b, config=config)
    assert on.launcher.launches == {64: ["fused_gemm"], 128: ["fused_columns", "fused_tall"]}[tile.block_m] * 3
    np.testing.assert_array_equal(whole.view(np.uint64), cut.view(np.uint64))
