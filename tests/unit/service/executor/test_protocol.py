"""Frames: cut anywhere, they come out whole; nonsense is refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from works import packed, unpacked

from gemmserve_service.executor import protocol
from gemmserve_service.executor.protocol import (
    TO_FRONT,
    TO_WORKER,
    ArrayRef,
    Decoder,
    Deliver,
    Delivered,
    Done,
    Drop,
    Failed,
    Forget,
    Hello,
    ProtocolError,
    Stop,
    Write,
    encode,
)
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import GemmParams, GemmReduceParams, Timings

REF = ArrayRef(extent="e", path="/p", capacity=4096, nbytes=64, dtype="complex64", shape=(2, 4), order="F")
FIELDS = {"operands": {"a": REF, "b": REF}, "results": {"d": REF}}
MESSAGES = [
    packed(Run("t", GemmParams(alpha=1.5 - 2j, beta=0.1 + 0.2j, trans_a="C"), "numpy", **FIELDS)),
    packed(Run("t", GemmReduceParams(reduce=["sum", "absmax"], axis=["m", "batch"]), "numpy", **FIELDS, verify=True)),
    Forget(extents=["a", "b"]),
    Write(task="t", places={"arr_1": ("e", "/p", 1 << 30, 4096, "arr_1")}, urgent=True),
    Drop(tasks=["t", "u"]),
    Deliver(number=3, array="arr_1", nbytes=5, memory="1:2", path="/proc/1/fd/3", capacity=4096),
    Stop(),
]
ANSWERS = [
    Hello(worker="cpu", pid=1, spec={"kind": "cpu", "memory_bytes": 1 << 40}, verified_error=1e-8),
    Done(task="t", algorithm="simt", timings=Timings(kernel_s=0.1), residual=1e-7, memory_used=5),
    Delivered(numbers=[3], refused=[4]),
    Failed(task="t", slug="s", status=500, title="T", detail="é\n\0", extra={"available": ["fp32"]}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_what_is_sent_to_a_worker_arrives(message):
    (body,) = Decoder().feed(encode(message))
    assert TO_WORKER.validate_json(body) == message


@pytest.mark.parametrize("message", ANSWERS, ids=lambda message: message.kind)
def test_what_a_worker_answers_arrives(message):
    (body,) = Decoder().feed(encode(message))
    assert TO_FRONT.validate_json(body) == message


def done_with(timings):
    """What a worker answers, with those times."""
    text = Done(task="t", algorithm="simt", timings=Timings()).model_dump_json()
    found = json.loads(text)
    found["timings"] |= timings
    return json.dumps(found)


def test_a_time_that_only_another_version_knows_is_passed_over():
    assert TO_FRONT.validate_json(done_with({"later_s": 1.0})).timings == Timings()


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_times_are_numbers(seconds):
    with pytest.raises(ValidationError):
        TO_FRONT.validate_json(done_with({"kernel_s": seconds}))


@given(st.complex_numbers(allow_nan=False, allow_infinity=False))
def test_scalars_arrive_bit_for_bit(alpha):
    run = Run("t", GemmParams(alpha=alpha), "numpy", **FIELDS)
    (body,) = Decoder().feed(encode(packed(run)))
    (there,) = unpacked(TO_WORKER.validate_json(body))
    assert there == run
    back = there.params.alpha
    assert back == alpha
    assert math.copysign(1, back.real) == math.copysign(1, complex(alpha).real)


@given(st.lists(st.sampled_from(MESSAGES + ANSWERS), max_size=6), st.data())
def test_frames_survive_any_cutting(messages, data):
    stream = b"".join(encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder, bodies = Decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        bodies += decoder.feed(stream[start:end])
    assert bodies == [encode(message)[4:] for message in messages]


def test_a_frame_of_absurd_length_is_refused_at_its_head():
    with pytest.raises(ProtocolError):
        Decoder().feed((1 << 31).to_bytes(4, "big"))


def test_a_message_too_long_is_not_sent(monkeypatch):
    monkeypatch.setattr(protocol, "_MAX_FRAME", 1 << 20)
    with pytest.raises(ProtocolError):
        encode(Forget(extents=["x" * protocol._MAX_FRAME]))


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"kind":"hello"}', b'{"kind":"no"}', b'{"kind":"done","x":1}', b"\xff"]
)
def test_what_is_no_message_is_refused(text):
    with pytest.raises(ValidationError):
        TO_FRONT.validate_json(text)


@pytest.mark.parametrize(
    ("there", "instead"),
    [(b'"verify"', b'"nonsense"'), (b'"algorithm":"numpy"', b'"algorithm":3'), (b'"task":"t"', b'"task":null')],
)
def test_work_is_looked_at_where_it_is_read(there, instead):
    (body,) = Decoder().feed(encode(MESSAGES[0]))
    assert there in body
    with pytest.raises(ValidationError):
        TO_WORKER.validate_json(body.replace(there, instead))
