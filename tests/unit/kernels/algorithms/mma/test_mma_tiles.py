"""Tiles of the mma.sync kernel: what is chosen for which device, what is refused, what the compiler makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_sources import SourceRecorder, compiled, matrix
from mma_cases import build

from gemmserve_kernels.algorithms.common.splits import PLANES, Planes
from gemmserve_kernels.algorithms.mma import gemm as mma
from gemmserve_kernels.algorithms.mma.tile import _CANDIDATES, ARITHMETIC, MmaTile, resolve_tile
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

DEVICES = ["A100", "H200", "B200", "RTX5090"]
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
KINDS = list(_CANDIDATES)
SPILLS = {
    ("3xtf32", True): 80,
    ("3xtf32", False): 32,
    ("1xtf32", True): 192,
    ("3xfp16", True): 64,
    ("1xfp16", True): 192,
    ("3xbf16", True): 160,
    ("6xbf16", True): 128,
    ("9xbf16", True): 128,
    ("6xbf16", False): 160,
    ("9xbf16", False): 160,
}
"""Bytes that a thread may spill, where sums and fragments fill its registers; none where nothing is said."""


def source_of(arithmetic, is_complex, tile):
    """The source that runs for a 4096^3 product."""
    recorder = SourceRecorder(KNOWN["H200"])
    x = matrix("c8" if is_complex else "f4")
    if not ARITHMETIC[arithmetic].planes:
        problem = build(x, x, compute=arithmetic)
        mma.run_gemm(recorder, problem, tile, x, x, None, x)
    else:
        problem = build(x, x, compute="auto")
        count = len(PLANES[arithmetic, is_complex, "a"])
        data, exponents = np.empty((1, count, 1, 1), "f2"), np.empty((1, 1), "i4")
        a, b = (Planes(arithmetic, is_complex, side, data, exponents, 1, 4096, 4096, 4096, ()) for side in ("a", "b"))
        mma.multiply(recorder, problem, tile, a, b, None, x)
    ((source, _, options),) = recorder.launched
    assert options["grid"] == -(-4096 // tile.block_m) * -(-4096 // tile.block_n)
    return source


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{'complex' if kind[1] else 'real'}")
def test_registers_and_spills(kind, arch):
    for candidate in _CANDIDATES[kind][: None if arch == "sm_90a" else 1]:
        cubin = compiled(source_of(*kind, candidate.tile), arch)
        assert cubin.registers["mma_gemm"] <= 255
        assert cubin.spill_bytes["mma_gemm"] <= SPILLS.get(kind, 0), candidate.tile


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("is_complex", [True, False], ids=["complex", "real"])
def test_choosing_tiles_costs_no_registers(arch, is_complex):
    """What the kernel needs that takes all tiles is all that the one needs that takes those that are served."""
    tile = _CANDIDATES["3xfp16", is_complex][0].tile
    every = source_of("3xfp16", is_complex, tile)
    served = replace(every, defines=tuple({**dict(every.defines), "TILES": "1"}.items()))
    found = [compiled(source, arch) for source in (every, served)]
    assert found[1].registers["mma_gemm"] <= found[0].registers["mma_gemm"]
    assert found[1].spill_bytes["mma_gemm"] <= found[0].spill_bytes["mma_gemm"] + 8


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", [("6xbf16", True), ("6xbf16", False), ("3xbf16", True)], ids=str)
def test_the_rest_of_the_tiles(kind, arch):
    every = source_of(*kind, _CANDIDATES[kind][0].tile)
    rest = replace(every, defines=tuple({**dict(every.defines), "TILES": "2"}.items()))
    assert compiled(rest, arch).spill_bytes["mma_gemm"] <= SPILLS[kind]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (512, 512, 512), (3456, 4096, 4096), (64, 64, 65536)])
def test_every_device_has_a_tile(kind, device, shape):
    arithmetic, is_complex = kind
    tile = resolve_tile(None, arithmetic, shape, KNOWN[device], is_complex=is_complex)
    assert tile.broken_limit(arithmetic, is_complex=is_complex, spec=KNOWN[device]) is None
    assert tile.shared_bytes(arithmetic, is_complex=is_complex) <= KNOWN[device].shared_per_block
    assert (tile.split_k - 1) * tile.k_part(shape[2]) < shape[2], "no split is empty"


def test_a_long_k_is_split_and_a_large_product_is_not():
    assert resolve_tile(None, "3xtf32", (64, 64, 65536), KNOWN["H200"], is_complex=True).split_k > 1
    assert resolve_tile(None, "3xtf32", (8192, 8192, 8192), KNOWN["H200"], is_complex=True).split_k == 1


def test_every_wish_is_granted():
    requested = {
        "block_m": 64, "block_n": 96, "block_k": 32, "warp_m": 32, "warp_n": 16, "instruction_k": 4, "stages": 2,
        "split_k": 2, "promote": 16, "raster": 4, "rounding_big": "nearest", "rounding_small": "toward_zero",
    }  # fmt: skip
    tile = resolve_tile(GemmConfig(**requested), "3xtf32", (512, 512, 512), KNOWN["A100"], is_complex=True)
    assert {name: getattr(tile, name) for name in requested} == requested


@pytest.mark.parametrize("block", [32, 64, 128])
def test_one_wish_bends_the_rest(block):
    tile = resolve_tile(GemmConfig(block_m=block), "3xtf32", (512, 512, 512), KNOWN["RTX5090"], is_complex=True)
    assert tile.block_m == block


@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        ({"thread_m": 4}, "no such setting"),
        ({"stages": 1}, "stages: at least 2"),
        ({"block_k": 24}, "block_k: a power of two"),
        ({"warp_m": 24}, "divisibility"),
        ({"instruction_k": 16}, "instruction_k"),
        ({"promote": 12}, "promote"),
        ({"rounding_big": "up"}, "rounding_big"),
        ({"block_m": 1024, "block_n": 1024}, "threads|shared memory"),
        ({"stages": 40}, "shared memory"),
        ({"warp_m": 128, "warp_n": 128, "block_m": 128, "block_n": 128, "stages": 2}, "registers"),
    ],
    ids=str,
)
def test_what_is_refused(requested, reason):
    with pytest.raises(ConfigInfeasible, match=reason):
        resolve_tile(GemmConfig(**requested), "3xtf32", (512, 512, 512), KNOWN["A100"], is_complex=True)


def test_the_grid_of_a_split_product():
    recorder = SourceRecorder(KNOWN["H200"])
    a, b = matrix("c8", rows=256, columns=1024), matrix("c8", rows=1024, columns=256)
    tile = MmaTile(64, 64, 32, 64, 16, 3, 32, split_k=4)
    mma.run_gemm(recorder, build(a, b, compute="3xtf32"), tile, a, b, None, matrix("c8", rows=256, columns=256))
    ((_, _, options),) = recorder.launched
    assert options["grid"] == 4 * 4 * 4
    assert (options["params"].splits, options["params"].k_part) == (4, 256)
