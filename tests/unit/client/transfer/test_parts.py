"""Arrays in parts, without I/O: which requests are made, what answers are believed, what is shown."""

from __future__ import annotations

import hashlib
import io
from base64 import b64encode

import numpy as np
import pytest

from gemmserve import CorruptAnswer, ProtocolError, TransportError
from gemmserve._calls.requests import send_part
from gemmserve._transfer import parts, progress
from gemmserve._transfer.parts import Download, Span, Stretch, divisible, flat, spans
from gemmserve._transfer.progress import SharedBar, Stopped, watched
from gemmserve.wire import format_npy_header

A = np.arange(1000, dtype="f4").reshape(10, 100)


@pytest.fixture
def file():
    target = io.BytesIO()
    np.save(target, A)
    return target.getvalue()


def answer(file, start, stop, *, total=None, etag='"x"'):
    return {
        "content-range": f"bytes {start}-{stop - 1}/{total or len(file)}",
        "content-length": str(stop - start),
        "etag": etag,
    }


def test_spans_that_come_in_any_order(file):
    download = Download()
    first = Span(download, 0, 500)
    assert first.headers() == {"Range": "bytes=0-499"}
    first.answer(answer(file, 0, 500)).feed(file[:500])
    assert first.finish() == 500
    rest = [Span(download, low, high) for low, high in spans(500, len(file), 1500)]
    for span in reversed(rest):
        assert span.headers() == {"Range": f"bytes={span.position}-{span._stop - 1}", "If-Range": '"x"'}
        receiver = span.answer(answer(file, span.position, span._stop))
        receiver.feed(file[span.position : span.position + 7])
        place = receiver.place()
        place[:] = file[span.position : span._stop]
        receiver.landed(len(place))
        assert span.finish() == span._stop
    assert np.array_equal(download.result(), A)


@pytest.mark.parametrize("cut", [0, 5, 100, 128, 2000])
def test_an_answer_that_breaks_is_gone_on_with(file, cut):
    download = Download()
    span = Span(download, 0, None)
    assert span.headers() == {}
    span.answer({"content-length": str(len(file)), "etag": '"x"'}).feed(file[:cut])
    with pytest.raises(TransportError, match=f"{cut} of {len(file)}"):
        span.finish()
    condition = {"Range": f"bytes={cut}-{len(file) - 1}", "If-Range": '"x"'}
    assert span.headers() == (condition if cut else {"Range": f"bytes=0-{len(file) - 1}", "If-Range": '"x"'})
    span.answer(answer(file, cut, len(file))).feed(file[cut:])
    assert span.finish() == len(file)
    assert np.array_equal(download.result(), A)


def test_whoever_knows_no_ranges_sends_the_whole_again(file):
    download = Download()
    span = Span(download, 0, None)
    span.answer({"content-length": str(len(file))}).feed(file[:900])
    span.answer({"content-length": str(len(file))}).feed(file)
    assert span.finish() == len(file)
    assert np.array_equal(download.result(), A)


@pytest.mark.parametrize(
    ("start", "stop", "total"), [(499, 1000, None), (501, 1000, None), (500, 1001, None), (500, 1000, 9999)]
)
def test_bytes_that_nobody_asked_for_are_refused(file, start, stop, total):
    download = Download()
    Span(download, 0, 500).answer(answer(file, 0, 500)).feed(file[:500])
    with pytest.raises(ProtocolError, match="asked for"):
        Span(download, 500, 1000).answer(answer(file, start, stop, total=total))
    with pytest.raises(ProtocolError, match="asked for"):
        Span(download, 500, 1000).answer({"content-length": str(len(file))})


def test_more_than_was_said(file):
    download = Download()
    span = Span(download, 0, None).answer({"content-length": str(len(file))})
    with pytest.raises(ProtocolError, match="longer than it says"):
        span.feed(file + b"x")


def test_which_arrays_are_slices_of_memory():
    assert all(map(divisible, (A, A.T, A[:3], A[:, :0], np.float32(3).reshape(()))))
    assert not any(map(divisible, (A[:, ::2], A[::-1], A.astype(">f4"))))
    assert bytes(flat(A.T)) == A.tobytes()


