"""Forms without I/O: the same parts however the bytes are cut, and what is no form is refused."""

from __future__ import annotations

import itertools
import random

import pytest

from gemmserve_service.errors import UnsupportedMediaType
from gemmserve_service.http.problems import MalformedMultipart
from gemmserve_service.http.requests.multipart_decoder import (
    END,
    NEED_DATA,
    MultipartDecoder,
    Part,
    boundary_of,
    split,
)

DISPOSITION = b'Content-Disposition: form-data; name="%s"'


def part(name, data, *headers):
    return b"\r\n".join([DISPOSITION % name, *headers]) + b"\r\n\r\n" + data


def body(*parts, boundary=b"XbX", end=b"--\r\n"):
    return b"".join(b"--" + boundary + b"\r\n" + each + b"\r\n" for each in parts) + b"--" + boundary + end


def decode(pieces, boundary=b"XbX"):
    """The parts' names and data, and whether the closing delimiter came."""
    decoder = MultipartDecoder(boundary)
    parts, ended = [], False
    for piece in pieces:
        decoder.feed(piece)
        while (event := decoder.next_event()) is not NEED_DATA:
            if event is END:
                ended = True
            elif isinstance(event, Part):
                parts.append((event.name, b""))
            else:
                assert len(event)
                name, data = parts.pop()
                parts.append((name, data + event))
    assert decoder.position <= sum(map(len, pieces))
    return parts, ended


# Full of what a delimiter begins with, and of one that differs in its last letter.
TRICKY = b"\r\n--XbZ\r\n--Xb\r\n-\r\r\n--Xb\r\n--Xb\r"
FORM = body(
    part(b"params", b"{}", b"Content-Type: application/json"),
    part(b"a", b"\x93NUMPY one\r\n", b"Content-Type: application/x-npy").replace(
        b'name="a"', b'name="a"; filename="a.npy"'
    ),
    b"Content-Type: application/octet-stream\r\n" + part(b"b", b"--XbX\r\n"[2:] + TRICKY),
    part(b"c", b""),
)
PARTS = [("params", b"{}"), ("a", b"\x93NUMPY one\r\n"), ("b", b"XbX\r\n" + TRICKY), ("c", b"")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 64, 1 << 20])
def test_pieces_of_one_size(size):
    assert decode([FORM[start : start + size] for start in range(0, len(FORM), size)]) == (PARTS, True)


@pytest.mark.parametrize("seed", range(30))
def test_pieces_of_any_size(seed):
    chance = random.Random(seed)
    cuts = sorted({0, len(FORM), *chance.choices(range(len(FORM)), k=chance.choice([1, 5, 40]))})
    assert decode([FORM[start:end] for start, end in itertools.pairwise(cuts)]) == (PARTS, True)


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_a_whole_body(kind):
    long = body(part(b"a", b"x" * 200_000 + TRICKY), part(b"b", b"y"))
    decoder = MultipartDecoder(b"XbX", kind(long))
    found = b""
    while (event := decoder.next_event()) is not END:
        found += b"|" if isinstance(event, Part) else event
    assert found == b"|" + b"x" * 200_000 + TRICKY + b"|y"


def test_data_that_are_skipped_are_not_looked_at():
    """Those that were fed, and those that never are."""
    data = b"\r\n--XbX--" * 5
    sent = body(part(b"a", data), part(b"b", b"y"))
    begin = sent.index(data)
    whole = MultipartDecoder(b"XbX", memoryview(sent))
    assert whole.next_event() == Part("a", None)
    assert whole.position == begin
    whole.skip(len(data))
    assert whole.at_delimiter()
    assert whole.next_event() == Part("b", None)

    decoder = MultipartDecoder(b"XbX")
    decoder.feed(sent[: begin + 1])
    assert decoder.next_event() == Part("a", None)
    assert not decoder.skippable  # a carriage return may begin the delimiter
    assert decoder.next_event() is NEED_DATA
    decoder = MultipartDecoder(b"XbX", sent[:begin])
    assert decoder.next_event() == Part("a", None)
    assert decoder.skippable
    decoder.skip(len(data))
    decoder.feed(sent[begin + len(data) :])
    assert decoder.next_event() == Part("b", None)
    assert bytes(decoder.next_event()) == b"y"
    assert decoder.next_event() is END
    assert decoder.next_event() is NEED_DATA


@pytest.mark.parametrize("epilogue", [b"", b"\r\n", b"\r\nepilogue", b"\r\n--XbX\r\n"])
def test_what_follows_the_end_is_ignored(epilogue):
    sent = body(part(b"a", b"x"), end=b"--") + epilogue
    assert decode([sent]) == decode([sent[:20], sent[20:]]) == ([("a", b"x")], True)


def test_a_form_may_begin_with_an_empty_line():
    assert decode([b"\r\n" + FORM]) == (PARTS, True)
    assert decode([bytes([byte]) for byte in b"\r\n" + FORM]) == (PARTS, True)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_form_that_breaks_off_has_no_end(cut):
    parts, ended = decode([FORM[:-cut]])
    assert ended == (cut <= 2)
    assert parts == PARTS or cut > 4


