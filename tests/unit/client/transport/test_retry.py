"""When a request is repeated, how long it waits before, and what stays the same across attempts."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from fake_service import problem

import gemmserve
from gemmserve import RetryPolicy
from gemmserve._transport.retry import Attempts

BROKEN = httpx.ReadError("broken")


def test_pauses_double_up_to_the_cap_and_end_with_the_attempts_if_they_are_counted(clock) -> None:
    attempts = Attempts(RetryPolicy(attempts=5, base_s=1, cap_s=3), clock=clock, uniform=lambda _, high: high)
    error = gemmserve.TransportError("broken")
    assert [attempts.pause_after(error) for _ in range(5)] == [1, 2, 3, 3, None]


def test_the_jitter_is_full(clock) -> None:
    asked = []
    attempts = Attempts(RetryPolicy(base_s=1), clock=clock, uniform=lambda low, high: asked.append((low, high)) or 0.0)
    assert attempts.pause_after(gemmserve.TransportError("x")) == 0.0
    assert asked == [(0.0, 1.0)]


def test_retry_after_is_honoured_unless_it_exceeds_the_time(clock) -> None:
    def pause(retry_after: float, **limits: float) -> float | None:
        attempts = Attempts(RetryPolicy(**limits), clock=clock, uniform=lambda *_: 0.0)
        return attempts.pause_after(gemmserve.QueueFull("full", status=429, retry_after=retry_after))

    assert pause(20) == 20
    assert pause(20, total_s=19) is None
    attempts = Attempts(RetryPolicy(total_s=60), clock=clock, uniform=lambda *_: 0.0)
    clock.now += 3600  # a long transfer that breaks may still be repeated: the time counts from the failure
    assert attempts.pause_after(gemmserve.QueueFull("full", retry_after=59)) == 59
    clock.now += 59
    assert attempts.pause_after(gemmserve.QueueFull("full", retry_after=2)) is None
    attempts = Attempts(RetryPolicy(), deadline=clock.now + 5, clock=clock, uniform=lambda *_: 0.0)
    assert attempts.pause_after(gemmserve.QueueFull("full", retry_after=6)) is None


def test_what_is_left_after_a_pause(clock) -> None:
    attempts = Attempts(RetryPolicy(base_s=1), deadline=clock.now + 5, clock=clock, uniform=lambda _, high: high)
    assert (attempts.pause_after(gemmserve.TransportError("broken")), attempts.spare_s) == (1, 4)
    clock.now += 4.5
    assert (attempts.pause_after(gemmserve.TransportError("broken")), attempts.spare_s) == (0.5, 0)


@pytest.mark.parametrize("limits", [{"attempts": 0}, {"base_s": -1}, {"total_s": -1}, {"first_s": -1}])
def test_a_policy_makes_sense(limits) -> None:
    with pytest.raises(gemmserve.ParameterInvalid):
        RetryPolicy(**limits)


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"), httpx.ConnectTimeout("slow"), BROKEN, httpx.WriteError("broken"),
        httpx.RemoteProtocolError("gone"), httpx.ReadTimeout("silent"), problem(429, "queue-full"),
        problem(429, "quota-exceeded"), problem(502, "x"), problem(503, "draining"), problem(504, "gateway"),
        problem(400, "digest-mismatch"),
    ],
)  # fmt: skip
def test_what_passes_is_repeated(client, service, clock, failure) -> None:
    service.script += [failure, failure]
    remote = client.put(np.eye(3))
    np.testing.assert_array_equal(service.arrays[remote.id], np.eye(3))
    assert service.calls == ["POST /v1/arrays"] * 3
    assert clock.slept == [0.1, 0.2]


@pytest.mark.parametrize(
    ("failure", "cls"),
    [
        (problem(422, "shape-mismatch"), gemmserve.ShapeMismatch),
        (problem(404, "not-found"), gemmserve.NotFound),
        (problem(401, "unauthorized"), gemmserve.Unauthorized),
        (problem(500, "worker-crashed"), gemmserve.WorkerCrashed),
        (problem(504, "timeout"), gemmserve.JobTimeout),
        (problem(507, "store-full"), gemmserve.StoreFull),
        (problem(422, "idempotency-mismatch"), gemmserve.IdempotencyConflict),
        (httpx.LocalProtocolError("illegal header"), gemmserve.TransportError),
    ],
)
def test_what_does_not_pass_is_raised_at_once(client, service, clock, failure, cls) -> None:
    service.script.append(failure)
    with pytest.raises(cls):
        client.put(np.eye(3))
    assert len(service.requests) == 1
    assert not clock.slept


def test_a_server_that_starts_again_is_waited_for_and_no_longer(client, service, clock) -> None:
    """Tries go on for a minute; the last one is at its end, and the last error is raised."""
    client.health()
    began = clock.now
    service.script += [httpx.ConnectError("refused")] * 14
    client.put(np.eye(3))
    assert 30 < clock.now - began < 60
    began = clock.now
    service.script += [httpx.ConnectError("refused")] * 17 + [problem(429, "queue-full")]
    with pytest.raises(gemmserve.QueueFull):
        client.put(np.eye(3))
    assert clock.now - began == pytest.approx(60)
    assert not service.script


def test_a_server_that_never_was_there_is_not(client, service, clock) -> None:
    began = clock.now
    service.script += [httpx.ConnectError("refused")] * 100
    with pytest.raises(gemmserve.TransportError, match="is `gemmserve serve` running there"):
        client.put(np.eye(3))
    assert clock.now - began == pytest.approx(5)


def test_bytes_that_change_every_time_are_given_up(client, service, clock) -> None:
    service.script += [problem(400, "digest-mismatch")] * 10
    with pytest.raises(gemmserve.DigestMismatch):
        client.put(np.eye(3))
    assert len(service.requests) == 5


def test_the_time_given_bounds_repeating(client, service, clock, random_complex) -> None:
    """Case of a job that is waited for: the server is not asked for longer than that, however long it is away."""
    a = client.put(random_complex(2, 2))
    job = client.submit("gemm", a, a)
    began = clock.now
    service.script += [BROKEN] * 100
    with pytest.raises(gemmserve.TransportError):
        job.wait(timeout=7)
    assert clock.now - began == pytest.approx(7)
    with pytest.raises(gemmserve.TransportError):
        client.gemm(a, a, timeout=11)
    assert clock.now - began == pytest.approx(18)


def test_a_submission_keeps_its_key_across_attempts_and_makes_one_job(client, service) -> None:
    a = client.put(np.eye(3))

    def answer_lost(request: httpx.Request) -> None:
        service.requests.pop()  # it will be counted again
        service(request)
        raise BROKEN

    service.script += [answer_lost, None, problem(409, "idempotency-conflict")]  # None: the lost answer itself
    service.requests.clear()
    client.submit("gemm", a, a)
    keys = {request.headers["idempotency-key"] for request in service.requests}
    assert len(service.requests) == 3
    assert len(keys) == len(service.jobs) == 1
    client.submit("gemm", a, a)
    assert len(service.jobs) == 2


def test_a_one_shot_is_repeated_whole(client, service, random_complex) -> None:
    a, b = random_complex(40, 30), random_complex(30, 20)
    service.script += [problem(503, "not-ready", headers={"retry-after": "2"}), BROKEN]
    np.testing.assert_array_equal(client.gemm(a, b), a @ b)


def test_a_download_that_breaks_off_begins_again(client, service, rng) -> None:
    stored = rng.standard_normal((300, 40))
    remote = client.put(stored)

    class Breaks(httpx.SyncByteStream):
        def __iter__(self):
            yield b"\x93NUMPY"
            raise BROKEN

    service.script += [httpx.Response(200, headers={"content-type": "application/x-npy"}, stream=Breaks())]
    np.testing.assert_array_equal(remote.numpy(), stored)
    assert service.calls[-2:] == ["GET /v1/arrays/arr/data"] * 2


async def test_the_async_client_repeats_too(async_client, service, clock) -> None:
    service.script += [BROKEN, problem(429, "queue-full", headers={"retry-after": "3"})]
    await async_client.put(np.eye(3))
    assert clock.slept == [0.1, 3.0]
