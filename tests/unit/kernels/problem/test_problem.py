"""Every check of a problem, and what it says about itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_kernels import (
    DtypeUnsupported,
    GemmProblem,
    GemmReduceProblem,
    Operand,
    ParameterInvalid,
    ShapeMismatch,
)


def operand(*shape: int, dtype: str = "complex64") -> Operand:
    return Operand.contiguous(shape, dtype)


def build(a=None, b=None, c=None, **options) -> GemmProblem:
    return GemmProblem.build(a or operand(3, 4), b or operand(4, 5), c, **options)


def reduction(a=None, b=None, **options) -> GemmReduceProblem:
    return GemmReduceProblem.build(a or operand(2, 3, 4), b or operand(4, 5), **options)


def test_operand_of_an_array_counts_elements():
    x = np.zeros((4, 6), np.complex64)[::-1, ::2]
    assert Operand.of(x) == Operand((4, 3), np.dtype("complex64"), (-6, 2))


def test_operand_refuses_strides_inside_elements():
    field = np.zeros((3, 3), [("flag", "i1"), ("x", "<f4")])["x"]
    with pytest.raises(ParameterInvalid, match="whole elements"):
        Operand.of(field)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from("CF"))
def test_contiguous_strides_are_numpys(shape, order):
    assert Operand.contiguous(shape, "f4", order) == Operand.of(np.empty(shape, "f4", order))


def test_sizes_flops_and_bytes():
    problem = build(operand(6, 3, 4), operand(5, 4), operand(3, 5), trans_b="T", beta=1)
    assert (problem.m, problem.n, problem.k, problem.batch_shape, problem.batch) == (3, 5, 4, (6,), 6)
    assert problem.flops() == 8 * 3 * 5 * 4 * 6
    assert problem.nbytes() == 8 * (6 * 12 + 20 + 15 + 6 * 15)
    assert problem.result == operand(6, 3, 5)
    assert build(operand(3, 4, dtype="float32"), operand(4, 5, dtype="float16")).flops() == 2 * 3 * 5 * 4


def test_beta_that_is_not_given_is_1_with_c():
    assert build(c=operand(3, 5)) == build(c=operand(3, 5), beta=1)
    assert build() == build(beta=0)


def test_c_that_is_not_read_moves_no_bytes():
    assert build(c=operand(3, 5), beta=0).nbytes() == build().nbytes()


@pytest.mark.parametrize(
    ("dtypes", "result", "accumulate"),
    [
        (("float16", "float16"), "float16", "float32"),
        (("float16", "float32"), "float32", "float32"),
        (("float64", "complex64"), "complex128", "complex128"),
        (("float32", "complex64"), "complex64", "complex64"),
    ],
)
def test_mixed_dtypes_follow_numpy(dtypes, result, accumulate):
    problem = build(operand(3, 4, dtype=dtypes[0]), operand(4, 5, dtype=dtypes[1]))
    assert (problem.dtype, problem.result_dtype, problem.accumulate) == (result, result, accumulate)


def test_fp64_accumulates_double_and_stores_single():
    problem = build(compute="fp64")
    assert (problem.accumulate, problem.result_dtype) == (np.complex128, np.complex64)


def test_c_counts_for_the_result_type():
    assert build(c=operand(3, 5, dtype="complex128")).result_dtype == np.complex128


def test_planar_results_are_planar():
    a, b = operand(2, 7, 3, 4, dtype="float32"), operand(2, 4, 5, dtype="float64")
    problem = build(a, b, layout="planar")
    assert (problem.dtype, problem.result_shape, problem.result_dtype) == (np.complex128, (2, 7, 3, 5), np.float64)
    results = reduction(a, b, layout="planar", reduce=["sum", "absmax", "argmax"], return_c=True).results
    assert {name: shape for name, (shape, _) in results.items()} == {
        "sum": (2, 7, 5),
        "absmax": (7, 5),
        "argmax": (7, 5),
        "c": (2, 7, 3, 5),
    }


@pytest.mark.parametrize(
    ("a", "b", "options"),
    [
        (operand(3, 4), operand(5, 6), {}),
        (operand(3, 4), operand(4, 5), {"trans_a": "T"}),
        (operand(3, 4), operand(4, 5), {"trans_b": "C"}),
        (operand(4), operand(4, 5), {}),
        (operand(3, 4), operand(4), {}),
        (operand(2, 3, 4), operand(5, 4, 5), {}),
        (operand(1 << 31, 1), operand(1, 1 << 31), {}),
        (operand(1 << 62, 1), operand(1, 1), {}),
        (Operand((-3, 4), np.dtype("complex64"), (4, 1)), operand(4, 5), {}),
        (operand(3, 4, dtype="float32"), operand(4, 5, dtype="float32"), {"layout": "planar"}),
        (operand(3, 3, 4, dtype="float32"), operand(2, 4, 5, dtype="float32"), {"layout": "planar"}),
    ],
)
def test_shapes_that_do_not_fit(a, b, options):
    with pytest.raises(ShapeMismatch):
        build(a, b, **options)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (4, 1, 5)])
def test_c_must_broadcast_to_the_result(shape):
    with pytest.raises(ShapeMismatch, match="does not broadcast"):
        build(c=operand(*shape), beta=1)


@pytest.mark.parametrize("shape", [(5,), ()])
def test_c_must_be_a_matrix(shape):
    with pytest.raises(ShapeMismatch, match="at least 2"):
        build(c=operand(*shape), beta=1)


def test_k_mismatch_names_both():
    with pytest.raises(ShapeMismatch, match=r"3 x 4.*5 x 6"):
        build(operand(3, 4), operand(5, 6))


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8", "int64", "float128", ">f4", "O", "M8[s]"])
def test_unsupported_dtypes(dtype):
    with pytest.raises(DtypeUnsupported):
        build(Operand((3, 4), np.dtype(dtype), (4, 1)))


def test_planar_float16_and_planar_complex_are_unsupported():
    for dtype in ("float16", "complex64"):
        with pytest.raises(DtypeUnsupported):
            build(operand(2, 3, 4, dtype=dtype), operand(2, 4, 5, dtype=dtype), layout="planar")


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), complex(0, float("inf")), "1", "", [1], 1e39, 10**400, np.ones(2)]
)
def test_scalars_must_be_numbers_that_the_dtype_holds(name, value):
    with pytest.raises(ParameterInvalid) as error:
        build(c=operand(3, 5), **{name: value})
    assert error.value.parameter == name


def test_complex_scalars_on_real_data():
    a, b = operand(3, 4, dtype="float32"), operand(4, 5, dtype="float32")
    with pytest.raises(ParameterInvalid, match="complex") as error:
        build(a, b, alpha=1j)
    assert error.value.parameter == "alpha"
    assert build(a, b, alpha=2 + 0j).alpha == 2
    assert build(a, operand(4, 5), alpha=1j).alpha == 1j


def test_beta_without_c():
    with pytest.raises(ParameterInvalid, match="no c") as error:
        build(beta=1)
    assert error.value.parameter == "beta"


@pytest.mark.parametrize(
    ("name", "value"), [("trans_a", "X"), ("trans_b", "n"), ("order", "A"), ("layout", "split"), ("trans_a", None)]
)
def test_unknown_words(name, value):
    with pytest.raises(ParameterInvalid) as error:
        build(**{name: value})
    assert error.value.parameter == name


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"axis": "m"}, (2, 5)),
        ({"axis": "n"}, (2, 3)),
        ({"axis": ["m", "batch"]}, (5,)),
        ({"axis": ["batch", "n"]}, (3,)),
    ],
)
def test_shape_of_a_reduction(options, shape):
    assert reduction(**options).results["sum"][0] == shape


@pytest.mark.parametrize(
    ("dtype", "pre_op", "expected"),
    [
        (
            "float16",
            "identity",
            {"sum": "f4", "mean": "f4", "sumsq": "f4", "absmax": "f2", "max": "f2", "argmax": "i8"},
        ),
        ("float32", "square", {"sum": "f4", "absmin": "f4", "min": "f4", "argmin": "i8"}),
        ("complex64", "identity", {"sum": "c8", "mean": "c8", "sumsq": "f4", "absmax": "f4", "argmax": "i8"}),
        ("complex64", "abs", {"sum": "f4", "mean": "f4", "max": "f4", "min": "f4"}),
        ("complex128", "square", {"sum": "c16", "sumsq": "f8", "absmax": "f8"}),
    ],
)
def test_dtypes_of_reductions(dtype, pre_op, expected):
    a, b = operand(3, 4, dtype=dtype), operand(4, 5, dtype=dtype)
    results = reduction(a, b, reduce=list(expected), pre_op=pre_op).results
    assert {name: found.str[1:] for name, (_, found) in results.items()} == expected
    assert list(results) == list(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"axis": "batch"},
        {"axis": ["m", "n"]},
        {"axis": []},
        {"axis": ["m", "m"]},
        {"axis": "k"},
        {"reduce": "median"},
        {"reduce": []},
        {"reduce": ["sum", "sum"]},
        {"pre_op": "exp"},
    ],
)
def test_malformed_reductions(options):
    with pytest.raises(ParameterInvalid) as error:
        reduction(**options)
    assert error.value.parameter == next(iter(options))


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_of_complex_values_hint_at_magnitudes(name):
    with pytest.raises(ParameterInvalid, match=f"abs{name}"):
        reduction(reduce=name)
    with pytest.raises(ParameterInvalid, match=f"abs{name}"):
        reduction(reduce=name, pre_op="square")
    assert reduction(reduce=name, pre_op="abs").results[name][1] == np.float32


@pytest.mark.parametrize("name", ["mean", "absmax", "absmin", "argmax", "argmin"])
def test_reducing_nothing(name):
    nothing = operand(0, 4)
    assert reduction(nothing, reduce=["sum", "sumsq"]).extent == 0
    with pytest.raises(ParameterInvalid, match="nothing"):
        reduction(nothing, reduce=name)
    with pytest.raises(ParameterInvalid, match="nothing"):
        reduction(operand(0, 3, 4), reduce=name, axis=["m", "batch"])
    assert reduction(operand(3, 0), operand(0, 5), reduce=name).k == 0
