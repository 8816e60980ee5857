"""Tiles of the MFMA kernels: what is chosen, what is refused and in which words; what fits which architecture."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_kernels.algorithms.mfma import gemm as mfma
from gemmserve_kernels.algorithms.mfma import gemm_reduce as mfma_reduce
from gemmserve_kernels.algorithms.mfma.tile import (
    ARCHITECTURES,
    CANDIDATES,
    MfmaTile,
    candidates_of,
    dense_arithmetic,
    resolve_tile,
)
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

BY_ARCH = {spec.arch: spec for spec in KNOWN.values() if spec.kind == "rocm"}
MI300X, RADEON = KNOWN["MI300X"], KNOWN["RX7900XTX"]


def problem(m, n, k, dtype="complex64", *, batch=(), **options):
    a, b = (Operand.contiguous((*batch, *shape), np.dtype(dtype)) for shape in ((m, k), (k, n)))
    return GemmProblem.build(a, b, **options)


SHIPPED = [(arch, *key) for arch, known in ARCHITECTURES.items() for key in CANDIDATES if key[0] in known]


@pytest.mark.parametrize(("arch", "arithmetic", "is_complex"), SHIPPED)
def test_every_candidate_fits_every_device_that_has_its_instruction(arch, arithmetic, is_complex):
    how = ARCHITECTURES[arch][arithmetic]
    for reducing in (False, True):
        for tile in candidates_of(arithmetic, arch, is_complex=is_complex, reducing=reducing):
            local = 16 if reducing else 0
            assert tile.broken_limit(how, is_complex=is_complex, spec=BY_ARCH[arch], local_bytes=local) is None
            assert tile.block_k % how.instruction.depth == 0
            assert how.instruction.wave == BY_ARCH[arch].warp_size


@pytest.mark.parametrize(
    ("dtype", "compute", "by_arch"),
    [
        ("float32", "auto", {"gfx90a": "fp32", "gfx942": "fp32", "gfx950": "fp32", "gfx1100": None}),
        ("complex128", "fp64", {"gfx90a": "fp64", "gfx942": "fp64", "gfx950": "fp64", "gfx1100": None}),
        ("complex64", "fp64", {"gfx90a": "fp64", "gfx942": "fp64", "gfx950": "fp64", "gfx1100": None}),
        ("float16", "auto", {"gfx90a": "fp32", "gfx942": "fp16", "gfx950": "fp16", "gfx1100": "fp16"}),
        ("float16", "fp32", {"gfx90a": "fp32", "gfx942": "fp16", "gfx1100": "fp16"}),
        ("complex64", "tf32", {"gfx90a": None, "gfx942": "xf32", "gfx950": None, "gfx1100": None}),
        ("float32", "3xtf32", {"gfx942": None}),
    ],
)
def test_what_multiplies(dtype, compute, by_arch):
    case = problem(64, 64, 64, dtype, compute=compute)
    assert {arch: dense_arithmetic(case, BY_ARCH[arch]) for arch in by_arch} == by_arch


def test_instructions_by_architecture():
    half = {
        "gfx942": "v_mfma_f32_32x32x8_f16",
        "gfx950": "v_mfma_f32_32x32x16_f16",
        "gfx1100": "v_wmma_f32_16x16x16_f16",
    }
    for name in ("fp16", "3xfp16", "1xfp16"):
        found = {arch: known[name].instruction.mnemonic for arch, known in ARCHITECTURES.items() if name in known}
        assert found == half
    assert [arch for arch, known in ARCHITECTURES.items() if "xf32" in known] == ["gfx942"]


def test_waves_of_32_lanes_count_their_own_threads_and_registers():
    how = ARCHITECTURES["gfx1100"]["fp16"]
    tile = resolve_tile(None, "fp16", (4096, 4096), 1, RADEON, is_complex=False)
    assert (tile.block_m, tile.block_n, tile.threads(how.instruction)) == (128, 128, 256)
    wide = GemmConfig(block_m=128, block_n=128, warp_m=128, warp_n=64)
    with pytest.raises(ConfigInfeasible, match="limit is 256"):
        resolve_tile(wide, "fp16", (4096, 4096), 1, RADEON, is_complex=False)
    narrow = GemmConfig(block_m=32, block_n=16, warp_m=16, warp_n=16)
    assert resolve_tile(narrow, "fp16", (4096, 4096), 1, RADEON, is_complex=False).threads(how.instruction) == 64


def test_a_small_product_has_smaller_tiles():
    large, small = (resolve_tile(None, "fp32", (n, n), 1, MI300X, is_complex=True) for n in (4096, 512))
    assert large == CANDIDATES["fp32", True][0]
    assert small == CANDIDATES["fp32", True][1]
    assert resolve_tile(None, "fp32", (512, 512), 64, MI300X, is_complex=True) == large
    assert mfma.resolve(None, problem(512, 512, 64), MI300X) == small


def test_a_reduction_has_tiles_of_its_own():
    a, b = (Operand.contiguous((4096, 4096), np.dtype("c8")) for _ in range(2))
    case = GemmReduceProblem.build(a, b, reduce=["sum", "argmax"])
    assert mfma_reduce.resolve(None, case, MI300X).block_n == 64
    assert mfma.resolve(None, problem(4096, 4096, 4096), MI300X).block_n == 128


def test_wishes_are_obeyed_and_the_rest_bent():
    tile = resolve_tile(GemmConfig(block_m=32), "fp32", (4096, 4096), 1, MI300X, is_complex=False)
    assert (tile.block_m, tile.warp_m) == (32, 32)
    tile = resolve_tile(GemmConfig(block_k=32, stages=1), "fp32", (4096, 4096), 1, MI300X, is_complex=False)
    assert (tile.block_k, tile.stages) == (32, 1)
    config = GemmConfig(block_m=128, block_n=64, warp_m=64, warp_n=32, raster=4)
    assert resolve_tile(config, "fp64", (64, 64), 1, MI300X, is_complex=False) == MfmaTile(128, 64, 8, 64, 32, 2, 4)


@pytest.mark.parametrize(
    ("config", "arithmetic", "word"),
    [
        (GemmConfig(block_m=48), "fp32", "warp_m"),
        (GemmConfig(block_m=64, warp_m=48), "fp32", "multiple"),
        (GemmConfig(warp_m=16), "fp32", "32"),
        (GemmConfig(block_k=12), "fp32", "power of two from 8"),
        (GemmConfig(block_k=8), "fp16", "power of two from 16"),
        (GemmConfig(stages=3), "fp32", "1 or 2"),
        (GemmConfig(block_m=512, block_n=512, warp_m=32, warp_n=32), "fp32", "limit is 1024"),
        (GemmConfig(block_k=256, stages=2), "fp32", "shared memory"),
        (GemmConfig(block_m=256, block_n=256, warp_m=256, warp_n=128, block_k=8), "fp32", "registers"),
        (GemmConfig(split_k=2), "fp32", "no such setting"),
        (GemmConfig(block_m=0), "fp32", "at least 1"),
    ],
)
def test_refusals_name_the_limit(config, arithmetic, word):
    with pytest.raises(ConfigInfeasible, match=word):
        resolve_tile(config, arithmetic, (4096, 4096), 1, MI300X, is_complex=False)


def test_supports():
    assert mfma.supports(problem(8, 8, 8), MI300X) is None
    assert "complex64 on gfx1100" in mfma.supports(problem(8, 8, 8), RADEON)
    assert mfma.supports(problem(8, 8, 8, "float16"), RADEON) is None
    assert "sm_90a" in mfma.supports(problem(8, 8, 8), KNOWN["H200"])
    assert "tf32" in mfma.supports(problem(8, 8, 8, compute="tf32"), KNOWN["MI355X"])
    assert "empty" in mfma.supports(problem(8, 8, 0), MI300X)
    mixed = GemmProblem.build(Operand.contiguous((8, 8), np.dtype("f4")), Operand.contiguous((8, 8), np.dtype("c8")))
    assert "float32 and complex64" in mfma.supports(mixed, MI300X)
    with pytest.raises(ConfigInfeasible, match="tf32"):
        mfma.resolve(None, problem(8, 8, 8, compute="tf32"), KNOWN["MI355X"])
