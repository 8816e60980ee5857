"""The Hopper kernel as NVRTC compiles it for sm_90a: registers, spills, what the assembler had to change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_sources import compiled

from gemmserve_kernels.algorithms.common.splits import WIDE
from gemmserve_kernels.algorithms.wgmma.candidates import _CANDIDATES
from gemmserve_kernels.algorithms.wgmma.direct.pack import SOURCE as PACK
from gemmserve_kernels.algorithms.wgmma.plan import defines
from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import StoredArray
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.usefixtures("nvrtc")

ARCH = "sm_90a"
ENTRY_REGISTERS = 168
"""65536 over 384 threads: what setmaxnreg deals out again. A block of 256 threads may have 255 without it."""
COMBINE_REGISTERS = 48


def _source(tile, *, swapped=False, vector=True, planar=False, c=None, across=(False, False), tiles=None):
    kind = "float16" if tile.scheme == "fp16" else "float32"
    dtype = np.dtype("complex64" if tile.complex and not planar else kind)
    array = np.empty((2, 8, 8) if planar else (8, 8), dtype)
    problem = GemmProblem.build(*[Operand.of(array)] * 2, layout="planar" if planar else "interleaved")
    stored = StoredArray(array.shape, array.strides, dtype, 0)
    added = stored if c is None else replace(stored, dtype=np.dtype(c))
    return KernelSource(
        "wgmma_gemm",
        defines(
            problem, tile, added.dtype, stored.dtype, swapped=swapped, vector=vector,
            wide=vector and dtype == np.float16, across=across, tiles=tiles,
        ),
    )  # fmt: skip


def _check(source):
    cubin = compiled(source, ARCH)
    assert cubin.spill_bytes == {"wgmma_gemm": 0, "wgmma_combine": 0}
    assert cubin.registers["wgmma_gemm"] <= ENTRY_REGISTERS
    assert cubin.registers["wgmma_combine"] <= COMBINE_REGISTERS
    # ptxas says so where it waits after each wgmma, or does not honour setmaxnreg.
    assert "serialized" not in cubin.log
    assert "setmaxnreg" not in cubin.log


SHIPPED = [
    (key, candidate)
    for key, candidates in _CANDIDATES.items()
    for candidate in candidates
    if key[0] != "fp16" or (candidate.cluster > 1) == (candidate.block_n > 128)
]
"""Tiles: one of those that differ in their cluster alone."""
SHIPPED_IDS = [
    f"{key[0]}-{'c' if key[1] else 'r'}-{c.block_m}x{c.block_n}x{c.block_k}-{c.cluster}-{c.promote}"
    for key, c in SHIPPED
]


@pytest.mark.parametrize(("key", "candidate"), SHIPPED, ids=SHIPPED_IDS)
def test_every_tile_that_may_be_chosen(key, candidate):
    _check(_source(candidate.tile(*key)))


FOURFOLD = WgmmaTile("3xfp16", True, 128, 128, 32, 3)
DIRECT = WgmmaTile("fp16", False, 128, 256, 64, 4, 2, promote=0)
VARIANTS = {
    "split over a cluster": lambda: _source(replace(FOURFOLD, split=4)),
    "quarters split over a cluster": lambda: _source(
        replace(FOURFOLD, block_k=64, stages=7, promote=64, split=2)
    ),
    "small tile split": lambda: _source(replace(FOURFOLD, block_m=64, block_n=64, split=2)),
    "split over grids": lambda: _source(replace(FOURFOLD, split=2, parts=3)),
    "multicast": lambda: _source(replace(FOURFOLD, cluster=2)),
    "two promotions a stage": lambda: _source(replace(FOURFOLD, promote=16)),
    "two promotions a stage, split": lambda: _source(replace(FOURFOLD, promote=16, split=4)),
    "two promotions a stage, real": lambda: _source(WgmmaTile("3xfp16", False, 128, 256, 64, 2, promote=32)),
    "two promotions a stage, small tile": lambda: _source(replace(FOURFOLD, block_m=64, block_n=64, promote=16)),
    "planar": lambda: _source(FOURFOLD, planar=True),
    "planar, single elements": lambda: _source(FOURFOLD, planar=True, vector=False),
    "single elements": lambda: _source(FOURFOLD, vector=False),
    "a real c": lambda: _source(FOURFOLD, c="float16"),
    "three products swapped": lambda: _source(WgmmaTile("3xfp16-3m", True, 128, 128, 64, 3, promote=64), swapped=True),
    "float16 across": lambda: _source(DIRECT, across=(True, True)),
    "float16 promoted across": lambda: _source(replace(DIRECT, promote=64), across=(False, True)),
    "float16, single elements": lambda: _source(DIRECT, vector=False, across=(False, True)),
    "float16 split": lambda: _source(replace(DIRECT, block_n=128, cluster=1, split=2, parts=3), across=(True, True)),
    "real multicast": lambda: _source(WgmmaTile("3xfp16", False, 128, 256, 64, 2, 2, promote=64)),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant):
    _check(VARIANTS[variant]())


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(
    ("key", "candidate"),
    [each for each in SHIPPED if each[0][0] in WIDE.values()],
    ids=[name for name, each in zip(SHIPPED_IDS, SHIPPED, strict=True) if each[0][0] in WIDE.values()],
)
def test_the_rest_of_the_tiles(key, candidate, split):
    """Each of the wide way, which looks for its tiles and counts them."""
    tile = candidate.tile(*key)
    _check(_source(replace(tile, cluster=1, split=split) if split > 1 else tile, tiles="rest"))


def test_copies():
    cubin = compiled(PACK, ARCH)
    assert cubin.spill_bytes == {"wgmma_pack": 0}
    assert cubin.registers["wgmma_pack"] <= COMBINE_REGISTERS


def test_the_variants_differ():
    assert len({make() for make in VARIANTS.values()}) == len(VARIANTS)
