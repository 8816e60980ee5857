"""Submissions and looks that pass ASGI by: nobody can tell but by the time that it takes."""

from __future__ import annotations

import contextlib
import json
import socket

import numpy as np
import pytest
import structlog
from raw_connection import Raw, eventually, until

from gemmserve import Client, NotFound
from gemmserve_service.errors import StoreFull
from gemmserve_service.http.routes import jobs
from gemmserve_service.http.small import exchange
from gemmserve_service.http.small.route_exchange import RouteExchange, SubmissionExchange
from gemmserve_service.tenancy.api_keys import Scope
from gemmserve_service.tenancy.keyring import create_key

pytestmark = pytest.mark.usefixtures("counted")  # for its patience: a slow machine must not decide the way

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def taken(monkeypatch):
    """The exchanges of submissions."""
    return noted(monkeypatch, SubmissionExchange)


@pytest.fixture
def looks(monkeypatch):
    """The exchanges of all routes but the one-shots'."""
    return noted(monkeypatch, RouteExchange)


def noted(monkeypatch, kind):
    """Return the list of exchanges of that kind, as they come."""
    seen = []
    accept = exchange.SmallRequests.accept

    def note(*arguments):
        found = accept(*arguments)
        if isinstance(found, kind):
            seen.append(found)
        return found

    monkeypatch.setattr(exchange.SmallRequests, "accept", note)
    return seen


@pytest.fixture
def job(live, random_array):
    with Client(live.url) as client:
        return {"op": "gemm", "a": client.put(random_array((6, 5))).id, "b": client.put(random_array((5, 7))).id}


@pytest.fixture
def raw(live):
    with contextlib.closing(Raw(live)) as connection:
        yield connection


def post(raw, document, *further, **fields):
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    raw.send(content, JSON, *further, path="/v1/jobs", **fields)


def in_chunks(raw, document, *further):
    """The same by the way of the app, which reads chunks."""
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    head = raw.head(content, JSON, "Transfer-Encoding: chunked", *further, path="/v1/jobs")
    head = head.replace(f"Content-Length: {len(content)}\r\n".encode(), b"")
    raw.socket.sendall(head + (b"%x\r\n%b\r\n" % (len(content), content) if content else b"") + b"0\r\n\r\n")


def test_what_the_client_library_sends_goes_this_way(live, random_array, taken):
    a, b = random_array((6, 5)), random_array((5, 7), seed=1)
    with Client(live.url) as client:
        ra, rb = client.put(a), client.put(b)
        for _ in range(3):
            np.testing.assert_allclose((ra @ rb).numpy(), a @ b, rtol=1e-4, atol=1e-5)
        client.submit("gemm", ra, rb).wait(60)
        assert len(client.submit_many([{"op": "gemm", "a": ra, "b": rb}] * 3)) == 3
    assert len(taken) == 5
    # The second product's head is the first one's, but for its Idempotency-Key.
    assert [found.cycle is None for found in taken[:3]] == [False, True, True]


def test_each_has_its_own_key(raw, job, taken):
    ids = set()
    for key in ("k1", "k2", "k1", "k2"):
        post(raw, job, f"Idempotency-Key: {key}", "Prefer: wait=60")
        status, headers, body = raw.answer()
        assert (status, headers["preference-applied"]) == (200, "wait=60")
        ids.add((key, json.loads(body)["id"]))
    assert len(ids) == 2
    assert [found.cycle is None for found in taken] == [False, True, True, True]


@pytest.mark.parametrize(
    "line", ["idempotency-key: one", "Idempotency-Key: a.b:c", "Idempotency-Key: one ", "Idempotency-Key:one"]
)
def test_a_key_counts_however_it_is_spelt(raw, job, line):
    """Repeated past the parser it was lost: the same job ran again."""
    ids = []
    for _ in range(3):
        post(raw, job, line)
        status, _, content = raw.answer()
        assert status in {200, 202}
        ids.append(json.loads(content)["id"])
    assert len(set(ids)) == 1
    post(raw, job, line.replace("one", "two").replace("a.b", "b.a"))
    assert json.loads(raw.answer()[2])["id"] not in ids


def test_a_key_without_characters_is_no_other_request_s(raw, job):
    for _ in range(2):
        post(raw, job, "Idempotency-Key: one")
        assert raw.answer()[0] in {200, 202}
    post(raw, job, "Idempotency-Key: ")
    assert raw.answer()[0] == 422


