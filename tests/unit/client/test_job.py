"""Jobs: states, waiting, results, and the error that each end stands for. Both clients."""

from __future__ import annotations

import copy
import inspect
import json
from functools import partial
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest

import gemmserve
from gemmserve import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Iterator


async def done(result):
    return await result if inspect.isawaitable(result) else result


async def items(events) -> list:
    return [each async for each in events] if hasattr(events, "__aiter__") else list(events)


async def test_submit_wait_result(connected, service, random_complex) -> None:
    a, b = random_complex(3, 4), random_complex(4, 5)
    service.polls_until_done = 2
    remote = await done(connected.put(a))
    job = await done(connected.submit("gemm", remote.H.conj(), b.T, trans_a="T", trans_b="T", priority=5, ttl_s=60))
    assert (job.state, job.done) == ("queued", False)
    assert service.jobs[job.id]["request"] | {"b": 0} == {
        "op": "gemm", "a": remote.id, "b": 0, "trans_a": "N", "trans_b": "T", "priority": 5, "ttl_s": 60,
    }  # fmt: skip
    assert set(service.arrays) == {remote.id}  # b's upload was deleted once the job had it
    assert (await done(job.refresh())).state == "queued"
    result = await done(job.result())
    np.testing.assert_allclose(await done(result.numpy()), a @ b, rtol=1e-5)
    assert (job.state, job.done, job.info.algorithm) == ("succeeded", True, "numpy")
    assert job.info.timings == {"kernel_s": 0.5}
    assert (job.info.finished_at - job.info.started_at).total_seconds() == 0.5


async def test_a_job_is_found_again(connected, random_complex) -> None:
    a = random_complex(3, 3)
    first = await done(connected.submit("gemm", a, a))
    second = await done(connected.submit("gemm_reduce", a, a, reduce=["sum", "absmax"]))
    assert [job.id for job in await done(connected.jobs())] == [second.id, first.id]
    again = await done(connected.job(second.id))
    assert list(await done(again.result())) == ["sum", "absmax"]
    with pytest.raises(gemmserve.NotFound):
        await done(connected.job("job_none"))


async def test_waiting_has_an_end(connected, service, clock, random_complex) -> None:
    a = random_complex(2, 2)
    service.polls_until_done = 10**6
    job = await done(connected.submit("gemm", a, a))
    began = clock.now
    with pytest.raises(gemmserve.JobTimeout, match="still queued") as caught:
        await done(job.wait(timeout=20))
    assert 20 <= clock.now - began < 21
    assert caught.value.job is job
    assert max(clock.slept) <= 1.0  # the fake answers at once: the client does not spin, nor sleep long
    with pytest.raises(TimeoutError):
        await done(job.result(timeout=0))
    assert service.jobs[job.id]["state"] == "queued"


async def test_cancel(connected, service, random_complex) -> None:
    a = random_complex(2, 2)
    job = await done(connected.submit("gemm", a, a))
    assert (await done(job.cancel())).state == "cancelled"
    with pytest.raises(gemmserve.JobCancelled) as caught:
        await done(job.result())
    assert caught.value.job is job
    service.script.append(httpx.Response(204))  # a server that says nothing is asked
    assert (await done(job.cancel())).state == "cancelled"


@pytest.mark.parametrize(
    ("state", "slug", "cls", "cause"),
    [
        ("failed", "worker-crashed", gemmserve.JobFailed, gemmserve.WorkerCrashed),
        ("failed", "from-the-future", gemmserve.JobFailed, gemmserve.ServerError),
        ("failed", None, gemmserve.JobFailed, type(None)),
        ("failed", "timeout", gemmserve.JobTimeout, gemmserve.JobTimeout),
        ("expired", None, gemmserve.JobTimeout, type(None)),
    ],
)
async def test_ends_that_are_errors(connected, service, random_complex, state, slug, cls, cause) -> None:
    a = random_complex(2, 2)
    job = await done(connected.submit("gemm", a, a))
    error = {"type": f"/problems/{slug}", "title": "t", "status": 500, "detail": "it broke"} if slug else None
    service.jobs[job.id] |= {"state": state, "error": error}
    assert (await done(job.wait())).state == state  # waiting is for the end, whatever it is
    with pytest.raises(cls) as caught:
        await done(job.result())
    assert type(caught.value.__cause__) is cause
    assert caught.value.job is job
    if slug:
        assert caught.value.problem == error
        assert str(caught.value) == "it broke"


async def test_a_failed_product_of_remote_operands_raises_it(connected, service, random_complex) -> None:
    a = await done(connected.put(random_complex(2, 2)))
    failed = {"id": "job_1", "state": "failed", "error": {"type": "/problems/device-error", "detail": "ECC"}}
    service.script.append(httpx.Response(200, json=failed))
    with pytest.raises(gemmserve.JobFailed, match="ECC") as caught:
        await done(connected.gemm(a, a))
    assert caught.value.slug == "device-error"
    assert caught.value.job.id == "job_1"


