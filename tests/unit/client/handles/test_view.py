"""Views by arithmetic against NumPy's own: the same elements, errors of the same kind, chains of any length."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gemmserve._handles.view import MAX_NDIM, Base, View, contiguous


def stored(shape: tuple[int, ...], order: str) -> tuple[Base, np.ndarray, np.ndarray]:
    """A base of complex numbers that are all different, as an array and as its elements in their order."""
    n = math.prod(shape)
    memory = np.arange(n) + 1j * np.arange(n, 2 * n)
    return Base(shape, memory.dtype, order), memory.reshape(shape, order=order), memory


CHAINABLE = ("index", "transpose", "swapaxes", "moveaxis", "expand_dims", "squeeze", "reshape", "broadcast_to",
             "diagonal", "flip")  # fmt: skip


def step(draw, view: View, truth: np.ndarray) -> tuple[View, np.ndarray]:
    """One more view of the view, and the same of the array."""
    kind = draw(st.sampled_from(CHAINABLE))
    ndim = truth.ndim
    axis = st.integers(-ndim, ndim - 1) if ndim else None
    if kind == "index":
        key = draw(hnp.basic_indices(truth.shape, max_dims=6, allow_newaxis=True, allow_ellipsis=True))
        rest = key if isinstance(key, tuple) else (key,)
        return view[key], truth[rest if any(each is Ellipsis for each in rest) else (*rest, ...)]
    if kind == "transpose":
        axes = draw(st.none() | st.permutations(range(ndim)))
        return view.transpose(axes), truth.transpose(axes)
    if kind == "swapaxes" and axis is not None:
        pair = draw(axis), draw(axis)
        return view.swapaxes(*pair), truth.swapaxes(*pair)
    if kind == "moveaxis" and axis is not None:
        count = draw(st.integers(1, ndim))
        source, destination = (draw(st.permutations(range(ndim)))[:count] for _ in range(2))
        return view.moveaxis(source, destination), np.moveaxis(truth, source, destination)
    if kind == "expand_dims" and ndim < 6:
        place = draw(st.integers(-ndim - 1, ndim))
        return view.expand_dims(place), np.expand_dims(truth, place)
    if kind == "squeeze":
        return view.squeeze(), truth.squeeze()
    if kind == "reshape":
        parts = draw(st.permutations(prime_factors(truth.size)))
        cuts = sorted(draw(st.lists(st.integers(0, len(parts)), max_size=4)))
        shape = [math.prod(parts[a:b]) for a, b in itertools.pairwise([0, *cuts, len(parts)])]
        order = draw(st.sampled_from("CF"))
        found = view.reshape(shape, order)
        wanted = truth.reshape(shape, order=order)
        assert (found is None) == (truth.size > 0 and not np.shares_memory(wanted, truth))
        return (view, truth) if found is None else (found, wanted)
    if kind == "broadcast_to":
        shape = (
            *draw(st.sampled_from([(), (2,), (1,)])),
            *(n if n != 1 else draw(st.integers(0, 3)) for n in view.shape),
        )
        return view.broadcast_to(shape), np.broadcast_to(truth, shape)
    if kind == "diagonal" and ndim >= 2:
        axes = draw(st.permutations(range(ndim)))[:2]
        offset = draw(st.integers(-3, 3))
        return view.diagonal(offset, *axes), truth.diagonal(offset, *axes)
    axes = draw(st.none() | st.sets(st.integers(0, ndim - 1)).map(tuple)) if ndim else None
    return view.flip(axes), np.asarray(np.flip(truth, axes)) if ndim else truth


def prime_factors(n: int) -> list[int]:
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found or [n]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_chains_of_views_show_numpys_elements(data) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
    base, truth, memory = stored(shape, data.draw(st.sampled_from("CF")))
    view = View.whole(base)
    for _ in range(data.draw(st.integers(1, 5))):
        if math.prod(view.shape) > 2000 or view.ndim > 8:
            break
        view, truth = step(data.draw, view, truth)
    if data.draw(st.booleans()):
        view, truth = view.conjugate(), truth.conj()
    assert view.shape == truth.shape
    np.testing.assert_array_equal(view.show(memory), truth)
    for part in ("real", "imag"):
        if not (view.conj and part == "imag"):
            shown = view.of_part(part)
            np.testing.assert_array_equal(shown.show(memory), getattr(truth, part))
            assert shown.dtype(base.dtype) == np.float64
    low, high = view.span()
    assert 0 <= low <= high <= base.size
    np.testing.assert_array_equal(view.show(memory[low:high].copy(), low), truth)
    sent = view.wire("x", base)
    if isinstance(sent, str):
        assert view.same_elements(View.whole(base))
        assert not view.conj
    else:
        again = View(tuple(sent["shape"]), tuple(sent["strides"]), sent.get("offset", 0), sent.get("conj", False))
        np.testing.assert_array_equal(again.show(memory), truth)


@pytest.mark.parametrize("order", "CF")
def test_transposition(order) -> None:
    base, _, _ = stored((2, 3, 4), order)
    view = View.whole(base)
    assert view.transposition(base) is False
    assert view.swapaxes(1, 2).transposition(base) is True
    assert view.swapaxes(1, 2).conjugate().swapaxes(-1, -2).transposition(base) is False
    assert view.transpose().transposition(base) is None, "all axes reversed are no matrices transposed"
    assert view[:, :2].transposition(base) is None
    assert view.of_part("real").transposition(base) is None
    assert view[:, None].transposition(base) is None
    square = Base((3, 3), np.dtype(float))
    assert View.whole(square).transpose().transposition(square) is True
    line = Base((1, 3), np.dtype(float))
    assert View.whole(line).transpose().transposition(line) is True
    column = View.whole(Base((3,), np.dtype(float)))[:, None]
    assert column.transposition(Base((3, 1), np.dtype(float))) is False, "strides of one element say nothing"


def test_what_is_sent() -> None:
    base = Base((4, 6), np.dtype(np.complex64))
    view = View.whole(base)
    assert view.wire("a", base) == "a"
    assert view.conjugate().wire("a", base) == {"id": "a", "shape": [4, 6], "strides": [6, 1], "conj": True}
    assert view.conjugate().wire("a", base, conj=False) == "a"
    assert view.conjugate().wire("a", Base((4, 6), np.dtype(float))) == "a", "real numbers are their own conjugates"
    assert view[1, ::-2].wire("a", base) == {"id": "a", "offset": 11, "shape": [3], "strides": [-2]}
    assert view[2:2, 3].wire("a", base) == {"id": "a", "shape": [0], "strides": [6]}, "nothing lies nowhere"
    assert view.of_part("imag").wire("a", base) == {"id": "a", "shape": [4, 6], "strides": [6, 1], "part": "imag"}
    assert View.whole(Base((4, 6), np.dtype(float), "F")).strides == contiguous((4, 6), "F") == (1, 4)


@pytest.mark.parametrize("key", [[0, 1], np.array([0]), True, np.True_, 1.0, "a", (0, [1]), np.array([True] * 4)])
def test_advanced_indexing_is_refused_by_name(key) -> None:
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        View.whole(Base((4, 6), np.dtype(float)))[key]


@pytest.mark.parametrize("key", [4, -5, (0, 6), (0, 0, 0), (..., 0, ...), (slice(None), None, 2**70)])
def test_wrong_indices(key) -> None:
    with pytest.raises(IndexError):
        View.whole(Base((4, 6), np.dtype(float)))[key]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.transpose((0, 0)),
        lambda x: x.transpose((0,)),
        lambda x: np.transpose(x, (0, 2)) if isinstance(x, np.ndarray) else x.transpose((0, 2)),
        lambda x: x.swapaxes(0, 2),
        lambda x: np.moveaxis(x, 0, 2) if isinstance(x, np.ndarray) else x.moveaxis(0, 2),
        lambda x: np.moveaxis(x, 0, (0, 1)) if isinstance(x, np.ndarray) else x.moveaxis(0, (0, 1)),
        lambda x: x.squeeze(0),
        lambda x: np.broadcast_to(x, (4, 5)) if isinstance(x, np.ndarray) else x.broadcast_to((4, 5)),
        lambda x: np.broadcast_to(x, (6,)) if isinstance(x, np.ndarray) else x.broadcast_to((6,)),
        lambda x: x.reshape((5, 5)),
        lambda x: x.reshape((-1, -1)),
        lambda x: x.reshape((-1, 5)),
        lambda x: x.reshape((0, -1)),
        lambda x: x.diagonal(0, 1, 1),
        lambda x: x[0].diagonal(),
        lambda x: np.flip(x, 2) if isinstance(x, np.ndarray) else x.flip(2),
        lambda x: np.expand_dims(x, (0, 0)) if isinstance(x, np.ndarray) else x.expand_dims((0, 0)),
    ],
)
def test_what_numpy_refuses_is_refused(wrong) -> None:
    with pytest.raises(ValueError):
        wrong(np.ones((4, 6)))
    with pytest.raises(ValueError):
        wrong(View.whole(Base((4, 6), np.dtype(float))))


def test_parts_that_are_no_views() -> None:
    view = View.whole(Base((3,), np.dtype(complex)))
    assert view.conjugate().of_part("real") == view.of_part("real") == view.of_part("real").of_part("real")
    assert view.of_part("imag").conjugate() == view.of_part("imag")
    with pytest.raises(TypeError, match="imag"):
        view.conjugate().of_part("imag")
    with pytest.raises(TypeError, match="real"):
        view.of_part("real").of_part("imag")


def test_repeated_elements_are_copied_and_dimensions_are_bounded() -> None:
    view = View.whole(Base((), np.dtype(float)))
    shown = view.broadcast_to((3,)).show(np.zeros(1))
    shown[0] = 1
    assert shown.tolist() == [1, 0, 0]
    view.broadcast_to((1,) * MAX_NDIM)
    with pytest.raises(ValueError, match="dimensions"):
        view.broadcast_to((1,) * (MAX_NDIM + 1))
