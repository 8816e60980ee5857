"""Frames of both kinds, cut anywhere, come out whole; targets say again what they were made of; nonsense is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gemmserve_service.executor.join_protocol import (
    FROM_AGENT,
    INLINE_BYTES,
    MAX_GREETING_FRAME,
    PROBE_BYTES,
    RESULT_BYTES,
    TO_AGENT,
    Bytes,
    Join,
    JoinDecoder,
    Joined,
    Probe,
    Pulse,
    Rate,
    ReadExtent,
    Refused,
    ResultBytes,
    WriteResult,
    binary_frame,
    parse_target,
    result_frame,
)
from gemmserve_service.executor.protocol import Cancel, ProtocolError, encode

JOIN = Join(name="node-7", device="cuda:0", session="0123456789abcdef", token="wk_x", cache_bytes=1 << 30)
TO = [
    Joined(worker="node-7/cuda:0", link="ab" * 16, silence_s=5, heartbeat_timeout_s=10, block_side=2048, server="s"),
    Refused(slug="token", detail="unknown"),
    Pulse(),
    Cancel(task="t"),
]
FROM = [JOIN, Rate(bytes_s=1e9)]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
COUNTS = st.integers(0, 1 << 50)


@pytest.mark.parametrize("message", TO, ids=lambda message: message.kind)
def test_what_is_sent_to_an_agent_arrives(message):
    (frame,) = JoinDecoder().feed(encode(message))
    assert frame.raw is None
    assert TO_AGENT.validate_json(frame.body) == message


@pytest.mark.parametrize("message", FROM, ids=lambda message: message.kind)
def test_what_an_agent_sends_arrives(message):
    (frame,) = JoinDecoder().feed(encode(message))
    assert FROM_AGENT.validate_json(frame.body) == message


def test_a_worker_is_named_by_its_node_and_device():
    assert JOIN.worker == "node-7/cuda:0"


def test_a_token_is_in_no_message_for_people():
    assert "wk_x" not in repr(JOIN)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a/b"},
        {"name": ""},
        {"name": "-x"},
        {"name": "a" * 64},
        {"device": "CUDA"},
        {"device": "cuda:"},
        {"session": "0123"},
        {"token": "x" * 513},
        {"link_bytes_s": 0.0},
        {"link_bytes_s": float("inf")},
        {"cache_bytes": -1},
        {"host": "a\nforged line"},
        {"host": "\x1b[2J"},
    ],
    ids=str,
)
def test_a_join_of_no_sense_is_refused(fields):
    with pytest.raises(ValidationError):
        Join(**(JOIN.model_dump() | fields))


def frame_of(head, raw):
    return b"".join(binary_frame(head, raw))


@given(task=NAMES, extent=NAMES, attempt=st.integers(0, 9), offset=COUNTS, raw=st.binary(max_size=9))
def test_an_agent_s_frames_are_those_of_the_model(task, extent, attempt, offset, raw):
    made = result_frame(task, attempt, extent, offset, memoryview(raw))
    (frame,) = JoinDecoder().feed(b"".join(made))
    assert FROM_AGENT.validate_json(frame.body) == ResultBytes(task=task, attempt=attempt, extent=extent, offset=offset)
    assert (frame.raw, made[1]) == (raw, raw)
    with pytest.raises(ProtocolError, match="in one frame"):
        result_frame(task, attempt, extent, offset, memoryview(bytes(RESULT_BYTES + 1)))


def whole(frames):
    """The frames, with what is one's in parts put together."""
    found = []
    for frame in frames:
        if frame.at:
            before = found.pop()
            assert (frame.body, frame.at, frame.nbytes) == (before.body, len(before.raw), before.nbytes)
            found.append(before._replace(raw=before.raw + bytes(frame.raw)))
        else:
            found.append(frame if frame.raw is None else frame._replace(raw=bytes(frame.raw)))
    assert all(frame.raw is None or len(frame.raw) == frame.nbytes for frame in found)
    return found


@given(raws=st.lists(st.binary(max_size=300), max_size=6), cuts=st.lists(st.integers(1, 70), min_size=1, max_size=9))
def test_frames_cut_anywhere_come_out_whole(raws, cuts):
    heads = [ResultBytes(task=f"t{i}", attempt=i, extent="e\0é", offset=i << 40) for i in range(len(raws))]
    stream = b"".join(frame_of(head, raw) + encode(Pulse()) for head, raw in zip(heads, raws, strict=True))
    decoder, frames, start = JoinDecoder(), [], 0
    while start < len(stream):
        cut = cuts[start % len(cuts)]
        frames += decoder.feed(stream[start : start + cut])
        start += cut
    frames = whole(frames)
    binary, plain = frames[::2], frames[1::2]
    assert [FROM_AGENT.validate_json(frame.body) for frame in binary] == heads
    assert [frame.raw for frame in binary] == raws
    assert [TO_AGENT.validate_json(frame.body) for frame in plain] == [Pulse()] * len(raws)


