"""Tiles of the fused kernel: how k is cut, what fits, and which products are left to other algorithms."""

from __future__ import annotations

import dataclasses

import pytest
from kernel_sources import SourceRecorder, matrix

from gemmserve_kernels.algorithms.fused import gemm as fused
from gemmserve_kernels.algorithms.fused.tile import FusedTile, choose_tile, chunks
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, Operand

H200 = KNOWN["H200"]


def problem(m, n, k, batch=(), dtype="complex64", **options):
    return GemmProblem.build(
        Operand.contiguous((*batch, m, k), dtype), Operand.contiguous((*batch, k, n), dtype), **options
    )


@pytest.mark.parametrize("k", [32, 33, 63, 64, 65, 96, 127, 128, 129, 1000, 4097, 6350, 65536])
def test_chunks_are_alike(k):
    """As the kernel cuts k: by pairs of steps, the first ones longer. None is so short that too few terms are left."""
    pairs, count = -(-k // 2), chunks(k)
    lengths = [2 * (pairs // count + (i < pairs % count)) for i in range(count)]
    lengths[-1] -= sum(lengths) - k
    assert sum(lengths) == k
    assert max(lengths) <= 64
    assert min(lengths) >= min(k, 31)


@pytest.mark.parametrize("k", [32, 35, 64, 65, 66, 67, 70, 96, 127, 129, 131, 1000, 4097, 65537])
def test_chunks_of_real_numbers_begin_at_multiples_of_four(k):
    piece, count = FusedTile(parts=1).piece, chunks(k)
    pieces = -(-k // piece)
    lengths = [piece * (pieces // count + (i < pieces % count)) for i in range(count)]
    lengths[-1] -= sum(lengths) - k
    assert piece == 4
    assert sum(lengths) == k
    assert max(lengths) <= 64
    assert min(lengths) >= min(k, 29)


@pytest.mark.parametrize(
    ("shape", "splits", "promote"),
    [
        ((8192, 64, 64, 64), 1, 64), ((16384, 48, 48, 48), 1, 64), ((4096, 96, 96, 96), 1, 64),
        ((512, 256, 256, 256), 1, 64), ((64, 512, 512, 2048), 1, 64), ((33, 64, 64, 64), 1, 32),
        ((1, 512, 512, 512), 4, 32), ((1, 384, 384, 384), 6, 32), ((1, 256, 256, 256), 4, 32),
        ((1, 768, 768, 768), 1, 32), ((1, 64, 64, 65536), 128, 32), ((1, 1024, 1024, 2048), 1, 64),
        ((1, 64, 8192, 512), 2, 32),
    ],
)  # fmt: skip
def test_tiles_of_real_numbers(shape, splits, promote):
    """Two blocks for each multiprocessor, of 64 x 64 whatever the product; sums of twice as many steps."""
    tile = choose_tile(None, shape, H200, parts=1)
    assert (tile.kernel, tile.block_m, tile.cluster, tile.parts) == ("fused_gemm", 64, 0, 1)
    assert (tile.split_k, tile.promote) == (splits, promote)
    assert (tile.split_k - 1) * tile.chunks_part(shape[3]) < chunks(shape[3])
    assert tile.resident(H200) == 2 * H200.sm_count
    assert 2 * (tile.shared_bytes + 1024 + 256) <= H200.shared_per_sm
    assert 2 * tile.threads * 64 <= H200.registers_per_sm


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GemmConfig(block_m=128), "block_m"), (GemmConfig(cluster=2), "cluster"), (GemmConfig(stages=3), "stages"),
        (GemmConfig(promote=48), "promote"), (GemmConfig(block_n=64), "block_n"), (GemmConfig(split_k=5), "split_k"),
    ],
)  # fmt: skip
def test_what_real_numbers_do_not_have_is_refused(config, name):
    with pytest.raises(ConfigInfeasible, match=name):
        choose_tile(config, (64, 256, 256, 256), H200, parts=1)
    assert fused.supports(problem(64, 64, 64, (500,), "float32"), H200) is None


@pytest.mark.parametrize(
    ("shape", "splits", "together"),
    [
        ((1, 512, 512, 512), 2, 2),
        ((1, 64, 64, 65536), 128, 12),
        ((1, 384, 384, 384), 3, 3),
        ((4096, 64, 64, 64), 1, 1),
        ((1, 64, 64, 100), 2, 2),
        ((1, 2048, 2048, 2048), 1, 1),
    ],
)
def test_k_is_cut_where_tiles_leave_multiprocessors_idle(shape, splits, together):
    tile = choose_tile(None, shape, H200)
    assert (tile.split_k, tile.together) == (splits, together)
    assert (tile.split_k - 1) * tile.chunks_part(shape[3]) < chunks(shape[3])  # none is empty


@pytest.mark.parametrize(("k", "promote"), [(64, 16), (512, 16), (513, 32)])
def test_sums_leave_the_tensor_core_sooner_where_they_are_short(k, promote):
    assert choose_tile(None, (1, 64, 64, k), H200).promote == promote


@pytest.mark.parametrize(
    ("shape", "promote"),
    [
        ((4096, 64, 64, 64), 32), ((1024, 128, 128, 128), 32), ((256, 256, 256, 256), 32), ((512, 192, 192, 192), 32),
        ((2048, 96, 96, 96), 16),  # chunks of 48 steps: a third of 64 would be multiplied in vain
        ((8192, 48, 48, 48), 16), ((8192, 32, 32, 32), 16),
        ((33, 64, 64, 64), 16), ((34, 64, 64, 64), 32),  # from where on a BLAS leaves k whole
        ((1, 512, 512, 512), 16), ((1, 1024, 1024, 512), 16),
    ],
)  # fmt: skip
def test_they_stay_longer_where_a_blas_would_not_cut_k(shape, promote):
    assert choose_tile(None, shape, H200).promote == promote


def test_a_configuration_is_honoured_or_refused():
    shape = (1, 64, 64, 1000)
    tile = choose_tile(GemmConfig(split_k=5, raster=2, promote=32, stages=2), shape, H200)
    assert (tile.split_k, tile.raster, tile.promote, tile.stages) == (4, 2, 32, 2)  # 16 chunks by four
    assert choose_tile(GemmConfig(block_m=128, promote=64), shape, H200).promote == 64
    for config, name in (
        (GemmConfig(split_k=17), "split_k"), (GemmConfig(promote=64), "promote"), (GemmConfig(stages=3), "stages"),
        (GemmConfig(block_m=256), "block_m"), (GemmConfig(block_n=64), "block_n"), (GemmConfig(split_k=0), "split_k"),
        (GemmConfig(block_m=128, stages=3), "stages"), (GemmConfig(block_m=128, promote=48), "promote"),
    ):  # fmt: skip
        with pytest.raises(ConfigInfeasible, match=name):
            choose_tile(config, shape, H200)


@pytest.mark.parametrize(
    ("shape", "cluster"),
    [
        ((256, 256, 256, 256), 2),
        ((1024, 128, 128, 128), 2),
        ((100, 200, 200, 200), 2),
        ((64, 512, 512, 512), 2),
        ((4096, 64, 64, 64), 0),
        ((64, 96, 96, 96), 0),
        ((1024, 128, 128, 64), 0),
        ((8, 256, 256, 256), 0),  # a round of either: that of a cluster is longer
        ((1024, 129, 130, 128), 0),  # 3 x 3 tiles of 64 rows and columns, 4 of 128 are more
        ((1, 512, 512, 512), 0),  # k is cut
        ((1, 64, 8192, 8192), 0),
    ],
)
def test_large_batches_have_clusters_of_two(shape, cluster):
    tile = choose_tile(None, shape, H200)
    assert tile.cluster == cluster
    assert choose_tile(GemmConfig(algorithm="fused"), shape, H200) == tile
    assert choose_tile(GemmConfig(algorithm="fused", block_m=64), shape, H200).cluster == 0
    if cluster:
        assert choose_tile(GemmConfig(algorithm="fused", cluster=2), shape, H200) == tile


@pytest.mark.parametrize(
    ("shape", "block_m", "splits"),
    [
        ((1, 64, 8192, 8192), 128, 2),
        ((1, 8192, 64, 8192), 128, 2),
        ((1, 1024, 1, 65536), 128, 16),
        ((1, 128, 4096, 512), 128, 2),
        ((1, 192, 8192, 8192), 64, 1),
        ((1, 64, 512, 8192), 64, 16),
        ((1024, 100, 100, 100), 64, 1),
    ],
)
def test_skinny_products_have_tall_tiles(shape, block_m, splits):
    tile = choose_tile(None, shape, H200)
    assert (tile.block_m, tile.split_k) == (block_m, splits)
    other = choose_tile(GemmConfig(block_m=192 - block_m), shape, H200)
    assert other.block_m == 192 - block_m


def test_blocks_of_a_cluster_never_cut_k():
    tile = choose_tile(GemmConfig(cluster=2), (1, 128, 128, 4096), H200)
    assert (tile.kernel, tile.cluster, tile.block_m, tile.block_n) == ("fused_cluster", 2, 128, 128)
    assert (tile.split_k, tile.stages, tile.threads, tile.promote) == (1, 3, 512, 32)
    assert tile.resident(H200) * 2 <= H200.sm_count
    assert choose_tile(GemmConfig(cluster=2, stages=2, promote=16, split_k=1), (1, 64, 64, 64), H200).stages == 2


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GemmConfig(cluster=1), "cluster"), (GemmConfig(cluster=4), "cluster"), (GemmConfig(cluster=0), "cluster"),
        (GemmConfig(cluster=2, block_m=64), "block_m"), (GemmConfig(cluster=2, split_k=2), "split_k"),
        (GemmConfig(cluster=2, promote=64), "promote"), (GemmConfig(cluster=2, stages=4), "stages"),
    ],
)  # fmt: skip
def test_what_clusters_do_not_have_is_refused(config, name):
    with pytest.raises(ConfigInfeasible, match=name):
        choose_tile(config, (64, 256, 256, 256), H200)


