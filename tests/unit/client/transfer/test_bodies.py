"""Bodies say their length and yield it; receivers put what comes where it belongs and trust nothing."""

from __future__ import annotations

import email
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmserve
from gemmserve import wire
from gemmserve._transfer import bodies


def whole(body: bodies.Body) -> bytes:
    data = b"".join(body.pieces())
    assert len(data) == body.nbytes
    assert b"".join(body.pieces()) == data  # the same again, for another attempt
    return data


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def fed(receiver: bodies.Receiver, data: bytes, size: int) -> object:
    for start in range(0, len(data), size):
        receiver.feed(data[start : start + size])
    return receiver.finish()


def test_npy_body(rng) -> None:
    array = rng.standard_normal((300, 400))
    body = bodies.NpyBody(array)
    np.testing.assert_array_equal(np.load(io.BytesIO(whole(body))), array)


def test_a_small_body_is_one_piece() -> None:
    assert len(list(bodies.NpyBody(np.eye(4)).pieces())) == 1
    assert len(list(bodies.MultipartBody({"x": 1}, {"a": np.eye(4), "b": np.eye(4)}).pieces())) == 1


def test_large_pieces_are_slices_of_the_array(rng) -> None:
    a, b = rng.standard_normal((2, 500, 600))
    parts = list(bodies.MultipartBody({}, {"a": a, "b": b}).pieces())
    large = [part for part in parts if len(part) > 1 << 16]
    assert sum(map(len, large)) == a.nbytes + b.nbytes
    for part in large:
        view = np.frombuffer(part, np.uint8)
        assert np.shares_memory(view, a) or np.shares_memory(view, b)


def test_multipart_body(rng) -> None:
    arrays = {
        "a": rng.standard_normal((200, 300)),
        "b": np.asfortranarray(rng.standard_normal((3, 2))),
        "c": np.zeros((0, 2)),
    }
    body = bodies.MultipartBody({"alpha": [1.0, 2.0]}, arrays)
    message = email.message_from_bytes(f"Content-Type: {body.content_type}\r\n\r\n".encode() + whole(body))
    parts = [
        (p.get_param("name", header="content-disposition"), p.get_payload(decode=True)) for p in message.get_payload()
    ]
    assert [name for name, _ in parts] == ["params", "a", "b", "c"]
    assert json.loads(parts[0][1]) == {"alpha": [1.0, 2.0]}
    for name, data in parts[1:]:
        np.testing.assert_array_equal(np.load(io.BytesIO(data)), arrays[name])


def test_json_takes_numpy_scalars_and_refuses_the_rest() -> None:
    assert json.loads(bodies.encode_json({"priority": np.int64(3)})) == {"priority": 3}
    for value in (float("nan"), object(), {1, 2}):
        with pytest.raises(gemmserve.ParameterInvalid):
            bodies.encode_json({"x": value})


@given(
    st.sampled_from(sorted(wire.DTYPES)),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
    st.booleans(),
    st.integers(1, 300),
)
def test_npy_in_any_division(name, shape, fortran, big_endian, size) -> None:
    array = np.asarray(np.random.default_rng(0).standard_normal(shape).astype(name), order="F" if fortran else "C")
    data = saved(array.astype(array.dtype.newbyteorder(">")) if big_endian else array)
    received = fed(bodies.NpyReceiver(len(data)), data, size)
    np.testing.assert_array_equal(received, array)
    assert received.dtype == array.dtype
    assert received.dtype.isnative
    assert received.flags.f_contiguous == array.flags.f_contiguous
    assert received.flags.writeable


@pytest.mark.parametrize("length", [None, 12345])
def test_npy_that_is_wrong(length) -> None:
    data = saved(np.eye(20))
    with pytest.raises(gemmserve.ProtocolError):
        fed(bodies.NpyReceiver(length), b"<html>" + data, 100)
    with pytest.raises(gemmserve.ProtocolError):
        fed(bodies.NpyReceiver(length), data + b"!", 100)
    if length is not None:
        with pytest.raises(gemmserve.ProtocolError, match="promises"):
            fed(bodies.NpyReceiver(length), data, 100)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_npy_that_ends_early_may_be_asked_for_again(kept) -> None:
    with pytest.raises(gemmserve.TransportError) as caught:
        fed(bodies.NpyReceiver(None), saved(np.eye(20))[:kept], 7)
    assert caught.value.retriable


def test_an_absurd_header_costs_no_memory() -> None:
    head = wire.format_npy_header(np.dtype("float64"), (1 << 50,))
    with pytest.raises(gemmserve.ProtocolError):
        fed(bodies.NpyReceiver(1000), head, 10)


def test_npz(rng) -> None:
    arrays = {"sum": rng.standard_normal(4), "c": rng.standard_normal((3, 4))}
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    received = fed(bodies.NpzReceiver(), stream.getvalue(), 50)
    assert list(received) == ["sum", "c"]
    np.testing.assert_array_equal(received["c"], arrays["c"])
    for data in (b"", b"nothing", stream.getvalue()[:-30]):
        with pytest.raises((gemmserve.ProtocolError, gemmserve.TransportError)):
            fed(bodies.NpzReceiver(), data, 50)


def test_no_pickle_is_ever_read() -> None:
    stream = io.BytesIO()
    np.savez(stream, x=np.array([{}], dtype=object))
    with pytest.raises(gemmserve.ProtocolError):
        fed(bodies.NpzReceiver(), stream.getvalue(), 50)
    data = io.BytesIO()
    np.save(data, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(gemmserve.ProtocolError):
        fed(bodies.NpyReceiver(None), data.getvalue(), 50)


def test_the_content_type_chooses_the_receiver() -> None:
    assert isinstance(bodies.receive_arrays({"content-type": "application/x-npy; x=y"}), bodies.NpyReceiver)
    assert isinstance(bodies.receive_arrays({"content-type": "application/x-npz"}), bodies.NpzReceiver)
    for headers in ({"content-type": "text/html"}, {}):
        with pytest.raises(gemmserve.ProtocolError):
            bodies.receive_arrays(headers)


def test_a_short_answer_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(bodies, "_MAX_JSON", 10)
    with pytest.raises(gemmserve.ProtocolError):
        fed(bodies.Whole(bytes), b"x" * 11, 4)
