"""The multipart reader by itself: however the body is cut into pieces, the same parts arrive or the same error."""

from __future__ import annotations

import asyncio
import io
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve.wire import NpyDtypeError, NpyError
from gemmserve_service.errors import (
    BodyTooLong,
    BodyTooShort,
    InvalidNpy,
    InvalidParameters,
    InvalidRequest,
    LengthRequired,
    TooLarge,
    UnsupportedMediaType,
)
from gemmserve_service.http.problems import MalformedMultipart
from gemmserve_service.http.requests.multipart import MAX_PARAMS, OneShotForm


class MemoryStore:
    """As much of a store as a form needs; counts what was reserved."""

    def __init__(self):
        self.reserved = 0
        self.aborted = 0

    def allocate(self, dtype, shape, order, **options):
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        self.reserved += nbytes
        upload = SimpleNamespace(nbytes=nbytes, filled=0, data=bytearray(), dtype=dtype, shape=shape, order=order)

        def write(piece):
            upload.data += piece
            upload.filled += len(piece)

        def abort():
            self.aborted += 1

        upload.write, upload.abort = write, abort
        return upload


def read(pieces, headers, *, names=("a", "b", "c"), check=lambda *_: None, length=None):
    store = MemoryStore()
    form = OneShotForm(store, names=names, check=check)
    total = sum(map(len, pieces)) if length is None else length

    coming = iter(pieces)

    async def receive():
        piece = next(coming, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    request = SimpleNamespace(
        headers={"content-length": str(total), **{k.lower(): v for k, v in headers.items()}}, receive=receive, scope={}
    )
    form.store = store
    asyncio.run(form.read(request))
    return form


@pytest.fixture
def failing():
    """Runs `read`, returns the error and the store; what was reserved is never more than what was sent."""

    def run(error, pieces, headers, match=None, **options):
        stores = []
        original = MemoryStore.__init__

        def remember(self):
            original(self)
            stores.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryStore, "__init__", remember)
            with pytest.raises(error, match=match):
                read(pieces, headers, **options)
        assert stores[0].reserved <= sum(map(len, pieces))
        return stores[0]

    return run


A = np.arange(6, dtype="c8").reshape(2, 3)
B = np.asfortranarray(np.arange(12, dtype=">f8").reshape(3, 4))
# Full of what a boundary begins with, and of one that differs in its last letter.
C = np.frombuffer(b"\r\n--XbZ\r\n--Xb\r\n-\r\r\n--Xb\r\n--XbX"[:28], dtype="f4")


def npy_of(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def form_of(parts, *, close=True):
    body = b"".join(
        b'--XbX\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), content)
        for name, content in parts
    )
    return body + (b"--XbX--\r\n" if close else b""), {"Content-Type": 'multipart/form-data; boundary="XbX"'}


@given(cuts=st.lists(st.integers(0, 2000), max_size=30))
def test_pieces_do_not_matter(cuts):
    body, headers = form_of([("params", b'{"alpha": 2}'), ("a", npy_of(A)), ("b", npy_of(B)), ("c", npy_of(C))])
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    form = read([body[low:high] for low, high in itertools.pairwise(edges)], headers)
    assert form.params == b'{"alpha": 2}'
    assert {name: bytes(upload.data) for name, upload in form.operands.items()} == {
        "a": A.tobytes(),
        "b": B.tobytes(order="F"),
        "c": C.tobytes(),
    }
    assert form.operands["b"].order == "F"
    assert form.declared["b"].byteswap
    assert not form.declared["a"].byteswap


def test_closing_boundary_is_needed(failing):
    body, headers = form_of([("a", npy_of(A)), ("b", npy_of(B))], close=False)
    failing(MalformedMultipart, [body], headers, match="breaks off")


@pytest.mark.parametrize("missing", [["a"], ["b"], ["a", "b"]])
def test_missing_parts(failing, missing):
    body, headers = form_of([(name, npy_of(A)) for name in ("a", "b") if name not in missing] + [("params", b"{}")])
    failing(InvalidParameters, [body], headers, match=" and ".join(missing))


def test_unknown_double_and_too_many_parts(failing):
    for parts, word in (
        ([("a", npy_of(A)), ("x", b"1")], "unknown part 'x'"),
        ([("a", npy_of(A)), ("a", npy_of(A))], "twice"),
    ):
        body, headers = form_of(parts)
        failing(InvalidParameters, [body], headers, match=word)
    body, headers = form_of([("a", npy_of(A)), ("b", npy_of(A)), ("c", npy_of(A))])
    failing(InvalidParameters, [body], headers, match="unknown part 'c'", names=("a", "b"))


def test_header_claims_more_than_the_body(npy_header, failing):
    header = npy_header("{'descr': '<c16', 'fortran_order': False, 'shape': (1048576, 1048576), }")
    body, headers = form_of([("a", header + b"x" * 100), ("b", npy_of(B))])
    store = failing(BodyTooShort, [body], headers, match="part a")
    assert store.reserved == 0


def test_parts_together_claim_no_more_than_the_body(npy_header, failing):
    header = npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (100, 1), }")
    body, headers = form_of([("a", header + bytes(400)), ("b", header), ("c", header)])
    failing(BodyTooShort, [body], headers)


