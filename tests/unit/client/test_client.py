"""The methods of Client, and that AsyncClient's do the same."""

from __future__ import annotations

import asyncio
import inspect

import httpx
import numpy as np
import pytest
from fake_service import FakeService, nobody_s_address, problem, serving

import gemmserve
from gemmserve import AsyncClient, Client


@pytest.fixture(params=["sync", "async"])
async def call(request, client, async_client):
    """call("gemm", a, b): that method of either client, awaited where it has to be."""
    connected = client if request.param == "sync" else async_client

    async def method(name, /, *args, **kwargs):
        result = getattr(connected, name)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    method.client = connected
    return method


async def value(maybe) -> np.ndarray:
    return await maybe if inspect.isawaitable(maybe) else maybe


async def test_numpy_in_numpy_out_is_one_exchange(call, service, random_complex) -> None:
    a, b, c = random_complex(2, 3, 4), random_complex(4, 5), random_complex(3, 5)
    d = await call("gemm", a, b, c, alpha=1 - 2j, beta=0.5)
    assert isinstance(d, np.ndarray)
    np.testing.assert_allclose(d, (1 - 2j) * (a @ b) + 0.5 * c, rtol=1e-4, atol=1e-4)
    assert service.calls == ["POST /v1/gemm"]


@pytest.mark.parametrize("order", ["C", "F"])
async def test_downloads_go_into_memory_of_the_callers(call, random_complex, order) -> None:
    a = random_complex(6, 4)
    remote = await call("put", a)
    out = np.zeros(a.shape, a.dtype, order=order)
    assert await value(remote.numpy(out=out)) is out
    np.testing.assert_array_equal(out, a)
    for given in (remote, remote.id):
        out[...] = 0
        assert await call("get", given, out=out) is out
        np.testing.assert_array_equal(out, a)
    strided = np.zeros((8, 6), a.dtype)
    await value(remote[::2].mT.numpy(out=strided[::2, ::2]))
    np.testing.assert_array_equal(strided[::2, ::2], a[::2].T)
    assert not strided[1::2].any()
    assert not strided[:, 1::2].any()


async def test_memory_that_does_not_fit_is_refused_before_the_download(call, service, random_complex) -> None:
    remote = await call("put", random_complex(3, 4))
    read_only = np.zeros((3, 4), "c8")
    read_only.flags.writeable = False
    service.requests.clear()
    for out, error, match in (
        (np.zeros((4, 3), "c8"), ValueError, "shape"),
        (np.zeros((3, 4), "c16"), TypeError, "dtype"),
        (np.zeros((3, 4), ">c8"), TypeError, "dtype"),
        (read_only, ValueError, "read-only"),
        ([0.0], TypeError, "NumPy array"),
    ):
        with pytest.raises(error, match=match):
            await value(remote.numpy(out=out))
    assert service.requests == []


async def test_order_and_transposes(call, random_complex) -> None:
    a, b = random_complex(4, 3), random_complex(5, 4)
    d = await call("gemm", a, b, trans_a="C", trans_b="T", order="F")
    assert d.flags.f_contiguous
    np.testing.assert_allclose(d, a.conj().T @ b.T, rtol=1e-5)


async def test_a_remote_operand_keeps_the_result_remote(call, service, random_complex) -> None:
    a, b, c = random_complex(3, 4), random_complex(4, 5), random_complex(3, 5)
    remote = await call("put", a)
    service.requests.clear()
    d = await call("gemm", remote, b, c, beta=1)
    assert not isinstance(d, np.ndarray)
    np.testing.assert_allclose(await value(d.numpy()), a @ b + c, rtol=1e-4, atol=1e-5)
    assert service.calls[:5] == ["POST /v1/arrays"] * 2 + ["POST /v1/jobs"] + ["DELETE /v1/arrays/arr"] * 2
    assert set(service.arrays) == {remote.id, d.id}
    uploads = [request for request in service.requests if request.url.path == "/v1/arrays"]
    assert all(float(request.url.params["ttl_s"]) > 0 for request in uploads)


