"""solve and inv: backward errors whatever the condition, singular matrices by their index, every shape and op."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linalg_cases import DTYPES, adjoint, eps, op, positive, random, run

from gemmserve_kernels import DtypeUnsupported, NotPositiveDefinite, Operand, ShapeMismatch, SingularMatrix
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.operations.linalg import elimination, factorization, library
from gemmserve_kernels.operations.linalg.cholesky import Cholesky
from gemmserve_kernels.operations.linalg.expm import Expm
from gemmserve_kernels.operations.linalg.solve import Inv, Solve


def matrices(rng, shape, dtype, assume):
    """op(a) of the assumption, and the same with other elements where it must not be read."""
    n = shape[-1]
    if assume == "positive":
        a = positive(rng, shape, dtype)
        return a, np.where(np.tri(n, dtype=bool), a, np.nan)
    a = random(rng, shape, dtype)
    if assume == "general":
        return a, a
    a = a + (2 * n * np.eye(n)).astype(dtype)
    kept = np.tri(n, dtype=bool) if assume == "lower" else np.tri(n, dtype=bool).T
    return np.where(kept, a, 0), np.where(kept, a, np.nan)


def backward_error(a, x, b):
    wide = "c16" if x.dtype.kind == "c" else "f8"
    a, x, b = a.astype(wide), x.astype(wide), b.astype(wide)
    left = np.linalg.norm(a @ x - b, axis=(-2, -1))
    size = np.linalg.norm(a, axis=(-2, -1)) * np.linalg.norm(x, axis=(-2, -1)) + np.linalg.norm(b, axis=(-2, -1))
    return float(np.max(left / np.maximum(size, 1e-30), initial=0))


@settings(max_examples=60)
@given(
    batches=st.sampled_from([((), ()), ((), (3,)), ((2,), ()), ((2, 1), (3,)), ((0,), ()), ((1, 1), (2, 2))]),
    n=st.integers(0, 21),
    k=st.integers(0, 4),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    assume=st.sampled_from(["general", "positive", "lower", "upper"]),
    trans=st.sampled_from("NTCR"),
    pieces=st.booleans(),
    seed=st.integers(0, 99),
)
def test_systems(batches, n, k, dtypes, assume, trans, pieces, seed):
    rng = np.random.default_rng(seed)
    of_a, of_b = batches
    exact, given_ = matrices(rng, (*of_a, n, n), dtypes[0], assume)
    b = random(rng, (*of_b, n, k), dtypes[1])
    with pytest.MonkeyPatch.context() as patch:
        if pieces:
            patch.setattr(factorization, "_LU_ROWS", 0)
            patch.setattr(elimination, "_LEAF", 3)
            patch.setattr(library, "_PART_FLOPS", 1)
        _, x, found = run(Solve, {"a": op(given_, trans), "b": b}, assume=assume, trans_a=trans)
        _, inverse, found_inverse = run(Inv, {"a": op(given_, trans)}, assume=assume, trans_a=trans)
    assert x.dtype == np.result_type(*dtypes)
    # n^2 for the growth of pivots (Higham, theorem 9.5, is far from what happens); most are below 5.
    assert backward_error(exact, x, b) <= (n + 8) * eps(x.dtype)
    assert found.residual <= (n + 8) * eps(x.dtype)
    if assume != "positive":
        assert backward_error(exact, inverse, np.eye(n)) <= (n + 8) * eps(inverse.dtype)
    else:
        np.testing.assert_array_equal(inverse, adjoint(inverse))
        np.testing.assert_allclose(
            exact @ inverse, np.broadcast_to(np.eye(n), exact.shape), atol=1e3 * eps(inverse.dtype)
        )
    assert not found.excess > 8
    assert not found_inverse.excess > 8


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ill_conditioned_systems_are_solved_backward_stably(dtype, pieces, monkeypatch):
    rng = np.random.default_rng(3)
    n = 60
    u, _ = np.linalg.qr(random(rng, (n, n), dtype))
    v, _ = np.linalg.qr(random(rng, (n, n), dtype))
    a = ((u * np.logspace(0, np.log10(eps(dtype)), n)) @ adjoint(v)).astype(dtype)
    b = random(rng, (n, 2), dtype)
    if pieces:
        monkeypatch.setattr(factorization, "_LU_ROWS", 0)
    _, x, found = run(Solve, {"a": a, "b": b})
    assert backward_error(a, x, b) < 10 * eps(dtype)
    assert found.excess < 8
    assert found.residual < 10 * eps(dtype)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize(("assume", "place"), [("general", (2, 3)), ("lower", (1, 0)), ("upper", (0, 4))])
def test_a_singular_matrix_is_named(assume, place, pieces, monkeypatch):
    if pieces:
        monkeypatch.setattr(factorization, "_LU_ROWS", 0)
    rng = np.random.default_rng(1)
    a = random(rng, (3, 5, 6, 6), "c16")
    a[(*place, slice(None), slice(2, 3))] = 0
    for kind, arrays in ((Solve, {"a": a, "b": random(rng, (6, 2), "c16")}), (Inv, {"a": a})):
        with pytest.raises(SingularMatrix, match="singular") as error:
            run(kind, arrays, assume=assume)
        assert error.value.index == list(place)
    with pytest.raises(SingularMatrix) as error:
        run(Inv, {"a": np.zeros((4, 4))})
    assert error.value.index == []


def test_a_matrix_that_is_not_positive_definite_is_named():
    a = positive(np.random.default_rng(1), (7, 5, 5), "c8")
    a[4, 3, 3] = -1
    for kind, arrays in ((Solve, {"a": a, "b": np.ones((5, 1), "f4")}), (Inv, {"a": a})):
        with pytest.raises(NotPositiveDefinite) as error:
            run(kind, arrays, assume="positive")
        assert error.value.index == [4]


def test_nan_goes_into_its_own_result_alone():
    rng = np.random.default_rng(1)
    a, b = random(rng, (3, 8, 8), "f8"), random(rng, (3, 8, 2), "f8")
    a[1, 4, 4] = np.nan
    _, x, found = run(Solve, {"a": a, "b": b})
    assert np.isnan(x[1]).any()
    assert np.isfinite(x[[0, 2]]).all()
    assert found.excess < 8  # of those that can be judged


def test_a_wrong_element_is_found():
    rng = np.random.default_rng(1)
    arrays = {"a": random(rng, (50, 50), "c16"), "b": random(rng, (50, 3), "c16")}
    operation, x, _ = run(Solve, arrays)
    x[20, 1] *= 1 + 1e-6
    assert operation.find(arrays, {"d": x}, 5).excess > 1e3


@pytest.mark.parametrize("dtype", ["c8", "c16"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *[(kind, {"assume": assume}) for kind in (Solve, Inv) for assume in ("general", "positive", "lower")],
        (Cholesky, {}),
        (Expm, {}),
    ],
)
def test_conjugates_are_made_part_by_part(kind, options, dtype, monkeypatch):
    """A stack that shows one matrix a million times was copied whole."""
    monkeypatch.setattr(library, "_PART_BYTES", 1)
    sizes = []
    conjugate = np.conjugate
    monkeypatch.setattr(
        np, "conjugate", lambda x, *more, **options: sizes.append(x.size) or conjugate(x, *more, **options)
    )
    n, count = 3, 50
    a = np.broadcast_to(np.eye(n, dtype=dtype) * 2, (count, n, n))
    arrays = {"a": a} | ({"b": np.ones((count, n, 1), "c16")} if kind is Solve else {})
    operation = kind.build(**{name: Operand.of(array) for name, array in arrays.items()}, trans_a="C", **options)
    out = np.empty(operation.results["d"].shape, operation.results["d"].dtype)
    operation.run(arrays, {"d": out})
    assert max(sizes) <= n * n
    assert np.isfinite(out).all()


@pytest.mark.parametrize(("assume", "triangle"), [("lower", "tril"), ("upper", "triu")])
def test_a_check_copies_a_shared_triangle_once(assume, triangle, monkeypatch):
    """It copied one for every right side, which may be more than the machine's memory."""
    copied = []
    whole = getattr(np, triangle)
    monkeypatch.setattr(np, triangle, lambda a: copied.append(a.shape) or whole(a))
    rng = np.random.default_rng(1)
    a, b = random(rng, (6, 6), "f8") + 9 * np.eye(6), random(rng, (5, 6, 2), "f8")
    _, _, finding = run(Solve, {"a": a, "b": b}, assume=assume)
    assert finding.excess < 1
    assert copied == [(6, 6)]


