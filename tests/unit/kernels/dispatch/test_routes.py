"""Which algorithm runs what, on devices that need not be here."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

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
from gemmserve_kernels.algorithms.algorithm import product_algorithm, reduction_algorithm
from gemmserve_kernels.algorithms.screen.seconds import screen_seconds
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch import estimate
from gemmserve_kernels.dispatch.routes import as_uniform, available, candidates, plan_gemm, plan_gemm_reduce
from gemmserve_kernels.problem.vocabulary import COMPUTE_MODES


@pytest.fixture(autouse=True)
def models_alone(monkeypatch):
    """What follows from the models; what was measured says another thing every time (test_measured_tables.py)."""
    monkeypatch.setattr(estimate, "table", lambda arch: estimate.Table({}))


H200, RADEON, CPU = KNOWN["H200"], KNOWN["RX7900XTX"], DeviceSpec.cpu()
TURING = dataclasses.replace(KNOWN["A100"], arch="sm_75", compute_modes=("auto", "fp32", "fp64"))


def problem(m=512, n=512, k=512, *, batch=(), dtype="complex64", **options) -> GemmProblem:
    a, b = Operand.contiguous((*batch, m, k), dtype), Operand.contiguous((*batch, k, n), dtype)
    return GemmProblem.build(a, b, **options)


def reduction(k=512, dtypes=("complex64", "complex64"), **options) -> GemmReduceProblem:
    a, b = Operand.contiguous((512, k), dtypes[0]), Operand.contiguous((k, 512), dtypes[1])
    return GemmReduceProblem.build(a, b, **{"reduce": "absmax"} | options)


OWN = ("small", "wgmma", "mma", "ozaki")


def algorithm(case, spec=H200) -> str:
    return plan_gemm(case, spec).algorithm


@pytest.mark.parametrize("spec", [RADEON, TURING])
def test_plain_arithmetic_where_there_is_no_other(spec):
    for dtype in ("float16", "float32", "float64", "complex64", "complex128"):
        for found in (plan_gemm(problem(dtype=dtype), spec), plan_gemm(problem(dtype=dtype, trans_a="T"), spec)):
            assert found.algorithm == "vendor"
            assert found.blas is not None
            assert found.arithmetic == "plain"


@pytest.mark.parametrize("compute", ["fp32", "fp64"])
def test_plain_modes_never_use_tensor_core_splits(compute):
    for size in (16, 512, 4096):
        for each in candidates(problem(size, size, size, compute=compute), H200):
            assert each.arithmetic == "plain"


def test_large_products_go_to_the_tensor_cores():
    for dtype, expected in (("complex64", "ozaki"), ("float32", "wgmma"), ("complex128", "ozaki")):
        assert algorithm(problem(8192, 8192, 8192, dtype=dtype)) == expected
    assert algorithm(problem(1024, 8192, 8192)) == "wgmma"
    assert algorithm(problem(8192, 8192, 8192), KNOWN["A100"]) == "mma"
    assert algorithm(problem(8192, 8192, 8192, dtype="float16")) == "vendor"
    assert algorithm(problem(8192, 8192, 8192), KNOWN["RTX5090"]) == "vendor"


def test_small_batched_products_have_their_own_kernel():
    for n in (4, 16, 32):
        assert algorithm(problem(n, n, n, batch=(20_000,))) == "small"


def test_auto_never_takes_what_is_less_accurate():
    for dtype, modes in (
        ("complex64", {"plain", "3xfp16"}),
        ("float32", {"plain", "3xfp16"}),
        ("float64", {"plain", "ozaki"}),
        ("complex128", {"plain", "ozaki"}),
        ("float16", {"plain", "fp16"}),
    ):
        for spec in KNOWN.values():
            assert {each.arithmetic for each in candidates(problem(dtype=dtype), spec)} <= modes


@pytest.mark.parametrize(
    "case",
    [
        problem(k=0),
        problem(m=0),
        problem(alpha=0),
        problem(k=0, compute="3xfp16"),
        problem(alpha=0, compute="ozaki"),
        problem(7, 7, 700, batch=(9,), dtype="float16"),
    ],
)
def test_what_has_nothing_to_multiply_is_for_the_portable_kernel(case):
    assert algorithm(case) == "simt"


@pytest.mark.parametrize(
    ("compute", "expected"),
    [("3xfp16", "wgmma"), ("3xfp16-3m", "wgmma"), ("3xtf32", "mma"), ("1xtf32", "mma"), ("ozaki", "ozaki")],
)
def test_a_mode_has_its_algorithm(compute, expected):
    found = plan_gemm(problem(compute=compute), H200)
    assert (found.algorithm, found.arithmetic) == (expected, compute)
    assert found.config is not None
    assert found.config.algorithm == expected
    with pytest.raises(ComputeUnsupported) as error:
        plan_gemm(problem(compute=compute), TURING)
    assert error.value.available == ["auto", "fp32", "fp64"]


def test_ampere_multiplies_planes_by_mma_sync():
    assert algorithm(problem(compute="3xfp16"), KNOWN["A100"]) == "mma"
    with pytest.raises(ComputeUnsupported):
        plan_gemm(problem(compute="3xfp16-3m"), KNOWN["A100"])


def test_operands_of_two_types_are_made_one_first():
    real, whole = Operand.contiguous((4096, 4096), "float32"), Operand.contiguous((4096, 4096), "complex64")
    case = GemmProblem.build(real, whole, compute="3xfp16")
    found = plan_gemm(case, H200)
    assert found.uniform
    assert as_uniform(case)[0].a == whole
    assert as_uniform(problem()) == (problem(), False)


def test_starved_kernels_are_worth_a_copy():
    """64 x 64 is one tile of the portable kernel, on one multiprocessor, however long k is."""
    assert algorithm(problem(64, 64, 65536, trans_a="R")) != "simt"


def test_the_result_s_strides_do_not_choose_the_algorithm():
    case = problem(dtype="float32", compute="fp32")
    gaps = Operand((512, 512), case.dtype, (2048, 2))
    found = plan_gemm(case, H200, gaps)
    assert found.algorithm == plan_gemm(case, H200).algorithm == "vendor"
    assert found.blas is not None
    assert found.blas.d.copied


def test_the_cpu_has_numpy():
    assert plan(problem(), CPU).algorithm == "numpy"
    assert plan(reduction(), CPU).algorithm == "numpy"


def test_reductions_are_ours_on_every_device():
    for spec in (TURING, RADEON):
        assert plan(reduction(), spec).algorithm == "simt"
    assert plan(reduction(compute="fp32"), H200).algorithm == "simt"
    found = plan(reduction(), H200)
    assert (found.algorithm, found.arithmetic, found.reduces) == ("wgmma", "3xfp16", True)
    assert (
        reduction_algorithm(found.algorithm, found.arithmetic).__name__
        == "gemmserve_kernels.algorithms.splits.gemm_reduce"
    )


@pytest.mark.parametrize(
    ("compute", "arithmetics"),
    [
        ("tf32", {"1xfp16", "1xtf32"}),
        ("1xtf32", {"1xtf32"}),
        ("3xtf32", {"3xtf32"}),
        ("3xfp16", {"3xfp16"}),
        ("3xfp16-3m", {"3xfp16-3m"}),
    ],
)
def test_modes_of_reductions(compute, arithmetics):
    assert plan(reduction(compute=compute), H200).arithmetic in arithmetics
    if compute != "3xfp16-3m":
        assert plan(reduction(compute=compute), KNOWN["A100"]).algorithm == "mma"


def test_sums_do_without_the_product():
    for options in ({"reduce": "sum"}, {"reduce": ["sum", "mean"], "axis": "n"}, {"reduce": "sum", "compute": "fp64"}):
        found = plan(reduction(**options), H200)
        assert found.algorithm == "sums"
        assert (
            reduction_algorithm(found.algorithm, found.arithmetic).__name__
            == "gemmserve_kernels.algorithms.sums.gemm_reduce"
        )
    whole = GemmConfig(algorithm="product")
    assert plan(reduction(reduce="sum", config=whole), H200).algorithm == "wgmma"
    assert plan(reduction(reduce="sum", config=whole, compute="fp32"), H200).algorithm == "simt"
    assert plan(reduction(reduce="sum", config=whole), CPU).algorithm == "numpy"
    for options in (
        {"reduce": ["sum", "absmax"]},
        {"reduce": "sum", "pre_op": "abs"},
        {"reduce": "sum", "return_c": True},
    ):
        assert plan(reduction(**options), H200).algorithm == "wgmma"
        with pytest.raises(ConfigInfeasible, match="sums"):
            plan(reduction(config=GemmConfig(algorithm="sums"), **options), H200)
    with pytest.raises(ConfigInfeasible, match="stages"):
        plan(reduction(reduce="sum", config=GemmConfig(algorithm="sums", stages=3)), H200)


def tall(rows=65536, columns=4096, k=64, batch=(16,), dtype="complex64", **options) -> GemmReduceProblem:
    a, b = Operand.contiguous((*batch, rows, k), dtype), Operand.contiguous((*batch, k, columns), dtype)
    return GemmReduceProblem.build(a, b, **{"reduce": "sumsq"} | options)


def test_sums_of_squares_of_tall_products_do_without_the_product():
    for options in ({}, {"reduce": ["sumsq", "mean"]}, {"pre_op": "abs"}, {"dtype": "float32"}, {"dtype": "float16"}):
        for name in ("H200", "A100"):
            found = plan(tall(**options), KNOWN[name])
            assert found.algorithm == "gram"
            assert (
                reduction_algorithm(found.algorithm, found.arithmetic).__name__
                == "gemmserve_kernels.algorithms.gram.gemm_reduce"
            )
    wide = {"rows": 4096, "columns": 65536, "axis": ["n", "batch"]}
    assert plan(tall(**wide), H200).algorithm == "gram"
    assert plan(tall(**wide | {"axis": "m"}, k=1024), H200).algorithm != "gram"  # its forms would take as long
    whole = GemmConfig(algorithm="product")
    assert plan(tall(config=whole), H200).algorithm == "wgmma"
    assert plan(tall(config=whole), CPU).algorithm == "numpy"
    assert plan(reduction(reduce="sumsq"), H200).algorithm == "wgmma"
    forced = GemmConfig(algorithm="gram", instruction_k=4)
    assert plan(reduction(reduce="sumsq", config=forced), H200).algorithm == "gram"


def test_auto_takes_gram_matrices_only_where_double_precision_is_fast_and_enough():
    for spec in (TURING, RADEON, KNOWN["RTX5090"], CPU):
        assert plan(tall(), spec).algorithm != "gram"
    for options in ({"compute": "fp32"}, {"compute": "fp64"}, {"compute": "3xfp16"}, {"dtype": "complex128"}):
        assert plan(tall(**options), H200).algorithm != "gram"


@pytest.mark.parametrize(
    ("options", "spec", "word"),
    [
        ({"dtype": "complex128"}, H200, "less accurate"),
        ({"reduce": ["sumsq", "absmax"]}, H200, "without the product"),
        ({"pre_op": "square"}, H200, "square"),
        ({"return_c": True}, H200, "without the product"),
        ({"k": 4096}, H200, "k = 4096"),
        ({"compute": "fp32"}, H200, "gram has no gemm_reduce in fp32"),
        ({"config": GemmConfig(algorithm="gram", stages=3)}, H200, "stages"),
        ({"config": GemmConfig(algorithm="gram", instruction_k=16)}, H200, "instruction_k"),
        ({}, TURING, "8.0"),
        ({}, CPU, "gram"),
    ],
)
def test_gram_matrices_that_cannot_be_had(options, spec, word):
    with pytest.raises(ConfigInfeasible, match=word):
        plan(tall(**{"config": GemmConfig(algorithm="gram")} | options), spec)


def doubles(m=1024, n=1024, k=512, batch=8, dtype="complex128", **options) -> GemmReduceProblem:
    a, b = Operand.contiguous((batch, m, k), dtype), Operand.contiguous((batch, k, n), dtype)
    return GemmReduceProblem.build(a, b, **{"reduce": "absmax", "axis": "n"} | options)


def test_extremes_of_double_precision_are_looked_for_where_that_is_faster():
    real = {"dtype": "float64", "reduce": "max"}
    for options in ({}, {"axis": ["m", "batch"]}, real | {"k": 1024}, real | {"m": 4096, "n": 4096}):
        assert plan(doubles(**options), H200).algorithm == "screen"
    small = ({"batch": 1, "m": 256, "n": 256}, {"m": 64, "n": 64, "k": 64}, {"n": 8, "m": 65536})
    other = ({"reduce": "absmin"}, {"reduce": ["absmax", "sumsq"]}, {"return_c": True}, {"pre_op": "square"})
    for options in (*small, *other, {"compute": "fp64"}, {"config": GemmConfig(algorithm="product")}):
        assert plan(doubles(**options), H200).algorithm in {"dmma", "simt", "vendor"}
    assert plan(doubles(), KNOWN["A100"]).algorithm in {"dmma", "vendor"}
    asked = plan(doubles(batch=1, m=256, n=256, config=GemmConfig(algorithm="screen")), H200)
    assert reduction_algorithm(asked.algorithm, asked.arithmetic).__name__.endswith("algorithms.screen.gemm_reduce")
    for options in other:
        with pytest.raises(ConfigInfeasible, match="screen"):
            plan(doubles(**options, config=GemmConfig(algorithm="screen")), H200)


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_columns_whose_numbers_lie_apart_take_longer(dtype, axis):
    """The other operand, whose lines are whole rows, may lie either way."""

    def seconds(trans):
        given = {"trans_a" if axis == "m" else "trans_b": trans}
        return screen_seconds(doubles(dtype=dtype, axis=axis, m=1024, n=1024, k=1024, **given), H200, lambda shape: 0.0)

    apart, along = ("T", "N") if axis == "m" else ("N", "T")
    assert seconds(apart) > 1.1 * seconds(along)


def test_what_residues_multiply_much_faster_is_reduced_from_memory():
    large = {"batch": 1, "m": 4096, "n": 4096, "k": 4096}
    for options in ({"reduce": "absmin"}, {"reduce": ["sum", "sumsq"]}, {"pre_op": "square"}):
        found = plan(doubles(**large, **options), H200)
        assert (found.algorithm, found.arithmetic, found.takes_prepared) == ("ozaki", "ozaki", False)
        assert plan(doubles(**options), H200).algorithm == "dmma"
        assert plan(doubles(**large, **options, compute="fp64"), H200).algorithm == "dmma"
        assert plan(doubles(**large, **options, return_c=True), H200).algorithm == "dmma"
    module = reduction_algorithm("ozaki", "ozaki")
    assert module.__name__ == "gemmserve_kernels.algorithms.ozaki.gemm_reduce"


def test_float16_is_read_as_it_lies_on_hopper():
    """Or copied, unless that is too much; else by the vendor's BLAS."""
    whole, odd = (reduction(k=k, dtypes=("float16", "float16")) for k in (512, 300_001))
    by_name = reduction(k=1001, dtypes=("float16", "float16"), config=GemmConfig(algorithm="wgmma"))
    assert plan(by_name, H200).arithmetic == "fp16"
    found = plan(whole, H200)
    assert (found.algorithm, found.arithmetic) == ("wgmma", "fp16")
    assert (
        reduction_algorithm(found.algorithm, found.arithmetic).__name__
        == "gemmserve_kernels.algorithms.wgmma.direct.gemm_reduce"
    )
    assert not found.takes_prepared
    for spec, case in ((H200, odd), (KNOWN["A100"], whole), (H200, replace(whole, compute="fp32"))):
        assert plan(case, spec).algorithm == "vendor"
    asked = problem(dtype="float16", trans_b="T", config=GemmConfig(algorithm="wgmma"))
    found = plan_gemm(asked, H200)
    assert (found.arithmetic, product_algorithm(found.algorithm, found.arithmetic).__name__) == (
        "fp16",
        "gemmserve_kernels.algorithms.wgmma.direct.gemm",
    )
    with pytest.raises(ConfigInfeasible, match="a: a matrix of 512 x 300001 with strides of 600002 and 2 bytes"):
        plan_gemm(problem(k=300_001, dtype="float16", config=GemmConfig(algorithm="wgmma")), H200)


