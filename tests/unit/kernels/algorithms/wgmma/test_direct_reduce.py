"""Reductions of products of float16 operands on the CPU shim's Hopper: every kind, tiles, splits of k, layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reduce_cases import REAL, build, check, check_exact, exact
from simt_cases import ShimMachine, random
from simt_shim import Order, ShimLauncher

from gemmserve_kernels import GemmConfig
from gemmserve_kernels.algorithms.wgmma.direct.gemm_reduce import resolve, run_gemm_reduce
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics.reference import oracle_product
from gemmserve_kernels.problem.errors import ConfigInfeasible

H200 = KNOWN["H200"]
CONFIGS = {
    "chosen": None,
    "wide": GemmConfig(block_m=128, block_n=256, cluster=2, stages=2),
    "split": GemmConfig(block_m=64, block_n=64, split_k=2),
}


@pytest.fixture
def machine():
    """Few multiprocessors, so that blocks walk over several tiles."""
    return ShimMachine(ShimLauncher(replace(H200, sm_count=2), order=Order("shuffled", 5), optimize="-O0"))


@pytest.mark.parametrize("axis", [["m"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_reduction(machine, axis, config):
    a, b = random(1, "float16", 2, 75, 136), random(2, "float16", 136, 264)
    options = {"reduce": list(REAL), "axis": axis, "return_c": True, "alpha": -2}
    check(machine, run_gemm_reduce, a, b, config=config, **options)
    assert "wgmma_reduce" in machine.launcher.launches


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("trans", ["TN", "NT"])
def test_extremes_without_promotion(machine, trans, axis):
    a = random(1, "float16", *((40, 72) if trans[0] == "T" else (72, 40)))
    b = random(2, "float16", *((80, 40) if trans[1] == "T" else (40, 80)))
    options = {"trans_a": trans[0], "trans_b": trans[1], "pre_op": "square"}
    check(machine, run_gemm_reduce, a, b, reduce=["max", "absmin", "argmax"], axis=axis, **options)


def test_ties_and_what_is_not_finite(machine):
    a, b = exact(1, "float16", 70, 8), exact(2, "float16", 8, 72)
    b[1, 3], a[4, 2] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        for axis in "mn":
            check_exact(machine, run_gemm_reduce, a, b, reduce=["max", "min", "argmax", "argmin"], axis=axis)


def test_an_atomic_sum(machine):
    a, b = random(1, "float16", 2, 72, 40), random(2, "float16", 40, 264)
    check(machine, run_gemm_reduce, a, b, reduce=["sum", "max"], axis=["n", "batch"], reproducible=False)


def test_the_same_bits_again_and_in_another_batch(machine):
    a, b = random(1, "float16", 3, 72, 40), random(2, "float16", 40, 72)
    options = {"reduce": ["sumsq", "absmax"], "axis": "n", "config": GemmConfig(block_m=64, block_n=64, split_k=1)}
    first, second = (check(machine, run_gemm_reduce, a, b, **options) for _ in range(2))
    alone = check(machine, run_gemm_reduce, a[1], b, **options)
    for name, result in first.items():
        np.testing.assert_array_equal(result, second[name])
        np.testing.assert_array_equal(result[1], alone[name])


def test_sums_of_one_sign_are_as_good_as_float32s(machine):
    """What truncation takes from every element adds up: 1e-5 of the sum of squares without promotion."""
    a, b = (np.abs(random(seed, "float16", *shape)) for seed, shape in ((1, (64, 1024)), (2, (1024, 64))))
    result = check(machine, run_gemm_reduce, a, b, reduce=["sum", "sumsq"], axis="n")
    product = oracle_product(build(a, b, reduce="sum"), a, b)
    for name, expected in (("sum", product.sum(1)), ("sumsq", (product**2).sum(1))):
        assert np.abs(result[name] / expected - 1).max() <= 4e-7


def test_tiles():
    """The rows of a tile are what remains; sums are promoted; no grids share k."""
    wide, tall = (random(1, "float16", *shape) for shape in ((8, 4096), (4096, 512)))
    found = [resolve(None, build(wide, tall, reduce=name, axis="m"), H200) for name in ("max", "sumsq")]
    assert [tile.promote for tile in found] == [0, 64]
    assert {tile.parts for tile in found} == {1}
    assert max(tile.split for tile in found) > 1
    long = build(random(1, "float16", 4096, 64), random(2, "float16", 64, 64), reduce="max", axis="m")
    assert resolve(None, long, H200).block_m == 64
    with pytest.raises(ConfigInfeasible, match="split_k"):
        resolve(GemmConfig(split_k=6), build(wide, tall, reduce="max"), H200)
