"""Pre-pass, balancing and fallback for every CUDA architecture: registers and spills, without a device."""

from __future__ import annotations

import pytest

from gemmserve_kernels import compiler
from gemmserve_kernels.arguments import StoredArray
from gemmserve_kernels.device import KNOWN, cuda_arch
from gemmserve_kernels.planes import balance, fallback, split
from gemmserve_kernels.problem import GemmProblem, Operand

SPECS = {"sm_80": KNOWN["A100"], "sm_90a": KNOWN["H200"], "sm_120": KNOWN["RTX5090"]}
SPLIT_REGISTERS = 64
"""Two blocks of 512 threads run together on a multiprocessor."""
SPLIT_SPILLS = 700
"""Bytes at most; the pieces of a strip are unrolled."""
REGISTERS = {"balance": 168, "fallback": 160}


@pytest.fixture(scope="module", autouse=True)
def _nvrtc():
    cupy = pytest.importorskip("cupy", reason="the CuPy wheel is not installed: no NVRTC")
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")


def side(shape, dtype, name, trans="N"):
    operand = Operand.contiguous(shape, dtype)
    strides = tuple(stride * operand.dtype.itemsize for stride in operand.strides)
    return split.Side.of(StoredArray(shape, strides, operand.dtype, 0), (), trans, left=name == "a", planar=False)


SCHEMES = [("3xfp16", "complex64"), ("3xfp16", "float32"), ("3xfp16-3m", "complex64"), ("1xfp16", "complex64")]


@pytest.mark.parametrize("arch", SPECS)
@pytest.mark.parametrize(("scheme", "dtype"), SCHEMES)
def test_split_and_balance(arch, scheme, dtype):
    spec = SPECS[arch]
    a, b = side((4096, 4096), dtype, "a"), side((4096, 4096), dtype, "b")
    plan = split.plan(spec, scheme, a, b)
    cubin = compiler.compile_cuda(plan.source.text, arch)
    assert cubin.registers["split"] <= (SPLIT_REGISTERS if plan.geometry.threads == 512 else 128)
    assert cubin.spill_bytes["split"] <= SPLIT_SPILLS
    assert plan.shared + 1024 <= spec.shared_per_block
    source, *_ = balance._plan(spec, scheme, a, b, ())
    cubin = compiler.compile_cuda(source.text, arch)
    assert cubin.registers["balance"] <= REGISTERS["balance"]
    assert cubin.spill_bytes["balance"] <= 64  # it runs for rare data only


@pytest.mark.parametrize("arch", SPECS)
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_fallback(arch, dtype):
    operand = Operand.contiguous((512, 512), dtype)
    problem = GemmProblem.build(operand, operand)
    stored = StoredArray((512, 512), (512 * operand.dtype.itemsize, operand.dtype.itemsize), operand.dtype, 0)
    plan = fallback._plan(SPECS[arch], problem, stored, stored, stored, stored, (), ())
    cubin = compiler.compile_cuda(plan.kernel.source.text, arch)
    assert cubin.registers["fallback"] <= REGISTERS["fallback"]
    assert cubin.spill_bytes["fallback"] == 0


@pytest.mark.parametrize("k", [1, 64, 65, 300, 1024, 4096, 5000, 16384])
def test_the_geometry_depends_on_k_alone(k):
    """The order of sums, and with it the flags, must not change with what else a launch does."""
    alone = split.plan(KNOWN["H200"], "3xfp16", side((100, k), "complex64", "a"), None).geometry
    both = split.plan(
        KNOWN["H200"], "3xfp16", side((9000, k), "complex64", "a"), side((k, 77), "complex64", "b")
    ).geometry
    assert alone == both
    assert both.tile_k * both.cluster >= min(k, 4096)


def test_architectures_are_named_as_devices_name_them():
    assert {spec.arch for spec in SPECS.values()} == set(SPECS) == {cuda_arch(c) for c in (80, 90, 120)}
