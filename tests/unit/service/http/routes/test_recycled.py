"""Recycled space: whatever goes wrong with an upload or a job, nobody is sent what lay in its place before."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest

SECRET = 0x5EC2E75EC2E75EC2


@pytest.fixture
def secret():
    """64 KiB of a pattern that no other test array has."""
    return np.full(8192, SECRET, dtype=np.uint64).view(np.float64)


@pytest.fixture
async def bob(as_, npy, secret, core):
    """Bob, after Alice's secret has been stored and deleted: its extent is the next that is handed out."""
    alice = as_("alice")
    answer = await alice.post("/v1/arrays", content=npy(secret), headers={"Content-Type": "application/x-npy"})
    name = extent_of(core, answer.json()["id"])
    await alice.delete(f"/v1/arrays/{answer.json()['id']}")
    assert core.store.recycled_bytes >= secret.nbytes
    assert all(extent.quiescent for extent in core.store._files._free.values())
    client = as_("bob")
    client.recycled = name
    return client


def extent_of(core, array_id):
    with core.store.pin(array_id) as pinned:
        return pinned.extent.name


def holds_secret(data):
    return SECRET.to_bytes(8, "little") in data


def everything_stored(core):
    """The bytes of every array that can be seen."""
    return {record.info.id: bytes(core.store.pin(record.info.id).view) for record in core.store._catalog}


async def test_the_extent_does_come_back_with_the_secret_in_it(bob, core, secret):
    """Else the other tests of this file prove nothing."""
    upload = core.store.allocate(np.dtype("f8"), (8192,), "C", ttl_s=None)
    assert upload.extent.name == bob.recycled
    assert holds_secret(bytes(upload.view))
    upload.abort()


@pytest.mark.parametrize("sent", [0, 1, 4096, 65535])
async def test_a_short_body_is_no_array(bob, core, npy, problem, sent):
    body = npy(np.zeros(8192))
    answer = await bob.post(
        "/v1/arrays", content=body[: len(body) - 65536 + sent], headers={"Content-Type": "application/x-npy"}
    )
    problem(answer, 400, "body-length")
    assert (await bob.get("/v1/arrays")).json()["items"] == []
    assert not holds_secret(answer.content)


async def test_a_short_part_is_no_operand(bob, npy, form, problem):
    whole = npy(np.zeros((64, 128)))
    body, headers = form([("a", whole[:-8000]), ("b", whole)])
    answer = await bob.post("/v1/gemm", content=body, headers=headers)
    problem(answer, 400, "body-length")


@pytest.mark.parametrize("filled", [0, 10, 65535])
async def test_an_upload_cannot_be_published_before_it_is_full(bob, core, filled):
    """Space is recycled by every caller of commit, however the bytes came."""
    upload = core.store.allocate(np.dtype("f8"), (8192,), "C", ttl_s=None, owner=bob.key_id)
    upload.write(bytes(filled))
    with pytest.raises(Exception, match="ended after"):
        await upload.commit()
    assert everything_stored(core) == {}


async def test_views_end_with_the_array(bob, core, npy):
    """A smaller array in the same extent: neither a download nor a range past its end shows more."""
    array = np.arange(8192 - 40, dtype=np.float64)
    answer = await bob.post("/v1/arrays", content=npy(array), headers={"Content-Type": "application/x-npy"})
    array_id = answer.json()["id"]
    assert extent_of(core, array_id) == bob.recycled
    for headers in (
        {},
        {"Accept": "application/octet-stream"},
        {"Range": "bytes=65000-70000"},
        {"Range": "bytes=-70000"},
        {"Range": "bytes=0-99999999"},
    ):
        data = (await bob.get(f"/v1/arrays/{array_id}/data", headers=headers)).content
        assert not holds_secret(data), headers
        assert len(data) <= array.nbytes + 128


async def test_a_result_is_written_whole(bob, npy, core):
    """The product of nothing (k = 0) into the recycled extent: zeros, not what lay there."""
    ids = []
    for shape in ((64, 0), (0, 128)):
        answer = await bob.post(
            "/v1/arrays", content=npy(np.zeros(shape)), headers={"Content-Type": "application/x-npy"}
        )
        ids.append(answer.json()["id"])
    job = await bob.post("/v1/jobs", json={"op": "gemm", "a": ids[0], "b": ids[1]}, headers={"Prefer": "wait=60"})
    result = job.json()["result"]["d"]
    assert extent_of(core, result) == bob.recycled
    data = (await bob.get(f"/v1/arrays/{result}/data")).content
    np.testing.assert_array_equal(np.load(io.BytesIO(data)), np.zeros((64, 128)))


async def test_a_failed_or_cancelled_job_leaves_no_array(bob, npy, core, spy):
    spy.hold = True
    answer = await bob.post(
        "/v1/arrays", content=npy(np.ones((64, 128))), headers={"Content-Type": "application/x-npy"}
    )
    a = answer.json()["id"]
    job = (await bob.post("/v1/jobs", json={"op": "gemm", "a": a, "b": a, "trans_b": "T"})).json()
    cancelled = (await bob.delete(f"/v1/jobs/{job['id']}")).json()
    assert (cancelled["state"], cancelled["result"]) == ("cancelled", None)
    spy.release()
    async with asyncio.timeout(60):
        while core.scheduler.running:  # noqa: ASYNC110 (the worker's answer)
            await asyncio.sleep(0.01)
    assert [item["id"] for item in (await bob.get("/v1/arrays")).json()["items"]] == [a]
    assert not any(map(holds_secret, everything_stored(core).values()))
