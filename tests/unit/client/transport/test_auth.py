"""The API key: sent to its server and to nobody else, and in no text that anybody sees."""

from __future__ import annotations

import copy
import logging
import pickle
import pprint
import traceback

import httpx
import numpy as np
import pytest
from fake_service import FakeService, serving

import gemmserve
from gemmserve import AsyncClient, Client
from gemmserve._transport.auth import KeyAuth, auth_of

KEY = "gs_0123456789_SecretSecretSecretSecretSecretSecretSecret0000000"


def client_of(handler, **options):
    return Client("http://host:1234", transport=httpx.MockTransport(handler), **{"api_key": KEY, **options})


def test_sent_with_every_request(service) -> None:
    with client_of(service) as client:
        client.put(np.eye(2)).numpy()
        client.usage()
    assert len(service.requests) >= 3
    assert {request.headers["authorization"] for request in service.requests} == {f"Bearer {KEY}"}


async def test_the_async_client_sends_it_too(service) -> None:
    async with AsyncClient("http://host", api_key=KEY, transport=httpx.MockTransport(service)) as client:
        await client.usage()
    assert service.requests[0].headers["authorization"] == f"Bearer {KEY}"


def test_the_variable(service, monkeypatch) -> None:
    monkeypatch.setenv("GEMMSERVE_API_KEY", f" {KEY}\n")
    for given, sent in ((None, f"Bearer {KEY}"), ("other", "Bearer other"), ("", None)):
        with client_of(service, api_key=given) as client:
            client.usage()
        assert service.requests[-1].headers.get("authorization") == sent


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "käse", "x" * 5000, "nul\0"])
def test_a_key_that_cannot_be_sent_is_refused_unquoted(key) -> None:
    with pytest.raises(gemmserve.ParameterInvalid) as caught:
        Client(api_key=key)
    assert key[:5] not in str(caught.value)


def test_never_to_another_server() -> None:
    """Redirects are not followed; and were they, another origin would not get the key."""
    asked = []

    def redirect(request):
        asked.append(request)
        return httpx.Response(307, headers={"Location": "http://evil.example/v1/usage"})

    with client_of(redirect) as client, pytest.raises(gemmserve.ProtocolError):
        client.usage()
    assert [request.url.host for request in asked] == ["host"]
    auth = auth_of(KEY, "http://host:1234")
    for url in ("http://evil.example/", "http://host:1235/", "https://host:1234/", "http://host/"):
        request = httpx.Request("GET", url)
        next(auth.auth_flow(request))
        assert "authorization" not in request.headers
    request = httpx.Request("GET", "http://host:1234/v1/usage")
    next(auth.auth_flow(request))
    assert request.headers["authorization"] == f"Bearer {KEY}"


def test_in_no_repr(service) -> None:
    with client_of(service) as client:
        remote = client.put(np.eye(2))
        pool = client._io.pool()
        for shown in (client, client._io, client._io.__dict__, pool._take().__dict__, remote, client._io.auth):
            assert "Secret" not in repr(shown)
            assert "Secret" not in pprint.pformat(shown)
    assert repr(auth_of(KEY, "http://host")) == "KeyAuth(***)"


def test_not_pickled_by_accident() -> None:
    auth = KeyAuth(KEY, "http://host")
    for dump in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError):
            dump(auth)


@pytest.mark.parametrize("status", [401, 403, 500])
def test_in_no_error_and_no_traceback(status) -> None:
    """Also of one that shows the frames' variables, as many tools do."""
    refuse = lambda _: httpx.Response(status, json={"type": "/problems/unauthorized", "detail": "no"})
    with client_of(refuse, retry=gemmserve.RetryPolicy(attempts=1)) as client:
        with pytest.raises(gemmserve.APIError) as caught:
            client.usage()
        shown = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "Secret" not in shown
    assert "Secret" not in repr(caught.value.__dict__)


@pytest.mark.parametrize("transport", [None, httpx.HTTPTransport()])
def test_in_no_log(caplog, transport) -> None:
    """Logs of ours, httpx's and httpcore's, at their most talkative; over a real socket."""
    caplog.set_level(logging.DEBUG)
    service = FakeService()
    with serving(service) as url, Client(url, api_key=KEY, transport=transport) as client:
        client.put(np.eye(2)).numpy()
    assert service.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert caplog.records
    assert "Secret" not in caplog.text


def test_a_file_that_holds_no_certificates(tmp_path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name in ("ca.pem", "missing.pem"):
        with pytest.raises(gemmserve.ParameterInvalid, match=name):
            Client("https://host", verify=str(tmp_path / name))


class TestTypedErrors:
    @pytest.mark.parametrize(
        ("status", "problem", "headers", "kind", "fields"),
        [
            (401, {"type": "/problems/unauthorized"}, {}, gemmserve.Unauthorized, {}),
            (403, {"type": "/problems/forbidden", "scope": "submit"}, {}, gemmserve.Forbidden, {"scope": "submit"}),
            (
                429,
                {"type": "/problems/quota-exceeded", "quota": "queued_jobs", "limit": 2, "used": 2},
                {"Retry-After": "7"},
                gemmserve.QuotaExceeded,
                {"quota": "queued_jobs", "limit": 2, "used": 2, "retry_after": 7.0},
            ),
            (
                507,
                {"type": "/problems/quota-exceeded", "quota": "stored_bytes"},
                {},
                gemmserve.QuotaExceeded,
                {"quota": "stored_bytes", "retry_after": None, "limit": None},
            ),
            (408, {"type": "/problems/request-timeout"}, {}, gemmserve.APIError, {"slug": "request-timeout"}),
            (431, {"type": "/problems/head-too-large"}, {}, gemmserve.InvalidRequest, {}),
            (503, {"type": "/problems/too-many-connections"}, {"Retry-After": "1"}, gemmserve.NotReady, {}),
        ],
    )
    def test_by_slug(self, status, problem, headers, kind, fields) -> None:
        answer = lambda _: httpx.Response(status, json={**problem, "detail": "x"}, headers=headers)
        with client_of(answer, retry=gemmserve.RetryPolicy(attempts=1)) as client, pytest.raises(kind) as caught:
            client.usage()
        for name, value in fields.items():
            assert getattr(caught.value, name) == value
        assert caught.value.status == status

    @pytest.mark.parametrize(
        ("status", "slug", "attempts"),
        [(401, "unauthorized", 1), (403, "forbidden", 1), (507, "quota-exceeded", 1), (429, "quota-exceeded", 7),
         (408, "request-timeout", 7)],
    )  # fmt: skip
    def test_only_what_time_heals_is_tried_again(self, status, slug, attempts) -> None:
        asked = []

        def answer(request):
            asked.append(request)
            return httpx.Response(status, json={"type": f"/problems/{slug}", "detail": "x"})

        with client_of(answer, retry=gemmserve.RetryPolicy(attempts=7)) as client:
            client._io._sleep = lambda _: None
            with pytest.raises(gemmserve.APIError):
                client.usage()
        assert len(asked) == attempts
