"""Elementwise operations beside NumPy's, on operands of any dtype and strides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from gemmserve_kernels import DtypeUnsupported, Operand, ParameterInvalid, ShapeMismatch
from gemmserve_kernels.operations import elementwise
from gemmserve_kernels.operations.elementwise import Add, Multiply

DTYPES = ["f2", "f4", "f8", "c8", "c16"]
FACTORS = [1, 0, -1, 2.5, 1j, 0.5 - 2j]


def run(kind, operands, **parameters):
    described = {name: Operand.of(array) for name, array in operands.items()}
    operation = kind.build(**described, **parameters)
    shape, dtype, order = operation.results["d"]
    out = np.full(shape, 77, dtype, order=order)
    operation.run(operands, {"d": out})
    return operation, out


def integers(rng, shape, dtype):
    """Small whole numbers, which every dtype adds and multiplies without rounding."""
    made = rng.integers(-4, 5, shape)
    return (made + 1j * rng.integers(-4, 5, shape) if dtype[0] == "c" else made).astype(dtype)


def strided(rng, shape, dtype):
    """The same lying somehow: transposed, backwards, every other element."""
    axes = rng.permutation(len(shape))
    steps = [int(step) for step in rng.choice([1, -1, 2, -2], len(shape))]
    grown = [shape[axis] * abs(step) for axis, step in zip(axes, steps, strict=True)]
    made = integers(rng, grown, dtype)[tuple(slice(None, None, step) for step in steps)]
    return made.transpose(np.argsort(axes))


@given(
    shapes=mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=0, max_side=5),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    factors=st.tuples(*[st.sampled_from(FACTORS)] * 3),
    one=st.booleans(),
    order=st.sampled_from("CF"),
    seed=st.integers(0, 99),
    block=st.sampled_from([1, 3, 1 << 15]),
)
def test_sums_are_numpys(shapes, dtypes, factors, one, order, seed, block):
    rng = np.random.default_rng(seed)
    a, b = (strided(rng, shape, dtype) for shape, dtype in zip(shapes.input_shapes, dtypes, strict=True))
    alpha, beta, gamma = factors
    operands = {"a": a} if one else {"a": a, "b": b}
    expected = alpha * a.astype("c16") + gamma if one else alpha * a.astype("c16") + beta * b.astype("c16") + gamma
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "_HOST_ELEMENTS", block)
        operation, out = run(Add, operands, alpha=alpha, beta=1 if one else beta, gamma=gamma, order=order)
    np.testing.assert_array_equal(out, expected)
    plain = np.result_type(*operands.values())
    imaginary = any(complex(factor).imag for factor in ((alpha, gamma) if one else factors))
    assert out.dtype == (np.result_type(plain, "c8") if imaginary else plain)
    assert out.flags.c_contiguous if order == "C" else out.flags.f_contiguous
    assert operation.nbytes() == sum(array.nbytes for array in operands.values()) + out.nbytes


@given(
    shapes=mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=0, max_side=5),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    alpha=st.sampled_from(FACTORS),
    seed=st.integers(0, 99),
)
def test_products_are_numpys(shapes, dtypes, alpha, seed):
    rng = np.random.default_rng(seed)
    a, b = (strided(rng, shape, dtype) for shape, dtype in zip(shapes.input_shapes, dtypes, strict=True))
    _, out = run(Multiply, {"a": a, "b": b}, alpha=alpha)
    np.testing.assert_array_equal(out, alpha * a.astype("c16") * b.astype("c16"))


def test_a_copy_keeps_every_bit():
    a = np.array([[0.0, -0.0, np.inf], [np.nan, -np.inf, 5e-324]])
    a = np.asfortranarray(np.stack([a, a[::-1]], axis=-1).view("c16")[..., 0])
    operation, out = run(Add, {"a": a}, order="C")
    assert operation.copies
    assert operation.flops() == operation.scratch_nbytes == 0
    assert out.tobytes() == np.ascontiguousarray(a).tobytes()
    whole = np.arange(6).reshape(2, 3)
    _, out = run(Add, {"a": whole.T})
    np.testing.assert_array_equal(out, whole.T)


def test_a_real_factor_leaves_infinities_what_they_are():
    a = np.array([complex(np.inf, 0), complex(1, -np.inf)])
    _, out = run(Add, {"a": a}, alpha=-2)
    assert out.tolist() == [complex(-np.inf, -0.0), complex(-2, np.inf)]


def test_the_result_is_cast_at_the_end():
    a = np.array([1e-30], "f8")
    _, out = run(Add, {"a": a, "b": np.array([1.0], "f4")}, dtype="float32")
    assert out.dtype == np.float32
    _, out = run(Add, {"a": np.array([65504], "f2"), "b": np.array([65504], "f2")}, alpha=1, beta=-1)
    assert out[0] == 0
    _, out = run(Add, {"a": np.array([60000], "f2"), "b": np.array([60000], "f2")}, dtype="float32")
    assert out[0] == 120000, "float16 in float32"
    _, out = run(Add, {"a": np.array([1.5], "f4")}, dtype="complex128")
    assert (out.dtype, out[0]) == (np.complex128, 1.5)


def test_a_wider_result_is_computed_in_its_own_dtype():
    a = np.array([0.3, -7], "f4")
    _, out = run(Add, {"a": a}, alpha=0.1, gamma=1e39, dtype="float64")
    np.testing.assert_array_equal(out, a.astype("f8") * 0.1 + 1e39)
    operation, out = run(Add, {"a": a.astype("c8")}, alpha=0.1, dtype="complex128")
    np.testing.assert_array_equal(out, a.astype("c16") * 0.1)
    assert operation.find({"a": a.astype("c8")}, {"d": out.astype("c8").astype("c16")}, 1).excess > 1, "and so checked"


SMALL = Operand.contiguous((2, 3), "f4")


@pytest.mark.parametrize(
    ("fields", "error", "parameter"),
    [
        ({"a": SMALL, "b": Operand.contiguous((2, 2), "f4")}, ShapeMismatch, None),
        ({"a": SMALL, "beta": 2}, ParameterInvalid, "beta"),
        ({"a": SMALL, "alpha": math.nan}, ParameterInvalid, "alpha"),
        ({"a": SMALL, "gamma": 1e39}, ParameterInvalid, "gamma"),
        ({"a": Operand.contiguous((2,), "c8"), "dtype": "float32"}, ParameterInvalid, "dtype"),
        ({"a": SMALL, "dtype": "int64"}, ParameterInvalid, "dtype"),
        ({"a": SMALL, "order": "K"}, ParameterInvalid, "order"),
        ({"a": Operand.contiguous((2,), "i8"), "alpha": 2}, DtypeUnsupported, None),
        ({"a": Operand((1 << 31, 1 << 31), np.dtype("f4"), (0, 0))}, ShapeMismatch, None),
        ({"a": Operand((1 << 31, 1), np.dtype("f4"), (0, 0)), "b": Operand((1, 1 << 31), np.dtype("f4"), (0, 0))},
         ShapeMismatch, None),
    ],
)  # fmt: skip
def test_what_is_refused(fields, error, parameter):
    with pytest.raises(error) as caught:
        Add.build(**fields)
    assert getattr(caught.value, "parameter", None) == parameter


@pytest.mark.parametrize("kind", [Add, Multiply])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_check_knows_right_from_wrong(kind, dtype):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((40, 30)).astype(dtype) for _ in range(2))
    operands = {"a": a, "b": b[:1]}
    operation, out = run(kind, operands, alpha=1.25)
    right = operation.find(operands, {"d": out}, 5)
    assert right.excess <= 1
    assert right.residual < 4 * np.finfo(dtype).eps
    wrong = out * np.array(1.1, out.dtype)
    assert operation.find(operands, {"d": wrong}, 5).excess > 8
    wrong[...] = np.nan
    assert operation.find(operands, {"d": wrong}, 5).excess == math.inf
    everything = {"a": np.full_like(a, np.nan), "b": b[:1]}
    assert math.isnan(operation.find(everything, {"d": wrong}, 5).excess), "nothing can be told"


def test_a_check_of_nothing_and_of_whole_numbers():
    empty = np.empty((0, 3), "f4")
    operation, out = run(Add, {"a": empty})
    assert operation.find({"a": empty}, {"d": out}, 1).excess == 0
    a = np.arange(100)
    operation, out = run(Add, {"a": a})
    assert operation.find({"a": a}, {"d": out}, 1).excess == 0
    assert operation.find({"a": a}, {"d": out + 1}, 1).excess == math.inf
    scalar = np.array(2.0)
    operation, out = run(Multiply, {"a": scalar, "b": scalar})
    assert out == 4
    assert operation.find({"a": scalar, "b": scalar}, {"d": out}, 1).excess <= 1
