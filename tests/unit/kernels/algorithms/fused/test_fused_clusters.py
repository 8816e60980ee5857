"""Clusters of the fused kernel on the CPU shim: the very bits of tiles of 64 x 64, whatever comes first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_cases import CASES, HOSTILE, check_case, check_not_finite, check_same_bits, run
from simt_cases import ShimMachine, random
from simt_shim import Order, ShimLauncher

from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig

SPEC = replace(KNOWN["H200"], sm_count=8)
"""Few multiprocessors: blocks go from tile to tile."""


def machine(**options):
    return ShimMachine(ShimLauncher(SPEC, **options))


def check(a, b, c=None, *, config=None, order=None, **options):
    """The same bits, and the same elements of which planes do not serve."""
    on, other = machine(**({} if order is None else {"order": order})), machine()
    check_same_bits(on, other, a, b, c, config=config, **options)
    assert set(on.launcher.launches) == {"fused_cluster"}
    assert on.launcher.counts().plain == other.launcher.counts().plain
    return on.launcher.counts().plain


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_has_the_same_bits(case):
    a, b, c = case.operands()
    check(a, b, c, out=case.out, **case.options)


@pytest.mark.parametrize("case", [CASES[name] for name in ("70x130x65", "CR 70", "complex alpha and beta")])
def test_every_element_is_within_its_bound(case):
    check_case(machine(), case, GemmConfig(cluster=2))


@pytest.mark.parametrize(
    ("m", "n", "k", "batch"),
    [(128, 128, 128, 5), (200, 200, 100, 3), (129, 321, 96, 2), (257, 65, 160, 2), (300, 64, 40, 2), (1, 520, 70, 3)],
)
@pytest.mark.parametrize("trans", ["NN", "CT"])
def test_blocks_go_from_tile_to_tile(m, n, k, batch, trans):
    """Also where a cluster's last blocks have no columns, and where a tile's last rows are none."""
    a = random(1, "complex64", batch, *((k, m) if trans[0] == "C" else (m, k)))
    b = random(2, "complex64", batch, *((n, k) if trans[1] == "T" else (k, n)))
    check(a, b, trans_a=trans[0], trans_b=trans[1])


@pytest.mark.parametrize("order", [Order("reverse"), Order("shuffled", 3)], ids=["reverse", "shuffled"])
@pytest.mark.parametrize("stages", [2, 3])
def test_copies_and_blocks_may_come_in_any_order(order, stages):
    a, b = random(1, "complex64", 3, 150, 200), random(2, "complex64", 3, 200, 260)
    a[1, 3, 7] *= 1e9  # planes do not serve a chunk of a tile
    assert check(a, b, config=GemmConfig(stages=stages), order=order) == 64 * 260


@pytest.mark.parametrize("promote", [16, 32])
def test_sums_of_any_length_have_the_same_bits(promote):
    for k in (32, 40, 64, 98, 130):
        a, b = random(1, "complex64", 130, k), random(2, "complex64", k, 70)
        check(a, b, config=GemmConfig(promote=promote))


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_planes_do_not_serve_is_computed_alike(kind):
    check(*HOSTILE[kind])


def test_a_tile_is_judged_by_halves_of_its_rows():
    """Rows of one warpgroup, of 128: as many elements as a tile of 64 x 64 has are computed by multiply-adds."""
    a, b = random(1, "complex64", 128, 128), random(2, "complex64", 128, 128)
    a[70, 100] *= 1e9
    assert check(a, b) == 64 * 128


def test_what_is_not_finite_is_what_plain_float32_makes_of_it():
    check_not_finite(machine(), GemmConfig(cluster=2))
    a, b = random(1, "complex64", 70, 100), random(2, "complex64", 100, 80)
    a[5, 3], b[50, 7] = np.inf, np.nan
    check(a, b)


def test_large_batches_have_clusters_unless_blocks_of_their_own_are_asked_for():
    a, b = random(1, "complex64", 40, 128, 128), random(2, "complex64", 40, 128, 128)
    on, alone = machine(), machine()
    (_, result), (_, expected) = run(on, a, b), run(alone, a, b, config=GemmConfig(block_m=64))
    assert on.launcher.launches == ["fused_cluster"]
    assert alone.launcher.launches == ["fused_gemm"]
    assert result.tobytes() == expected.tobytes()
