"""herk: the product beside numpy, exactly Hermitian, one triangle of the addend read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linalg_cases import adjoint, op, positive, random, run

from gemmserve_kernels import Operand, ParameterInvalid, ShapeMismatch
from gemmserve_kernels.operations.linalg import hermitian
from gemmserve_kernels.operations.linalg.herk import Herk


@settings(max_examples=60)
@given(
    batch=st.lists(st.integers(0, 3), max_size=2),
    n=st.integers(0, 23),
    k=st.integers(0, 9),
    dtype=st.sampled_from(["f2", "f4", "f8", "c8", "c16"]),
    trans=st.sampled_from("NTCR"),
    fill=st.sampled_from(["both", "lower", "upper"]),
    addend=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_product_and_its_triangles(batch, n, k, dtype, trans, fill, addend, seed):
    rng = np.random.default_rng(seed)
    a = random(rng, (*batch, k, n) if trans in "TC" else (*batch, n, k), dtype)
    wide = op(a, trans).astype("c16")
    expected = 2 * wide @ adjoint(wide)
    size = 2 * np.abs(wide) @ np.abs(adjoint(wide))
    arrays, parameters = {"a": a}, {}
    if addend:
        c = positive(rng, (n, n), dtype) if n else np.zeros((0, 0), dtype)
        expected = expected - 0.5 * c.astype("c16")
        size = size + 0.5 * np.abs(c)
        other = np.triu(np.ones((n, n), bool), 1)
        arrays["c"] = np.where(other.T if fill == "upper" else other, np.nan, c).astype(dtype)
        parameters["beta"] = -0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hermitian, "_HOST_LEAF", 4)  # several blocks
        _, made, found = run(Herk, arrays, alpha=2, trans_a=trans, fill=fill, **parameters)
    kept = {"both": np.ones((n, n), bool), "lower": np.tri(n, dtype=bool), "upper": np.tri(n, dtype=bool).T}[fill]
    unit = np.finfo(np.float32 if dtype == "f2" else dtype).eps
    bound = (k + 8) * unit * size + np.finfo(dtype).eps * np.abs(expected) + np.finfo(dtype).tiny
    assert np.all(np.abs(made - np.where(kept, expected, 0)) <= bound)
    assert not np.diagonal(made, axis1=-2, axis2=-1).imag.any()
    if fill == "both":
        np.testing.assert_array_equal(made, adjoint(made))
    else:
        assert not made[..., ~kept].any()
    assert not found.excess > 8


def test_nan_stays_where_it_belongs():
    rng = np.random.default_rng(1)
    a = random(rng, (40, 5), "c16")
    a[3, 2] = np.nan
    _, made, found = run(Herk, {"a": a})
    wrong = np.isnan(made)
    assert wrong[3].all()
    assert wrong[:, 3].all()
    assert not np.delete(np.delete(wrong, 3, 0), 3, 1).any()
    assert np.isnan(found.residual)


def test_a_wrong_element_is_found():
    rng = np.random.default_rng(1)
    a = random(rng, (60, 30), "f8")
    operation, made, found = run(Herk, {"a": a})
    assert found.excess < 8
    made[40, 7] += 1e-3
    assert operation.find({"a": a}, {"d": made}, 5).excess > 1e6


def test_half_of_the_work(monkeypatch):
    counted = []
    gemm = hermitian.gemm

    def counting(a, b, *rest, **options):
        made = gemm(a, b, *rest, **options)
        counted.append(made.size * a.shape[-1])
        return made

    monkeypatch.setattr(hermitian, "gemm", counting)
    n, k = 2048, 8
    run(Herk, {"a": random(np.random.default_rng(1), (n, k), "f4")})
    assert sum(counted) <= 0.6 * n * n * k


@pytest.mark.parametrize(
    ("parameters", "error"),
    [({"alpha": 1j}, ParameterInvalid), ({"beta": 1}, ParameterInvalid), ({"fill": "all"}, ParameterInvalid)],
)
def test_what_it_refuses(parameters, error):
    with pytest.raises(error):
        Herk.build(a=Operand.contiguous((3, 2), "c16"), **parameters)


def test_an_addend_that_does_not_fit():
    with pytest.raises(ShapeMismatch):
        Herk.build(a=Operand.contiguous((3, 2), "c16"), c=Operand.contiguous((2, 2), "c16"), beta=1)