async def test_reductions(call, random_complex) -> None:
    a, b = random_complex(3, 4), random_complex(4, 5)
    one = await call("gemm_reduce", a, b, reduce="absmax", axis="n")
    np.testing.assert_allclose(one, np.abs(a @ b).max(1), rtol=1e-5)
    several = await call("gemm_reduce", a, b, reduce=["sumsq", "argmax"])
    assert list(several) == ["sumsq", "argmax"]
    np.testing.assert_array_equal(several["argmax"], np.abs(a @ b).argmax(0))
    where = await call("gemm_reduce", a, b, reduce="argmax", axis="n")
    assert where.dtype == np.int64
    np.testing.assert_array_equal(where, np.abs(a @ b).argmax(1))
    assert list(await call("gemm_reduce", a, b, reduce=["sum"])) == ["sum"]
    assert list(await call("gemm_reduce", a, b, return_c=True)) == ["sum", "c"]


async def test_remote_reductions(call, random_complex) -> None:
    a, b = random_complex(3, 4), random_complex(4, 5)
    remote = await call("put", a)
    one = await call("gemm_reduce", remote, b, reduce="absmax")
    np.testing.assert_allclose(await value(one.numpy()), np.abs(a @ b).max(0), rtol=1e-5)
    where = await call("gemm_reduce", remote, b, reduce="argmax")
    assert where.dtype == np.int64
    np.testing.assert_array_equal(await value(where.numpy()), np.abs(a @ b).argmax(0))
    several = await call("gemm_reduce", remote, b, reduce=["sum"], return_c=False)
    assert list(several) == ["sum"]
    assert list(await call("gemm_reduce", remote, b, return_c=True)) == ["sum", "c"]


async def test_what_cannot_work_is_not_sent(call, service, random_complex) -> None:
    a, b = random_complex(3, 4), random_complex(3, 4)
    remote = await call("put", a)
    service.requests.clear()
    with pytest.raises(gemmserve.ShapeMismatch):
        await call("gemm", a, b)
    with pytest.raises(gemmserve.DtypeUnsupported, match="b has dtype int64"):
        await call("gemm", a, np.eye(4, dtype=np.int64))
    with pytest.raises(gemmserve.DtypeUnsupported):
        await call("gemm", remote, [[1, 2]])
    with pytest.raises(gemmserve.ParameterInvalid):
        await call("gemm", a, b, trans_b="H")
    with pytest.raises(gemmserve.ParameterInvalid):
        await call("gemm", a, b, trans_b="T", alpha=float("nan"))
    with pytest.raises(gemmserve.ParameterInvalid, match="beta needs c"):
        await call("gemm", a, b, trans_b="T", beta=1)
    with pytest.raises(gemmserve.ParameterInvalid):
        await call("submit", "invert", remote, remote)
    with pytest.raises(gemmserve.ParameterInvalid):
        await call("submit", "gemm_reduce", remote, remote, remote)
    assert not service.requests


async def test_arrays(call, service) -> None:
    for size in range(4):
        await call("put", np.eye(size), ttl_s=60)
    assert service.requests[0].url.params["ttl_s"] == "60"
    assert [remote.shape for remote in await call("arrays")] == [(3, 3), (2, 2), (1, 1), (0, 0)]
    assert len(await call("arrays", limit=2)) == 2
    remote = await call("array", (await call("arrays"))[0].id)
    np.testing.assert_array_equal(await call("get", remote), np.eye(3))
    np.testing.assert_array_equal(await call("get", remote.id), np.eye(3))
    await call("delete", remote.id)
    for method in ("array", "get", "delete"):
        with pytest.raises(gemmserve.NotFound):
            await call(method, remote.id)


@pytest.mark.parametrize("method", ["arrays", "jobs"])
async def test_everybodys_are_asked_for_by_name(call, service, method) -> None:
    await call(method)
    await call(method, everybody=True)
    assert [request.url.params.get("all") for request in service.requests] == [None, "true"]


async def test_listings_are_read_to_the_last_page(call, service, monkeypatch) -> None:
    monkeypatch.setattr("gemmserve._calls.exchanges.PAGE", 2)
    for size in range(5):
        await call("put", np.eye(size))
    service.requests.clear()
    assert len(await call("arrays")) == 5
    assert len(service.requests) == 3
    assert [remote.shape[0] for remote in await call("arrays", limit=3)] == [4, 3, 2]