def test_the_answer_is_the_app_s(raw, job, taken):
    """But for what is another in every answer."""
    cases = [
        (job, ["Prefer: wait=60"]),
        ({"jobs": [job] * 2}, ["Prefer: wait=60"]),
        (job, ["Idempotency-Key: k", "Prefer: wait=60"]),
        (job | {"alpha": 2}, ["Idempotency-Key: k"]),
        (job | {"alpah": 2}, []),
        (job | {"a": "arr_" + "0" * 26}, []),
        (job | {"b": job["a"]}, []),
        ({"jobs": [job, job | {"b": job["a"]}]}, []),
        (b"{", []),
        (b"[]", []),
        (b"\xff", []),
        (b'{"op": "gemm", "op": "gemm"}', []),
    ]
    found = []
    for send in (post, in_chunks):
        seen = []
        for document, further in cases:
            send(raw, document, *further)
            status, headers, body = raw.answer()
            told = json.loads(body)
            kept = {name: headers.get(name) for name in ("content-type", "cache-control", "x-frame-options")}
            slug = told.get("type")
            jobs = told.get("jobs", [told])
            seen.append((status, sorted(set(headers) - {"idempotent-replayed"}), kept, slug, told.get("detail"),
                         [each.get("state") for each in jobs], sorted(told)))  # fmt: skip
        found.append(seen)
    assert found[0] == found[1]
    assert [status for status, *_ in found[0]] == [200, 200, 200, 422, 422, 404, 422, 422, 400, 422, 400, 400]
    assert len(taken) == len(cases)


@pytest.mark.parametrize(
    "unusual",
    [
        ["Content-Encoding: identity"],
        ["Content-Digest: sha-256=:AAAA:"],
        [f"Idempotency-Key: {'k' * 256}"],
        ["Idempotency-Key: k", "Idempotency-Key: k"],
        ["Prefer: wait=1", "Prefer: respond-async"],
    ],
)
def test_what_is_unusual_is_the_app_s(raw, job, taken, unusual):
    post(raw, job, *unusual)
    assert raw.answer()[0] in {200, 202, 400, 415, 422}
    assert not taken


def test_other_bodies_are_the_app_s(raw, job, taken):
    for content, headers, path, status in (
        (b"", JSON, "/v1/jobs", 400),
        (json.dumps(job).encode(), {"Content-Type": "text/plain"}, "/v1/jobs", 415),
        (json.dumps(job).encode(), JSON, "/v1/jobs?wait=3", 202),
    ):
        raw.send(content, headers, path=path)
        assert raw.answer()[0] == status
    assert not taken


def test_pipelined_submissions_are_answered_in_their_order(raw, job):
    content = json.dumps(job).encode()
    requests = [
        raw.head(content, JSON, f"X-Request-Id: r{number}", *further, path="/v1/jobs") + content
        for number, further in enumerate([["Prefer: wait=60"], [], ["Prefer: wait=60"], ["Transfer-Encoding: x"]])
    ]
    raw.socket.sendall(b"".join(requests[:3]))
    answers = [raw.answer() for _ in range(3)]
    assert [answer[1]["x-request-id"] for answer in answers] == ["r0", "r1", "r2"]
    assert [answer[0] for answer in answers] == [200, 202, 200]


def test_who_hangs_up_while_waiting_cancels_nothing(live, job):
    live.executor.hold = True
    scheduler = live.core.scheduler
    with structlog.testing.capture_logs() as lines:
        with contextlib.closing(Raw(live)) as connection:
            post(connection, job, "Idempotency-Key: k", "Prefer: wait=60")
            until(lambda: scheduler.queued + scheduler.running == 1)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        until(lambda: live.connections == 0)
        live.executor.release()
        until(lambda: [line for line in tuple(lines) if line["event"] == "request" and line["path"] == "/v1/jobs"])
    (line,) = [line for line in lines if line["event"] == "request" and line["path"] == "/v1/jobs"]
    assert (line["status"], line["method"], line["route"]) == (499, "POST", "/v1/jobs")
    with contextlib.closing(Raw(live)) as connection:
        post(connection, job, "Idempotency-Key: k", "Prefer: wait=60")
        status, headers, body = connection.answer()
    assert (status, headers["idempotent-replayed"], json.loads(body)["state"]) == (200, "true", "succeeded")


def test_a_server_that_ends_answers_who_waits(serve, spy, random_array):
    live = serve()
    with Client(live.url) as client:
        remote = client.put(random_array((5, 5)))
    spy.hold = True
    with contextlib.closing(Raw(live)) as connection:
        post(connection, {"op": "gemm", "a": remote.id, "b": remote.id}, "Prefer: wait=60")
        until(lambda: live.core.scheduler.queued + live.core.scheduler.running == 1)
        live.call(lambda: (live.core.scheduler.drain(), live.core.jobs.release_waiters()))
        assert connection.answer()[0] == 202
        spy.release()
        post(connection, {"op": "gemm", "a": remote.id, "b": remote.id})
        assert connection.answer()[0] == 503