def test_one_matrix_is_factored_once_for_all_right_sides(monkeypatch):
    calls = []
    vendor = factorization.vendor_solve
    monkeypatch.setattr(factorization, "vendor_solve", lambda *given_: calls.append(given_[1].shape) or vendor(*given_))
    rng = np.random.default_rng(1)
    a, b = random(rng, (1, 6, 6), "f8"), random(rng, (4, 5, 6, 2), "f8")
    operation, x, _ = run(Solve, {"a": a, "b": b})
    assert calls == [(6, 6)]
    np.testing.assert_allclose(a @ x, b, atol=1e-12)
    assert operation.flops() < 20 * 2 * 6**3


def test_a_large_system_can_be_interrupted():
    class EnoughError(Exception):
        pass

    asked = []

    def callback():
        asked.append(1)
        if len(asked) == 20:
            raise EnoughError

    rng = np.random.default_rng(1)
    arrays = {"a": random(rng, (1100, 1100), "f4"), "b": random(rng, (1100, 1), "f4")}
    with pytest.raises(EnoughError), interruptible(callback):
        run(Solve, arrays)


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (((3, 4), "f8"), ((3, 1), "f8"), ShapeMismatch),
        (((3, 3), "f8"), ((4, 1), "f8"), ShapeMismatch),
        (((3, 3), "f8"), ((3,), "f8"), ShapeMismatch),
        (((2, 3, 3), "f8"), ((3, 3, 1), "f8"), ShapeMismatch),
        (((3, 3), "f2"), ((3, 1), "f8"), DtypeUnsupported),
        (((3, 3), "f8"), ((3, 1), "i8"), DtypeUnsupported),
    ],
)
def test_what_it_refuses(a, b, error):
    with pytest.raises(error):
        Solve.build(a=Operand.contiguous(*a), b=Operand.contiguous(*b))
