"""Accept and Prefer."""

from __future__ import annotations

import pytest

from gemmserve_service.http.headers.preferences import Preference, choose_media_type, parse_prefer

NPY, BIN = "application/x-npy", "application/octet-stream"


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, NPY),
        ("", NPY),
        ("*/*", NPY),
        ("application/*", NPY),
        (BIN, BIN),
        (f"{NPY};q=0.5, {BIN}", BIN),
        (f"{NPY};q=0.5, {BIN};q=0.5", NPY),
        (f"*/*, {NPY};q=0", BIN),
        ("text/html, */*;q=0.1", NPY),
        ("TEXT/HTML, APPLICATION/OCTET-STREAM", BIN),
        ("text/html", None),
        ("*/*;q=0", None),
        (f"{NPY};q=nonsense", None),
    ],
)
def test_accept(accept, chosen):
    assert choose_media_type(accept, (NPY, BIN)) == chosen


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], Preference()),
        (["wait=10"], Preference(wait_s=10)),
        (["respond-async, wait=10"], Preference(respond_async=True, wait_s=10)),
        (["respond-async", 'wait="7"; x=y'], Preference(respond_async=True, wait_s=7)),
        (["wait=3, wait=9"], Preference(wait_s=3)),
        (["wait=-1", "wait=soon", "handling=lenient"], Preference()),
    ],
)
def test_prefer(values, expected):
    assert parse_prefer(values) == expected


def test_what_was_applied():
    assert Preference().applied(0) is None
    assert Preference(respond_async=True).applied(0) == "respond-async"
    assert Preference(respond_async=True, wait_s=100).applied(60.0) == "respond-async, wait=60"