@pytest.mark.parametrize(
    ("change", "error"), [(lambda data: data + b"y", BodyTooLong), (lambda data: data[:-1], BodyTooShort)]
)
def test_part_length_and_header_must_agree(failing, change, error):
    body, headers = form_of([("a", change(npy_of(A))), ("b", npy_of(B)), ("params", b" " * 100)])
    failing(error, [body], headers, match="part a")


def test_part_must_be_npy(failing):
    for content, error in (
        (b"hello", NpyError),
        (npy_of(A)[:20], InvalidNpy),
        (b"", InvalidNpy),
        (npy_of(np.arange(3)), NpyDtypeError),
    ):
        body, headers = form_of([("a", content)])
        failing(error, [body], headers, match="part a")


def test_params_is_small(failing):
    body, headers = form_of([("params", b" " * (MAX_PARAMS + 1))])
    failing(TooLarge, [body], headers)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Disposition: form-data\r\n\r\n",
        b"Content-Disposition: attachment; name=a\r\n\r\n",
        b"\r\n",
        b"X" * 10_000 + b": 1\r\n\r\n",
        b"".join(b"X-%d: 1\r\n" % index for index in range(100)) + b"\r\n",
        b"Bad Header\r\n\r\n",
    ],
)
def test_part_headers(head, failing):
    failing(
        MalformedMultipart,
        [b"--XbX\r\n" + head + b"\r\n--XbX--\r\n"],
        {"Content-Type": "multipart/form-data; boundary=XbX"},
    )


@pytest.mark.parametrize(
    ("content_type", "error"),
    [
        ("application/json", UnsupportedMediaType),
        ("", UnsupportedMediaType),
        ("multipart/form-data", MalformedMultipart),
        (f"multipart/form-data; boundary={'x' * 71}", MalformedMultipart),
    ],
)
def test_content_type(content_type, error, failing):
    failing(error, [b""], {"Content-Type": content_type})


@given(st.binary(max_size=300))
def test_garbage_is_a_client_error(garbage):
    with pytest.raises((MalformedMultipart, InvalidParameters)):
        read([garbage], {"Content-Type": "multipart/form-data; boundary=XbX"})


def test_length_is_needed():
    with pytest.raises(LengthRequired, match="Content-Length"):
        asyncio.run(
            OneShotForm(MemoryStore(), names=("a", "b"), check=lambda *_: None).read(
                SimpleNamespace(headers={"content-type": "multipart/form-data; boundary=x"})
            )
        )
    with pytest.raises(InvalidRequest):
        read([b""], {"Content-Type": "multipart/form-data; boundary=x", "Content-Length": "-1"})


def test_params_first_refuses_before_the_data():
    seen = []

    def check(params, declared):
        seen.append((params, sorted(declared)))
        if len(declared) == 2:
            raise InvalidParameters("no")

    body, headers = form_of([("params", b"{}"), ("a", npy_of(A)), ("b", npy_of(B))])
    end = body.rindex(B.tobytes(order="F"))

    with pytest.raises(InvalidParameters):
        read([body[:end]], headers, check=check, length=len(body))
    assert seen == [(b"{}", ["a"]), (b"{}", ["a", "b"])]
