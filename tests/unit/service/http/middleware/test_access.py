"""API keys over HTTP: who gets in, what each scope opens, and that owners do not see each other."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from inline_executor import InlineExecutor

from gemmserve_service.http.app import create_app
from gemmserve_service.jobs.core import Core
from gemmserve_service.tenancy.api_keys import Scope
from gemmserve_service.tenancy.keyring import KeyringError, create_key, revoke_key


@pytest.fixture
async def tenants(as_, npy):
    """Alice with two arrays, an expired one and a finished job; Bob with a key; and an administrator."""
    alice, bob, admin = as_("alice"), as_("bob"), as_("admin", scopes=[Scope.ADMIN])
    secret = np.full((64, 64), 7.25)
    a = await put(alice, npy(secret))
    b = await put(alice, npy(np.eye(64)))
    job = (await alice.post("/v1/jobs", json={"op": "gemm", "a": a, "b": b}, headers={"Prefer": "wait=60"})).json()
    assert job["state"] == "succeeded", job
    return SimpleNamespace(alice=alice, bob=bob, admin=admin, a=a, b=b, job=job, d=job["result"]["d"], secret=secret)


async def put(client, body, **query):
    answer = await client.post("/v1/arrays", params=query, content=body, headers={"Content-Type": "application/x-npy"})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def operations(app):
    """Every (method, path template) of the API."""
    return [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods]


PUBLIC = {
    "/healthz", "/livez", "/readyz", "/problems", "/problems/{slug}", "/v2", "/v2/health/live", "/v2/health/ready",
}  # fmt: skip


async def test_without_a_key_nothing_but_signs_of_life(app, client, make_key):
    make_key()
    for method, path in operations(app):
        answer = await client.request(method, re.sub(r"\{\w+\}", "gone", path))
        if path in PUBLIC:
            assert answer.status_code == 200, (method, path)
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == 'Bearer realm="gemmserve"'
    for path in ("/", "/docs", "/openapi.json"):
        assert (await client.get(path)).status_code == 200
    assert (await client.get("/nowhere")).status_code == 401


async def test_what_is_wrong_with_a_key(client, problem, make_key, settings, core):
    text = make_key()
    other = text[:-1] + ("x" if text[-1] != "x" else "y")
    for value in ("Bearer nonsense", f"Bearer {other}", f"Basic {text}", f"Bearer {text}, Bearer {text}"):
        answer = await client.get("/v1/arrays", headers={"Authorization": value})
        problem(answer, 401, "unauthorized")
        assert 'error="invalid_token"' in answer.headers["www-authenticate"]
        assert text[14:40] not in answer.text
    assert (await client.get("/v1/arrays", headers={"X-API-Key": text})).status_code == 200
    revoke_key(settings.data_dir, text.split("_")[1])
    core.keyring.refresh()
    assert (
        "revoked" in problem(await client.get("/v1/arrays", headers={"X-API-Key": text}), 401, "unauthorized")["detail"]
    )


async def test_every_operation_wants_its_scope(app, as_, problem):
    reader, submitter = as_("reader", scopes=[Scope.READ]), as_("submitter", scopes=[Scope.SUBMIT])
    for method, path in operations(app):
        if path in PUBLIC:
            continue
        looks = method in {"GET", "HEAD"} or path in {"/v2/repository/index", "/v1/job-states"}
        url = re.sub(r"\{\w+\}", "none", path)
        refused = await (submitter if looks else reader).request(method, url)
        assert refused.status_code == 403, (method, path)
        assert 'error="insufficient_scope"' in refused.headers["www-authenticate"]
        if path.startswith("/v2"):
            assert f"the scope {'read' if looks else 'submit'}" in refused.json()["error"]
        elif method != "HEAD":
            assert problem(refused, 403, "forbidden")["scope"] == ("read" if looks else "submit")
        endless = path == "/v1/overview/stream"
        let_in = await (reader if looks else submitter).request("HEAD" if endless else method, url)
        assert let_in.status_code not in {401, 403}, (method, path)


async def test_another_s_things_are_not_there(app, tenants, problem):
    """Every operation with an id answers another owner exactly as for an id that never was."""
    bare = {"Content-Type": "application/octet-stream"}
    begun = await tenants.alice.post("/v1/uploads?dtype=float32&shape=9", headers=bare)
    never = {"array_id": "arr_" + "0" * 26, "job_id": "job_" + "0" * 26, "upload_id": "upl_" + "0" * 26, "offset": 0}
    real = {"array_id": tenants.a, "job_id": tenants.job["id"], "upload_id": begun.json()["id"], "offset": 0}
    tried = 0
    for method, path in operations(app):
        if "_id}" not in path:
            continue
        tried += 1
        theirs = await tenants.bob.request(method, path.format(**real))
        nobody_s = await tenants.bob.request(method, path.format(**never))
        assert theirs.status_code == nobody_s.status_code == 404, (method, path)
        if method != "HEAD":
            said = [
                json.loads(re.sub(r"(arr|job|upl)_[0-9a-z]{26}", "ID", answer.text)) for answer in (theirs, nobody_s)
            ]
            assert said[0] == said[1]
    assert tried >= 6
    # Nothing that Bob tried had an effect.
    assert (await tenants.alice.get(f"/v1/arrays/{tenants.a}")).status_code == 200
    assert (await tenants.alice.get(f"/v1/uploads/{real['upload_id']}")).status_code == 200
    assert (await tenants.alice.get(f"/v1/jobs/{tenants.job['id']}")).json()["state"] == "succeeded"


async def test_another_s_arrays_are_no_operands(tenants, npy, problem):
    mine = await put(tenants.bob, npy(np.eye(64)))
    for a, b in ((tenants.a, mine), (mine, tenants.a), (tenants.d, tenants.d)):
        problem(await tenants.bob.post("/v1/jobs", json={"op": "gemm", "a": a, "b": b}), 404, "not-found")


async def test_listings_are_one_s_own(tenants, npy):
    mine = await put(tenants.bob, npy(np.eye(3)))
    assert [item["id"] for item in (await tenants.bob.get("/v1/arrays")).json()["items"]] == [mine]
    assert (await tenants.bob.get("/v1/jobs")).json()["items"] == []
    assert (await tenants.bob.get("/v1/jobs", params={"state": "succeeded"})).json()["items"] == []
    assert {item["id"] for item in (await tenants.alice.get("/v1/arrays")).json()["items"]} == {
        tenants.a,
        tenants.b,
        tenants.d,
    }
    # Page by page, too.
    seen, cursor = [], None
    while True:
        page = (
            await tenants.alice.get("/v1/arrays", params={"limit": 1} | ({"cursor": cursor} if cursor else {}))
        ).json()
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert set(seen) == {tenants.a, tenants.b, tenants.d}


async def test_an_expired_array_of_another_is_not_there_rather_than_gone(tenants, npy, problem):
    array_id = await put(tenants.alice, npy(np.eye(3)), ttl_s=0.01)
    async with asyncio.timeout(60):
        while (await tenants.alice.get(f"/v1/arrays/{array_id}")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    problem(await tenants.alice.get(f"/v1/arrays/{array_id}"), 410, "gone")
    problem(await tenants.bob.get(f"/v1/arrays/{array_id}"), 404, "not-found")


async def test_an_administrator_sees_all_where_it_asks(tenants, problem):
    everybody_s = {"all": "true"}
    assert (await tenants.admin.get("/v1/arrays")).json()["items"] == []
    assert len((await tenants.admin.get("/v1/arrays", params=everybody_s)).json()["items"]) == 3
    assert len((await tenants.admin.get("/v1/jobs", params=everybody_s)).json()["items"]) == 1
    problem(await tenants.admin.get(f"/v1/arrays/{tenants.a}"), 404, "not-found")
    for path in (f"/v1/arrays/{tenants.a}", f"/v1/arrays/{tenants.a}/data", f"/v1/jobs/{tenants.job['id']}"):
        assert (await tenants.admin.get(path, params=everybody_s)).status_code == 200
        problem(await tenants.alice.get(path, params=everybody_s), 403, "forbidden")
    assert (await tenants.admin.delete(f"/v1/arrays/{tenants.a}", params=everybody_s)).status_code == 204
    problem(await tenants.alice.get(f"/v1/arrays/{tenants.a}"), 404, "not-found")


async def test_a_second_key_of_the_owner_sees_the_same(tenants, as_):
    reader = as_("reader", scopes=[Scope.READ], owner=tenants.alice.key_id)
    assert (await reader.get(f"/v1/arrays/{tenants.a}")).status_code == 200
    assert (await reader.delete(f"/v1/arrays/{tenants.a}")).status_code == 403


async def test_an_idempotency_key_is_the_owner_s(tenants, npy):
    headers = {"Idempotency-Key": "nightly"}
    mine = await put(tenants.bob, npy(np.eye(64)))
    first = await tenants.alice.post("/v1/jobs", json={"op": "gemm", "a": tenants.a, "b": tenants.b}, headers=headers)
    other = await tenants.bob.post("/v1/jobs", json={"op": "gemm", "a": mine, "b": mine}, headers=headers)
    again = await tenants.alice.post("/v1/jobs", json={"op": "gemm", "a": tenants.a, "b": tenants.b}, headers=headers)
    assert (first.status_code, other.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"] != other.json()["id"]


async def test_what_was_made_before_the_first_key_is_the_administrator_s(client, put, as_, problem):
    array_id = await put(np.eye(3))
    alice, admin = as_("alice"), as_("admin", scopes=[Scope.ADMIN])
    problem(await alice.get(f"/v1/arrays/{array_id}"), 404, "not-found")
    assert (await admin.get(f"/v1/arrays/{array_id}", params={"all": True})).status_code == 200
    problem(await client.get(f"/v1/arrays/{array_id}"), 401, "unauthorized")


async def test_keys_open_to_any_host_but_to_no_other_site(tenants, problem):
    """CORS is off: a page's preflight gets no leave, and no answer names an allowed origin."""
    preflight = await tenants.bob.options(
        "/v1/arrays", headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code >= 400
    for answer in (preflight, await tenants.bob.get("/v1/arrays", headers={"Origin": "https://evil.example"})):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.fixture
def audit(app):
    """What was written into the audit since the last call."""
    lines = []
    app.state.audit.write = lambda **fields: lines.append({k: v for k, v in fields.items() if v is not None})

    def take():
        taken = list(lines)
        lines.clear()
        return taken

    return take


async def test_the_audit_has_every_mutation_and_refusal(app, as_, client, npy, audit):
    alice, reader = as_("alice"), as_("reader", scopes=[Scope.READ])
    audit()
    array_id = await put(alice, npy(np.eye(3)))
    await alice.get(f"/v1/arrays/{array_id}")
    await alice.post("/v1/job-states", json={"ids": ["job_" + "0" * 26]})
    await alice.delete(f"/v1/arrays/{array_id}")
    await reader.delete(f"/v1/arrays/{array_id}")
    await client.get("/v1/arrays?token=x")
    await alice.delete(f"/v1/arrays/{array_id}")
    made, deleted, forbidden, unknown, failed = audit()
    assert (made["action"], made["outcome"], made["key"], made["key_name"]) == (
        "POST /v1/arrays", "done", alice.key_id, "alice",
    )  # fmt: skip
    assert made["created"] == f"/v1/arrays/{array_id}"
    assert made["address"] == "127.0.0.1"
    assert (deleted["action"], deleted["path"]) == ("DELETE /v1/arrays/{array_id}", f"/v1/arrays/{array_id}")
    assert (forbidden["outcome"], forbidden["problem"], forbidden["key"]) == ("refused", "forbidden", reader.key_id)
    assert (unknown["status"], unknown["problem"]) == (401, "unauthorized")
    assert "key" not in unknown
    assert unknown["path"] == "/v1/arrays"  # without its query
    assert (failed["outcome"], failed["problem"]) == ("failed", "not-found")


async def test_the_audit_file_is_json_lines_without_secrets(make_settings, tmp_path, npy):
    settings = make_settings(audit_log=tmp_path / "audit.jsonl")
    core = Core(settings, InlineExecutor())
    app = create_app(settings, core)
    async with app.router.lifespan_context(app):
        key_id, text = create_key(settings.data_dir, "ali\nce")
        core.keyring.refresh()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers={"X-API-Key": text}) as client:
            await put(client, npy(np.eye(3)))
            (tmp_path / "audit.jsonl").rename(tmp_path / "rotated.jsonl")
            await client.post("/v1/jobs", content=b"{}", headers={"X-API-Key": text[:-1] + "-"})
            revoke_key(settings.data_dir, key_id)
            core.keyring.refresh()
    before = [json.loads(line) for line in (tmp_path / "rotated.jsonl").read_text().splitlines()]
    after = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["action"] for line in before] == ["keys create", "POST /v1/arrays"]
    assert [line["action"] for line in after] == ["POST unmatched", "keys revoke"]
    assert before[1]["key_name"] == "ali\nce"
    assert all(line["timestamp"].endswith("Z") for line in before + after)
    assert before[1]["request_id"]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0
    assert text[14:50] not in (tmp_path / "rotated.jsonl").read_text() + (tmp_path / "audit.jsonl").read_text()