def test_counted_logged_and_audited(serve, tmp_path, random_array, taken):
    live = serve(audit_log=tmp_path / "audit")
    key_id, text = create_key(live.core.settings.data_dir, "alice")
    until(lambda: key_id in live.core.keyring.current.keys)
    with Client(live.url, api_key=text) as client:
        remote = client.put(random_array((5, 5)))
        job = client.submit("gemm", remote, remote)
    assert len(taken) == 1
    value = live.app.state.metrics.registry.get_sample_value
    labels = {"route": "/v1/jobs", "method": "POST", "status": "202"}
    assert eventually(lambda: value("gemmserve_http_requests_total", labels) == 1)
    assert eventually(lambda: "/v1/jobs" in (tmp_path / "audit").read_text())
    (line,) = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines() if "/v1/jobs" in line]
    assert (line["created"], line["key"], line["outcome"]) == (f"/v1/jobs/{job.id}", key_id, "done")
    with contextlib.closing(Raw(live)) as connection:
        post(connection, {"op": "gemm", "a": remote.id, "b": remote.id})
        assert connection.answer()[0] == 401
    assert len(taken) == 1


def test_what_nobody_foresaw_is_a_500(raw, live, job, monkeypatch):
    async def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(live.core.jobs, "accept", fail)
    with structlog.testing.capture_logs() as lines:
        post(raw, job)
        status, _, body = raw.answer()
    assert (status, json.loads(body)["type"]) == (500, "/problems/internal")
    assert "ZeroDivisionError" not in body.decode()
    assert [line for line in lines if line["event"] == "unexpected error"]


def by_its_form(taken):
    """Whether the last submission was that of a job whose form was known, without a task."""
    return taken[-1]._accepted is not None


@pytest.fixture
def known(live, raw, job):
    """A job whose form is known; those before it have ended."""
    for _ in range(2):
        post(raw, job)
        assert raw.answer()[0] == 202
    until(lambda: not live.core.scheduler.running and not live.core.scheduler.queued)
    return job


def test_a_job_of_a_known_form_is_answered_as_any_other(live, raw, known, taken):
    live.executor.hold = True
    post(raw, known, "Prefer: wait=0")  # which the worker has, and others wait for
    raw.answer()
    found = []
    for send, further in ((post, []), (post, ["Idempotency-Key: k"]), (in_chunks, [])):
        send(raw, known, *further)
        status, headers, body = raw.answer()
        told = json.loads(body)
        assert headers["location"] == f"/v1/jobs/{told['id']}"
        assert int(headers["content-length"]) == len(body)
        own = {"location", "x-request-id", "date"}
        kept = {name: value for name, value in headers.items() if name not in own}
        found.append((status, kept, {**told, "id": "", "created_at": ""}))
    assert by_its_form(taken)
    assert len(taken) == 3
    assert found[0] == found[1] == found[2]
    assert found[0][2]["state"] == "queued"
    assert found[0][2]["request"]["a"] == known["a"]
    live.executor.release()


def test_a_known_form_runs_on_other_operands(live, raw, known, taken, random_array):
    a, b = random_array((3, 4), seed=5), random_array((4, 2), seed=6)
    with Client(live.url) as client:
        ra, rb = client.put(a), client.put(b)
        post(raw, {"op": "gemm", "a": ra.id, "b": rb.id})
        told = json.loads(raw.answer()[2])
        assert by_its_form(taken)
        assert told["request"]["a"] == ra.id
        done = client.job(told["id"]).wait(60)
        np.testing.assert_allclose(done.result().numpy(), a @ b, rtol=1e-4, atol=1e-5)


def test_what_is_wrong_with_a_job_of_a_known_form(raw, known, taken):
    nobody = "arr_" + "0" * 26
    for wrong in ({"a": nobody}, {"b": known["a"]}):
        found = []
        for send in (post, in_chunks):
            send(raw, known | wrong)
            status, _, body = raw.answer()
            found.append((status, {**json.loads(body), "instance": None}))
        assert found[0] == found[1]
        assert found[0][0] in {404, 422}
    post(raw, known)
    assert raw.answer()[0] == 202
    assert by_its_form(taken)


def test_keys_of_jobs_of_a_known_form(raw, known, taken):
    post(raw, known, "Idempotency-Key: k")
    _, headers, first = raw.answer()
    assert by_its_form(taken)
    assert "idempotent-replayed" not in headers
    post(raw, known, "Idempotency-Key: k")
    status, headers, again = raw.answer()
    assert (status, headers["idempotent-replayed"]) == (202, "true")
    assert json.loads(again)["id"] == json.loads(first)["id"]
    post(raw, known | {"a": known["b"]}, "Idempotency-Key: k")
    status, _, body = raw.answer()
    assert (status, json.loads(body)["type"]) == (422, "/problems/idempotency-mismatch")


def test_a_key_whose_first_request_is_being_taken_in(live, raw, known, taken):
    live.call(lambda: live.core.jobs._keys.arrive("", "k", "digest"))
    post(raw, known, "Idempotency-Key: k")
    assert json.loads(raw.answer()[2])["type"] == "/problems/idempotency-mismatch"
    live.call(lambda: live.core.jobs._keys.arrived("", "k"))
    post(raw, known, "Idempotency-Key: k")
    assert raw.answer()[0] == 202
    assert not live.core.jobs._keys._arriving


