"""What people have becomes bytes on the wire: right, and uncopied where possible."""

from __future__ import annotations

import io
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmserve
from gemmserve import wire
from gemmserve._transfer import arrays as _arrays


def sent(array: np.ndarray) -> np.ndarray:
    data = _arrays.npy_header(array) + b"".join(_arrays.pieces(array))
    return np.load(io.BytesIO(data), allow_pickle=False)


@st.composite
def arrays(draw) -> np.ndarray:
    """Any dtype, byte order, up to four dimensions, transposed, sliced, reversed, broadcast."""
    name = draw(st.sampled_from(sorted(wire.DTYPES)))
    dtype = np.dtype(name).newbyteorder(draw(st.sampled_from("<>")))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    array = array[tuple(slice(None, None, draw(st.sampled_from([1, 2, -1]))) for _ in shape)]
    return np.broadcast_to(array, (draw(st.integers(1, 3)), *array.shape)) if draw(st.booleans()) else array


@given(arrays())
def test_what_is_sent_is_the_array(array) -> None:
    received = sent(array)
    assert received.shape == array.shape
    assert received.dtype == array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(received, array)


def test_contiguous_arrays_are_sent_from_their_own_memory(rng) -> None:
    array = rng.standard_normal((600, 700))
    for laid in (array, array.T, array.reshape(10, 60, 700)):
        parts = list(_arrays.pieces(laid))
        assert len(parts) > 1
        assert max(map(len, parts)) == wire.PIECE
        assert all(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in parts)


def test_fortran_order_is_kept_and_said(rng) -> None:
    array = np.asfortranarray(rng.standard_normal((4, 5)))
    header = wire.parse_npy_header(_arrays.npy_header(array))
    assert header.fortran_order
    assert sent(array).flags.f_contiguous
    vector = rng.standard_normal(5)  # both orders at once: said to be C
    assert not wire.parse_npy_header(_arrays.npy_header(vector)).fortran_order


def test_other_strides_are_copied_in_pieces_of_bounded_size(rng) -> None:
    array = rng.standard_normal((2000, 800))[::2, ::2]
    parts = list(_arrays.pieces(array))
    assert max(map(len, parts)) <= wire.PIECE
    assert len(parts) <= -(-array.nbytes // wire.PIECE) + 1
    np.testing.assert_array_equal(sent(array), array)


def test_read_only_and_mapped_arrays(rng, tmp_path) -> None:
    array = rng.standard_normal((3, 4))
    np.save(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(sent(np.load(tmp_path / "a.npy", mmap_mode="r")), array)


@pytest.mark.parametrize("value", [[[1.0, 2.0]], [[1j]], 2.5, np.float32(1), np.eye(2, dtype=">c16")])
def test_array_likes(value) -> None:
    np.testing.assert_array_equal(_arrays.as_array(value), value)


def test_nothing_is_copied_on_the_way_in(rng) -> None:
    array = rng.standard_normal((3, 4))[:, ::2]
    assert _arrays.as_array(array) is array
    matrix = array.view(np.matrix)  # whose reshape(-1) has two dimensions
    assert np.shares_memory(_arrays.as_array(matrix), array)
    np.testing.assert_array_equal(sent(_arrays.as_array(matrix)), array)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.eye(2, dtype=int), "astype(np.float64) loses nothing"),
        ([[1, 2]], "astype(np.float64) loses nothing"),
        (np.array([-(2**53)]), "astype(np.float64) loses nothing"),
        (np.array([2**53 + 1]), "above 2**53"),
        (np.array([-(2**63)]), "above 2**53"),
        (np.array([2**64 - 1], "u8"), "above 2**53"),
        (np.eye(0, dtype=int), "astype(np.float64) loses nothing"),
        (np.eye(2, dtype="i4"), "astype(np.float64) loses nothing"),
        (np.eye(2, dtype="u2"), "astype(np.float32) loses nothing"),
        (np.eye(2, dtype=bool), "astype(np.float32) loses nothing"),
        (np.eye(2, dtype=np.longdouble), "astype(np.float64)"),
        (np.array([[None]]), "Only numbers"),
        (np.array([["a"]]), "Only numbers"),
        (np.zeros(2, "f4,f8"), "Only numbers"),
    ],
)
def test_other_dtypes_are_refused_with_a_hint(value, hint) -> None:
    with pytest.raises(gemmserve.DtypeUnsupported, match="x has dtype") as caught:
        _arrays.as_array(value, "x")
    assert hint in str(caught.value)
    assert isinstance(caught.value, TypeError)


class Tensor:
    """A tensor whose dtype NumPy does not have, as torch refuses it."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("a.npy", "numpy.load('a.npy')"),
        (pathlib.Path("a.npy"), "numpy.load('a.npy')"),
        ("arr_a.npy", "numpy.load('arr_a.npy')"),
        ("arr_01jd2w7m4h8k3n5p6q9r0s1t2v", "x is the id of an array, 'arr_01jd2w7m4h8k3n5p6q9r0s1t2v': client.array("),
        ("arr_01jd2w7m4h8k3n5p6q9r0s1t2v_7", "client.array('arr_01jd2w7m4h8k3n5p6q9r0s1t2v_7')"),
        ("job_01jd2w7m4h8k3n5p6q9r0s1t2v", "client.job('job_01jd2w7m4h8k3n5p6q9r0s1t2v').result()"),
        (np.ma.masked_array([1.0, 2.0], [0, 1]), "x.filled(0)"),
        (Tensor(), ".float() loses nothing"),
        ([[1.0], [1.0, 2.0]], "inhomogeneous"),
    ],
)
def test_what_is_no_array_is_refused_with_a_hint(value, hint) -> None:
    with pytest.raises(gemmserve.DtypeUnsupported) as caught:
        _arrays.as_array(value, "x")
    assert hint in str(caught.value)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 4, 5), (300, 200)])
def test_samples_of_other_fillings_differ(shape) -> None:
    a = np.zeros(shape)
    seen = _arrays.sample(a)
    assert seen == _arrays.sample(a.copy())
    a[...] = 1
    assert (_arrays.sample(a) != seen) == bool(a.size)
    assert len(seen) <= 4096 * a.itemsize
