"""Tiles: what is chosen, what is refused and in which words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_kernels.algorithms.simt.tile import _CANDIDATES, SimtTile, resolve_simt
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_kernels.dispatch.routes import check_feasible
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

H200 = KNOWN["H200"]
ACCUMULATORS = ["float32", "float64", "complex64", "complex128"]


def _resolve(config=None, *, m=4096, n=4096, batch=1, dtype="complex64", spec=H200, local_bytes=0):
    return resolve_simt(config, m=m, n=n, batch=batch, accumulate=np.dtype(dtype), spec=spec, local_bytes=local_bytes)


@pytest.mark.parametrize("spec", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("dtype", ACCUMULATORS)
def test_every_candidate_runs_on_every_device(dtype, spec):
    for candidate in _CANDIDATES[dtype]:
        assert candidate.tile.broken_limit(np.dtype(dtype).itemsize, spec, local_bytes=16) is None


@pytest.mark.parametrize("dtype", ACCUMULATORS)
def test_small_products_get_small_tiles(dtype):
    area = [tile.block_m * tile.block_n for n in (100, 512, 2048, 8192) for tile in [_resolve(m=n, n=n, dtype=dtype)]]
    assert area == sorted(area)
    assert _resolve(dtype=dtype) == max((c.tile for c in _CANDIDATES[dtype]), key=lambda t: t.block_m * t.block_n)


def test_a_large_batch_is_as_good_as_a_large_product():
    assert _resolve(m=128, n=128, batch=4096) == _resolve()
    assert _resolve(m=128, n=128) != _resolve()


def test_overrides_are_kept_and_the_rest_is_chosen():
    tile = _resolve(GemmConfig(block_m=96, thread_n=2, stages=1))
    assert (tile.block_m, tile.thread_n, tile.stages) == (96, 2, 1)
    assert tile.block_n == _resolve().block_n
    assert tile.broken_limit(8, H200) is None


def test_an_empty_override_is_the_choice_itself():
    assert _resolve(GemmConfig(algorithm="simt", split_k=1)) == _resolve()


def test_a_resolved_tile_is_taken_as_it_is():
    tile = SimtTile(32, 16, 4, 2, 2, min_blocks=3)
    assert _resolve(tile) is tile
    with pytest.raises(ConfigInfeasible, match="stages"):
        _resolve(replace(tile, stages=3))


REFUSED = {
    "divisibility: block_m=100 is not a multiple of thread_m=8": GemmConfig(block_m=100, thread_m=8),
    "threads: the tile needs 4096 a block, the limit is 1024": GemmConfig(
        block_m=128, block_n=128, thread_m=2, thread_n=2
    ),
    "registers: the tile needs about .* a thread, the limit is 255": GemmConfig(
        block_m=256, block_n=256, thread_m=16, thread_n=16
    ),
    "registers: the tile needs about .* x 1024 threads, NVIDIA H200 has 65536": GemmConfig(
        block_m=256, block_n=128, thread_m=8, thread_n=4
    ),
    "shared memory: the tile needs .* bytes a block, NVIDIA H200 has 232448": GemmConfig(
        block_m=128, block_n=128, block_k=256
    ),
    "stages: the portable kernel has 1 or 2, not 3": GemmConfig(stages=3),
    "split_k: the portable kernel does not split k": GemmConfig(split_k=2),
    "block_k: must be at least 1, not 0": GemmConfig(block_k=0),
    "thread_n: must be at least 1, not -4": GemmConfig(thread_n=-4),
}


@pytest.mark.parametrize(("reason", "config"), REFUSED.items(), ids=[r.partition(":")[0] for r in REFUSED])
def test_refusals_name_the_limit(reason, config):
    with pytest.raises(ConfigInfeasible, match=reason) as error:
        _resolve(config)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigInfeasible, match=reason.partition(":")[0]):
        check_feasible(config, H200, np.dtype("complex64"))


def test_less_shared_memory_refuses_more():
    config = GemmConfig(block_m=128, block_n=128, block_k=32, stages=2)
    _resolve(config)
    with pytest.raises(ConfigInfeasible, match="MI300X has 65536"):
        _resolve(config, spec=KNOWN["MI300X"])


def test_partials_of_a_reduction_count_as_shared_memory():
    config = GemmConfig(block_m=128, block_n=128, block_k=4, thread_m=4, thread_n=8, stages=1)
    _resolve(config, spec=KNOWN["MI300X"])
    with pytest.raises(ConfigInfeasible, match="shared memory"):
        _resolve(config, spec=KNOWN["MI300X"], local_bytes=32)


@pytest.mark.parametrize(
    ("config", "spec", "reason"),
    [
        (GemmConfig(block_m=64), DeviceSpec.cpu(), "block_m: the numpy algorithm has no tiles"),
        (GemmConfig(algorithm="vendor", stages=2), H200, "stages: the vendor algorithm has no tiles"),
        (GemmConfig(algorithm="simt"), DeviceSpec.cpu(), "algorithm: simt needs a CUDA or ROCm device"),
    ],
)
def test_tiles_need_a_tiled_kernel(config, spec, reason):
    with pytest.raises(ConfigInfeasible, match=reason):
        check_feasible(config, spec, np.dtype("float32"))


def test_transposition():
    config = GemmConfig("simt", 1, 2, 3, 4, 5, 6, 7)
    assert config.transposed() == GemmConfig("simt", 2, 1, 3, 5, 4, 6, 7)
    tile = SimtTile(64, 32, 8, 4, 2, min_blocks=3)
    assert tile.transposed() == SimtTile(32, 64, 8, 2, 4, min_blocks=3)
    assert tile.transposed().transposed() == tile


@given(
    block_m=st.none() | st.integers(1, 512),
    block_n=st.none() | st.integers(1, 512),
    block_k=st.none() | st.integers(1, 64),
    thread_m=st.none() | st.integers(1, 16),
    thread_n=st.none() | st.integers(1, 16),
    dtype=st.sampled_from(ACCUMULATORS),
)
def test_whatever_is_asked_for_is_run_or_refused(block_m, block_n, block_k, thread_m, thread_n, dtype):
    config = GemmConfig(None, block_m, block_n, block_k, thread_m, thread_n)
    try:
        tile = _resolve(config, dtype=dtype)
    except ConfigInfeasible:
        return
    assert tile.broken_limit(np.dtype(dtype).itemsize, H200) is None
    for field, value in config.tile_fields.items():
        assert getattr(tile, field) == value
