"""Plain multipart bodies, cut by searching; whatever else there is, is left alone."""

from __future__ import annotations

import pytest

from gemmserve_service.http.small import forms

DISPOSITION = b'Content-Disposition: form-data; name="%s"'


def part(name, data, *headers):
    return b"\r\n".join([DISPOSITION % name, *headers]) + b"\r\n\r\n" + data


def body(*parts, boundary=b"XbX", end=b"--\r\n"):
    return b"".join(b"--" + boundary + b"\r\n" + each + b"\r\n" for each in parts) + b"--" + boundary + end


class TestCutting:
    def test_what_clients_send(self):
        sent = body(
            part(b"params", b"{}", b"Content-Type: application/json"),
            part(b"a", b"\x93NUMPY one\r\n", b"Content-Type: application/x-npy").replace(
                b'name="a"', b'name="a"; filename="a.npy"'
            ),
            b"Content-Type: application/octet-stream\r\n" + part(b"b", b"--XbX\r\n"[2:] + b"two"),
        )
        found = forms.cut(sent, b"XbX")
        assert {name: sent[start:end] for name, (start, end) in found.items()} == {
            "params": b"{}",
            "a": b"\x93NUMPY one\r\n",
            "b": b"XbX\r\ntwo",
        }
        assert forms.cut(sent.removesuffix(b"\r\n"), b"XbX") == found

    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            body(),
            body(part(b"a", b"x"))[2:],
            body(part(b"a", b"x"), end=b""),
            body(part(b"a", b"x"), end=b"-\r\n"),
            body(part(b"a", b"x")) + b"epilogue",
            b"preamble\r\n" + body(part(b"a", b"x")),
            body(part(b"a", b"x"), part(b"a", b"y")),
            body(part(b"a", b"x", b"X-Other: 1")),
            body(part(b"a", b"x", b"Content-Type: application/x-npy-header")),
            body(part(b"a", b"x", b"Content-Transfer-Encoding: base64")),
            body(part(b"A", b"x")),
            body(part(b"a", b"x").replace(b'"a"', b"a")),
            body(part(b"a", b"x").replace(b"\r\n\r\n", b"\r\n" + b" " * 600 + b"\r\n\r\n")),
            body(part(b"a", b"--XbX\r\n")),
        ],
    )
    def test_anything_else_is_left_to_the_parser(self, sent):
        assert forms.cut(sent, b"XbX") is None

    @pytest.mark.parametrize(
        ("value", "boundary"),
        [
            ("multipart/form-data; boundary=abc", b"abc"),
            ("multipart/form-data;boundary=------------------------1f2e", b"------------------------1f2e"),
            ('multipart/form-data; boundary="a b:c"', b"a b:c"),
            ("multipart/form-data; boundary=a b", None),
            ("multipart/form-data; boundary=a;b", None),
            ("multipart/form-data; boundary=", None),
            ("multipart/form-data; boundary=" + "x" * 71, None),
            ("multipart/form-data; charset=utf-8; boundary=abc", None),
            ("multipart/mixed; boundary=abc", None),
            ("", None),
        ],
    )
    def test_boundaries(self, value, boundary):
        assert forms.boundary_of(value) == boundary
