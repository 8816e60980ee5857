"""The kernel for small products on the CPU shim, against a higher-precision reference and an a-priori bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simt_cases import COMPLEX_ALPHA, ShimMachine, random
from simt_shim import ORDERS, ShimLauncher
from small_cases import SMALL_CASES, TF32, check_non_finite_and_tiny, check_small, product, run_small

from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig

H200, MI300X = KNOWN["H200"], KNOWN["MI300X"]


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(H200))


@pytest.mark.parametrize("case", SMALL_CASES.values(), ids=SMALL_CASES)
def test_every_case(machine, case):
    check_small(machine, case)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("spec", [H200, MI300X], ids=["warp32", "warp64"])
@pytest.mark.parametrize("name", ["5x5x5, 29 complex128", "broadcast both ways"])
def test_thread_orders_do_not_matter(spec, order, name):
    expected = run_small(ShimMachine(ShimLauncher(H200)), SMALL_CASES[name])[-1]
    result = run_small(ShimMachine(ShimLauncher(spec, order=order)), SMALL_CASES[name])[-1]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    "name", ["2x3x5, 77 complex64", "8x8x8, 33 complex64", "a for all", "planar CR fortran", "float16xfloat32xfloat32"]
)
def test_no_races_and_no_stray_accesses(name):
    check_small(ShimMachine(ShimLauncher(H200, checked=True)), SMALL_CASES[name])


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["2x3x5, 77 complex64", "8x8x8, 33 complex64", "b for all"])
def test_blocks_walk_over_many_groups(stages, name):
    """Two blocks for everything: stages are reused, the last group is cut short."""
    machine = ShimMachine(ShimLauncher(H200, checked=True, max_grid=2))
    case = SMALL_CASES[name]
    config = GemmConfig(stages=stages)
    result = run_small(machine, case, config=config)[-1]
    np.testing.assert_array_equal(result, run_small(ShimMachine(ShimLauncher(H200)), case)[-1])
    if name == "2x3x5, 77 complex64":
        check_small(machine, product(2, 3, 5, (400,)), config)


@pytest.mark.parametrize("tile", [(1, 1), (3, 2), (4, 4), (7, 5)])
def test_other_tiles(machine, tile):
    config = GemmConfig(thread_m=tile[0], thread_n=tile[1])
    check_small(machine, product(7, 10, 4, (9,), c=(9, 7, 10), options=COMPLEX_ALPHA), config)


def test_one_product_again_and_again(machine):
    case = product(6, 4, 8, (30,))
    a, b = (np.broadcast_to(array[:1], array.shape) for array in case.operands()[:2])
    result = run_small(machine, case, (a, b, None))[-1]
    np.testing.assert_array_equal(result, np.broadcast_to(run_small(machine, case)[-1][:1], result.shape))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_beta_zero_never_reads_c(machine, value):
    case = product(5, 6, 4, (9,), c=(9, 5, 6), options={"beta": 0})
    a, b, c = case.operands()
    expected = run_small(machine, case, (a, b, c))[-1]
    np.testing.assert_array_equal(run_small(machine, case, (a, b, np.full_like(c, value)))[-1], expected)


def test_non_finite_values_stay_in_their_rows_and_columns(machine):
    a, b = random(1, "float32", 9, 6, 5), random(2, "float32", 9, 5, 7)
    a[3, 4, 1], a[5, 0, 0], b[8, 4, 6], b[2, 2, 3] = np.nan, np.inf, -np.inf, np.nan
    result = run_small(machine, product(6, 7, 5, (9,), dtypes=("float32",)), (a, b, None))[-1]
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(result[np.isinf(expected)], expected[np.isinf(expected)].astype(np.float32))


@pytest.mark.parametrize("options", [{}, TF32], ids=["plain", "tensor"])
def test_non_finite_and_tiny_values_give_what_float32_gives(machine, options):
    check_non_finite_and_tiny(machine, options)


@pytest.mark.parametrize(
    ("sizes", "trans"), [((33, 33, 33), "NN"), ((50, 3, 41), "CT"), ((1, 64, 40), "TR"), ((64, 20, 1), "NC")], ids=str
)
def test_tensor_cores(machine, sizes, trans):
    """What the shim plays of them: a warp's tile, its edges, C and both factors."""
    m, n, k = sizes
    check_small(machine, product(m, n, k, (7,), trans, c=(7, m, n), options=COMPLEX_ALPHA | TF32))


@pytest.mark.parametrize("how", [("fortran", "plain", "fortran"), ("offset",) * 3])
def test_tensor_cores_of_strided_operands(machine, how):
    check_small(machine, product(40, 36, 50, (3,), strides=how[:2], out=how[2], options=TF32))
    planar = {"layout": "planar"} | TF32
    check_small(machine, product(17, 36, 9, (2, 3), dtypes=("float32",), strides=how[:2], options=planar))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_tensor_cores_in_any_order_of_threads(machine, order):
    case = product(40, 36, 50, (5,), options=TF32)
    result = run_small(ShimMachine(ShimLauncher(H200, order=order)), case)[-1]
    np.testing.assert_array_equal(result, run_small(machine, case)[-1])


SIDES = st.integers(1, 12)
HOW = st.sampled_from(["plain", "fortran", "reversed", "gaps", "offset", "padded"])


@settings(max_examples=10)
@given(
    m=SIDES,
    n=SIDES,
    k=SIDES,
    batch=st.integers(1, 40),
    how=st.tuples(HOW, HOW, HOW),
    trans=st.tuples(st.sampled_from("NTCR"), st.sampled_from("NTCR")),
    dtype=st.sampled_from(["float16", "float32", "float64", "complex64", "complex128"]),
    beta=st.sampled_from([0, 1, -0.5]),
)
def test_any_problem(m, n, k, batch, how, trans, dtype, beta):
    case = product(
        m,
        n,
        k,
        (batch,),
        "".join(trans),
        dtypes=(dtype,),
        strides=how[:2],
        out=how[2],
        c=(batch, m, n) if beta else None,
        options={"beta": beta, "alpha": 1.5},
    )
    check_small(ShimMachine(ShimLauncher(H200)), case)