def test_reductions_of_nothing_and_of_mixed_operands():
    assert plan(reduction(k=0), H200).algorithm == "simt"
    assert plan(reduction(dtypes=("float32", "complex64"), compute="3xfp16"), H200).uniform


def test_tf32_needs_its_hardware():
    assert plan_gemm(problem(compute="tf32"), H200).arithmetic in {"tf32", "1xfp16", "1xtf32"}
    for spec in (TURING, KNOWN["MI250X"], CPU):
        with pytest.raises(ComputeUnsupported) as error:
            plan_gemm(problem(compute="tf32"), spec)
        assert error.value.available == ["auto", "fp32", "fp64"]
    with pytest.raises(ComputeUnsupported) as error:
        plan_gemm_reduce(reduction(compute="ozaki"), H200)
    assert "ozaki" not in error.value.available
    assert "3xfp16" in error.value.available


@pytest.mark.parametrize(
    ("dtype", "compute", "spec", "modes", "why"),
    [
        ("complex64", "bf16", CPU, ["auto", "fp32", "fp64"], "is not known"),
        ("float64", "fp32", CPU, ["auto", "fp64"], "does not apply to float64"),
        ("float64", "3xtf32", H200, ["auto", "fp64", "ozaki"], "does not apply to float64"),
        ("complex128", "tf32", TURING, ["auto", "fp64"], "does not apply to complex128"),
        ("float16", "fp64", H200, ["auto", "fp32"], "does not apply to float16"),
        ("float16", "ozaki", CPU, ["auto", "fp32"], "does not apply to float16"),
        ("float64", "ozaki", CPU, ["auto", "fp64"], "is not available here"),
    ],
)
def test_of_a_mode_that_a_dtype_lacks_those_are_named_that_the_device_has_too(dtype, compute, spec, modes, why):
    with pytest.raises(ComputeUnsupported, match=why) as error:
        plan_gemm(problem(dtype=dtype, compute=compute), spec)
    assert error.value.available == modes
    with pytest.raises(ComputeUnsupported) as error:
        plan_gemm_reduce(reduction(dtypes=(dtype, dtype), compute=compute), spec)
    assert set(error.value.available) <= set(modes)


