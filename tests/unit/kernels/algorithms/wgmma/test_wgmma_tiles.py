"""Tiles of the Hopper kernel: what is chosen, what is refused and in which words."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from gemmserve_kernels.algorithms.wgmma.candidates import _CANDIDATES, promotion, resolve, supports
from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, Operand

H200 = KNOWN["H200"]
SCHEMES = tuple(_CANDIDATES)


def dtype_of(scheme, is_complex):
    if scheme == "fp16":
        return "float16"
    return "complex64" if is_complex else "float32"


def matrix(*shape, dtype="complex64"):
    """Takes no memory."""
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, (0,) * len(shape))


def problem(m, n, k, *, batch=(), dtype="complex64", **options):
    a, b = matrix(*batch, m, k, dtype=dtype), matrix(*batch, k, n, dtype=dtype)
    return GemmProblem.build(Operand.of(a), Operand.of(b), **options)


@pytest.mark.parametrize(("scheme", "is_complex"), SCHEMES)
def test_every_candidate_fits_and_has_the_promotion_of_its_k(scheme, is_complex):
    candidates = _CANDIDATES[scheme, is_complex]
    assert [candidate.tile(scheme, is_complex).broken_limit(H200) for candidate in candidates] == [None] * len(
        candidates
    )
    for k in (64, 1000, 4000, 1 << 20):
        tile = resolve(None, problem(1536, 1536, k, dtype=dtype_of(scheme, is_complex)), H200, scheme)
        assert tile.promote == promotion(scheme, is_complex, k)


def test_promotions_by_k():
    """What the models found: short sums where k is short, long ones where rounding is what counts."""
    assert [promotion("3xfp16", True, k) for k in (1, 512, 513, 6143, 6144, 1 << 24)] == [16, 16, 32, 32, 64, 64]
    assert {promotion("3xfp16", True, k, cut=True) for k in (513, 6144, 1 << 24)} == {32}
    assert [promotion("3xfp16", True, k, small=True, cut=True) for k in (513, 4096, 4097, 1 << 24)] == [16, 16, 32, 32]
    assert {promotion("3xfp16", False, k, cut=True) for k in (1, 1025, 1 << 24)} == {32}
    assert [promotion("3xfp16", False, k) for k in (1, 1024, 1025, 1 << 24)] == [32, 32, 64, 64]
    assert {promotion("3xfp16-3m", True, k) for k in (1, 1024, 1 << 24)} == {64}
    assert {promotion("1xfp16", c, k) for c in (True, False) for k in (1, 1024)} == {0}
    assert [promotion("fp16", False, k) for k in (1, 4096, 4097)] == [0, 0, 64]
    assert {promotion("fp16", False, k, wide=True) for k in (1, 1024, 1 << 24)} == {64}


@pytest.mark.parametrize("k", [500, 5000, 50000])
def test_a_promotion_that_was_asked_for(k):
    for promote in (16, 32, 64):
        tile = resolve(GemmConfig(promote=promote), problem(1000, 1000, k), H200, "3xfp16")
        assert (tile.promote, tile.block_k % promote) == (promote, 0)


@pytest.mark.parametrize(("scheme", "is_complex"), SCHEMES)
@pytest.mark.parametrize("extents", list(itertools.product((1, 100, 1024, 20000), (1, 100, 5000), (1, 70, 65536))))
def test_something_runs_whatever_the_size(scheme, is_complex, extents):
    tile = resolve(None, problem(*extents, dtype=dtype_of(scheme, is_complex)), H200, scheme)
    assert tile.broken_limit(H200) is None
    assert (tile.scheme, tile.complex) == (scheme, is_complex)
    # No part of k is empty.
    assert tile.split * tile.parts <= -(-extents[2] // tile.block_k)


@pytest.mark.parametrize(
    ("extents", "batch", "expected"),
    [
        ((3456, 4096, 4096), (), (128, 128, 32, 1, 1)),
        ((8192, 8192, 8192), (), (128, 128, 64, 1, 1)),
        ((1024, 1024, 1024), (), (128, 64, 32, 1, 1)),
        ((512, 512, 512), (), (64, 64, 32, 2, 1)),
        ((512, 512, 512), (64,), (128, 128, 32, 1, 1)),
        ((256, 256, 256), (), (64, 64, 32, 4, 1)),
        ((64, 64, 65536), (), (64, 64, 32, 4, 16)),
        ((16384, 64, 4096), (), (128, 64, 32, 1, 1)),
    ],
)
def test_choices_for_complex_products(extents, batch, expected):
    tile = resolve(None, problem(*extents, batch=batch), H200, "3xfp16")
    assert (tile.block_m, tile.block_n, tile.block_k, tile.split, tile.parts) == expected


@pytest.mark.parametrize(
    ("extents", "batch", "expected"),
    [
        ((1024, 1024, 1024), (64,), (128, 256, 2, 1, 1)),
        ((128, 1024, 1024), (64,), (128, 256, 1, 1, 1)),
        ((512, 512, 512), (), (64, 64, 1, 2, 1)),
        ((64, 64, 8192), (), (64, 64, 1, 4, 16)),
    ],
)
def test_choices_for_float16(extents, batch, expected):
    """A cluster shares columns where there are rows for both of its blocks."""
    tile = resolve(None, problem(*extents, batch=batch, dtype="float16"), H200, "fp16")
    assert (tile.block_m, tile.block_n, tile.cluster, tile.split, tile.parts) == expected


def test_overrides_are_honoured():
    config = GemmConfig(block_m=128, block_n=64, block_k=32, stages=3, raster=4, split_k=6, promote=16)
    tile = resolve(config, problem(300, 300, 300), H200, "3xfp16")
    assert tile == WgmmaTile("3xfp16", True, 128, 64, 32, 3, 1, 2, 3, 4, 16)
    assert resolve(tile, problem(300, 300, 300), H200, "3xfp16") is tile


def test_stages_are_as_many_as_fit():
    tile = resolve(GemmConfig(block_m=64, block_n=128, block_k=32), problem(300, 300, 300), H200, "3xfp16")
    assert tile.broken_limit(H200) is None
    assert replace(tile, stages=tile.stages + 1).broken_limit(H200)


@pytest.mark.parametrize(
    ("scheme", "config", "reason"),
    [
        ("3xfp16", GemmConfig(block_m=96), "block_m: "),
        ("3xfp16", GemmConfig(block_n=96), "block_n: "),
        ("3xfp16", GemmConfig(block_k=48), "block_k: |promote: "),
        ("3xfp16", GemmConfig(block_n=256), "registers: "),
        ("3xfp16", GemmConfig(block_m=128, block_n=128, block_k=32, stages=5), "shared memory: "),
        ("3xfp16", GemmConfig(stages=1), "stages: "),
        ("3xfp16-3m", GemmConfig(stages=20), "stages: |shared memory: "),
        ("3xfp16", GemmConfig(cluster=3), "cluster: "),
        ("3xfp16", GemmConfig(promote=24), "promote: |block_k: "),
        ("1xfp16", GemmConfig(promote=32), "promote: "),
        ("fp16", GemmConfig(promote=24), "promote: "),
        ("fp16", GemmConfig(block_n=64, cluster=2), "cluster: each of 2"),
        ("3xfp16", GemmConfig(thread_m=4), "thread_m: the wgmma algorithm has no such setting"),
        ("3xfp16", GemmConfig(split_k=0), "split_k: must be at least 1"),
    ],
)
def test_what_cannot_run_is_refused_by_its_limit(scheme, config, reason):
    with pytest.raises(ConfigInfeasible, match=f"^({reason})"):
        resolve(config, problem(4096, 4096, 4096, dtype=dtype_of(scheme, True)), H200, scheme)


def test_a_tile_is_checked_too():
    with pytest.raises(ConfigInfeasible, match=r"^shared memory: "):
        resolve(WgmmaTile("3xfp16", True, 128, 128, 32, 4), problem(64, 64, 64), H200, "3xfp16")
    with pytest.raises(ConfigInfeasible, match="not both"):
        resolve(WgmmaTile("3xfp16", True, 128, 128, 32, 3, 2, 2), problem(64, 64, 64), H200, "3xfp16")


def test_supported_problems():
    assert supports(problem(64, 64, 64), H200) is None
    assert supports(problem(64, 64, 64, dtype="float32"), H200) is None
    assert "Hopper" in (supports(problem(64, 64, 64), KNOWN["A100"]) or "")
    assert "float64" in (supports(problem(64, 64, 64, dtype="float64"), H200) or "")
    assert "extent is 0" in (supports(problem(64, 64, 0), H200) or "")
    assert "2^27 tiles" in (supports(problem(64, 64, 64, batch=(1 << 28,)), H200) or "")
    mixed = GemmProblem.build(Operand.of(matrix(8, 8)), Operand.of(matrix(8, 8, dtype="float32")))
    assert "one dtype" in (supports(mixed, H200) or "")
    planar = GemmProblem.build(*[Operand.of(matrix(2, 8, 8, dtype="float32"))] * 2, layout="planar")
    assert supports(planar, H200) is None


def test_a_c_of_another_type():
    operands = [Operand.of(matrix(8, 8))] * 2
    half = GemmProblem.build(*operands, Operand.of(matrix(8, 8, dtype="float16")), beta=1)
    assert supports(half, H200) is None