@pytest.mark.parametrize("tile", [FusedTile(), FusedTile(block_m=128), FusedTile(block_m=128, stages=3, cluster=2)])
def test_the_shared_memory_of_a_block_fits(tile):
    assert tile.shared_bytes + 256 <= H200.shared_per_block


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (problem(64, 64, 31), "k must be"),
        (problem(64, 64, 31, (), "float32"), "k must be"),
        (problem(64, 64, 64, (500,), "float64"), "complex64, and float32"),
        (problem(4096, 4096, 4096, (), "float32"), "preparing"),
        (problem(64, 64, 64, (500,), "complex128"), "complex64"),
        (problem(64, 64, 64, (500,), compute="6xbf16"), "arithmetic"),
        (problem(256, 8192, 8192), "preparing"),
    ],
)
def test_what_is_left_to_other_algorithms(case, word):
    assert word in fused.supports(case, H200)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 8192, 8192), (8192, 64, 8192), (16, 8192, 8192), (128, 8192, 8192)])
def test_skinny_products_are_not_left_to_others(m, n, k):
    assert fused.supports(problem(m, n, k), H200) is None


@pytest.mark.parametrize("n", [1, 64, 256])
def test_products_of_few_tiles_are_not_left_to_others(n):
    assert fused.supports(problem(n, n, max(n, 32)), H200) is None