async def test_lost_keys_do_not_open_what_was_made_under_them(make_settings, npy, caplog):
    settings = make_settings()
    _, text = create_key(settings.data_dir, "alice")
    first = create_app(settings, Core(settings, InlineExecutor()))
    async with first.router.lifespan_context(first):
        transport = httpx.ASGITransport(app=first)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers={"X-API-Key": text}) as client:
            await put(client, npy(np.eye(3)))
    (settings.data_dir / "keys.json").unlink()
    exposed = Core(make_settings(host="0.0.0.0", allow_unauthenticated=True), InlineExecutor())
    with pytest.raises(KeyringError, match=r"keys\.json is gone"):
        await exposed.start()
    at_home = Core(settings, InlineExecutor())
    await at_home.start()
    await at_home.stop()
    assert "keys.json is gone" in caplog.text


async def test_nothing_but_http_comes_in(app, make_key):
    make_key()
    sent = []

    async def send(message):
        sent.append(message)

    await app({"type": "websocket", "path": "/v1/arrays", "headers": [], "query_string": b""}, None, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_weights_reach_the_queue(core, as_):
    alice = as_("alice", weight=2.5)
    assert core.scheduler.queue.weight_of(alice.key_id) == 2.5
    assert core.scheduler.queue.weight_of("") == 1