def test_available_modes():
    assert available(problem(dtype="float16").dtype, H200) == ("auto", "fp32")
    assert available(problem(dtype="complex128").dtype, H200) == ("auto", "fp64", "ozaki")
    assert set(available(problem().dtype, H200)) == set(COMPUTE_MODES)


def test_an_override_is_obeyed():
    assert plan_gemm(problem(config=GemmConfig(algorithm="simt")), H200).algorithm == "simt"
    assert plan_gemm(problem(config=GemmConfig(block_m=64, block_n=64)), H200).algorithm == "simt"
    for name in OWN[1:3]:
        assert plan_gemm(problem(config=GemmConfig(algorithm=name)), H200).algorithm == name
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
        (problem(config=GemmConfig(algorithm="wgmma")), KNOWN["A100"], "9.0"),
        (problem(config=GemmConfig(algorithm="mma")), RADEON, "NVIDIA"),
        (problem(config=GemmConfig(algorithm="wgmma"), dtype="float64"), H200, "float64"),
        (problem(config=GemmConfig(algorithm="ozaki")), H200, "2048 x 2048"),
        (problem(2048, 2048, 2048, config=GemmConfig(algorithm="ozaki"), dtype="float32"), H200, "no residues"),
        (problem(config=GemmConfig(algorithm="small")), H200, "small"),
        (problem(config=GemmConfig(algorithm="wgmma", thread_m=4)), H200, "thread_m"),
        (problem(config=GemmConfig(algorithm="simt", warp_m=64)), H200, "warp_m"),
        (problem(config=GemmConfig(block_m=512, block_n=512, block_k=64)), H200, "limit|has"),
    ],
)
def test_infeasible_overrides_name_the_limit(case, spec, word):
    with pytest.raises(ConfigInfeasible, match=word):
        plan_gemm(case, spec)


