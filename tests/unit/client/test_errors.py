"""Answers become the right errors."""

from __future__ import annotations

import inspect
import json
import re

import httpx
import pytest
from fake_service import problem

import gemmserve
from gemmserve import _errors


def made(status: int, body: bytes = b"", **headers: str) -> Exception:
    return _errors.from_answer(status, httpx.Headers({k.replace("_", "-"): v for k, v in headers.items()}), body)


@pytest.mark.parametrize("cls", sorted(set(_errors._BY_SLUG.values()), key=lambda cls: cls.__name__))
def test_every_slug_has_its_class(cls) -> None:
    response = problem(422, cls.default_slug, "why")
    error = _errors.from_answer(422, response.headers, response.content)
    assert type(error) is cls
    assert (str(error), error.detail, error.slug, error.status) == ("why", "why", cls.default_slug, 422)
    assert error.problem["title"] == cls.default_slug
    assert error.request_id == "req-1"


@pytest.mark.parametrize(
    ("slug", "cls"),
    [
        ("draining", "NotReady"),
        ("idempotency-mismatch", "IdempotencyConflict"),
        ("out-of-device-memory", "DeviceError"),
    ],
)
def test_further_slugs(slug, cls) -> None:
    assert type(_errors.from_problem({"type": f"/problems/{slug}"})).__name__ == cls


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (400, "InvalidRequest"), (401, "Unauthorized"), (403, "Forbidden"), (404, "NotFound"), (405, "APIError"),
        (410, "Gone"), (413, "TooLarge"), (418, "APIError"), (422, "InvalidRequest"), (429, "Overloaded"),
        (500, "ServerError"), (502, "ServerError"), (503, "NotReady"), (504, "ServerError"), (507, "StoreFull"),
    ],
)  # fmt: skip
def test_an_unknown_slug_or_none_falls_back_to_the_status(status, cls) -> None:
    response = problem(status, "from-the-future")
    assert type(_errors.from_answer(status, response.headers, response.content)).__name__ == cls
    error = made(status, b"<html>  a proxy's\npage </html>", content_type="text/html")
    assert type(error).__name__ == cls
    assert "a proxy's page" in str(error)
    assert "no answer of a gemmserve server" in str(error)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff"])
def test_a_problem_that_is_none_still_makes_an_error(body) -> None:
    assert isinstance(made(500, body, content_type="application/problem+json"), gemmserve.ServerError)


def test_extras() -> None:
    error = _errors.from_problem({"type": "/problems/compute-unsupported", "available": ["fp32"]})
    assert error.available == ["fp32"]
    assert _errors.from_problem({"type": "/problems/parameter-invalid", "parameter": "beta"}).parameter == "beta"
    assert made(429, retry_after="7").retry_after == 7.0
    assert made(429, retry_after="Wed, 21 Oct 2026 07:28:00 GMT").retry_after is None
    assert made(429, retry_after="nan").retry_after is None
    finer = json.dumps({"type": "/problems/queue-full", "retry_after_s": 0.08}).encode()
    assert made(429, finer, content_type="application/problem+json", retry_after="1").retry_after == 0.08


def test_a_redirect_is_not_followed_but_explained() -> None:
    error = made(301, location="https://elsewhere/")
    assert isinstance(error, gemmserve.ProtocolError)
    assert "https://elsewhere/" in str(error)


def test_the_drawn_tree_is_the_tree() -> None:
    """The docstring's drawing names every class, under its parent."""
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in _errors.__doc__.splitlines():
        if match := re.match(r"^    ([│ ]*)([├└]── )?([A-Z]\w+)", line):
            depth, name = len(match[1]) + len(match[2] or ""), match[3]
            while above and above[-1][0] >= depth:
                above.pop()
            drawn[name] = above[-1][1] if above else "Exception"
            above.append((depth, name))
    classes = [v for v in vars(_errors).values() if inspect.isclass(v) and issubclass(v, gemmserve.GemmserveError)]
    assert drawn == {cls.__name__: cls.__bases__[0].__name__ for cls in classes}