async def test_a_digest_goes_with_the_upload_when_asked(call, service) -> None:
    await call("put", np.eye(3))
    assert "content-digest" not in service.requests[-1].headers
    await call("put", np.eye(3), digest=True)
    assert service.requests[-1].headers["content-digest"].startswith("sha-256=:")


@pytest.mark.parametrize("identifier", ["", "a/b", "../jobs", "a?b", "a b", None])
async def test_an_id_never_reaches_another_route(call, service, identifier) -> None:
    for method in ("array", "get", "delete", "job"):
        with pytest.raises(gemmserve.NotFound):
            await call(method, identifier)
    assert not service.requests


async def test_the_server_about_itself(call, service) -> None:
    assert (await call("devices"))[0]["id"] == "cpu"
    assert await call("usage") == {"arrays": 0}
    assert await call("health") == {"status": "ok"}
    assert await call("ready") is True
    service.ready = False
    assert await call("ready") is False


async def test_answers_that_are_no_answers(call, service, random_complex) -> None:
    a = random_complex(2, 2)
    for wrong in (
        httpx.Response(200, content=b"<html>", headers={"content-type": "text/html"}),
        httpx.Response(200, json={"id": "x"}),
        httpx.Response(200, json=[1]),
        httpx.Response(302, headers={"location": "/elsewhere"}),
    ):
        service.script.append(wrong)
        with pytest.raises(gemmserve.ProtocolError):
            await call("put", a)
    for method in ("arrays", "devices", "jobs"):
        service.script.append(httpx.Response(200, json={"something": 1}))
        with pytest.raises(gemmserve.ProtocolError):
            await call(method)
    service.script.append(httpx.Response(200, content=b"x", headers={"content-type": "text/plain"}))
    with pytest.raises(gemmserve.ProtocolError):
        await call("gemm", a, a)


async def test_the_key_and_the_agent_travel() -> None:
    service = FakeService()
    with Client("host:1234/", api_key="s3cret", transport=httpx.MockTransport(service)) as client:
        assert client.url == "http://host:1234"
        client.health()
    sent = service.requests[0].headers
    assert sent["authorization"] == "Bearer s3cret"
    assert sent["user-agent"].startswith("gemmserve/")
    assert sent["accept-encoding"] == "identity"


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:notaport"])
def test_urls_that_are_none(url) -> None:
    with pytest.raises(gemmserve.ParameterInvalid):
        Client(url)


@pytest.mark.parametrize("made", [Client, gemmserve.AsyncClient])
def test_which_server_where_none_is_named(made, monkeypatch) -> None:
    monkeypatch.delenv("GEMMSERVE_SERVER", raising=False)
    assert made().url == "http://127.0.0.1:8000"
    monkeypatch.setenv("GEMMSERVE_SERVER", "gpu.example:9000")
    assert made().url == "http://gpu.example:9000"
    assert made("http://other").url == "http://other"


def test_the_silence_allowed_grows_with_what_is_waited_for(client, service, random_complex) -> None:
    a = random_complex(2, 2)
    remote = client.put(a)
    client.gemm(a, a)
    client.gemm(a, a, timeout=7)
    client.gemm(remote, remote)
    allowed = [request.extensions["timeout"]["read"] for request in service.requests]
    assert allowed == [30.0, 3630.0, 37.0, 60.0]
    assert service.requests[2].url.params["timeout_s"] == "7"
    assert service.requests[3].headers["prefer"] == "wait=30"


def test_nobody_there() -> None:
    retry = gemmserve.RetryPolicy(attempts=1)
    with (
        nobody_s_address() as url,
        Client(url, retry=retry) as nobody,
        pytest.raises(gemmserve.TransportError) as caught,
    ):
        nobody.health()
    assert "gemmserve serve" in str(caught.value)
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


def test_over_a_socket(service, rng) -> None:
    stored = rng.standard_normal((700, 800))
    strided = rng.standard_normal((700, 1600))[:, ::2]
    with serving(service) as url, Client(url) as client:
        np.testing.assert_array_equal(client.put(stored).numpy(), stored)
        np.testing.assert_allclose(client.gemm(stored, strided, trans_b="T"), stored @ strided.T)
        with pytest.raises(gemmserve.NotFound):
            client.get("arr_none")


