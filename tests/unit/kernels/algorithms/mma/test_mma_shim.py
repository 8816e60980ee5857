"""The mma.sync kernel on the CPU shim, which plays the matrix instructions: the unmodified source and host code."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_models import splits as plane_models
from mma_cases import build, check, check_not_finite, check_planes, planes_of, run
from simt_cases import ShimMachine, random, strided
from simt_shim import ShimLauncher

from gemmserve_kernels.algorithms.mma import gemm as mma
from gemmserve_kernels.algorithms.mma import plan
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import models
from gemmserve_kernels.problem.config import GemmConfig

SMALL = GemmConfig(block_m=32, block_n=32, block_k=16, warp_m=16, warp_n=16, promote=16, stages=2)
SMALL_PLANES = GemmConfig(block_m=32, block_n=32, block_k=32, warp_m=16, warp_n=16, promote=32, stages=2)


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(KNOWN["A100"]))


@pytest.mark.parametrize("trans", ["NN", "TC", "RT"])
@pytest.mark.parametrize("order", "CF")
def test_operations(machine, trans, order):
    m, n, k = 35, 41, 37
    a = random(1, "c8", *((k, m) if trans[0] in "TC" else (m, k)))
    b = random(2, "c8", *((n, k) if trans[1] in "TC" else (k, n)))
    options = {"trans_a": trans[0], "trans_b": trans[1], "alpha": 2 - 1j, "beta": 0.5j}
    check(machine, "3xtf32", a, b, random(3, "c8", m, n), order=order, config=SMALL, **options)


@pytest.mark.parametrize("compute", ["3xtf32", "1xtf32"])
@pytest.mark.parametrize("instruction_k", [4, 8])
def test_real(machine, compute, instruction_k):
    config = GemmConfig(**{**SMALL.tile_fields, "instruction_k": instruction_k, "stages": 3})
    check(machine, compute, random(1, "f4", 40, 50), random(2, "f4", 50, 36), config=config)


@pytest.mark.parametrize("how", ["reversed", "gaps"])
def test_strides(machine, how):
    a, b, c = (strided(random(i, "f4", *shape), how) for i, shape in enumerate([(33, 40), (40, 36), (33, 36)]))
    check(machine, "3xtf32", a, b, c, beta=-1, config=SMALL)


def test_planar(machine):
    a, b, c = (random(i, "f4", 2, *shape) for i, shape in enumerate([(33, 40), (40, 36), (33, 36)]))
    check(machine, "3xtf32", a, b, c, layout="planar", alpha=1j, beta=2, trans_a="R", config=SMALL)


def test_splits_and_batches(machine, monkeypatch):
    """The workspace holds two tiles at once: the batch is launched in turns, with the bits of its products."""
    monkeypatch.setattr(plan, "_WORKSPACE_BYTES", 2 * 3 * 32 * 32 * 8)
    config = GemmConfig(**{**SMALL.tile_fields, "split_k": 3})
    a, b = random(1, "c8", 2, 1, 40, 150), random(2, "c8", 2, 150, 20)
    both = check(machine, "3xtf32", a, b, config=config)
    assert len(machine.launcher.launches) == 4
    alone = check(machine, "3xtf32", a[1, 0], b[0], config=config)
    np.testing.assert_array_equal(both[1, 0], alone)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_not_finite(machine, dtype):
    check_not_finite(machine, dtype, "3xtf32", SMALL)


@pytest.mark.parametrize("style", models.ROUNDINGS)
def test_rounding_is_the_models(machine, style):
    rng = np.random.default_rng(1)
    a = rng.integers(0, 2**32, (32, 32), dtype=np.uint32).view(np.float32)
    a[~np.isfinite(a) | (np.abs(a) < 1e-37) | (np.abs(a) > 1e38)] = 1 + 2**-11
    config = GemmConfig(**{**SMALL.tile_fields, "rounding_small": style})
    _, result = run(machine, "1xtf32", a, np.eye(32, dtype=np.float32), config=config)
    np.testing.assert_array_equal(result.view(np.uint32), models.round_tf32(a, style).view(np.uint32))


@pytest.mark.parametrize(("dtype", "scheme"), [("complex64", "3xfp16"), ("float32", "1xfp16")])
@pytest.mark.parametrize("order", "CF")
def test_planes(machine, dtype, scheme, order):
    check_planes(machine, dtype, scheme, order, SMALL_PLANES)


def test_every_access_is_inside_and_ordered():
    """Bounds, races and reads of shared memory that nothing wrote."""
    machine = ShimMachine(ShimLauncher(KNOWN["A100"], checked=True))
    check(machine, "3xtf32", random(1, "c8", 33, 40), random(2, "c8", 40, 18), config=SMALL)


def test_supports():
    a, b = random(1, "f4", 8, 8), random(2, "f4", 8, 8)
    problem = build(a, b, compute="3xtf32")
    assert mma.supports(problem, KNOWN["A100"]) is None
    assert "NVIDIA" in mma.supports(problem, KNOWN["MI300X"])
    assert "fp32" in mma.supports(build(a, b, compute="fp32"), KNOWN["A100"])
    assert "float64" in mma.supports(build(a.astype("f8"), b.astype("f8"), compute="3xtf32"), KNOWN["A100"])
    assert mma.supports_planes(problem, "3xfp16", KNOWN["A100"]) is None
    assert "3m" in mma.supports_planes(problem, "3xfp16-3m", KNOWN["A100"])


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("big", ["toward_zero", "nearest"])
def test_the_models_bits_of_tf32(machine, dtype, big):
    a, b = random(1, dtype, 35, 77), random(2, dtype, 77, 33)
    config = GemmConfig(**{**SMALL.tile_fields, "rounding_big": big})
    _, result = run(machine, "3xtf32", a, b, config=config)
    np.testing.assert_array_equal(result, models.product(a, b, "3xtf32", big=big, promote=16))


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("scheme", ["3xfp16", "1xfp16"])
def test_the_models_bits_of_planes(machine, dtype, scheme):
    """A lane brings eight neighbours of k for two instructions: of 32 steps each takes half of every eight."""
    m, n, k = 35, 33, 96
    a, b = random(1, dtype, 1, m, k), random(2, dtype, 1, n, k)
    left, right = (planes_of(machine, x, scheme, side) for x, side in ((a, "a"), (b, "b")))
    problem = build(a[0], b[0].T, compute="auto")
    out = machine.put(np.full((m, n), np.nan, dtype))
    tile = mma.resolve_planes(SMALL_PLANES, problem, scheme, machine.launcher.spec)
    mma.multiply(machine.launcher, problem, tile, left, right, None, out)
    order = np.arange(k).reshape(-1, 4, 2, 4).swapaxes(1, 2).reshape(-1)
    found = plane_models.multiply(left.data[0][..., order], right.data[0][..., order], scheme, kernel="mma")
    exponents = np.add.outer(left.exponents[0], right.exponents[0])
    np.testing.assert_array_equal(machine.get(out), found * np.exp2(exponents.astype(np.float32)))
