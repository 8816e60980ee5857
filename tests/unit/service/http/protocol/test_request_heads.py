"""Checks of a request's line and fields, beyond the parser's."""

from __future__ import annotations

import pytest

from gemmserve_service.errors import ServiceError
from gemmserve_service.http.protocol.request_heads import check_head, describe_parser_error

HOST = [(b"host", b"127.0.0.1:8000")]


class TestTargets:
    @pytest.mark.parametrize(
        ("target", "found"),
        [
            (b"/", b"/"),
            (b"/a?b=c", b"/a?b=c"),
            (b"//example.org/a", b"//example.org/a"),
            (b"http://127.0.0.1:8000/a?b", b"/a?b"),
            (b"HTTP://127.0.0.1:8000", b"/"),
            (b"https://127.0.0.1:8000?a=b", b"/?a=b"),
        ],
    )
    def test_become_paths(self, target, found):
        assert check_head("GET", target, "1.1", HOST) == found

    @pytest.mark.parametrize(
        "target",
        [
            b"*",
            b"/a#b",
            b"http://127.0.0.1/",
            b"http://127.0.0.1:8000/#",
            b"ftp://127.0.0.1:8000/",
            b"a/b",
            b"/\xff",
            b"/?\xff",
        ],
    )
    def test_refused(self, target):
        with pytest.raises(ServiceError):
            check_head("GET", target, "1.1", HOST)

    @pytest.mark.parametrize("hosts", [[], HOST * 2])
    def test_a_whole_url_needs_one_host(self, hosts):
        with pytest.raises(ServiceError):
            check_head("GET", b"http://127.0.0.1:8000/", "1.1", hosts)


@pytest.mark.parametrize(
    ("message", "status"),
    [("Content-Length overflow", 413), ("Pause on PRI/Upgrade", 505), ("Invalid character in chunk size", 400)],
)
def test_the_parser_s_messages(message, status):
    assert describe_parser_error(message).status == status
