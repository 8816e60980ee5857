"""Steps of contractions, run by an interpreter against numpy.einsum; how many there are, and what they need."""

from __future__ import annotations

import numpy as np
import pytest
from contraction_steps import ring, run
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmserve import DtypeUnsupported, ParameterInvalid
from gemmserve._contraction.plan import Operand, plan
from gemmserve._handles.view import Base, View


def stored(x, view=None) -> Operand:
    """An operand that is on the server, in C order."""
    view = view or View.whole(Base(x.shape, x.dtype))
    return Operand(view.shape, view.dtype(x.dtype), view)


def local(x) -> Operand:
    return Operand(x.shape, x.dtype)


def ops(planned) -> list[str]:
    return [step.op for step in planned.steps]


def random_of(rng, shape):
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


@st.composite
def contractions(draw):
    """(equation, shapes): repeated labels, lone labels, labels of several operands, axes of 1 and 0, ellipses."""
    labels = "abcdef"[: draw(st.integers(1, 6))]
    sizes = {label: draw(st.sampled_from([2, 3, 4, 1, 2, 3, 4, 0])) for label in labels}
    dots = draw(st.lists(st.integers(1, 3), max_size=2))
    terms, shapes = [], []
    for _ in range(draw(st.integers(1, 5))):
        term = draw(st.lists(st.sampled_from(labels), max_size=4))
        short = draw(st.sets(st.sampled_from(labels), max_size=1))
        shape = [1 if label in short else sizes[label] for label in term]
        if dots and draw(st.booleans()):
            at = draw(st.integers(0, len(term)))
            broadcast = [draw(st.sampled_from([size, 1])) for size in dots[draw(st.integers(0, len(dots))) :]]
            shape[at:at] = broadcast
            term[at:at] = ["..."]
        terms.append("".join(term))
        shapes.append(tuple(shape))
    equation = ",".join(terms)
    if draw(st.integers(0, 4)):
        used = sorted({*equation} & {*labels})
        output = draw(st.permutations(used))[: draw(st.integers(0, len(used)))]
        if "..." in equation:
            output.insert(draw(st.integers(0, len(output))), "...")
        equation += "->" + "".join(output)
    return equation, shapes


@settings(deadline=None, max_examples=300)
@given(contractions(), st.sampled_from([True, "greedy", False]), st.data())
def test_steps_compute_what_numpy_does(contraction, optimize, data) -> None:
    equation, shapes = contraction
    rng = np.random.default_rng(len(equation))
    bases, shown, operands = [], [], []
    for shape in shapes:
        kind = data.draw(st.sampled_from(["local", "stored", "transposed", "reversed", "repeated"]))
        below = {"transposed": shape[::-1], "repeated": shape[1:]}.get(kind, shape)
        x = random_of(rng, below)
        view = View.whole(Base(below, x.dtype))
        if kind == "transposed":
            view = view.transpose()
        elif kind == "reversed":
            view = view.flip().conjugate()
        elif kind == "repeated":
            view = view.broadcast_to(shape)
        bases.append(x)
        shown.append(view.show(x.reshape(-1)))
        operands.append(local(x) if kind == "local" else stored(x, view))
    planned = plan(equation, operands, optimize=optimize)
    expected = np.einsum(equation, *shown)
    found = run(planned, bases)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    products = [step for step in planned.steps if step.op in {"gemm", "multiply"}]
    assert len(products) == len(shapes) - 1


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("ij,jk->ik", [(8, 9), (9, 7)], ["gemm"]),
        ("ij,kj->ki", [(8, 9), (7, 9)], ["gemm"]),
        ("ji,jk->ki", [(9, 8), (9, 7)], ["gemm"]),
        ("bij,bjk->bik", [(3, 8, 9), (3, 9, 7)], ["gemm"]),
        ("ijb,jkb->ikb", [(8, 9, 3), (9, 7, 3)], ["gemm"]),
        ("aijb,jbk->aik", [(2, 8, 4, 5), (4, 5, 7)], ["gemm"]),
        ("i,i", [(9,), (9,)], ["gemm"]),
        ("ij,j", [(8, 9), (9,)], ["gemm"]),
        ("ij,ij->ij", [(8, 9), (8, 9)], ["multiply"]),
        ("i,j->ij", [(8,), (9,)], ["multiply"]),
        ("ij,jk->ik", [(8, 9), (9, 1)], ["gemm"]),
        ("ijk->k", [(4, 5, 6)], ["sum"]),
        ("ijk,k->k", [(4, 5, 6), (6,)], ["sum", "multiply"]),
        ("ii->i", [(5, 5)], []),
        ("ijk->kij", [(4, 5, 6)], []),
        ("ii", [(5, 5)], ["sum"]),
        # A gate on the middle axis of a state: the axes outside of it are a batch, and nothing is copied.
        ("xy,ayb->axb", [(2, 2), (1024, 2, 1024)], ["gemm"]),
        ("ij,jk,kl,lm->im", [(50, 60), (60, 3), (3, 60), (60, 50)], ["gemm", "gemm", "gemm"]),
    ],
)
def test_no_more_steps_than_products(equation, shapes, expected) -> None:
    planned = plan(equation, [stored(np.empty(shape)) for shape in shapes])
    assert ops(planned) == expected
    assert planned.copies == 0