@pytest.mark.parametrize(
    "sent",
    [
        b"preamble\r\n" + FORM,
        FORM[2:],
        b"--XbXX\r\n" + FORM,
        body(part(b"a", b"x"), end=b"-\r\n"),
        body(part(b"a", b"x"), end=b"  \r\n"),
        body(b"\r\nx"),
        body(part(b"", b"x")),
        body(b"Content-Disposition: form-data\r\n\r\n"),
        body(b'Content-Disposition: attachment; name="a"\r\n\r\n'),
        body(b'Content-Disposition: form-data; name="a"; name="b"\r\n\r\n'),
        body(b'Content-Disposition: form-data; name="a\r\n\r\n'),
        body(part(b"a", b"x", DISPOSITION % b"b")),
        body(part(b"a", b"x", b"Bad Header")),
        body(part(b"a", b"x", b" folded: y")),
        body(part(b"a", b"x", b"Space : y")),
        body(part(b"a", b"x", *(b"X-%d: 1" % index for index in range(8)))),
        body(part(b"a", b"x", b"X-Long: " + b"x" * 5000)),
    ],
)
def test_malformed_forms(sent):
    with pytest.raises(MalformedMultipart):
        decode([sent])
    with pytest.raises(MalformedMultipart):
        decode([bytes([byte]) for byte in sent])
    assert split(sent, b"XbX", 0) is None


class TestParts:
    @pytest.mark.parametrize(
        ("disposition", "name"),
        [
            (b'form-data; name="a"', "a"),
            (b"form-data; name=a", "a"),
            (b'FORM-DATA;filename="x; y.npy";NAME="a" ', "a"),
            (b'form-data; name="a \\"b\\" c"', 'a "b" c'),
            ('form-data; name="\N{GREEK SMALL LETTER ALPHA}"'.encode(), "\N{GREEK SMALL LETTER ALPHA}"),
            (b'form-data; name="\xff"', "\N{REPLACEMENT CHARACTER}"),
        ],
    )
    def test_names(self, disposition, name):
        sent = body(b"Content-Disposition: " + disposition + b"\r\n\r\nx")
        assert decode([sent]) == ([(name, b"x")], True)

    def test_arrays_in_shared_memory(self):
        header = b"content-type: application/x-npy-header"
        decoder = MultipartDecoder(
            b"XbX", body(part(b"a", b"x", header, b"Gemmserve-Data: 7"), part(b"b", b"y", header))
        )
        assert decoder.next_event() == Part("a", "7")
        assert bytes(decoder.next_event()) == b"x"
        assert decoder.next_event() == Part("b", "")


class TestSplitting:
    def test_by_name(self):
        found = split(b"head" + FORM, b"XbX", 4)
        assert {name: (b"head" + FORM)[start:end] for name, (start, end) in found.items()} == dict(PARTS)

    def test_what_is_split_is_what_is_decoded(self):
        chance = random.Random(7)
        agreed = 0
        for _ in range(3000):
            sent = bytearray(FORM)
            for _ in range(chance.choice([1, 1, 3])):
                at = chance.randrange(len(sent))
                piece = chance.choice(
                    [b"", b"\r\n", b"--XbX", b"\r\n--XbX", b"--", b'"', bytes([chance.randrange(256)])]
                )
                sent[at : at + chance.choice([0, 1, 2, 9])] = piece
            found = split(bytes(sent), b"XbX", 0)
            if found is not None:
                parts = [(name, bytes(sent[start:end])) for name, (start, end) in found.items()]
                assert decode([bytes(sent)]) == (parts, True), bytes(sent)
                agreed += 1
        assert agreed > 300

    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            FORM[:-4],
            body(part(b"a", b"x"), end=b""),
            body(part(b"a", b"x"), part(b"a", b"y")),
            body(part(b"a", b"x", b"Content-Type: application/x-npy-header")),
        ],
    )
    def test_what_the_app_answers(self, sent):
        assert split(sent, b"XbX", 0) is None


@pytest.mark.parametrize(
    ("value", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ("multipart/form-data;boundary=------------------------1f2e", b"------------------------1f2e"),
        ('multipart/form-data; boundary="a b:c"', b"a b:c"),
        ("Multipart/Form-Data; charset=utf-8; BOUNDARY=abc", b"abc"),
        ("multipart/form-data; boundary=a b", MalformedMultipart),
        ("multipart/form-data; boundary=a; boundary=b", MalformedMultipart),
        ("multipart/form-data; boundary=", MalformedMultipart),
        ("multipart/form-data; boundary=" + "x" * 71, MalformedMultipart),
        ("multipart/form-data", MalformedMultipart),
        ("multipart/mixed; boundary=abc", UnsupportedMediaType),
        ("", UnsupportedMediaType),
    ],
)
def test_boundaries(value, boundary):
    if isinstance(boundary, bytes):
        assert boundary_of(value, "send a form") == boundary
    else:
        with pytest.raises(boundary):
            boundary_of(value, "send a form")