async def test_over_a_socket_awaited(service, rng) -> None:
    stored = rng.standard_normal((700, 800))
    with serving(service) as url:
        async with AsyncClient(url) as client:
            remotes = await asyncio.gather(*(client.put(stored * n) for n in range(3)))
            for n, remote in enumerate(remotes):
                np.testing.assert_array_equal(await remote.numpy(), stored * n)


def test_a_refusal_in_the_middle_of_an_upload_is_still_read(rng) -> None:
    """The server answers 413 and hangs up while the body is under way; the answer must not be lost."""
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        answer = problem(413, "too-large", "much too large")
        head = f"HTTP/1.1 413 X\r\ncontent-type: application/problem+json\r\ncontent-length: {len(answer.content)}\r\n"
        asked = b""
        while not asked.startswith(b"POST /v1/arrays"):  # before it the client asks which cells there are
            connection, _ = listener.accept()
            with connection:
                asked = connection.recv(1000)
                connection.sendall(head.encode() + b"connection: close\r\n\r\n" + answer.content)
                while connection.recv(1 << 20):
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, Client(url) as client, pytest.raises(gemmserve.TooLarge, match="much too large"):
        client.put(rng.standard_normal((1 << 20,)))
    thread.join()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": 5}, "URL is a string.*not 5"), ({"url": b"http://x"}, "URL is a string"),
        ({"url": "http://127.0.0.1:99999"}, "a port is a number from 1 to 65535"),
        ({"api_key": 5}, "the API key is a string.*not int"), ({"timeout": "x"}, "timeout is a number.*'x'"),
        ({"timeout": None}, "timeout is a number"), ({"timeout": float("nan")}, "timeout is a number"),
        ({"timeout": 0}, "timeout is a number"), ({"connections": -1}, "connections is a number.*-1"),
        ({"connections": 1.5}, "connections is a number"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [gemmserve.Client, gemmserve.AsyncClient])
def test_options_that_make_no_sense_are_refused_at_once(kind, options, said) -> None:
    with pytest.raises(gemmserve.ParameterInvalid, match=said):
        kind(**options)


async def test_a_closed_client_says_so(call, random_complex) -> None:
    remote = await call("put", random_complex(3, 3))
    await call("close")
    for use in (lambda: call("health"), lambda: value(remote.numpy()), lambda: call("put", np.eye(2))):
        with pytest.raises(gemmserve.ClientClosed, match="closed: make another"):
            await use()
    with pytest.raises(gemmserve.ClientClosed):
        await call("__enter__" if isinstance(call.client, Client) else "__aenter__")
    await call("close")  # again does nothing


def test_a_transport_of_an_event_loop_that_has_ended(service) -> None:
    async def of_its_loop(request):
        if asyncio.get_running_loop() is not first:
            raise RuntimeError("Event loop is closed")  # as httpcore's, which holds sockets of its loop
        return service(request)

    client = gemmserve.AsyncClient(transport=httpx.MockTransport(of_its_loop))
    first = asyncio.new_event_loop()
    first.run_until_complete(client.health())
    first.close()
    with pytest.raises(gemmserve.TransportError, match="event loop that has ended: make an AsyncClient"):
        asyncio.run(client.health())


async def test_names_and_labels(call, service) -> None:
    for size in range(3):
        await call("put", np.eye(size), name="weights", labels={"run": str(size), "equation": "a=b"})
    await call("put", np.eye(7))
    assert service.requests[0].url.params.multi_items() == [
        ("name", "weights"), ("label", "run=0"), ("label", "equation=a=b"),
    ]  # fmt: skip
    newest = await call("__getitem__", "weights")
    assert (newest.shape, newest.info.name, newest.info.labels) == ((2, 2), "weights", {"run": "2", "equation": "a=b"})
    assert [found.shape for found in await call("arrays", name="weights", limit=2)] == [(2, 2), (1, 1)]
    assert [found.shape for found in await call("arrays", labels={"run": "1"})] == [(1, 1)]
    assert (await call("arrays"))[0].info.name is None
    with pytest.raises(LookupError, match="no array of the name 'biases'"):
        await call("__getitem__", "biases")
    service.requests.clear()
    for bad in ({"name": 7}, {"labels": {"run": 7}}, {"labels": ["run"]}):
        with pytest.raises(gemmserve.ParameterInvalid, match="string"):
            await call("put", np.eye(2), **bad)
    with pytest.raises(gemmserve.ParameterInvalid):
        await call("__getitem__", 0)
    assert not service.requests