def test_summed_labels_that_lie_apart_are_copied_once() -> None:
    a, b = np.empty((64, 8, 64, 8)), np.empty((8, 8, 64))
    assert ops(plan("aibj,ijc->abc", [stored(a), stored(b)])) == ["add", "gemm"]
    # What is not yet sent is sent in the order that is wanted; as it is, where that serves.
    assert ops(plan("aibj,ijc->abc", [local(a), stored(b)])) == ["gemm"]
    planned = plan("ij,kj->ki", [local(np.empty((300, 200))), local(np.empty((400, 200)))])
    assert [laid.axes for laid in planned.laid.values()] == [(0, 1), (0, 1)]
    planned = plan("ij,jk->ik", [local(np.empty((300, 200))), local(np.empty((200, 400)))])
    assert [laid.axes for laid in planned.laid.values()] == [(0, 1), (0, 1)]


def test_the_result_of_a_closed_network_is_one_number_and_few_copies() -> None:
    terms, sizes = ring(24, seed=5)
    planned = plan(",".join(terms) + "->", [stored(np.empty([sizes[label] for label in term])) for term in terms])
    assert planned.equation.shape == ()
    assert sum(step.op == "gemm" for step in planned.steps) == 23
    moved = sum(step.result.size for step in planned.steps if step.op == "add")
    assert moved <= sum(step.result.size for step in planned.steps) / 2


def test_bytes_that_are_needed_at_one_time() -> None:
    a, b, c = (np.empty((10, 10)) for _ in range(3))
    planned = plan("ij,jk,kl->il", [stored(a), stored(b), stored(c)], optimize=[(0, 1), (0, 1)])
    assert planned.peak_nbytes == 3 * 800  # two operands and their product; then that, the third, and the result
    assert planned.flops == 2 * 2 * 1000
    assert planned.largest == 100


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["f4", "f4", "c16"], "c16"),
        (["f2", "f4", "f8"], "f8"),
        (["f4", "c8", "f8"], "c16"),
        (["c8", "c8", "c8"], "c8"),
        (["f2", "f2", "f2"], "f2"),
    ],
)
@pytest.mark.parametrize("kind", [local, stored])
def test_narrow_operands_are_multiplied_in_the_precision_of_the_result(dtypes, expected, kind) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((6, 6)).astype(dtype) for dtype in dtypes]
    planned = plan("ij,jk,kl->il", [kind(x) for x in arrays], optimize=[(0, 1), (0, 1)])
    assert planned.dtype == expected
    found = run(planned, arrays)
    assert found.dtype == expected
    exact = np.linalg.multi_dot([x.astype(complex) for x in arrays])
    tolerance = 100 * np.finfo(expected).eps * np.abs(exact).max()
    np.testing.assert_allclose(found.astype(complex), exact, rtol=0, atol=tolerance)


def test_the_dtype_that_is_asked_for() -> None:
    a, b = np.ones((3, 4), "f4"), np.ones((4, 5), "f4")
    planned = plan("ij,jk", [stored(a), stored(b)], dtype="c16")
    assert run(planned, [a, b]).dtype == "c16"
    assert run(plan("ij->ji", [stored(a)], dtype="f8"), [a]).dtype == "f8"
    assert run(plan("ij->ji", [local(a)], dtype="f8"), [a]).dtype == "f8"
    assert run(plan("ij->", [local(a)], dtype="f8"), [a]).dtype == "f8"
    with pytest.raises(DtypeUnsupported):
        plan("ij,jk", [stored(a), stored(b)], dtype="f2")


def test_parts_and_conjugates_are_views() -> None:
    rng = np.random.default_rng(0)
    x = random_of(rng, (5, 5))
    whole = View.whole(Base(x.shape, x.dtype))
    planned = plan("ij,kj->ik", [stored(x, whole.of_part("imag")), stored(x, whole.conjugate())])
    assert ops(planned) == ["gemm"]
    np.testing.assert_allclose(run(planned, [x, x]), x.imag @ x.conj().T, rtol=1e-12)


def test_views_have_at_most_as_many_axes_as_the_server_takes() -> None:
    labels, strides = [*range(33)], tuple(3**n for n in range(33))  # no two axes are one in memory
    for count in (32, 33):
        view = View((2,) * count, strides[:count])
        operands = [Operand(view.shape, np.dtype("f4"), view)] * 2
        if count == 32:
            assert ops(plan([labels[:32]] * 3, operands)) == ["multiply"]
        else:
            with pytest.raises(ParameterInvalid, match="33 axes"):
                plan([labels] * 3, operands)


def test_the_path_of_a_plan_is_numpys_and_makes_the_same_plan() -> None:
    terms, sizes = ring(7, seed=3)
    operands = [stored(np.empty([sizes[label] for label in term])) for term in terms]
    equation = ",".join(terms) + "->"
    planned = plan(equation, operands)
    assert planned.path[0] == "einsum_path"
    assert plan(equation, operands, optimize=planned.path).path == planned.path
    arrays = [np.ones(operand.shape) for operand in operands]
    np.testing.assert_allclose(np.einsum(equation, *arrays, optimize=planned.path), run(planned, arrays))
    assert plan("ij->ji", [stored(np.empty((2, 3)))]).path == ["einsum_path", (0,)]
    assert "6 gemm" in planned.report