def test_a_job_of_a_known_form_that_cannot_be_put_on_record(live, raw, known, taken):
    def write(statement):
        live.call(lambda: live.core.database.write_soon(lambda db: db.execute(statement)))

    write("CREATE TRIGGER refuse BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'no room'); END")
    post(raw, known, "Idempotency-Key: k")
    status, _, body = raw.answer()
    assert (status, json.loads(body)["type"]) == (500, "/problems/internal")
    until(lambda: not live.core.jobs._live)
    write("DROP TRIGGER refuse")
    post(raw, known, "Idempotency-Key: k")
    status, headers, _ = raw.answer()
    assert (status, headers.get("idempotent-replayed")) == (202, None)
    assert by_its_form(taken)


def test_a_known_form_is_waited_for_without_a_task(live, raw, known, taken):
    live.executor.hold = True
    post(raw, known, "Prefer: wait=60", "Idempotency-Key: k")
    until(lambda: live.core.scheduler.running)
    until(lambda: live.tasks == 0)  # those of the requests before
    live.executor.release()
    status, headers, body = raw.answer()
    told = json.loads(body)
    assert (status, headers["preference-applied"], told["state"]) == (200, "wait=60", "succeeded")
    ask(raw, f"/v1/jobs/{told['id']}")
    assert raw.answer()[2] == body
    in_chunks(raw, known, "Prefer: wait=60")  # by the way of the app
    _, others, _ = raw.answer()
    own = {"location", "x-request-id", "date", "server-timing", "content-length"}
    assert headers.keys() == others.keys()
    assert {name: headers[name] for name in headers.keys() - own} == {
        name: others[name] for name in others.keys() - own
    }
    post(raw, known, "Prefer: wait=60", "Idempotency-Key: k")
    status, headers, again = raw.answer()
    assert (status, headers["idempotent-replayed"], again) == (200, "true", body)


def test_a_known_form_is_waited_for_no_longer_than_was_asked_for(live, raw, known):
    live.executor.hold = True
    post(raw, known, "Prefer: wait=1")
    status, headers, body = raw.answer()
    assert (status, headers["preference-applied"], json.loads(body)["state"]) == (202, "wait=1", "running")
    live.executor.release()
    until(lambda: not live.core.jobs._live)
    post(raw, known, "Prefer: wait=60")
    assert raw.answer()[0] == 200, "the next answer on this connection is the next request's"


def test_a_server_that_ends_answers_who_waits_for_a_known_form(live, raw, known):
    live.executor.hold = True
    post(raw, known, "Prefer: wait=60")
    until(lambda: live.core.scheduler.running)
    live.call(lambda: (live.core.scheduler.drain(), live.core.jobs.release_waiters()))
    assert raw.answer()[0] == 202
    live.executor.release()


def test_who_hangs_up_while_waiting_for_a_known_form_cancels_nothing(live, known):
    live.executor.hold = True
    with structlog.testing.capture_logs() as lines:
        with contextlib.closing(Raw(live)) as connection:
            post(connection, known, "Prefer: wait=60")
            until(lambda: live.core.scheduler.running)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        before = len(live.core.jobs._recent)
        live.executor.release()
        until(lambda: len(live.core.jobs._recent) > before and not live.core.jobs._live)
        until(lambda: 499 in [line["status"] for line in tuple(lines) if line["event"] == "request"])


@pytest.mark.parametrize("how", ["the record", "the answer"])
def test_a_known_form_that_is_waited_for_in_vain_is_a_500(live, raw, known, monkeypatch, how):
    def fail(*_):
        raise ZeroDivisionError

    if how == "the answer":
        monkeypatch.setattr(jobs, "waited_for", fail)
    else:
        trigger = "CREATE TRIGGER refuse BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'no room'); END"
        live.call(lambda: live.core.database.write_soon(lambda db: db.execute(trigger)))
    post(raw, known, "Prefer: wait=60")
    status, _, body = raw.answer()
    assert (status, json.loads(body)["type"]) == (500, "/problems/internal")
    until(lambda: not live.core.jobs._live)


