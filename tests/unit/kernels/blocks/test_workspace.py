"""What a block's algorithm takes: no less than what is known of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gemmserve_kernels import GemmConfig, GemmProblem, GemmReduceProblem, Operand, plan
from gemmserve_kernels.algorithms.common.panels import panel_bytes
from gemmserve_kernels.algorithms.cpu.gemm import BLOCK_BYTES
from gemmserve_kernels.algorithms.ozaki.lines import OUTLIER_WORDS
from gemmserve_kernels.algorithms.ozaki.plan import WORKSPACE
from gemmserve_kernels.blocks.workspace import block_seconds, workspace_bytes
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_kernels.dispatch.planned_call import fresh_key
from gemmserve_kernels.dispatch.planned_call import program_of as product_program_of
from gemmserve_kernels.dispatch.planned_reduce import program_of, written_of

H200 = KNOWN["H200"]
REDUCED = ("sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin")


def block(dtype: str, n: int = 4096, k: int = 8192, **options) -> GemmProblem:
    return GemmProblem.build(
        Operand.contiguous((n, k), np.dtype(dtype)), Operand.contiguous((k, n), np.dtype(dtype)), **options
    )


@pytest.mark.parametrize(("dtype", "bytes_an_element"), [("complex64", 12), ("float32", 6)])
def test_planes_are_the_wide_ones(dtype, bytes_an_element) -> None:
    """Three bfloat16 parts of each element of both operands, in the place of two float16 ones."""
    planes = 2 * 4096 * 8192 * bytes_an_element
    assert planes <= workspace_bytes(block(dtype, compute="3xfp16"), H200) < 1.1 * planes


def test_residues_have_a_bound() -> None:
    config = GemmConfig(algorithm="ozaki", outliers=0)
    without = workspace_bytes(block("complex128", config=config), H200)
    assert 1 << 30 < without <= WORKSPACE + (2 << 20)
    assert workspace_bytes(block("complex128"), H200) == without + 8192 * 4 * OUTLIER_WORDS


def test_residues_of_single_precision_have_the_memory_of_planes_too() -> None:
    """Sixteen bytes of every element of both operands and of the result, or three bfloat16 parts of operands that are
    cut into strips where those would need more.
    """
    residues = 16 * (2 * 4096 * 8192 + 4096 * 4096)
    assert residues <= workspace_bytes(block("complex64"), H200) < 1.05 * residues
    lines = workspace_bytes(block("complex64", config=GemmConfig(outliers=0, algorithm="ozaki")), H200)
    assert workspace_bytes(block("complex64"), H200) == lines + 8192 * 4 * OUTLIER_WORDS
    deep = block("complex64", 2048, 1 << 19)
    assert workspace_bytes(deep, H200) < 1.05 * WORKSPACE < 2 * 2048 * (1 << 19) * 12


@pytest.mark.parametrize("strips", [1, 4, 16])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4096, 4096, 8192), "complex64"), ((3000, 5000, 2100), "complex64"), ((2048, 2048, 1 << 18), "complex64")],
)
def test_products_by_residues_take_no_more_than_is_planned(shape, dtype, strips) -> None:
    m, n, k = shape
    problem = GemmProblem.build(Operand.contiguous((m, k), dtype), Operand.contiguous((k, n), dtype), compute="ozaki")
    planned = workspace_bytes(problem, H200, strips)
    problem = replace(problem, config=GemmConfig(algorithm="ozaki", strips=strips))
    recorder = CupyLauncher(H200)
    keys = fresh_key(problem.a), fresh_key(problem.b), None, fresh_key(Operand.contiguous((m, n), dtype))
    program = product_program_of(recorder, problem, plan(problem, H200), keys)
    assert 0.6 * planned < program.workspace <= planned


def reduction(dtype: str, n: int = 4096, k: int = 512, **options) -> GemmReduceProblem:
    return GemmReduceProblem.build(
        Operand.contiguous((n, k), np.dtype(dtype)), Operand.contiguous((k, n), np.dtype(dtype)),
        **{"reduce": "sumsq", "config": GemmConfig(algorithm="vendor")} | options,
    )  # fmt: skip


@pytest.mark.parametrize("spec", [H200, KNOWN["A100"], KNOWN["MI300X"]], ids=lambda spec: spec.arch)
def test_products_of_the_vendor_are_reduced_from_a_panel(spec) -> None:
    """A panel has the dtype in which products are summed, and 1 GiB at most; there is none where the product is
    returned. Operands that the BLAS does not read are copied.
    """
    without = workspace_bytes(reduction("complex64", config=GemmConfig(algorithm="simt")), spec)
    elements, operand = 4096 * 4096, 4096 * 512 * 8
    assert workspace_bytes(reduction("complex64"), spec) == without + elements * 8
    assert workspace_bytes(reduction("complex64", return_c=True), spec) == without
    conjugated = reduction("complex64", trans_a="R")
    assert workspace_bytes(conjugated, spec) == without + elements * 8, "the transposed product has A^H"
    assert workspace_bytes(replace(conjugated, axis=("n",)), spec) == without + elements * 8 + operand
    wide = reduction("complex64", compute="fp64")
    assert workspace_bytes(wide, spec) == without + elements * 16 + 2 * 2 * operand
    half = reduction("float16")
    assert workspace_bytes(half, spec) == without + elements * 4
    large = workspace_bytes(reduction("complex64", 32768), spec)
    assert large - workspace_bytes(reduction("complex64", 32768, config=GemmConfig(algorithm="simt")), spec) == 1 << 30


def test_a_program_takes_no_more_than_is_planned() -> None:
    for problem in (
        *(reduction("complex64", axis=axis, reduce=REDUCED) for axis in ("m", "n", ("m", "batch"))),
        reduction("float32", 32768, 64, axis="n"),
        reduction("float64", 1000, 64, axis="m", reduce=REDUCED, return_c=True),
        reduction("float16", 5000, 64, axis="n", reduce=REDUCED),
    ):
        recorder, written = CupyLauncher(H200), written_of(problem)
        keys = fresh_key(problem.a), fresh_key(problem.b)
        program = program_of(recorder, problem, plan(problem, H200), keys, written)
        assert panel_bytes(problem, problem.accumulate.itemsize) <= program.workspace
        assert program.workspace <= workspace_bytes(problem, H200)


def test_operands_of_another_dtype_are_converted() -> None:
    problem = GemmProblem.build(
        Operand.contiguous((4096, 8192), np.dtype("f4")), Operand.contiguous((8192, 4096), np.dtype("c8"))
    )
    assert workspace_bytes(problem, H200) >= workspace_bytes(block("complex64"), H200) + 2 * 4096 * 8192 * 8


def test_plain_arithmetic_takes_little() -> None:
    assert workspace_bytes(block("float32", config=GemmConfig(algorithm="simt")), H200) < 4 << 20
    assert workspace_bytes(block("float32"), DeviceSpec.cpu()) == 3 * BLOCK_BYTES


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64", "float64", "complex128"])
@pytest.mark.parametrize("spec", [*KNOWN.values(), DeviceSpec.cpu()], ids=lambda spec: spec.name)
def test_time_grows_with_the_block(spec, dtype) -> None:
    one, two = (block_seconds(block(dtype, k=k), spec) for k in (4096, 16384))
    assert 0 < one < two < 1e5
