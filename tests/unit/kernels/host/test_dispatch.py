"""Which algorithm runs what, on devices that need not be here."""

from __future__ import annotations

import dataclasses

import pytest

from gemmserve_kernels import (
    ComputeUnsupported,
    ConfigInfeasible,
    DeviceSpec,
    GemmConfig,
    GemmProblem,
    GemmReduceProblem,
    Operand,
    plan,
)
from gemmserve_kernels.device import KNOWN
from gemmserve_kernels.dispatch import available, plan_gemm, plan_gemm_reduce

H200, MI300X, CPU = KNOWN["H200"], KNOWN["MI300X"], DeviceSpec.cpu()
TURING = dataclasses.replace(KNOWN["A100"], arch="sm_75", compute_modes=("auto", "fp32", "fp64"))


def problem(m=512, n=512, k=512, *, batch=(), dtype="complex64", **options) -> GemmProblem:
    a, b = Operand.contiguous((*batch, m, k), dtype), Operand.contiguous((*batch, k, n), dtype)
    return GemmProblem.build(a, b, **options)


def reduction(**options) -> GemmReduceProblem:
    a, b = Operand.contiguous((512, 512), "complex64"), Operand.contiguous((512, 512), "complex64")
    return GemmReduceProblem.build(a, b, **options)


@pytest.mark.parametrize("spec", [H200, MI300X, KNOWN["A100"]])
def test_plain_products_go_to_the_vendor(spec):
    for dtype in ("float16", "float32", "float64", "complex64", "complex128"):
        found = plan_gemm(problem(dtype=dtype), spec)
        assert found.algorithm == "vendor"
        assert found.blas is not None
        assert plan_gemm(problem(dtype=dtype, trans_a="T", order="F"), spec).algorithm == "vendor"


@pytest.mark.parametrize(
    "case",
    [
        problem(k=0),
        problem(m=0),
        problem(alpha=0),
        problem(4096, 8, 64, trans_a="R"),
        problem(8, 4096, 64, trans_b="R"),
        problem(4096, 4096, 4, batch=(3,), order="F"),
        problem(7, 7, 7, batch=(9,), dtype="float16"),
    ],
)
def test_what_the_vendor_cannot_do_well_is_ours(case):
    assert plan_gemm(case, H200).algorithm == "simt"


def test_starved_kernels_are_worth_a_copy():
    """64 x 64 is one tile of ours, on one multiprocessor, however long k is."""
    assert plan_gemm(problem(64, 64, 65536, trans_a="R"), H200).algorithm == "vendor"


def test_planar_and_mixed_operands_are_copied_for_large_products():
    for size, algorithm in ((64, "simt"), (2048, "vendor")):
        planes = Operand.contiguous((2, size, size), "float32")
        assert plan_gemm(GemmProblem.build(planes, planes, layout="planar"), H200).algorithm == algorithm
        real, whole = Operand.contiguous((size, size), "float32"), Operand.contiguous((size, size), "complex64")
        assert plan_gemm(GemmProblem.build(real, whole), H200).algorithm == algorithm


def test_the_result_s_strides_do_not_choose_the_algorithm():
    case = problem(dtype="float32")
    gaps = Operand((512, 512), case.dtype, (2048, 2))
    found = plan_gemm(case, H200, gaps)
    assert found.algorithm == "vendor"
    assert found.blas is not None
    assert found.blas.d.copied


def test_the_cpu_has_numpy():
    assert plan(problem(), CPU).algorithm == "numpy"
    assert plan(reduction(), CPU).algorithm == "numpy"


def test_reductions_are_ours_on_every_device():
    for spec in (H200, MI300X):
        assert plan(reduction(), spec).algorithm == "simt"


def test_tf32_is_the_vendor_s_and_needs_its_hardware():
    assert plan_gemm(problem(compute="tf32"), H200).algorithm == "vendor"
    assert plan_gemm(problem(4096, 16, 4096, trans_a="R", compute="tf32"), H200).algorithm == "vendor"
    for spec in (TURING, MI300X, CPU):
        with pytest.raises(ComputeUnsupported) as error:
            plan_gemm(problem(compute="tf32"), spec)
        assert error.value.available == ["auto", "fp32", "fp64"]
    with pytest.raises(ComputeUnsupported) as error:
        plan_gemm_reduce(reduction(compute="tf32"), H200)
    assert error.value.available == ["auto", "fp32", "fp64"]


@pytest.mark.parametrize("compute", ["1xtf32", "3xtf32", "3xfp16", "3xfp16-3m", "ozaki"])
def test_modes_without_a_kernel_name_those_with_one(compute):
    with pytest.raises(ComputeUnsupported) as error:
        plan_gemm(problem(compute=compute), H200)
    assert error.value.available == ["auto", "fp32", "fp64", "tf32"]


def test_available_modes():
    assert available(problem(dtype="float16").dtype, H200) == ("auto", "fp32")
    assert available(problem(dtype="complex128").dtype, H200) == ("auto", "fp64")


def test_an_override_is_obeyed():
    assert plan_gemm(problem(config=GemmConfig(algorithm="simt")), H200).algorithm == "simt"
    assert plan_gemm(problem(config=GemmConfig(block_m=64, block_n=64)), H200).algorithm == "simt"
    thin = problem(4096, 16, 4096, trans_a="R", config=GemmConfig(algorithm="vendor"))
    assert plan_gemm(thin, H200).algorithm == "vendor"


@pytest.mark.parametrize(
    ("case", "spec", "word"),
    [
        (problem(config=GemmConfig(algorithm="numpy")), H200, "CPU"),
        (problem(config=GemmConfig(algorithm="vendor")), CPU, "vendor"),
        (problem(config=GemmConfig(algorithm="simt")), CPU, "simt"),
        (problem(config=GemmConfig(block_m=64)), CPU, "block_m"),
        (problem(k=0, config=GemmConfig(algorithm="vendor")), H200, "empty"),
        (problem(config=GemmConfig(algorithm="vendor", block_m=64)), H200, "block_m"),
        (problem(config=GemmConfig(algorithm="simt"), compute="tf32"), H200, "tf32"),
        (problem(config=GemmConfig(block_m=512, block_n=512, block_k=64)), H200, "limit|has"),
    ],
)
def test_infeasible_overrides_name_the_limit(case, spec, word):
    with pytest.raises(ConfigInfeasible, match=word):
        plan_gemm(case, spec)


def test_infeasible_overrides_of_reductions():
    for algorithm, spec in (("vendor", H200), ("numpy", H200), ("simt", CPU), ("vendor", CPU)):
        with pytest.raises(ConfigInfeasible):
            plan_gemm_reduce(reduction(config=GemmConfig(algorithm=algorithm)), spec)
