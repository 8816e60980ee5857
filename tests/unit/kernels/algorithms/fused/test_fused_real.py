"""The fused kernel of float32 on the CPU shim: half a block of the same source, two blocks of a multiprocessor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_cases import (
    REAL_CASES,
    REAL_HOSTILE,
    REAL_SERVED,
    REAL_SPLITS,
    check_case,
    check_dominant_term,
    check_elements,
    check_long_promotion,
    check_not_finite,
    elementwise,
    one_sign,
    plain,
    run,
)
from simt_cases import ShimMachine, random
from simt_shim import Order, ShimLauncher

from gemmserve_kernels.algorithms.fused import gemm as fused
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig

SPEC = KNOWN["H200"]


def machine(spec=SPEC, **options):
    return ShimMachine(ShimLauncher(spec, **options))


@pytest.mark.parametrize("case", REAL_CASES.values(), ids=REAL_CASES)
def test_every_case(case):
    check_case(machine(), case)


@pytest.mark.parametrize("promote", [16, 32, 64])
@pytest.mark.parametrize("name", ["70x130x65", "3x100x129", "TN 70", "complex alpha and beta"])
def test_every_promotion(name, promote):
    check_case(machine(), REAL_CASES[name], GemmConfig(promote=promote))


@pytest.mark.parametrize(("case", "config"), REAL_SPLITS.values(), ids=REAL_SPLITS)
def test_parts_of_k_of_several_blocks(case, config):
    check_case(machine(), case, config)


def test_blocks_go_from_tile_to_tile():
    """Two blocks of each of two multiprocessors, seventeen tiles of which some have rows that planes do not serve."""
    on = machine(replace(SPEC, sm_count=2))
    a, b = random(1, "float32", 17, 50, 100), random(2, "float32", 17, 100, 40)
    a[::5, 3, 7] *= 1e9
    check_elements(on, a, b)
    assert on.launcher.counts().plain == 4 * 50 * 40


@pytest.mark.parametrize("kind", REAL_HOSTILE)
def test_every_element_is_as_accurate_as_plain_float32s(kind):
    on = machine()
    a, b = REAL_HOSTILE[kind]
    result = check_elements(on, a, b)
    assert (on.launcher.counts().plain == 0) == (kind in REAL_SERVED)
    if kind in {"identity", "small integers"}:
        np.testing.assert_array_equal(result, a.astype("f8") @ b.astype("f8"))


@pytest.mark.parametrize("k", [64, 128, 256])
def test_sums_of_64_steps_are_no_worse_than_plain_float32s(k):
    check_long_promotion(machine(), GemmConfig(), k, "float32")


@pytest.mark.parametrize("k", [32, 40, 48, 63, 70, 96, 100, 192])
def test_batches_of_any_k_are_no_worse_than_plain_float32s(k):
    """Data of one sign, of which truncation takes most; as many products as have the longest sums."""
    a, b = one_sign((34, 40, k), 1, "float32"), one_sign((34, k, 36), 2, "float32")
    _, result = run(machine(), a, b)
    assert elementwise(a, b, result) <= elementwise(a, b, plain(a, b))


@pytest.mark.parametrize("promote", [16, 32, 64])
def test_a_dominant_term_keeps_its_bound(promote):
    check_dominant_term(machine(), GemmConfig(promote=promote), dtype="float32")
    check_dominant_term(machine(), GemmConfig(promote=promote), (64, 64, 192), dtype="float32")


def test_what_is_not_finite_is_what_plain_float32_makes_of_it():
    check_not_finite(machine(), dtype="float32")


@pytest.mark.parametrize("order", [Order("reverse"), Order("shuffled", 3)], ids=["reverse", "shuffled"])
def test_sums_of_several_blocks_have_the_same_bits_in_any_order(order):
    a, b = random(1, "float32", 40, 520), random(2, "float32", 520, 36)
    a[:, 7] *= 1e6
    config = GemmConfig(split_k=6)
    _, first = run(machine(), a, b, config=config)
    on = machine(order=order)
    _, second = run(on, a, b, config=config)
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))
    assert on.launcher.counts().plain == 40 * 36


def test_a_launch_whose_workspace_is_too_small_is_cut(monkeypatch):
    a, b = random(1, "float32", 5, 33, 192), random(2, "float32", 5, 192, 34)
    config = GemmConfig(split_k=3)
    _, whole = run(machine(), a, b, config=config)
    monkeypatch.setattr(fused, "_WORKSPACE_BYTES", 2 * 3 * 64 * 64 * 4)
    on = machine()
    _, cut = run(on, a, b, config=config)
    assert on.launcher.launches == ["fused_gemm"] * 3
    np.testing.assert_array_equal(whole.view(np.uint32), cut.view(np.uint32))


def test_conjugation_of_real_numbers_has_the_kernel_of_none():
    a, b = random(1, "float32", 70, 64), random(2, "float32", 64, 66)
    on, other = machine(), machine()
    _, first = run(on, a, b, trans_a="R", trans_b="R")
    _, second = run(other, a, b)
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))
    assert on.launcher.launches == ["fused_gemm"]