def test_infeasible_overrides_of_reductions():
    for algorithm, spec in (("small", H200), ("numpy", H200), ("simt", CPU), ("vendor", CPU)):
        with pytest.raises(ConfigInfeasible):
            plan_gemm_reduce(reduction(config=GemmConfig(algorithm=algorithm)), spec)


VENDOR = GemmConfig(algorithm="vendor")


@pytest.mark.parametrize("compute", ["auto", "fp32", "fp64", "tf32"])
@pytest.mark.parametrize("spec", [H200, KNOWN["A100"], KNOWN["RTX5090"], KNOWN["MI300X"], RADEON, TURING])
def test_the_vendors_product_is_reduced_where_its_name_says_so(spec, compute):
    """In the modes in which `gemm` has it."""
    case = reduction(compute=compute, config=VENDOR)
    if compute not in spec.compute_modes:
        with pytest.raises(ComputeUnsupported):
            plan(case, spec)
    elif compute == "tf32" and spec.kind == "rocm":
        with pytest.raises(ConfigInfeasible, match="no TF32"):
            plan(case, spec)
    else:
        found = plan(case, spec)
        assert (found.algorithm, found.reduces, found.blas) == ("vendor", True, None)
        assert found.arithmetic == plan_gemm(problem(compute=compute, config=VENDOR), spec).arithmetic
        assert not found.takes_prepared


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"compute": "3xfp16"}, "vendor has no gemm_reduce in 3xfp16"),
        ({"config": GemmConfig(algorithm="vendor", stages=3)}, "stages"),
        ({"dtypes": ("float16", "float16"), "return_c": True}, "returned in float16"),
        ({"compute": "fp64", "return_c": True}, "returned in complex64"),
    ],
)
def test_products_of_the_vendor_that_cannot_be_reduced(options, word):
    with pytest.raises(ConfigInfeasible, match=word):
        plan(reduction(**{"config": VENDOR} | options), H200)


def test_plain_modes_reduce_the_vendors_product_where_it_is_much_faster():
    for spec in (H200, KNOWN["A100"], KNOWN["RTX5090"], KNOWN["MI300X"], RADEON, TURING):
        large = {"batch": 1, "m": 4096, "n": 4096, "k": 4096, "compute": "fp64"}
        assert plan(doubles(**large, dtype="complex64"), spec).algorithm == "vendor"
        assert plan(doubles(**large | {"k": 4}, dtype="complex64"), spec).algorithm != "vendor", "mostly a pass"
        assert plan(doubles(**large, dtype="complex64", return_c=True), spec).algorithm != "vendor"
