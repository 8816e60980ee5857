"""The fused kernel on the device: the shim's cases, hostile data beside the vendor, repeats, batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_cases import (
    CASES,
    HOSTILE,
    REAL_CASES,
    REAL_HOSTILE,
    REAL_SERVED,
    REAL_SPLITS,
    SERVED,
    SPLITS,
    TILES,
    WHOLE,
    check_case,
    check_elements,
    check_not_finite,
    check_same_bits,
    elementwise,
    one_sign,
    run,
)
from simt_cases import CupyMachine, random

from gemmserve_kernels.algorithms.fused import gemm as fused
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.gpu
ASKED = GemmConfig(algorithm="fused")
tiles = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)


@pytest.fixture
def machine():
    launcher = CupyLauncher.current()
    operand = Operand.contiguous((64, 64), "complex64")
    if reason := fused.supports(GemmProblem.build(operand, operand, config=ASKED), launcher.spec):
        pytest.skip(reason)
    return CupyMachine(launcher)


@tiles
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case(machine, case, tile):
    check_case(machine, case, tile)


@tiles
@pytest.mark.parametrize(("case", "config"), SPLITS.values(), ids=SPLITS)
def test_parts_of_k_of_several_blocks(machine, case, config, tile):
    check_case(machine, case, replace(config or GemmConfig(), block_m=tile.block_m))


@tiles
@pytest.mark.parametrize("kind", HOSTILE)
def test_every_element_is_as_accurate_as_plain_float32s(machine, kind, tile):
    check_elements(machine, *HOSTILE[kind], config=tile)


@pytest.mark.parametrize("kind", sorted(SERVED - {"nothing"}))
def test_sums_that_leave_the_tensor_core_once_for_each_chunk(machine, kind):
    import cupy

    a, b = (np.concatenate([x] * 70, axis) for x, axis in zip(HOSTILE[kind], (1, 0), strict=True))
    _, result = run(machine, a, b, config=WHOLE)
    vendor = cupy.matmul(cupy.asarray(a), cupy.asarray(b)).get()
    assert elementwise(a, b, result) <= max(4, 2 * elementwise(a, b, vendor))


@tiles
def test_what_is_not_finite_is_what_plain_float32_makes_of_it(machine, tile):
    check_not_finite(machine, tile)


@tiles
@pytest.mark.parametrize("kind", sorted(SERVED - {"nothing"}))
@pytest.mark.parametrize("k", [64, 1000])
def test_elements_beside_the_vendors(machine, kind, k, tile):
    import cupy

    a, b = (np.concatenate([x] * (-(-k // 96)), axis)[:, :k] if axis else np.concatenate([x] * (-(-k // 96)), 0)[:k]
            for x, axis in zip(HOSTILE[kind], (1, 0), strict=True))  # fmt: skip
    _, result = run(machine, a, b, config=tile)
    vendor = cupy.matmul(cupy.asarray(a), cupy.asarray(b)).get()
    assert elementwise(a, b, result) <= max(4, 2 * elementwise(a, b, vendor))


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize("shape", [(512, 64, 64), (256, 96, 96), (256, 128, 128), (64, 256, 256), (256, 128, 70)])
def test_elements_of_batches_beside_the_vendors(machine, kind, shape):
    """The promotion that batches have, where the vendor's BLAS adds up all of k in a row."""
    import cupy

    batch, n, k = shape
    a, b = random(1, "complex64", batch, n, k), random(2, "complex64", batch, k, n)
    if kind == "positive":
        a, b = ((np.abs(x.real) + 1j * np.abs(x.imag)).astype(np.complex64) for x in (a, b))
    _, result = run(machine, a, b)
    vendor = cupy.matmul(cupy.asarray(a), cupy.asarray(b)).get()
    for i in (0, batch // 2, batch - 1):
        assert elementwise(a[i], b[i], result[i]) <= max(4, 2 * elementwise(a[i], b[i], vendor[i]))


@tiles
@pytest.mark.parametrize(
    "shape",
    [(3000, 64, 64, 64), (300, 128, 128, 128), (1, 512, 512, 512), (1, 64, 64, 65536), (1, 2000, 60, 5000)],
)
def test_results_have_the_same_bits_on_every_run(machine, shape, tile):
    batch, m, n, k = shape
    a, b = random(1, "complex64", batch, m, k), random(2, "complex64", batch, k, n)
    results = [run(machine, a, b, config=tile)[1] for _ in range(3)]
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        np.testing.assert_array_equal(other.view(np.uint64), results[0].view(np.uint64))
    assert elementwise(a[-1, -8:], b[-1], results[0][-1, -8:]) <= 8


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_of_clusters_has_the_same_bits(machine, case):
    a, b, c = case.operands()
    check_same_bits(machine, machine, a, b, c, out=case.out, **case.options)


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_planes_do_not_serve_is_computed_alike_by_clusters(machine, kind):
    check_same_bits(machine, machine, *HOSTILE[kind])


def test_what_is_not_finite_is_what_plain_float32_makes_of_it_in_clusters(machine):
    check_not_finite(machine, GemmConfig(cluster=2))


@pytest.mark.parametrize("promote", [16, 32])
@pytest.mark.parametrize(
    "shape", [(64, 128, 128, 128), (40, 256, 256, 256), (33, 200, 330, 100), (9, 512, 512, 512), (7, 129, 65, 1000)]
)
def test_batches_of_clusters_have_the_same_bits(machine, shape, promote):
    batch, m, n, k = shape
    a, b = random(1, "complex64", batch, m, k), random(2, "complex64", batch, k, n)
    a[::5, 3, 7] *= 1e9
    result = check_same_bits(machine, machine, a, b, config=GemmConfig(promote=promote))
    assert elementwise(a[-1, -8:], b[-1], result[-1, -8:]) <= 8


def test_a_large_batch_of_clusters_has_the_same_bits_every_time(machine):
    """Whatever block comes first: a race between blocks would show in some of so many tiles."""
    import cupy

    on = [machine.put(random(seed, "complex64", 512, 256, 256)) for seed in (1, 2)]
    config = replace(ASKED, cluster=2)
    problem = GemmProblem.build(*(Operand.contiguous((512, 256, 256), "complex64") for _ in on), config=config)
    first = cupy.full((512, 256, 256), cupy.nan, "complex64")
    fused.run_gemm(machine.launcher, problem, replace(ASKED, block_m=64), *on, None, first)
    for _ in range(50):
        into = cupy.full_like(first, cupy.nan)
        fused.run_gemm(machine.launcher, problem, config, *on, None, into)
        assert bool((into.view("uint64") == first.view("uint64")).all())


@pytest.mark.parametrize("promote", [None, 16, 64])
@pytest.mark.parametrize("case", REAL_CASES.values(), ids=REAL_CASES)
def test_every_case_of_float32(machine, case, promote):
    check_case(machine, case, GemmConfig(promote=promote))


@pytest.mark.parametrize(("case", "config"), REAL_SPLITS.values(), ids=REAL_SPLITS)
def test_parts_of_k_of_several_blocks_of_float32(machine, case, config):
    check_case(machine, case, config)


@pytest.mark.parametrize("kind", REAL_HOSTILE)
def test_every_element_of_float32_is_as_accurate_as_plain_float32s(machine, kind):
    check_elements(machine, *REAL_HOSTILE[kind])


def test_what_is_not_finite_is_what_plain_float32_makes_of_it_in_float32(machine):
    check_not_finite(machine, dtype="float32")


@pytest.mark.parametrize("kind", sorted(REAL_SERVED - {"nothing"}))
@pytest.mark.parametrize("k", [64, 1000, 5000])
def test_elements_of_float32_beside_the_vendors(machine, kind, k):
    import cupy

    a, b = (np.concatenate([x] * (-(-k // 96)), axis) for x, axis in zip(REAL_HOSTILE[kind], (1, 0), strict=True))
    a, b = np.ascontiguousarray(a[:, :k]), b[:k]
    _, result = run(machine, a, b)
    vendor = cupy.matmul(cupy.asarray(a), cupy.asarray(b)).get()
    assert elementwise(a, b, result) <= max(4, 2 * elementwise(a, b, vendor))


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize("shape", [(16384, 48, 48), (8192, 64, 64), (512, 96, 96), (512, 128, 128), (64, 256, 256)])
def test_elements_of_batches_of_float32_beside_the_vendors(machine, kind, shape):
    """The longest sums, where the vendor's BLAS adds up all of k in a row."""
    import cupy

    batch, n, k = shape
    if kind == "positive":
        a, b = one_sign((batch, n, k), 1, "float32"), one_sign((batch, k, n), 2, "float32")
    else:
        a, b = random(1, "float32", batch, n, k), random(2, "float32", batch, k, n)
    _, result = run(machine, a, b)
    vendor = cupy.matmul(cupy.asarray(a), cupy.asarray(b)).get()
    for i in (0, batch // 2, batch - 1):
        assert elementwise(a[i], b[i], result[i]) <= max(4, 2 * elementwise(a[i], b[i], vendor[i]))


@pytest.mark.parametrize(
    "shape", [(8192, 64, 64, 64), (600, 128, 128, 128), (1, 512, 512, 512), (1, 64, 64, 65536), (900, 70, 100, 67)]
)
def test_results_of_float32_have_the_same_bits_on_every_run(machine, shape):
    import cupy

    batch, m, n, k = shape
    on = [machine.put(random(seed, "float32", batch, *extents)) for seed, extents in ((1, (m, k)), (2, (k, n)))]
    problem = GemmProblem.build(*(Operand.contiguous(x.shape, "float32") for x in on), config=ASKED)
    results = []
    for _ in range(20):
        results.append(cupy.full((batch, m, n), cupy.nan, "float32"))
        fused.run_gemm(machine.launcher, problem, ASKED, *on, None, results[-1])
    for other in results[1:]:
        assert bool((other.view("uint32") == results[0].view("uint32")).all())
    a, b = (x.astype("float64") for x in on)
    error = abs(results[0] - a @ b) / (abs(a) @ abs(b))
    assert float(error.max()) <= 8 * 2.0**-24