def test_bytes_are_handed_on_as_they_come_and_are_not_copied():
    raw = bytes(range(256)) * 4096
    stream = memoryview(frame_of(ResultBytes(task="t", attempt=1, extent="e", offset=0), raw))
    decoder, at = JoinDecoder(), 0
    for start in range(0, len(stream), 1 << 18):
        data = stream[start : start + (1 << 18)]
        (frame,) = decoder.feed(data)
        assert (frame.at, frame.nbytes, frame.raw.obj) == (at, len(raw), stream.obj)
        assert frame.raw == raw[at : at + len(frame.raw)]
        at += len(frame.raw)
    assert at == len(raw)


@pytest.mark.parametrize(
    ("head", "most"),
    [
        (Bytes(extent="e", offset=0), INLINE_BYTES),
        (ResultBytes(task="t", attempt=0, extent="e", offset=0), RESULT_BYTES),
    ],
    ids=["operand", "result"],
)
def test_the_largest_binary_frame_passes_and_a_larger_one_is_not_made(head, most):
    raw = bytes(most)
    (frame,) = JoinDecoder().feed(frame_of(head, raw))
    assert frame.raw == raw
    with pytest.raises(ProtocolError, match="bytes in one frame"):
        binary_frame(head, bytes(most + 1))


@pytest.mark.parametrize(
    "data",
    [
        (MAX_GREETING_FRAME + 1).to_bytes(4, "big"),
        b"GET ",
        (1 << 31 | MAX_GREETING_FRAME + 1).to_bytes(4, "big"),
        (1 << 31 | 2).to_bytes(4, "big") + b"ab",
        (1 << 31 | 6).to_bytes(4, "big") + (3).to_bytes(4, "big") + b"{}",
        b"\xff\xff\xff\xff",
    ],
    ids=["long", "text", "long binary", "no header", "header too long", "all ones"],
)
def test_a_frame_of_no_sense_is_refused_before_it_is_there(data):
    with pytest.raises(ProtocolError):
        JoinDecoder(limit=MAX_GREETING_FRAME).feed(data)


def test_bytes_of_a_binary_frame_are_limited_too():
    raw = bytes(RESULT_BYTES + 1)
    frame = (1 << 31 | len(raw) + 6).to_bytes(4, "big") + (2).to_bytes(4, "big") + b"{}" + raw
    with pytest.raises(ProtocolError, match="bytes in one frame"):
        JoinDecoder().feed(frame)


def test_a_limit_is_changed_between_frames():
    decoder = JoinDecoder(limit=10)
    decoder.limit = 100
    (frame,) = decoder.feed(encode(Cancel(task="t" * 20)))
    assert TO_AGENT.validate_json(frame.body) == Cancel(task="t" * 20)


@given(extent=NAMES, offset=COUNTS, length=COUNTS)
def test_a_target_of_a_read_says_what_it_was_made_of(extent, offset, length):
    asked = ReadExtent(extent, offset, length)
    assert asked.target.isascii()
    assert parse_target("GET", asked.target) == asked


@given(task=NAMES, extent=NAMES, attempt=COUNTS, offset=COUNTS, rows=st.integers(2, 1 << 40), stride=st.integers(1, 9))
def test_a_target_of_a_write_says_what_it_was_made_of(task, extent, attempt, offset, rows, stride):
    for asked in (WriteResult(task, attempt, extent, offset), WriteResult(task, attempt, extent, offset, rows, stride)):
        assert parse_target("PUT", asked.target) == asked


def test_a_target_of_a_probe_says_what_it_was_made_of():
    assert parse_target("GET", Probe(PROBE_BYTES).target) == Probe(PROBE_BYTES)
    assert parse_target("PUT", Probe().target) == Probe()


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/"),
        ("GET", "/v1/arrays"),
        ("POST", "/internal/probe"),
        ("GET", "/internal/extents/e"),
        ("GET", "/internal/extents/e?offset=1"),
        ("GET", "/internal/extents/e?offset=-1&length=2"),
        ("GET", "/internal/extents/e?offset=+1&length=2"),
        ("GET", "/internal/extents/e?offset=1&length=2&length=2"),
        ("GET", "/internal/extents/e?offset=1&length=2&other=3"),
        ("GET", "/internal/extents/e?offset=1&length=99999999999999999999"),
        ("GET", "/internal/extents/e?offset=٣&length=1"),
        ("GET", "/internal/extents/?offset=1&length=1"),
        ("GET", "/internal/extents/%ff?offset=1&length=1"),
        ("PUT", "/internal/results/t/1?offset=0"),
        ("PUT", "/internal/results/t/x/e?offset=0"),
        ("PUT", "/internal/results/t/1/e?offset=0&rows=0&stride=4"),
        ("PUT", "/internal/results/t/1/e?offset=0&rows=2"),
        ("PUT", "/internal/results/t/1/e?offset=0&stride=2"),
        ("PUT", "/internal/results/t/1/e/f?offset=0"),
        ("GET", f"/internal/probe?length={PROBE_BYTES + 1}"),
        ("PUT", "/internal/probe?length=1"),
    ],
)
def test_other_targets_are_refused(method, target):
    with pytest.raises(ValueError, match=r".+"):
        parse_target(method, target)
