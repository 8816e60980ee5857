"""Tiles in double precision: which one suits which product and device, and how long runs of k are."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_sources import SourceRecorder, matrix

from gemmserve_kernels.algorithms.dmma import gemm as dmma
from gemmserve_kernels.algorithms.dmma.tile import TILES, choose, run_of
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

H200 = KNOWN["H200"]


@pytest.mark.parametrize("kind", TILES)
def test_large_products_take_the_largest_tile(kind):
    assert choose(8192, 8192, H200, kind) == TILES[kind][0]
    assert choose(4096, 4096, H200, kind) == TILES[kind][0]


@pytest.mark.parametrize("kind", TILES)
def test_few_tiles_are_small(kind):
    assert choose(256, 256, H200, kind) == TILES[kind][-1]


def test_a_last_wave_of_few_tiles_is_avoided():
    """1536 x 1536 has 144 tiles of 128 x 128, for 132 multiprocessors."""
    assert choose(1536, 1536, H200, "float64") == TILES["float64"][-1]
    assert choose(1024, 1024, H200, "float64") == TILES["float64"][1]


@pytest.mark.parametrize("kind", TILES)
def test_a_batch_counts_as_one_large_product(kind):
    assert choose(256, 256, H200, kind, 1024) == TILES[kind][0]


@pytest.mark.parametrize("name", [name for name, spec in KNOWN.items() if spec.kind == "cuda"])
def test_every_device_has_a_tile_for_everything(name):
    spec = KNOWN[name]
    for kind in TILES:
        for n in (1, 100, 1500, 20_000):
            tile = choose(n, n, spec, kind)
            assert tile.shared_bytes <= spec.shared_per_block
            assert tile.stages >= 3
            assert (
                tile.min_blocks * (tile.shared_bytes + 1024) <= spec.shared_per_sm
                or spec.shared_per_sm < H200.shared_per_sm
            )


def test_runs_are_short_where_a_blas_would_cut_k():
    def run(n, batch=1, k=512, dtype=np.complex128):
        a, b = (Operand.contiguous((batch, *shape), np.dtype(dtype)) for shape in ((n, k), (k, n)))
        return run_of(GemmProblem.build(a, b, None))

    assert run(1536) == run(1024) == run(128, batch=64) == 256
    assert run(1023) == run(768) == run(128, batch=36) == 64
    assert run(767) == run(128) == run(128, batch=35) == 16
    assert (run(100, k=513), run(100, k=8192), run(100, k=8193)) == (64, 64, 256)
    assert run(4096) == run(4096, dtype=np.float64) == 512
    assert run(2048, dtype=np.float64) == run(1024, batch=4, dtype=np.float64) == 256
    assert run(2047, dtype=np.float64) == run(1024, batch=3, k=8192, dtype=np.float64) == 64
    assert run(1024, k=8193, dtype=np.float64) == run(100, k=8193, dtype=np.float64) == 256
    assert (run(100, dtype=np.float64), run(100, k=513, dtype=np.float64)) == (16, 64)
    assert all(run(n) % tile.block_k == 0 for n in (1, 1024, 8192) for tiles in TILES.values() for tile in tiles)


def test_the_kernel_is_told_of_conjugation_by_its_source_alone():
    """The flag among a product's arguments is the 0 that the compiler must not know (once_read in ptx/hopper.cuh)."""
    x, recorder = matrix("complex128", rows=512, columns=512), SourceRecorder()
    dmma.run_gemm(
        recorder, GemmProblem.build(Operand.of(x), Operand.of(x), trans_a="C", trans_b="R"), None, x, x, None, x
    )
    ((source, _, options),) = recorder.launched
    assert dict(source.defines)["CONJUGATE_A"] == "1"
    assert (options["params"].gemm.conjugate_a, options["params"].gemm.conjugate_b) == (0, 0)