def test_what_is_asked_for_by_name_is_done():
    asked = GemmConfig(algorithm="fused")
    for case in (problem(256, 8192, 8192), problem(64, 64, 64)):
        assert fused.supports(dataclasses.replace(case, config=asked), H200) is None
    assert "9.0" in fused.supports(dataclasses.replace(problem(64, 64, 64), config=asked), KNOWN["A100"])


@pytest.mark.parametrize("shape", [(256, 256, 256), (64, 4096, 512)], ids=str)
def test_kernels_are_told_of_conjugation_by_their_source_alone(shape):
    """The flag among a product's arguments is the 0 that the compiler must not know (once_read in ptx/hopper.cuh)."""
    m, n, k = shape
    a, b = matrix("complex64", rows=m, columns=k), matrix("complex64", rows=k, columns=n)
    recorder = SourceRecorder()
    product = GemmProblem.build(Operand.of(a), Operand.of(b), trans_a="R", trans_b="R", compute="3xfp16")
    fused.run_gemm(recorder, product, None, a, b, None, matrix("complex64", rows=m, columns=n))
    multiplied = [
        (source, options["params"]) for source, entry, options in recorder.launched if entry != "fused_columns"
    ]
    assert multiplied
    for source, params in multiplied:
        assert dict(source.defines)["CONJUGATE_A"] == "1"
        assert (params.gemm.conjugate_a, params.gemm.conjugate_b) == (0, 0)
