"""Small one-shot bodies, which take a shorter way: the same answers as the longer one, whatever is sent."""

from __future__ import annotations

import asyncio
import json
import random
import re

import numpy as np
import pytest

from gemmserve_service import small_forms
from gemmserve_service.api_keys import Quota
from gemmserve_service.errors import QueueFull
from gemmserve_service.routes import small

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
        found = small_forms.cut(sent, b"XbX")
        assert {name: sent[start:end] for name, (start, end) in found.items()} == {
            "params": b"{}",
            "a": b"\x93NUMPY one\r\n",
            "b": b"XbX\r\ntwo",
        }
        assert small_forms.cut(sent.removesuffix(b"\r\n"), b"XbX") == found

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
        assert small_forms.cut(sent, b"XbX") is None

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
        assert small_forms.boundary_of(value) == boundary


@pytest.fixture
def both(client, monkeypatch):
    """Posts a body the short way and the long way; both answers, without what differs each time."""

    async def post(content, headers, path="/v1/gemm"):
        answers = []
        for most in (small_forms.MOST_BYTES, -1):
            monkeypatch.setattr(small, "MOST_BYTES", most)
            answer = await client.post(path, content=content, headers=headers)
            kept = {
                name: re.sub(r"dur=[\d.]+", "", value)
                for name, value in answer.headers.items()
                if name != "x-request-id"
            }
            answers.append((answer.status_code, kept, answer.content))
        return answers

    return post


@pytest.fixture
def counted(monkeypatch):
    """How many requests took the short way to its end."""
    calls = []
    run = small.run_small

    async def count(*args, **fields):
        calls.append(args)
        return await run(*args, **fields)

    monkeypatch.setattr(small, "run_small", count)
    return calls


@pytest.mark.parametrize(
    ("path", "params", "c"),
    [
        ("/v1/gemm", None, False),
        ("/v1/gemm", {"alpha": [0, 1], "trans_a": "N", "order": "F"}, False),
        ("/v1/gemm", {"beta": 2}, True),
        ("/v1/gemm", {}, True),
        ("/v1/gemm-reduce", {"reduce": "argmax"}, False),
        ("/v1/gemm-reduce", {"reduce": ["sum"], "axis": "n"}, False),
    ],
)
async def test_both_ways_answer_the_same(both, form, npy, random_array, counted, path, params, c):
    parts = [("a", npy(random_array((6, 5)))), ("b", npy(np.asfortranarray(random_array((5, 7), seed=1))))]
    parts += [("c", npy(random_array((6, 7))))] if c else []
    parts += [] if params is None else [("params", json.dumps(params).encode())]
    content, headers = form(parts)
    for _ in range(2):  # the second time the product is known
        short, long = await both(content, headers, path)
        assert short == long
        assert short[0] == 200
    assert len(counted) == 2


async def test_both_ways_refuse_the_same(both, form, npy, npy_header, random_array):
    a, b = ("a", npy(random_array((3, 4)))), ("b", npy(random_array((4, 2))))
    plain, headers = form([a, b])
    cases = [
        form([a])[0],
        form([a, ("b", npy(random_array((5, 2))))])[0],
        form([a, b, ("c", npy(random_array((3, 2)))), ("d", b"")])[0],
        form([a, b, ("params", b"{")])[0],
        form([a, b, ("params", b'{"alpha": "x"}')])[0],
        form([a, b, ("params", b'{"beta": 1}')])[0],
        form([a, ("b", b[1][:-8])])[0],
        form([a, ("b", b[1] + b"12345678")])[0],
        form([a, ("b", b"nothing")])[0],
        form([a, ("b", npy_header("{'descr': '<i4', 'fortran_order': False, 'shape': (4, 2), }") + bytes(32))])[0],
        form([a, ("b", npy(random_array((4, 2)).astype(">c8")))])[0],
        form([a, ("b", npy(np.empty((4, 0), "c8")))])[0],
        form([a, ("b", npy(random_array((4, 2)), version=(2, 0)))])[0],
    ]
    chance = random.Random(7)
    for _ in range(60):
        broken = bytearray(plain)
        for _ in range(chance.choice((1, 1, 3))):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        cases.append(bytes(broken[: chance.choice((len(broken), len(broken), chance.randrange(len(broken))))]))
    seen = set()
    for content in cases:
        short, long = await both(content, headers)
        assert short == long
        seen.add(short[0])
    assert seen >= {200, 400, 422}


async def test_a_key_s_quota_holds_here_too(as_, client, form, npy, random_array, core, problem, counted):
    alice = as_("alice", quota=Quota(inflight_bytes=300))
    content, headers = form([("a", npy(random_array((8, 8)))), ("b", npy(random_array((8, 8))))])
    problem(await alice.post("/v1/gemm", content=content, headers=headers), 429, "quota-exceeded")
    assert counted
    assert core.quotas.inflight_bytes("") == 0


async def test_the_queue_s_limit_and_the_deadline(client, core, spy, form, npy, problem, monkeypatch, counted):
    content, headers = form([("a", npy(np.eye(3))), ("b", npy(np.eye(3)))])
    spy.hold = True
    problem(await client.post("/v1/gemm?timeout_s=0.2", content=content, headers=headers), 504, "timeout")
    request = asyncio.ensure_future(client.post("/v1/gemm", content=content, headers=headers))
    async with asyncio.timeout(30):
        while not core.scheduler.queued:  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.005)

    def full(*_):
        raise QueueFull("full", retry_after_s=7)

    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler.admissions, "_check", full)
        answer = await client.post("/v1/gemm", content=content, headers=headers)
        problem(answer, 429, "queue-full")
        assert answer.headers["retry-after"] == "7"
    request.cancel()
    await asyncio.wait([request])
    assert core.scheduler.queued == 0
    spy.release()
    async with asyncio.timeout(30):
        while core.store.scratch_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert len(counted) == 3
    assert (await client.post("/v1/gemm", content=content, headers=headers)).status_code == 200


def test_a_client_that_hangs_up_cancels_its_product(live, form, npy):
    content, headers = form([("a", npy(np.eye(3))), ("b", npy(np.eye(3)))])
    live.executor.hold = True
    head = f"POST /v1/gemm HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\nContent-Length: {len(content)}\r\n"
    head += f"Content-Type: {headers['Content-Type']}\r\n\r\n"
    connections = [live.connect() for _ in range(2)]
    for connection in connections:
        connection.sendall(head.encode() + content)
    scheduler = live.core.scheduler
    assert eventually(lambda: scheduler.queued + scheduler.running == 2)
    for connection in connections:
        connection.close()
    assert eventually(lambda: scheduler.queued == 0)
    live.executor.release()
    assert eventually(lambda: not scheduler.running and not live.core.store.scratch_bytes)


def eventually(condition, within_s=30.0):
    import time

    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
