"""What runs on AMD devices: pure plans, and the whole call on the CPU shim."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_kernels.algorithms.algorithm import product_algorithm, reduction_algorithm
from gemmserve_kernels.algorithms.mfma.tile import MfmaTile
from gemmserve_kernels.device.spec import KNOWN, rocm_modes
from gemmserve_kernels.dispatch.routes import candidates, plan_gemm, plan_gemm_reduce
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ComputeUnsupported, ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

MI250X, MI300X, MI355X, RADEON = (KNOWN[name] for name in ("MI250X", "MI300X", "MI355X", "RX7900XTX"))
DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


def problem(n=1024, dtype="complex64", **options):
    x = Operand.contiguous((n, n), np.dtype(dtype))
    return GemmProblem.build(x, x, **options)


def reduction(n=1024, dtype="complex64", reduce="absmax", **options):
    x = Operand.contiguous((n, n), np.dtype(dtype))
    return GemmReduceProblem.build(x, x, reduce=reduce, **options)


def test_modes_by_architecture():
    plain = ("auto", "fp32", "fp64")
    assert rocm_modes("gfx942") == rocm_modes("gfx950") == rocm_modes("gfx1100") == (*plain, "tf32", "3xfp16")
    for arch in ("gfx90a", "gfx1030", "gfx1201", "gfx000"):
        assert rocm_modes(arch) == plain
    assert MI250X.compute_modes == plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [MI250X, MI300X, MI355X], ids=lambda spec: spec.arch)
def test_auto_knows_three_ways_and_no_split(spec, dtype):
    """The accuracy of float16 planes has not been seen on AMD devices: `auto` does without."""
    found = candidates(problem(dtype=dtype), spec)
    assert [each.algorithm for each in found] == ["vendor", "simt", "mfma"]
    assert {each.arithmetic for each in found} == {"plain"}
    assert plan_gemm(problem(4096, dtype), spec).algorithm == "vendor"
    assert plan_gemm_reduce(reduction(4096, dtype), spec).algorithm == "vendor"
    reduced = plan_gemm_reduce(reduction(4096, dtype, config=GemmConfig(algorithm="mfma")), spec)
    assert (reduced.algorithm, reduction_algorithm(reduced.algorithm, reduced.arithmetic).__name__) == (
        "mfma",
        "gemmserve_kernels.algorithms.mfma.gemm_reduce",
    )


def test_a_radeons_matrix_units_multiply_float16_alone():
    for dtype in DTYPES[1:]:
        assert [each.algorithm for each in candidates(problem(dtype=dtype), RADEON)] == ["vendor", "simt"]
        assert plan_gemm_reduce(reduction(dtype=dtype), RADEON).algorithm == "vendor"
    with pytest.raises(ConfigInfeasible, match="gfx1100"):
        plan_gemm(problem(config=GemmConfig(algorithm="mfma")), RADEON)
    assert [each.algorithm for each in candidates(problem(dtype="float16"), RADEON)] == ["vendor", "simt", "mfma"]
    by_name = reduction(4096, "float16", config=GemmConfig(algorithm="mfma"))
    assert plan_gemm_reduce(by_name, RADEON).algorithm == "mfma"


@pytest.mark.parametrize(
    ("spec", "compute", "expected"),
    [
        (MI300X, "tf32", ("mfma", "xf32", "gemmserve_kernels.algorithms.mfma")),
        (MI355X, "tf32", ("mfma", "1xfp16", "gemmserve_kernels.algorithms.splits")),
        (MI300X, "3xfp16", ("mfma", "3xfp16", "gemmserve_kernels.algorithms.splits")),
        (MI355X, "3xfp16", ("mfma", "3xfp16", "gemmserve_kernels.algorithms.splits")),
        (RADEON, "tf32", ("mfma", "1xfp16", "gemmserve_kernels.algorithms.splits")),
        (RADEON, "3xfp16", ("mfma", "3xfp16", "gemmserve_kernels.algorithms.splits")),
    ],
)
def test_modes_have_their_algorithm(spec, compute, expected):
    for plan in (plan_gemm(problem(compute=compute), spec), plan_gemm_reduce(reduction(compute=compute), spec)):
        assert (
            plan.algorithm,
            plan.arithmetic,
            product_algorithm(plan.algorithm, plan.arithmetic).__name__.rpartition(".")[0],
        ) == expected


@pytest.mark.parametrize("compute", ["3xfp16", "tf32", "3xtf32", "ozaki"])
def test_a_mode_that_the_device_lacks_is_refused(compute):
    with pytest.raises(ComputeUnsupported) as error:
        plan_gemm(problem(compute=compute), MI250X)
    assert error.value.available == ["auto", "fp32", "fp64"]


def test_the_vendors_blas_has_no_tf32_there():
    with pytest.raises(ConfigInfeasible, match="no TF32"):
        plan_gemm(problem(compute="tf32", config=GemmConfig(algorithm="vendor")), MI300X)


def test_an_override_is_obeyed_and_checked():
    config = GemmConfig(algorithm="mfma", block_m=64, block_n=64, warp_m=32, warp_n=32)
    for dtype in DTYPES:
        assert plan_gemm(problem(dtype=dtype, config=config), MI300X).algorithm == "mfma"
        assert plan_gemm_reduce(reduction(dtype=dtype, config=config), MI300X).algorithm == "mfma"
    with pytest.raises(ConfigInfeasible, match="stages"):
        plan_gemm(problem(config=GemmConfig(algorithm="mfma", stages=3)), MI300X)
    with pytest.raises(ConfigInfeasible, match="thread_m"):
        plan_gemm(problem(config=GemmConfig(algorithm="mfma", thread_m=4)), MI300X)
    with pytest.raises(ConfigInfeasible, match="AMD"):
        plan_gemm(problem(config=GemmConfig(algorithm="mfma")), KNOWN["H200"])


def test_mixed_types_are_converted_and_empty_products_are_not_multiplied():
    single, double = (Operand.contiguous((64, 64), np.dtype(dtype)) for dtype in ("c8", "f8"))
    mixed = plan_gemm(GemmProblem.build(single, double, config=GemmConfig(algorithm="mfma")), MI300X)
    assert mixed.uniform
    nothing = GemmProblem.build(Operand.contiguous((8, 0), np.dtype("c8")), Operand.contiguous((0, 8), np.dtype("c8")))
    assert plan_gemm(nothing, MI300X).algorithm == "simt"


def test_planes_have_tiles_of_the_matrix_units():
    plan = plan_gemm(problem(compute="3xfp16"), MI300X)
    assert isinstance(
        product_algorithm(plan.algorithm, plan.arithmetic).resolve(plan.config, problem(compute="3xfp16"), MI300X),
        MfmaTile,
    )
