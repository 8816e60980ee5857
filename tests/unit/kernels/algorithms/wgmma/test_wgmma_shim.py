"""The Hopper kernel on the CPU shim, which plays its barriers, copies, clusters and matrix instructions.

The unmodified source and host code, against the models bit for bit and against higher precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import simt_shim.launcher
from kernel_models import splits as plane_models
from simt_cases import ShimMachine, random
from simt_shim import FORWARD, REVERSE, Order, ShimLauncher
from simt_shim.module import DataRace, ShimError
from wgmma_cases import IDS, SCHEMES, Case, check, planes_of, run

from gemmserve_kernels.algorithms.common.splits import PLANES, Planes, is_wide
from gemmserve_kernels.algorithms.splits import gemm as planes
from gemmserve_kernels.algorithms.wgmma import gemm as wgmma
from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

H200 = KNOWN["H200"]
SHUFFLED = Order("shuffled", 5)
WGMMA = GemmConfig(algorithm="wgmma")
FOURFOLD = WgmmaTile("3xfp16", True, 64, 64, 32, 3)
every_scheme = pytest.mark.parametrize(("scheme", "is_complex"), SCHEMES, ids=IDS)


def machine(order=SHUFFLED, sm_count=2):
    """Few multiprocessors, so that blocks walk over several tiles and come round their stages."""
    return ShimMachine(ShimLauncher(replace(H200, sm_count=sm_count), order=order, optimize="-O0"))


@every_scheme
def test_the_models_bits(scheme, is_complex):
    m, n, k = 70, 65, 150
    config = GemmConfig(block_m=64, block_n=64, split_k=1)
    _, a, b, _, result = run(machine(), scheme, is_complex, Case((m, n, k), config=config))
    left, right = (planes_of(x, scheme, side, (), np.array) for x, side in ((a, "a"), (b.T, "b")))
    planes = [stored[0][..., :k] for stored in (left.data, right.data)]
    if is_wide(scheme):
        planes = [(each.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in planes]
    found = plane_models.multiply(*planes, scheme)
    expected = found * np.exp2(np.add.outer(left.exponents[0], right.exponents[0]).astype(np.float32))
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("promote", [16, 32, 64])
def test_every_tile_has_the_same_bits(promote):
    """A stage of one promotion or of several, by quarters, shared by a cluster: k alone decides."""
    tiles = [WgmmaTile("3xfp16", True, 64, 64, 64, 3, promote=promote)]
    if promote == 64:
        tiles.append(WgmmaTile("3xfp16", True, 128, 128, 64, 7, promote=64))
    else:
        tiles.append(WgmmaTile("3xfp16", True, 128, 64, 32, 3, cluster=2, promote=promote))
    results = [run(machine(), "3xfp16", True, Case((130, 66, 150), config=tile))[-1] for tile in tiles]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("order", [FORWARD, REVERSE, SHUFFLED, Order("shuffled", 6)], ids=str)
def test_threads_and_copies_in_any_order(order):
    """More stages of k than there are, and more tiles than blocks."""
    check(machine(order), "3xfp16", True, Case((130, 130, 330), config=replace(FOURFOLD, stages=2)))


@every_scheme
@pytest.mark.parametrize("extents", [(1, 1, 1), (65, 1, 17), (3, 129, 64)], ids=str)
def test_odd_sizes(scheme, is_complex, extents):
    config = GemmConfig(block_m=64, block_n=64, split_k=1)
    check(machine(), scheme, is_complex, Case(extents, config=config))


@pytest.mark.parametrize("split_k", [4, 6])
def test_split_k(split_k):
    """A cluster of 4 and another of 2 with three grids; more parts than blocks of k; C, and both factors."""
    config = GemmConfig(block_m=64, block_n=64, block_k=32, split_k=split_k)
    options = {"alpha": 0.5, "beta": -2}
    for k in (200, 70):
        check(machine(), "3xfp16", True, Case((70, 66, k), a=(2,), c=(2, 70, 66), config=config, options=options))


def test_multicast_and_planar_data():
    tile = WgmmaTile("3xfp16", True, 128, 128, 32, 3, cluster=2)
    options = {"layout": "planar", "alpha": 1 - 2j, "beta": 0.5j}
    check(machine(), "3xfp16", True, Case((300, 70, 100), b=(2,), c=(1, 70), config=tile, options=options))


@pytest.mark.parametrize("out", ["fortran", "reversed", "offset", "padded"])
def test_strides_of_the_result(out):
    options = {"alpha": -1.5, "beta": 0.5}
    check(machine(), "3xfp16", True, Case((66, 67, 40), a=(2, 1), b=(3,), c=(66, 1), out=out, options=options))


@pytest.mark.parametrize("split_k", [1, 2, 6])
def test_small_integers_are_exact_whatever_the_exponents(split_k):
    """Nothing that is given back for truncation shows in what was not cut."""
    m, n, k = 70, 66, 128
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-3, 4, (rows, k)).astype(np.float32) for rows in (m, n))
    exponents = [np.linspace(-165, 115, rows).astype(np.int32) for rows in (m, n)]
    on, planes = machine(), []
    for x, side, exponent in ((a, "a", exponents[0]), (b, "b", exponents[1])):
        data = np.zeros((1, len(PLANES["3xfp16", False, side]), len(x), k), np.float16)
        data[0, 0] = x
        planes.append(Planes("3xfp16", False, side, on.put(data), on.put(exponent[None]), 1, len(x), k, k, ()))
    problem = GemmProblem.build(Operand.of(a), Operand.of(b.T))
    tile = wgmma.resolve(GemmConfig(split_k=split_k), problem, H200, "3xfp16")
    out = on.put(np.full((m, n), np.nan, np.float32))
    wgmma.multiply(on.launcher, problem, tile, *planes, None, out)
    with np.errstate(over="ignore"):
        exact = a.astype(np.float64) @ b.T.astype(np.float64)
        expected = np.ldexp(exact, exponents[0][:, None] + exponents[1]).astype(np.float32)
    np.testing.assert_array_equal(on.get(out), expected)


_RELEASE = "            release();\n"
_FIRST = "        const int im_first = turn & 1;\n"
FAULTS = {
    "a stage is read before it is there": [
        ("        barrier_wait(pipeline.full_barrier(turn.stage), turn.parity);\n", ""),
    ],
    "a stage is overwritten while it is read": [
        ("                barrier_wait(pipeline.empty_barrier(turn.stage), turn.parity ^ 1);\n", ""),
    ],
    "a stage is given back too early": [(_RELEASE, ""), (_FIRST, _FIRST + _RELEASE)],
    "a copy is not counted": [
        ("barrier_arrive_expecting(to.full, Config::STAGE_BYTES)", "barrier_arrive_expecting(to.full, 16)"),
    ],
    "a product is not waited for": [("    wgmma_wait<0>();\n    pin(temporary);\n}", "}")],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_be_seen(monkeypatch, fault):
    """The checks above fail for kernels that are wrong in these ways."""
    compiled = simt_shim.launcher.compile_source

    def broken(text, **options):
        for old, new in FAULTS[fault]:
            assert old in text
            text = text.replace(old, new)
        return compiled(text, **options)

    case = Case((70, 66, 330), config=replace(FOURFOLD, stages=2))
    good = run(machine(), "3xfp16", True, case)[-1]
    simt_shim.launcher._module.cache_clear()
    monkeypatch.setattr(simt_shim.launcher, "compile_source", broken)
    try:
        found = [run(machine(Order("shuffled", seed)), "3xfp16", True, case)[-1] for seed in range(3)]
    except ShimError:
        return
    finally:
        simt_shim.launcher._module.cache_clear()
    assert not all(np.array_equal(each, good) for each in found)


@pytest.mark.parametrize("beta", [0, -2])
def test_whole_tiles_are_written_with_c_and_without(beta):
    """By a loop each, where alpha is 1; C is not read where beta is 0."""
    on = machine()
    a, b = random(1, "complex64", 70, 90), random(2, "complex64", 90, 128)
    c = random(3, "complex64", 70, 128) if beta else np.full((70, 128), np.nan, np.complex64)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c), beta=beta)
    out = on.put(np.full((70, 128), np.nan, np.complex64))
    planes.run_gemm(on.launcher, problem, WGMMA, *(on.put(x) for x in (a, b, c)), out)
    expected = a.astype(complex) @ b + (beta * c.astype(complex) if beta else 0)
    assert np.abs(on.get(out) - expected).max() <= 2e-6 * np.abs(expected).max()


@dataclass(frozen=True)
class TextSource:
    """A kernel source given as text."""

    text: str
    defines: Any


class WithoutWait(ShimLauncher):
    """Takes all waits for the kernels ahead out of the product's source."""

    def launch(self, source, entry, **options):
        if entry == "wgmma_gemm":
            text = source.text.replace("wait_for_previous();", ";")
            source = TextSource(text, source.defines)
        super().launch(source, entry, **options)


def test_planes_are_not_fetched_before_they_are_there():
    """The product starts while the pre-pass still runs."""
    on = ShimMachine(WithoutWait(replace(H200, sm_count=2), optimize="-O0"))
    with pytest.raises(DataRace, match="kernels ahead"):
        run(on, "3xfp16", True, Case((70, 64, 40)))
