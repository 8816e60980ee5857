"""Which request an answer belongs to."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from fake_service import FakeService, echoing, npy, problem

import gemmserve
from gemmserve import AsyncClient, Client

NAME = "Gemmserve-Exchange"


class Crossing:
    """A service whose next answer is the one before it."""

    def __init__(self) -> None:
        self.service = FakeService()
        self.crossed = False
        self.last: httpx.Response | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        last, self.last = self.last, self.service(request)
        if self.crossed:
            assert last is not None
            return httpx.Response(last.status_code, headers=last.headers, content=last.content)
        return self.last


async def test_an_answer_to_another_request_is_never_taken(rng) -> None:
    """Two products of one shape: nothing but its name tells one's answer from the other's."""
    crossing = Crossing()
    a, b = rng.standard_normal((2, 4, 4))
    with Client(transport=httpx.MockTransport(crossing)) as client:
        client.gemm(a, a)
        crossing.crossed = True
        for call in (lambda: client.gemm(b, b), client.health, lambda: client.put(a)):
            with pytest.raises(gemmserve.CrossedAnswer, match="another request"):
                call()
        assert len(crossing.service.requests) == 4  # none was repeated
        crossing.crossed = False
        np.testing.assert_array_equal(client.gemm(b, b), b @ b)
    async with AsyncClient(transport=httpx.MockTransport(crossing)) as awaited:
        crossing.crossed = True
        with pytest.raises(gemmserve.CrossedAnswer):
            await awaited.gemm(b, b)


def test_errors_and_events_are_checked_too(client) -> None:
    other = {NAME: "of-another"}
    crossed = httpx.MockTransport(lambda request: problem(404, "not-found", headers=other))
    with Client(transport=crossed) as connected, pytest.raises(gemmserve.CrossedAnswer):
        connected.health()
    job = client.submit("gemm", np.eye(2), np.eye(2))
    stream = httpx.MockTransport(
        lambda request: httpx.Response(200, headers={"content-type": "text/event-stream", **other})
    )
    with Client(transport=stream) as connected, pytest.raises(gemmserve.CrossedAnswer):
        list(gemmserve.Job(connected, job.info).events())


@pytest.mark.parametrize(
    ("headers", "kind"),
    [({"X-Request-Id": "of-a-server"}, gemmserve.CrossedAnswer), ({}, gemmserve.ProtocolError)],
)
def test_an_answer_that_does_not_say_whose_it_is_is_none(headers, kind) -> None:
    """Such is the answer to a request of another kind of client, and that of an older server."""

    def answer(_: httpx.Request) -> httpx.Response:
        response = npy(np.eye(2))
        response.headers.update(headers)
        return response

    with Client(transport=httpx.MockTransport(answer)) as client, pytest.raises(gemmserve.ProtocolError) as caught:
        client.gemm(np.eye(2), np.eye(2))
    assert type(caught.value) is kind


def test_errors_of_what_is_on_the_way_are_told_as_they_are() -> None:
    refused = httpx.MockTransport(lambda _: httpx.Response(413, text="<h1>too large</h1>"))
    with Client(transport=refused) as client, pytest.raises(gemmserve.TooLarge):
        client.put(np.eye(2))


def test_each_attempt_has_a_name_of_its_own(client, service) -> None:
    service.script += [problem(503, "draining")] * 3
    client.put(np.eye(2))
    names = [request.headers[NAME] for request in service.requests]
    assert len(set(names)) == len(names) == 4


def test_the_fake_echoes() -> None:
    """Else none of the above would mean anything."""
    request = httpx.Request("GET", "http://h", headers={NAME: "x"})
    assert echoing(request, httpx.Response(200)).headers[NAME] == "x"
