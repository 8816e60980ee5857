"""What a block's algorithm takes: no less than what is known of it."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_kernels import GemmConfig, GemmProblem, Operand
from gemmserve_kernels.algorithms.cpu.gemm import BLOCK_BYTES
from gemmserve_kernels.algorithms.ozaki.lines import OUTLIER_WORDS
from gemmserve_kernels.algorithms.ozaki.plan import WORKSPACE
from gemmserve_kernels.blocks.workspace import block_seconds, workspace_bytes
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec

H200 = KNOWN["H200"]


def block(dtype: str, n: int = 4096, k: int = 8192, **options) -> GemmProblem:
    return GemmProblem.build(
        Operand.contiguous((n, k), np.dtype(dtype)), Operand.contiguous((k, n), np.dtype(dtype)), **options
    )


@pytest.mark.parametrize(("dtype", "bytes_an_element"), [("complex64", 12), ("float32", 6)])
def test_planes_are_the_wide_ones(dtype, bytes_an_element) -> None:
    """Three bfloat16 parts of each element of both operands, in the place of two float16 ones."""
    planes = 2 * 4096 * 8192 * bytes_an_element
    assert planes <= workspace_bytes(block(dtype), H200) < 1.1 * planes


def test_residues_have_a_bound() -> None:
    config = GemmConfig(algorithm="ozaki", outliers=0)
    without = workspace_bytes(block("complex128", config=config), H200)
    assert 1 << 30 < without <= WORKSPACE + (2 << 20)
    assert workspace_bytes(block("complex128"), H200) == without + 8192 * 4 * OUTLIER_WORDS


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
