"""/v1/arrays/{id}/sample through the app."""

from __future__ import annotations

import numpy as np
import pytest


async def test_a_sample_of_an_array(client, put, read_npy, random_array):
    array = random_array((200, 300))
    answer = await client.get(f"/v1/arrays/{await put(array)}/sample", params={"rows": 10, "columns": 3})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-npy")
    assert np.array_equal(read_npy(answer.content), array[::20, ::100])


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5, 0), (7,), (2, 0, 3), (2, 3, 4)])
async def test_shapes(client, put, read_npy, shape):
    found = read_npy((await client.get(f"/v1/arrays/{await put(np.ones(shape))}/sample")).content)
    assert found.ndim == 2
    assert (found == 1).all()


@pytest.mark.parametrize("query", [{"rows": 0}, {"columns": 65}, {"rows": "x"}, {"step": 3}])
async def test_refused(client, put, problem, query):
    array = await put(np.ones((3, 3)))
    problem(await client.get(f"/v1/arrays/{array}/sample", params=query), 422, "parameter-invalid")


async def test_of_nothing(client, put, problem):
    array = await put(np.ones((3, 3)))
    await client.delete(f"/v1/arrays/{array}")
    problem(await client.get(f"/v1/arrays/{array}/sample"), 404, "not-found")


async def test_others_see_none(as_, npy, problem):
    alice, bob = as_("alice"), as_("bob")
    made = await alice.post("/v1/arrays", content=npy(np.ones(3)), headers={"Content-Type": "application/x-npy"})
    problem(await bob.get(f"{made.headers['location']}/sample"), 404, "not-found")


async def test_nothing_is_moved_for_a_result_on_a_device_alone(client, put, core, monkeypatch):
    array = await put(np.ones((3, 3)))
    moved = []
    monkeypatch.setattr(core.scheduler.writes, "wait_readable", moved.append)
    monkeypatch.setattr("gemmserve_service.store.pin.Pinned.pending", property(lambda _: object()))
    answer = await client.get(f"/v1/arrays/{array}/sample")
    assert (answer.status_code, answer.content, moved) == (204, b"", [])
