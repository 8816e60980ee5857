"""What the small algorithm takes, the tiles it chooses, and its kernels for every CUDA architecture by NVRTC."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_sources import SourceRecorder, compiled

from gemmserve_kernels.algorithms.small import gemm as small
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, Operand

H200, MI300X = KNOWN["H200"], KNOWN["MI300X"]
DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


def problem(m, n, k, dtype="complex64", batch=1000, **options):
    a, b = Operand.contiguous((batch, m, k), dtype), Operand.contiguous((batch, k, n), dtype)
    return GemmProblem.build(a, b, **options)


def batch_of(dtype, rows, columns, batch=1000):
    """Matrices that take no memory."""
    dtype = np.dtype(dtype)
    strides = (rows * columns * dtype.itemsize, columns * dtype.itemsize, dtype.itemsize)
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), (batch, rows, columns), strides)


def launched(m, n, k, dtype, spec=H200, config=None, **options):
    a, b, out = batch_of(dtype, m, k), batch_of(dtype, k, n), batch_of(dtype, m, n)
    recorder = SourceRecorder(spec)
    small.run_gemm(recorder, GemmProblem.build(Operand.of(a), Operand.of(b), **options), config, a, b, None, out)
    (launch,) = recorder.launched
    return launch


# ---- what it takes


def test_supported():
    for dtype in DTYPES:
        for sizes in ((1, 1, 1), (32, 32, 32), (3, 32, 17)):
            assert small.supports(problem(*sizes, dtype), H200) is None
            assert small.supports(problem(*sizes, dtype), MI300X) is None
    assert small.supports(problem(64, 33, 64, compute="3xtf32"), H200) is None
    assert small.supports(problem(5, 5, 5, compute="fp64"), H200) is None


@pytest.mark.parametrize(
    ("sizes", "dtype", "spec", "options", "reason"),
    [
        ((33, 4, 4), "float32", H200, {}, "m must be 1 to 32, not 33"),
        ((4, 65, 4), "complex64", H200, {"compute": "3xtf32"}, "n must be 1 to 64, not 65"),
        ((4, 4, 33), "complex64", H200, {"compute": "fp32"}, "k must be 1 to 32, not 33"),
        ((4, 4, 33), "complex64", MI300X, {}, "k must be 1 to 32, not 33"),
        ((4, 4, 0), "complex64", H200, {}, "k must be 1 to 32, not 0"),
        ((4, 4, 4), "complex64", H200, {"compute": "tf32"}, "arithmetic is one of"),
        ((4, 4, 4), "complex64", DeviceSpec.cpu(), {}, "needs a CUDA or ROCm device"),
    ],
)
def test_not_supported(sizes, dtype, spec, options, reason):
    assert reason in small.supports(problem(*sizes, dtype, **options), spec)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GemmConfig(block_m=16), "block_m: the small algorithm has no such setting"),
        (GemmConfig(stages=9), "stages: the small kernel takes 1 to 4, not 9"),
        (GemmConfig(thread_m=16, thread_n=16), "registers"),
        (GemmConfig(thread_m=2, warp_n=8), "not both"),
        (GemmConfig(warp_m=16), "TF32"),
    ],
)
def test_refused_configs(config, reason):
    with pytest.raises(ConfigInfeasible, match=reason):
        small.resolve(config, problem(32, 32, 32), H200)


@pytest.mark.parametrize(
    ("config", "reason"),
    [(GemmConfig(warp_m=24), "multiple of 16 x 8"), (GemmConfig(thread_m=4), "plain arithmetic")],
)
def test_refused_configs_of_tensor_cores(config, reason):
    with pytest.raises(ConfigInfeasible, match=reason):
        small.resolve(config, problem(32, 32, 32, compute="3xtf32"), H200)


def test_tensor_cores_are_for_complex64():
    with pytest.raises(ConfigInfeasible, match="TF32 tensor cores multiply complex64"):
        small.resolve(GemmConfig(warp_m=16), problem(16, 16, 16, "float64"), H200)
    assert small.resolve(None, problem(40, 40, 40, compute="3xtf32"), H200).tensor
    assert not small.resolve(None, problem(32, 32, 32), H200).tensor
    assert small.resolve(GemmConfig(warp_m=16), problem(32, 32, 32, compute="3xtf32"), H200).tensor
    assert small.supports(problem(40, 40, 40), H200) is not None
    assert small.supports(problem(8, 8, 8, "float32", compute="3xtf32"), H200) is not None


@pytest.mark.parametrize("spec", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_for_every_extent(spec, dtype):
    for sizes in [(n, n, n) for n in range(1, 33)] + [(1, 32, 32), (32, 1, 1), (2, 31, 7), (32, 32, 1)]:
        tile = small.resolve(None, problem(*sizes, dtype), spec)
        assert tile.threads % spec.warp_size == 0
        assert tile.threads_each(*sizes[:2]) * tile.group <= tile.threads


def test_asked_tiles_are_honoured():
    tile = small.resolve(GemmConfig(thread_m=3, thread_n=5, stages=1), problem(9, 10, 4), H200)
    assert (tile.thread_m, tile.thread_n, tile.stages) == (3, 5, 1)


def test_one_launch_that_fits_the_device():
    _, entry, options = launched(4, 4, 4, "complex64")
    assert entry == "small_gemm"
    assert options["grid"] == -(-1000 // 16)
    source, _, options = launched(32, 32, 32, "complex64")
    assert options["grid"] == H200.sm_count * int(dict(source.defines)["MIN_BLOCKS"])
    assert options["params"].batch == 1000


def test_aligned_batches_move_in_whole_vectors():
    for dtype in DTYPES:
        defines = dict(launched(16, 16, 16, dtype)[0].defines)
        width = 16 // np.dtype(dtype).itemsize
        assert defines["A_VECTOR"] == defines["B_VECTOR"] == str(width)
        assert defines["A_PACKED"] == defines["B_PACKED"] == "1"
    odd = dict(launched(5, 3, 7, "complex64")[0].defines)
    assert (odd["A_IMAGE"], odd["A_VECTOR"], odd["STAGED_D"], odd["D_VECTOR"]) == ("1", "2", "1", "2")


# ---- compiled

ARCHITECTURES = {"sm_80": KNOWN["A100"], "sm_90a": H200, "sm_100a": KNOWN["B200"], "sm_120": KNOWN["RTX5090"]}
# Registers of one thread at most: what NVRTC 13.0 takes on the hungriest architecture, rounded up to a multiple of 8.
REGISTERS = {
    ("complex64", 4): 64,
    ("complex64", 5): 96,
    ("complex64", 16): 128,
    ("complex64", 32): 128,
    ("complex64", 64): 248,
    ("float16", 32): 152,
    ("float32", 32): 152,
    ("float64", 16): 128,
    ("complex128", 32): 168,
}


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "n"), REGISTERS, ids=[f"{dtype}-{n}" for dtype, n in REGISTERS])
def test_within_its_budget(dtype, n, arch):
    spec = ARCHITECTURES[arch]
    options = {"compute": "3xtf32"} if n > small.LIMIT else {}
    cubin = compiled(launched(n, n, n, dtype, spec, **options)[0], arch)
    assert cubin.spill_bytes["small_gemm"] == 0
    assert cubin.registers["small_gemm"] <= REGISTERS[dtype, n]


VARIANTS = {
    "transposes": lambda: launched(12, 12, 12, "complex64", trans_a="C", trans_b="T"),
    "tensor cores, odd": lambda: launched(33, 41, 50, "complex64", compute="3xtf32"),
    "tensor cores, columns": lambda: launched(48, 48, 48, "complex64", trans_a="C", trans_b="T", compute="3xtf32"),
    "tensor cores, asked for": lambda: launched(
        32, 32, 32, "complex64", config=GemmConfig(warp_m=16, warp_n=32), compute="3xtf32"
    ),
    "float32 in float64": lambda: launched(12, 12, 12, "float32", compute="fp64"),
    "one stage": lambda: launched(32, 32, 32, "float64", config=GemmConfig(stages=1)),
}


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant):
    cubin = compiled(VARIANTS[variant]()[0], "sm_90a")
    assert cubin.spill_bytes["small_gemm"] == 0


def test_the_text_does_not_change_with_where_an_array_lies():
    assert launched(8, 8, 8, "complex64")[0] == launched(8, 8, 8, "complex64")[0]
