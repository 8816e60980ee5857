"""The matrix units' kernels on an AMD device against higher precision: dtypes, edges, ways to lie, the model's bits."""

from __future__ import annotations

import numpy as np
import pytest
import reduce_cases
from kernel_models import mfma as model
from mfma_cases import BOTH, check, run
from simt_cases import CupyMachine, random, strided

from gemmserve_kernels.algorithms.mfma.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.algorithms.mfma.tile import CANDIDATES, candidates_of, check_device, dense_arithmetic
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.gpu
DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


@pytest.fixture
def machine():
    launcher = CupyLauncher.current()
    if reason := check_device(launcher.spec):
        pytest.skip(reason)
    return CupyMachine(launcher)


def arithmetic_of(machine, *arrays):
    """What multiplies them here; skips where nothing does (RDNA 3 has float16 alone)."""
    found = dense_arithmetic(GemmProblem.build(*map(Operand.of, arrays)), machine.launcher.spec)
    if found is None:
        pytest.skip(f"no {arrays[0].dtype} on {machine.launcher.spec.arch}")
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans", ["NN", "TC", "CT", "RR"])
def test_operations(machine, dtype, trans):
    m, n, k = 300, 170, 231
    arithmetic_of(machine, np.zeros((8, 8), dtype), np.zeros((8, 8), dtype))
    a = random(1, dtype, *((k, m) if trans[0] in "TC" else (m, k)))
    b = random(2, dtype, *((n, k) if trans[1] in "TC" else (k, n)))
    options = BOTH if np.dtype(dtype).kind == "c" else {"alpha": 1.5, "beta": -0.5}
    check(machine, a, b, random(3, dtype, m, n), trans_a=trans[0], trans_b=trans[1], **options)


@pytest.mark.parametrize(
    ("arithmetic", "is_complex"), [key for key in CANDIDATES if key[0] in {"fp32", "fp64", "fp16"}]
)
def test_every_tile(machine, arithmetic, is_complex):
    dtype = {"fp32": ("float32", "complex64"), "fp64": ("float64", "complex128"), "fp16": ("float16",)}[arithmetic]
    a, b = random(1, dtype[is_complex], 300, 100), random(2, dtype[is_complex], 100, 270)
    arch = machine.launcher.spec.arch
    if arithmetic_of(machine, a, b) != arithmetic:
        pytest.skip(f"not on {arch}")
    for tile in candidates_of(arithmetic, arch, is_complex=is_complex, reducing=False):
        check(machine, a, b, config=tile)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (64, 64, 16), (65, 1, 7), (1, 900, 3), (128, 64, 8), (33, 31, 4099)]
)
@pytest.mark.parametrize("dtype", ["complex64", "float16"])
def test_extents(machine, m, n, k, dtype):
    a, b = random(1, dtype, m, k), random(2, dtype, k, n)
    arithmetic_of(machine, a, b)
    check(machine, a, b)


@pytest.mark.parametrize(
    ("how_a", "how_b", "out"),
    [("fortran", "fortran", "fortran"), ("reversed", "gaps", "reversed"), ("offset", "padded", "gaps")],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strides_and_batches(machine, how_a, how_b, out, dtype):
    a, b = strided(random(1, dtype, 3, 140, 148), how_a), strided(random(2, dtype, 148, 156), how_b)
    arithmetic_of(machine, a, b)
    check(machine, a, b, random(3, dtype, 3, 140, 156), beta=1, out=out)


@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(machine, dtype, axis):
    a, b = random(1, dtype, 3, 200, 90), random(2, dtype, 90, 170)
    arithmetic_of(machine, a, b)
    names = reduce_cases.COMPLEX if np.dtype(dtype).kind == "c" else reduce_cases.REAL
    first = reduce_cases.check(machine, run_gemm_reduce, a, b, reduce=list(names), axis=axis, return_c=True)
    again = reduce_cases.run(machine, run_gemm_reduce, a, b, reduce=list(names), axis=axis, return_c=True)[1]
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])


def test_the_models_bits(machine):
    """What the emulation assumes of the matrix units. A difference here is news, not a mistake of the kernel."""
    a, b = random(1, "float16", 64, 512), random(2, "float16", 512, 64)
    if arithmetic_of(machine, a, b) != "fp16":
        pytest.skip("float16 is multiplied as float32 here")
    _, result = run(machine, a, b)
    np.testing.assert_array_equal(result, model.product_fp16(a, b, machine.launcher.spec.arch).astype(np.float16))