async def test_names_go_with_parts_and_with_jobs(call, service, monkeypatch) -> None:
    monkeypatch.setattr("gemmserve._calls.arrays.PARTS_FROM", 8)
    service.script.append(problem(507, "store-full"))
    with pytest.raises(gemmserve.StoreFull):
        await call("put", np.eye(20), name="weights", labels={"run": "7"})
    sent = service.requests[-1].url
    assert (sent.path, sent.params["name"], sent.params["label"]) == ("/v1/uploads", "weights", "run=7")
    monkeypatch.undo()
    remote = await call("put", np.eye(2))
    job = await call("submit", "gemm", remote, remote, name="product", labels={"run": "7"})
    assert (job.info.fields["request"]["name"], job.info.fields["request"]["labels"]) == ("product", {"run": "7"})


async def test_many_are_deleted_by_one_exchange(call, service, monkeypatch) -> None:
    handles = [await call("put", np.eye(2)) for _ in range(6)]
    service.requests.clear()
    assert await call("delete", handles[0], handles[1].id) == 2
    assert await call("delete", [handles[0], *(each.id for each in handles[1:4])]) == 2, "two were gone"
    assert service.calls == ["POST /v1/deletions"] * 2
    assert await call("delete", []) == 0
    assert list(service.arrays) == [each.id for each in handles[4:]]
    assert "deleted" in repr(handles[0])
    assert "deleted" not in repr(handles[5])
    monkeypatch.setattr("gemmserve.wire.MAX_DELETED", 1)
    assert await call("delete", handles[4:]) == 2
    assert not service.arrays


def failing(what: Exception | tuple[int, str]) -> Exception | httpx.Response:
    """A failure of the service's script: an answer is read once."""
    return what if isinstance(what, Exception) else problem(*what)


@pytest.mark.parametrize(
    "lost",
    [httpx.ReadError("reset"), httpx.RemoteProtocolError("closed"), httpx.ReadTimeout("silent"), (502, "x")],
)
async def test_an_array_that_an_attempt_before_has_deleted_is_deleted(call, service, lost) -> None:
    """Its answer was lost, as where a front is killed."""
    remote = await call("put", np.eye(2))
    del service.arrays[remote.id]
    service.script += [failing(lost), problem(429, "queue-full")]
    assert await call("delete", remote) == 1
    assert "deleted" in repr(remote)


@pytest.mark.parametrize(
    "before",
    [
        [],
        [httpx.ConnectError("refused")],
        [httpx.ProxyError("no tunnel")],
        [(429, "x"), (503, "draining")],
    ],
)
async def test_an_array_that_no_attempt_before_can_have_deleted_is_not_found(call, service, before) -> None:
    remote = await call("put", np.eye(2))
    del service.arrays[remote.id]
    service.script += map(failing, before)
    with pytest.raises(gemmserve.NotFound):
        await call("delete", remote)
    assert not service.script


async def test_arrays_are_deleted_by_what_they_are(call, service) -> None:
    for size in range(5):
        await call("put", np.eye(size), name="weights", labels={"run": str(size % 2)})
    assert await call("delete", name="weights", labels={"run": "1"}, dry_run=True) == 2
    assert len(service.arrays) == 5
    service.deleted_at_once = 2
    assert await call("delete", labels={"run": "0"}) == 3
    assert len(service.arrays) == 2
    remote = (await call("arrays"))[0]
    for wrong in ({"name": "weights"}, {"dry_run": True}, {"older_than_s": 1}, {"labels": {"run": "1"}}):
        with pytest.raises(gemmserve.ParameterInvalid):
            await call("delete", remote, **wrong)
    assert len(service.arrays) == 2


async def test_reprs_of_clients(client, async_client) -> None:
    assert repr(client) == "<Client at http://127.0.0.1:8000>"
    assert repr(async_client) == "<AsyncClient at http://127.0.0.1:8000>"
    with Client("http://me:secret@10.0.0.1:9000") as named:
        assert repr(named) == "<Client at http://10.0.0.1:9000>"
    assert repr(named) == "<Client at http://10.0.0.1:9000 closed>"
    assert repr(Client("unix:/run/a.sock")) == "<Client at unix:/run/a.sock>"
