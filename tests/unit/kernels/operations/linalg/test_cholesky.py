"""cholesky: the factor, in one call of LAPACK and in blocks."""

from __future__ import annotations

import numpy as np
import pytest
from linalg_cases import DTYPES, TRANS, adjoint, eps, op, positive, run

from gemmserve_kernels import DtypeUnsupported, NotPositiveDefinite, Operand
from gemmserve_kernels.operations.linalg import factorization, hermitian
from gemmserve_kernels.operations.linalg.cholesky import Cholesky


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (2, 0, 3, 3), (3, 2, 20, 20), (57, 57)])
@pytest.mark.parametrize("leaf", [512, 8])
def test_the_factor(dtype, shape, leaf, monkeypatch):
    monkeypatch.setattr(factorization, "_CHOLESKY_ROWS", leaf)
    monkeypatch.setattr(hermitian, "_HOST_LEAF", leaf)
    a = positive(np.random.default_rng(1), shape, dtype)
    n = shape[-1]
    for trans in TRANS:
        unread = np.where(np.tri(n, dtype=bool), a, np.nan)
        _, made, found = run(Cholesky, {"a": op(unread, trans)}, trans_a=trans)
        assert made.dtype == dtype
        assert not np.triu(made, 1).any()
        wide = made.astype("c16")
        # Higham, theorem 10.3: |A - L L^H| <= gamma_(n+1) |L| |L^H|, complex numbers by a factor below 4.
        bound = 4 * (n + 2) * eps(dtype) * np.abs(wide) @ np.abs(adjoint(wide)) + eps(dtype) * np.abs(a)
        assert (np.abs(wide @ adjoint(wide) - a) <= bound).all()
        assert not found.excess > 8


@pytest.mark.parametrize("leaf", [512, 8])
@pytest.mark.parametrize("value", [0, -1, np.nan])
def test_a_matrix_without_a_factor_is_named(leaf, value, monkeypatch):
    monkeypatch.setattr(factorization, "_CHOLESKY_ROWS", leaf)
    a = positive(np.random.default_rng(1), (5, 30, 30), "c16")
    a[3, 20, :] = a[3, :, 20] = value
    with pytest.raises(NotPositiveDefinite, match=r"\[3\]") as error:
        run(Cholesky, {"a": a})
    assert error.value.index == [3]


def test_half_precision_is_refused():
    with pytest.raises(DtypeUnsupported, match="float16"):
        Cholesky.build(a=Operand.contiguous((3, 3), "f2"))


def test_a_wrong_element_is_found():
    a = positive(np.random.default_rng(1), (40, 40), "f8")
    operation, made, _ = run(Cholesky, {"a": a})
    made[30, 4] += 1e-6
    assert operation.find({"a": a}, {"d": made}, 5).excess > 1e3