def test_what_nobody_foresaw_about_a_known_form_is_a_500(raw, live, known, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(live.core.jobs, "accept_now", fail)
    with structlog.testing.capture_logs() as lines:
        post(raw, known)
        status, _, body = raw.answer()
    assert (status, json.loads(body)["type"]) == (500, "/problems/internal")
    assert "ZeroDivisionError" not in body.decode()
    assert [line for line in lines if line["event"] == "unexpected error"]


def test_who_hangs_up_at_once_has_submitted_a_job_of_a_known_form(live, known):
    before = len(live.core.jobs._recent)
    with contextlib.closing(Raw(live)) as connection:
        post(connection, known, "Idempotency-Key: k")
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    until(lambda: len(live.core.jobs._recent) > before and not live.core.jobs._live)
    with contextlib.closing(Raw(live)) as connection:
        post(connection, known, "Idempotency-Key: k")
        status, headers, body = connection.answer()
    assert (status, headers["idempotent-replayed"], json.loads(body)["state"]) == (202, "true", "succeeded")


def test_many_jobs_of_known_forms_are_answered_as_any_others(live, raw, known):
    live.executor.hold = True
    jobs = [known, known | {"alpha": 2}] * 100
    document = json.dumps({"jobs": jobs}).encode()
    found = []
    for send in (post, post, in_chunks):
        send(raw, document)
        status, headers, body = raw.answer()
        told = json.loads(body)["jobs"]
        assert len({each["id"] for each in told}) == len(jobs)
        state = [{**each, "id": "", "created_at": "", "started_at": None, "estimated_s": None} for each in told]
        found.append((status, headers["content-type"], state))
    assert found[0][0] == 202
    assert found[0][1] == found[1][1] == found[2][1]
    assert {json.dumps(each) for _, _, states in found[1:] for each in states} == {json.dumps(found[2][2][-1])}
    live.executor.release()


def test_many_jobs_of_which_one_is_wrong(live, raw, known):
    nobody = "arr_" + "0" * 26
    for wrong, slug, field in (
        (known | {"a": nobody}, "not-found", None),
        (known | {"b": known["a"]}, "shape-mismatch", None),
        (known | {"alpah": 1}, "parameter-invalid", "jobs.77.alpah"),
        (known | {"a": "x"}, "parameter-invalid", "jobs.77.a"),
    ):
        found = []
        for send in (post, post, in_chunks):
            send(raw, {"jobs": [known] * 77 + [wrong] + [known] * 100})
            status, _, body = raw.answer()
            found.append((status, {**json.loads(body), "instance": None}))
        assert found[0] == found[1] == found[2]
        told = found[0][1]
        assert told["type"] == f"/problems/{slug}"
        assert told["errors"][0]["field"] == field if field else told["item"] == 77
    until(lambda: not live.core.jobs._live)


def ask(raw, target, *further, method="GET"):
    head = [f"{method} {target} HTTP/1.1", f"Host: 127.0.0.1:{raw.port}", *further]
    raw.socket.sendall("".join(f"{line}\r\n" for line in [*head, ""]).encode())


def by_the_app(raw, target, *further, method="GET"):
    ask(raw, target, *further, "Content-Encoding: identity", method=method)


def test_looks_and_deletions_of_the_client_library(live, random_array, looks):
    with Client(live.url) as client:
        arrays = [client.put(random_array((5, 5), seed=seed)) for seed in range(3)]
        for _ in range(3):
            client.job(client.submit("gemm", arrays[0], arrays[1]).id)  # whose look is sent however fast it is done
        for array in arrays:
            assert client.array(array.id).shape == (5, 5)
            array.delete()
    kinds = [(each._scope["method"], each._scope["route"].path, each.cycle is None) for each in looks]
    for method, path in (
        ("GET", "/v1/jobs/{job_id}"),
        ("GET", "/v1/arrays/{array_id}"),
        ("DELETE", "/v1/arrays/{array_id}"),
    ):
        assert [past for *other, past in kinds if other == [method, path]] == [False, True, True]


def test_each_look_is_at_its_own(raw, job, looks):
    ids = []
    for _ in range(3):
        post(raw, job, "Prefer: wait=60")
        ids.append(json.loads(raw.answer()[2])["id"])
    for job_id in (*ids, *ids):
        ask(raw, f"/v1/jobs/{job_id}?wait=2.5", "X-Request-Id: r")
        status, headers, body = raw.answer()
        assert (status, headers["x-request-id"]) == (200, "r")
        assert json.loads(body)["id"] == job_id
    with structlog.testing.capture_logs() as lines:
        ask(raw, f"/v1/jobs/{ids[0]}?wait=2.5", "X-Request-Id: r")
        assert raw.answer()[0] == 200
        until(lambda: [line for line in tuple(lines) if line.get("path") == f"/v1/jobs/{ids[0]}"])
    assert {line["route"] for line in lines if line["event"] == "request"} == {"/v1/jobs/{job_id}"}
    assert [each.cycle is None for each in looks[3:]] == [False, *[True] * 6]


def test_a_job_in_memory_is_looked_at_without_a_task(live, raw, job, looks):
    live.executor.hold = True
    post(raw, job)
    job_id = json.loads(raw.answer()[2])["id"]
    until(lambda: live.core.scheduler.running)
    for wait in ("", "", "?wait=0.02", "?wait=0.02"):  # the second time past the parser
        ask(raw, f"/v1/jobs/{job_id}{wait}")
        assert json.loads(raw.answer()[2])["state"] == "running"
    ask(raw, f"/v1/jobs/{job_id}?wait=60")
    until(lambda: len(looks) == 6)
    until(lambda: live.tasks == 0)  # those of the requests before
    live.executor.release()
    told = raw.answer()[2]
    assert json.loads(told)["state"] == "succeeded"
    for wait in ("", "?wait=60"):
        ask(raw, f"/v1/jobs/{job_id}{wait}")
        assert raw.answer()[2] == told


def test_a_job_that_was_refused_is_not_found_by_who_waits_for_it(live, raw, job):
    live.executor.hold = True
    post(raw, job)
    job_id = json.loads(raw.answer()[2])["id"]
    ask(raw, f"/v1/jobs/{job_id}?wait=60")
    until(lambda: live.core.jobs._live[job_id]._told)
    live.call(lambda: live.core.jobs._refuse([live.core.jobs._live[job_id]], StoreFull("no room")))
    assert raw.answer()[0] == 404
    live.executor.release()


def test_many_looks_at_once_are_answered_one_by_one(raw, job, looks):
    post(raw, job, "Prefer: wait=60")
    job_id = json.loads(raw.answer()[2])["id"]
    for _ in range(2):
        ask(raw, f"/v1/jobs/{job_id}")
        assert raw.answer()[0] == 200
    raw.socket.sendall(f"GET /v1/jobs/{job_id} HTTP/1.1\r\nHost: 127.0.0.1:{raw.port}\r\n\r\n".encode() * 600)
    assert {json.loads(raw.answer()[2])["id"] for _ in range(600)} == {job_id}
    assert len(looks) == 603


def test_the_answers_to_looks_are_the_app_s(raw, job, looks):
    post(raw, job, "Prefer: wait=60")
    done = json.loads(raw.answer()[2])
    result = done["result"]["d"]
    targets = [
        f"/v1/jobs/{done['id']}", f"/v1/jobs/{done['id']}?wait=1", f"/v1/jobs/job_{'0' * 26}", "/v1/jobs/x?wait=1",
        f"/v1/arrays/{job['a']}", f"/v1/arrays/arr_{'0' * 26}", "/v1/arrays/x",
    ]  # fmt: skip
    cases = [("GET", target) for target in targets]
    cases += [("DELETE", "/v1/arrays/x"), ("DELETE", "/v1/arrays/{}"), ("DELETE", "/v1/arrays/{}")]
    post(raw, job, "Prefer: wait=60")
    other = json.loads(raw.answer()[2])["result"]["d"]
    del looks[:]
    found = []
    for send, array in ((ask, result), (by_the_app, other)):
        for _ in range(2):  # the second time past the parser
            seen = []
            for method, target in cases:
                send(raw, target.format(array), method=method)
                status, headers, body = raw.answer()
                told = json.loads(body) if body else None
                told = told and {name: value for name, value in told.items() if name not in {"request_id", "instance"}}
                kept = {name: value for name, value in headers.items() if name not in {"date", "x-request-id"}}
                seen.append((status, method, kept, told))
            found.append(seen[:-2])
            statuses = [status for status, *_ in seen]
            gone = [204, 404] if len(found) % 2 else [404, 404]
            assert statuses == [200, 200, 404, 404, 200, 404, 404, 404, *gone]
    assert found[0] == found[1] == found[2] == found[3]
    assert len(looks) == 2 * len(cases)


DELETIONS = [
    {"ids": ["arr_" + "0" * 26]},
    {"ids": ["{a}"], "dry_run": True},
    {"ids": ["{a}", "{a}", "arr_" + "0" * 26]},
    {"labels": {"run": "7"}},
    {"older_than_s": 1e11},
    {"ids": []},
    {"ids": ["x"]},
    {"ids": ["{b}"], "dryrun": True},
    {},
    b"{",
]


def test_the_answers_to_deletions_of_many_are_the_app_s(live, raw, random_array, looks):
    found = []
    with Client(live.url) as client:
        for coding in ((), (), ("Content-Encoding: identity",)):
            a, b = (client.put(random_array((5, 5))) for _ in "ab")
            seen = []
            for document in DELETIONS:
                content = document if isinstance(document, bytes) else json.dumps(document).encode()
                content = content.replace(b"{a}", a.id.encode()).replace(b"{b}", b.id.encode())
                raw.send(content, JSON, *coding, path="/v1/deletions")
                status, headers, body = raw.answer()
                told = {
                    name: value for name, value in json.loads(body).items() if name not in {"request_id", "instance"}
                }
                kept = {name: value for name, value in headers.items() if name not in {"date", "x-request-id"}}
                seen.append((status, kept, told))
            found.append(seen)
            b.delete()
            with pytest.raises(NotFound):
                client.delete(a.id)
    assert found[0] == found[1] == found[2]
    assert [status for status, *_ in found[0]] == [200, 200, 200, 200, 200, 422, 422, 422, 422, 400]
    taken = [each for each in looks if each._scope["path"] == "/v1/deletions"]
    assert len(taken) == 2 * len(DELETIONS)
    assert [each.cycle is None for each in taken[len(DELETIONS) :]] == [True] * len(DELETIONS)


@pytest.mark.parametrize(
    ("path", "further", "content"),
    [
        ("/v1/deletions?all=true", (), b'{"ids":["x"]}'),
        ("/v1/deletions", ("Content-Encoding: gzip",), b"x"),
        ("/v1/deletions", (), b'{"ids":["%s"]}' % (b"x" * (1 << 18))),
    ],
)
def test_unusual_deletions_of_many_are_the_app_s(raw, looks, path, further, content):
    raw.send(content, JSON, *further, path=path)
    assert raw.answer()[0] >= 400
    assert not looks


def test_a_choice_that_is_too_long_is_refused_likewise(raw, looks):
    raw.send(b'{"ids":["%s"]}' % (b"x" * (64 << 10)), JSON, path="/v1/deletions")
    status, _, body = raw.answer()
    assert (status, json.loads(body)["type"].rpartition("/")[2]) == (413, "too-large")
    assert looks


def ask_states(raw, *ids, further=(), **question):
    raw.send(json.dumps({"ids": ids, **question}).encode(), JSON, *further, path="/v1/job-states")


def test_states_of_jobs_in_memory_are_told_without_a_task(live, raw, job, looks):
    post(raw, job, "Prefer: wait=60")
    done = json.loads(raw.answer()[2])["id"]
    live.executor.hold = True
    post(raw, job)
    held = json.loads(raw.answer()[2])["id"]
    until(lambda: live.core.scheduler.running)
    for wait in (0, 0, 0.02, 0.02):  # the second time past the parser
        ask_states(raw, held, done, wait=wait)
        assert [each["state"] for each in json.loads(raw.answer()[2])["jobs"]] == ["running", "succeeded"]
    ask_states(raw, held, done, wait=60)
    until(lambda: live.core.jobs._live[held]._told)
    until(lambda: live.tasks == 0)  # those of the requests before
    live.executor.release()
    told = raw.answer()[2]
    assert [each["state"] for each in json.loads(told)["jobs"]] == ["succeeded", "succeeded"]
    ask_states(raw, held, done, wait=60)
    assert raw.answer()[2] == told
    assert len(looks) == 2 + 6


def test_states_of_many_at_once_are_answered_one_by_one(raw, job):
    post(raw, job, "Prefer: wait=60")
    job_id = json.loads(raw.answer()[2])["id"]
    content = json.dumps({"ids": [job_id]}).encode()
    request = raw.head(content, JSON, path="/v1/job-states") + content
    raw.socket.sendall(request * 300)
    assert {json.loads(raw.answer()[2])["jobs"][0]["id"] for _ in range(300)} == {job_id}


def test_the_answers_about_states_are_the_app_s(live, raw, job, looks):
    post(raw, job, "Prefer: wait=60")
    done = json.loads(raw.answer()[2])["id"]
    post(raw, job, "Prefer: wait=60")
    forgotten = json.loads(raw.answer()[2])["id"]
    live.call(lambda: live.core.jobs._recent.pop(forgotten))
    unknown = "job_" + "0" * 26
    cases = [
        {"ids": [done]}, {"ids": [done, forgotten, unknown]}, {"ids": [done, forgotten], "wait": 1},
        {"ids": [forgotten], "wait": 1, "final": True}, {"ids": [unknown]}, {"ids": []}, {"ids": ["x"]},
        {"ids": [done], "x": 1}, b"{",
        b'{"ids": ["%s"]}' % (b"x" * (16 << 10)),
    ]  # fmt: skip
    del looks[:]
    found = []
    for coding in ((), (), ("Content-Encoding: identity",)):
        seen = []
        for case in cases:
            content = case if isinstance(case, bytes) else json.dumps(case).encode()
            raw.send(content, JSON, *coding, path="/v1/job-states")
            status, headers, body = raw.answer()
            told = {name: value for name, value in json.loads(body).items() if name not in {"request_id", "instance"}}
            kept = {name: value for name, value in headers.items() if name not in {"date", "x-request-id"}}
            seen.append((status, kept, told))
        found.append(seen)
    assert found[0] == found[1] == found[2]
    assert [status for status, *_ in found[0]] == [200] * 5 + [422] * 3 + [400, 413]
    assert [len(told["jobs"]) for status, _, told in found[0] if status == 200] == [1, 2, 2, 1, 0]
    assert len(looks) == 2 * len(cases)


def test_an_error_while_states_are_told_is_a_500(raw, job, monkeypatch):
    post(raw, job, "Prefer: wait=60")
    job_id = json.loads(raw.answer()[2])["id"]

    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("gemmserve_service.http.routes.jobs.answer_states_now", fail)
    ask_states(raw, job_id)
    assert raw.answer()[0] == 500
    monkeypatch.undo()
    ask_states(raw, job_id)
    assert raw.answer()[0] == 200


@pytest.mark.parametrize(
    ("target", "further"),
    [
        ("/v1/jobs/{}?wait=1&all=true", []),
        ("/v1/jobs/{}?wait=1&wait=1", []),
        ("/v1/jobs/{}?wait=-1", []),
        ("/v1/jobs/{}?wait=86401", []),
        ("/v1/jobs/{}?wait=1e1", []),
        ("/v1/jobs/{}?timeout_s=1", []),
        ("/v1/jobs/{}?", ["Content-Length: 1"]),
        ("/v1/jobs/{}", ["Expect: 100-continue"]),
        ("/v1/jobs/{}/events", []),
        ("/v1/jobs/{}%20", []),
        ("/v1/arrays/{}?timeout_s=1", []),
        ("/v1/arrays/{}/data", []),
        ("/v1/arrays/{}", ["Want-Content-Digest: sha-256=1"]),
    ],
)
def test_unusual_looks_are_the_app_s(raw, job, looks, target, further):
    post(raw, job, "Prefer: wait=60")
    job_id = json.loads(raw.answer()[2])["id"]
    del looks[:]
    ask(raw, target.format(job_id if "jobs" in target else job["a"]), *further)
    if further == ["Content-Length: 1"]:
        raw.socket.sendall(b"x")
    assert raw.answer()[0] in {200, 404, 422}
    assert not looks


def test_who_hangs_up_while_looking(live, job, looks):
    live.executor.hold = True
    with contextlib.closing(Raw(live)) as connection:
        post(connection, job)
        job_id = json.loads(connection.answer()[2])["id"]
        with contextlib.closing(Raw(live)) as other:
            ask(other, f"/v1/jobs/{job_id}?wait=60")
            until(lambda: len(looks) == 2)
        until(lambda: live.connections == 1)
        live.executor.release()
        ask(connection, f"/v1/jobs/{job_id}?wait=60")
        assert json.loads(connection.answer()[2])["state"] == "succeeded"


def test_a_look_needs_a_key(serve, random_array, looks):
    live = serve()
    key_id, text = create_key(live.core.settings.data_dir, "alice")
    _, stranger = create_key(live.core.settings.data_dir, "bob")
    until(lambda: key_id in live.core.keyring.current.keys)
    with Client(live.url, api_key=text) as client:
        remote = client.put(random_array((5, 5)))
        job_id = client.submit("gemm", remote, remote).wait(60).id
    del looks[:]
    with contextlib.closing(Raw(live)) as connection:
        for target in (f"/v1/jobs/{job_id}", f"/v1/arrays/{remote.id}"):
            for key, status in ((None, 401), (stranger, 404), (text, 200)):
                for _ in range(2):
                    ask(connection, target, *([] if key is None else [f"X-API-Key: {key}"]))
                    assert connection.answer()[0] == status
    assert len(looks) == 8


def test_deletions_of_many_need_a_key_that_may_and_take_its_owner_s_alone(serve, tmp_path, random_array, looks):
    live = serve(audit_log=tmp_path / "audit")
    data_dir = live.core.settings.data_dir
    alice, text = create_key(data_dir, "alice")
    bob, stranger = create_key(data_dir, "bob")
    last, reader = create_key(data_dir, "reader", scopes=[Scope.READ], owner=alice)
    until(lambda: last in live.core.keyring.current.keys)
    with Client(live.url, api_key=text) as client:
        remote = client.put(random_array((5, 5)))
        content, everything = json.dumps({"ids": [remote.id]}).encode(), b'{"older_than_s":0}'
        found = []
        with contextlib.closing(Raw(live)) as connection:
            for key, body in ((None, content), (reader, content), (stranger, content), (stranger, everything)):
                for _ in range(2):
                    further = [] if key is None else [f"X-API-Key: {key}"]
                    connection.send(body, JSON, *further, path="/v1/deletions")
                    status, _, answered = connection.answer()
                    found.append((status, json.loads(answered).get("count")))
            assert found == [(401, None)] * 2 + [(403, None)] * 2 + [(200, 0)] * 4
            assert len(looks) == 4, "whoever may not is refused by the app"
            assert client.array(remote.id).shape == (5, 5)
            connection.send(content, JSON, f"X-API-Key: {text}", path="/v1/deletions")
            assert json.loads(connection.answer()[2])["count"] == 1
    lines = []

    def told():
        lines[:] = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
        lines[:] = [line for line in lines if line.get("path") == "/v1/deletions"]
        return len(lines) == 9

    until(told)
    assert [line["outcome"] for line in lines] == ["refused"] * 4 + ["done"] * 5
    assert [line["owner"] for line in lines[-2:]] == [bob, alice]