async def test_events(connected, service, random_complex) -> None:
    a = random_complex(2, 2)
    service.polls_until_done = 2
    job = await done(connected.submit("gemm", a, a))
    seen = await items(job.events())
    assert [info.state for info in seen] == ["queued", "queued", "queued", "succeeded"]
    assert job.state == "succeeded"
    service.jobs.clear()
    with pytest.raises(gemmserve.NotFound):
        await items(job.events())


def test_repr(client, random_complex) -> None:
    job = client.submit("gemm", random_complex(2, 2), random_complex(2, 2))
    assert repr(job) == f"<Job {job.id} gemm queued at http://127.0.0.1:8000>"


async def test_a_result_shows_what_it_is(connected, random_complex) -> None:
    remote = await done(connected.put(random_complex(3, 4)))
    job = await done(connected.submit("gemm", remote, remote.H, order="F"))
    found = [await done(job.result()), await done((await done(connected.job(job.id))).result())]
    found += [await done((await done(connected.submit_many([{"op": "gemm", "a": remote, "b": remote.H}])))[0].result())]
    found += await items(connected.map([{"op": "gemm", "a": remote, "b": remote.H}]))
    for result in found:
        assert "complex64[3, 3] 72 B" in repr(result)


async def test_it_is_known_without_asking_where_the_operands_are(connected, service, random_complex) -> None:
    remote = await done(connected.put(random_complex(3, 4)))
    job = await done(
        connected.submit("gemm_reduce", remote, random_complex(4, 5), reduce=["absmax", "argmax"], axis="n")
    )
    await done(job.wait())
    asked = len(service.requests)
    found = await done(copy.copy(job).result())
    assert [repr(x).split()[2] for x in found.values()] == ["float32[3]", "int64[3]"]
    assert len(service.requests) == asked
    await done((await done(connected.job(job.id))).result())
    assert service.calls[asked:] == ["GET /v1/jobs/job", "GET /v1/arrays/arr", "GET /v1/arrays/arr"]


async def test_products_of_remote_operands_take_one_exchange(connected, service, random_complex) -> None:
    remote = await done(connected.put(random_complex(3, 4)))
    asked = len(service.requests)
    product = await done(remote @ remote.H)
    assert service.calls[asked:] == ["POST /v1/jobs"]
    assert (product.shape, product.dtype) == ((3, 3), np.complex64)
    asked = len(service.requests)
    assert len(await items(connected.map([{"op": "gemm", "a": remote, "b": remote.H}] * 5))) == 5
    assert not [call for call in service.calls[asked:] if call.startswith("GET /v1/arrays")]


async def test_the_rest_of_a_result_is_asked_for_by_name(connected, service, random_complex) -> None:
    remote = await done(connected.put(random_complex(3, 4)))
    product = await done(remote @ remote.H)
    if isinstance(connected, AsyncClient):
        with pytest.raises(RuntimeError, match=r"await ra\.refresh\(\)"):
            product.info  # noqa: B018
    else:
        assert product.info.shape == (3, 3)
    asked = len(service.requests)
    assert (await done(product.refresh())) is product
    assert service.calls[asked:] == ["GET /v1/arrays/arr"]
    assert product.info.nbytes == 72
    assert product.T.info == product.info
    await done(product.delete())
    with pytest.raises(gemmserve.NotFound):
        await done(product.refresh())


class Streams:
    """A job's events by one stream after the other, each of which ends as the test says; `asked` for with these ids."""

    def __init__(self, service, job: gemmserve.Job, *streams: list[tuple[int, str] | Exception]) -> None:
        self.asked: list[str | None] = []
        self._fields = service.jobs[job.id]
        service.script += [partial(self._answer, events) for events in streams]

    def _answer(self, events: list, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.headers.get("last-event-id"))
        shown = {name: value for name, value in self._fields.items() if name not in {"polls", "operands"}}

        def told() -> Iterator[bytes]:
            for event in events:
                if isinstance(event, Exception):
                    raise event
                attempt, state = event
                document = json.dumps({**shown, "attempt": attempt, "state": state})
                yield f"id: {attempt}.{state}\nevent: job\ndata: {document}\n\n".encode()

        class Stream(httpx.SyncByteStream, httpx.AsyncByteStream):
            def __iter__(self):
                return told()

            async def __aiter__(self):
                for piece in told():
                    yield piece

        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Stream())


async def test_events_go_on_behind_what_came_last(connected, service) -> None:
    job = await done(connected.submit("gemm", np.eye(2), np.eye(2)))
    broken = httpx.ReadError("broken")
    streams = Streams(
        service, job,
        [(0, "queued"), (1, "running"), broken],
        [broken],
        [(1, "running")],  # known, and then it ends although the job has not
        [(1, "running"), (2, "queued"), broken],
        [(2, "running"), (2, "running"), (2, "succeeded")],
    )  # fmt: skip
    seen = await items(job.events())
    assert [(info.attempt, info.state) for info in seen] == [
        (0, "queued"), (1, "running"), (2, "queued"), (2, "running"), (2, "running"), (2, "succeeded"),
    ]  # fmt: skip
    assert streams.asked == [None, "1.running", "1.running", "1.running", "2.queued"]