def test_a_part_s_body():
    data = memoryview(bytes(range(256)) * 10_000)
    request = send_part("upl_1", 0, data, digest=True, label="")
    body = request.body
    assert b"".join(body.pieces()) == data
    assert max(map(len, body.pieces())) == 1 << 20
    assert request.headers["Content-Digest"] == f"sha-256=:{b64encode(hashlib.sha256(data).digest()).decode()}:"


class Drawn:
    def __init__(self):
        self.counts, self.closed = [], 0

    def advance(self, nbytes):
        self.counts.append(nbytes)

    def close(self):
        self.closed += 1


def test_one_bar_for_all_parts():
    drawn = Drawn()
    shared = SharedBar(drawn)
    for _ in range(2):
        assert list(watched([b"12", b"345"], progress.Progress(enabled=False), "sending", None, shared)) == [
            b"12",
            b"345",
        ]
    assert (sum(drawn.counts), drawn.closed) == (10, 0)
    shared.stop()
    shared.stop()
    assert drawn.closed == 1
    with pytest.raises(Stopped):
        list(watched([b"12"], progress.Progress(enabled=False), "sending", None, shared))
    with pytest.raises(Stopped):
        _stopped().advance(1)


def _stopped():
    shared = SharedBar(None)
    shared.stop()
    return shared


def test_spans_are_hashed_in_their_order_whatever_they_came_in(rng) -> None:
    array = rng.standard_normal(5000)
    head = format_npy_header(array.dtype, array.shape)
    file = head + array.tobytes()
    sha256 = hashlib.sha256(file).digest()
    field = {"repr-digest": f"sha-256=:{b64encode(sha256).decode()}:"}
    cuts = [0, 4000, 9000, 9001, 30000, len(file)]

    def received(order: list[int], data: bytes, *, late: bool = False) -> Download:
        download = Download()
        for number in order:
            start, stop = cuts[number], cuts[number + 1]
            span = Span(download, start, stop)
            known = field if not late or number else {}
            span.answer({"content-range": f"bytes {start}-{stop - 1}/{len(file)}", **known})
            span.feed(data[start:stop])
            if download.sha256 is not None:
                download.came(start, span.finish())
        return download

    for order in ([0, 1, 2, 3, 4], [0, 4, 3, 2, 1], [0, 2, 1, 4, 3]):
        download = received(order, file)
        download.check()
        np.testing.assert_array_equal(download.result(), array)
        with pytest.raises(CorruptAnswer):
            received(order, file[:-1] + bytes([file[-1] ^ 1])).check()
    assert received([0, 1, 2, 3, 4], file, late=True).sha256 is None  # known too late: nothing is compared


@pytest.mark.parametrize("ranged", [True, False])
def test_a_stretch_of_bare_data_comes_in_pieces(ranged):
    bare = A.tobytes()
    memory = bytearray(200)
    stretch = Stretch(memoryview(memory), 1000)
    assert stretch.headers() == {"Range": "bytes=1000-1199"}
    with pytest.raises(TransportError, match="1000 of 1200"):
        stretch.finish()
    for first, count in ((1000, 30), (1030, 100)):  # the first answer breaks off, and so does the second
        body = bare[first:1200] if ranged else bare
        receiver = stretch.answer(answer(body, first, 1200, total=len(bare)) if ranged else {})
        start = 0 if ranged else first
        assert len(receiver.place()) == (1200 - first if ranged or not first else 0)
        receiver.feed(body[: start + count])
    assert stretch.headers() == {"Range": "bytes=1130-1199"}
    receiver = stretch.answer(answer(bare, 1130, 1200))
    place = receiver.place()
    place[:] = bare[1130:1200]
    receiver.landed(len(place))
    assert receiver.finish() == 1200
    assert memory == bare[1000:1200]


def test_a_stretch_believes_no_other_range():
    stretch = Stretch(memoryview(bytearray(8)), 8)
    with pytest.raises(ProtocolError, match="bytes 0 to 7"):
        stretch.answer({"content-range": "bytes 0-7/16"})


@pytest.mark.parametrize("processors", [1, 7, 8, 64])
def test_on_one_host_parts_pay_where_there_are_processors(monkeypatch, processors) -> None:
    monkeypatch.setattr(parts.os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
    assert parts.pays_on_one_host() == (processors >= 8)