async def test_streams_that_always_break_are_given_up(connected, service, clock) -> None:
    job = await done(connected.submit("gemm", np.eye(2), np.eye(2)))
    Streams(service, job, [(1, "running")], *[[(1, "running")]] * 100)
    with pytest.raises(gemmserve.TransportError, match="ended before"):
        await items(job.events())
    assert sum(clock.slept) == pytest.approx(60)


async def test_streams_that_were_good_for_a_while_are_not(connected, service, clock) -> None:
    """A proxy that ends each one after a minute: for an hour."""
    job = await done(connected.submit("gemm", np.eye(2), np.eye(2)))

    good = [(1, "running")]
    streams = Streams(service, job)

    def slowly(events, request):
        clock.now += 60
        return streams._answer(events, request)

    service.script += [partial(slowly, events) for events in [*[good] * 60, [(1, "succeeded")]]]
    assert [info.state for info in await items(job.events())] == ["running", "succeeded"]


async def test_submit_many(connected, service, random_complex) -> None:
    a, b = random_complex(3, 4), random_complex(4, 5)
    remote = await done(connected.put(a))
    asked = [{"op": "gemm", "a": remote, "b": b}, {"op": "gemm_reduce", "a": a, "b": b, "reduce": ["sum"]}] * 2
    posts = len(service.requests)
    jobs = await done(connected.submit_many(asked))
    assert [job.info.op for job in jobs] == ["gemm", "gemm_reduce"] * 2
    sent = [(request.method, request.url.path) for request in service.requests[posts:]]
    # `a` and `b` are in several of them, and sent once.
    assert sent == [("POST", "/v1/arrays")] * 2 + [("POST", "/v1/jobs")] + [
        ("DELETE", f"/v1/arrays/{each}") for each in gone(service, sent)
    ]
    assert set(service.arrays) == {remote.id}
    np.testing.assert_allclose(await done((await done(jobs[2].result())).numpy()), a @ b, rtol=1e-5)
    assert list(await done(jobs[3].result())) == ["sum"]  # a list is answered by a dict, as `submit` does
    assert await done(connected.submit_many([])) == []


async def test_an_array_that_an_iterator_fills_again_is_not_sent(connected, service, random_complex) -> None:
    a, buffer = random_complex(2, 2), np.empty((2, 2), np.complex64)

    def filled(count):
        for number in range(count):
            buffer[:] = number
            yield buffer

    def products():
        return ({"op": "gemm", "a": a, "b": each} for each in filled(3))

    asked = list(service.requests)
    calls = [
        lambda: connected.submit_many(products()),
        lambda: connected.gemm_many(a, filled(3)),
        lambda: items(connected.map(products())),
    ]
    for call in calls:
        with pytest.raises(gemmserve.ParameterInvalid, match="product 0: b has been filled again") as raised:
            await done(call())
        assert raised.value.problem["item"] == 0
    assert service.requests == asked
    one_by_one = await items(connected.map(products(), in_flight=1))
    assert len(one_by_one) == 3


def gone(service, sent) -> list[str]:
    return [path.rpartition("/")[2] for method, path in sent if method == "DELETE"]


async def test_many_go_in_several_exchanges(connected, service, random_complex) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    jobs = await done(connected.submit_many([{"op": "gemm", "a": remote, "b": remote}] * 1200))
    assert len({job.id for job in jobs}) == 1200
    assert [request.url.path for request in service.requests].count("/v1/jobs") == 3


async def test_those_before_the_refused_ones_are_cancelled(connected, service, random_complex) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    refusal = {"type": "/problems/shape-mismatch", "title": "", "status": 422, "detail": "job 7: no", "item": 7}
    service.script.extend([None, httpx.Response(422, json=refusal)])
    with pytest.raises(gemmserve.ShapeMismatch, match=r"^product 507: no$") as caught:
        await done(connected.submit_many([{"op": "gemm", "a": remote, "b": remote}] * 600))
    assert caught.value.problem["item"] == 507
    assert {job["state"] for job in service.jobs.values()} == {"cancelled"}
    assert len(service.jobs) == 500


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"op": "gemm", "a": np.ones((2, 2))}, gemmserve.ParameterInvalid),
        ({"op": "syrk", "a": np.ones((2, 2)), "b": np.ones((2, 2))}, gemmserve.ParameterInvalid),
        ({"op": "gemm", "a": np.ones((2, 2)), "b": np.ones((3, 2))}, gemmserve.ShapeMismatch),
    ],
)
async def test_what_is_wrong_is_found_before_anything_is_sent(connected, service, wrong, kind) -> None:
    good = {"op": "gemm", "a": np.ones((2, 2)), "b": np.ones((2, 2))}
    with pytest.raises(kind, match=r"^product 1: ") as caught:
        await done(connected.submit_many([good, wrong, good]))
    assert caught.value.problem["item"] == 1
    assert service.requests == []


async def test_an_answer_that_lists_others_is_no_answer(connected, service, random_complex) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    service.script.append(httpx.Response(202, json={"jobs": []}))
    with pytest.raises(gemmserve.ProtocolError):
        await done(connected.submit_many([{"op": "gemm", "a": remote, "b": remote}]))
