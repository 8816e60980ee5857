"""A disk that arrays have filled, or others beside them: arrays can be deleted, and there is room again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos.faults import fill, small_disk
from live_server import LiveServer

if TYPE_CHECKING:
    import httpx

BINARY = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def disk():
    with small_disk(48) as folder:
        if folder is None:
            pytest.skip("this user may not mount a tmpfs")
        yield folder


def put(http: httpx.Client, n: int) -> httpx.Response:
    return http.post(f"/v1/arrays?dtype=complex64&shape={n},{n}", content=bytes(8 * n * n), headers=BINARY)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_arrays_that_fill_the_disk_can_be_deleted(disk, one_by_one):
    with LiveServer(data_dir=disk / "data") as server, server.http() as http:
        ids = []
        for n in (512, 64, 22):  # the small ones take what the large ones have left
            while (answer := put(http, n)).status_code == 201:
                ids.append(answer.json()["id"])
            assert (answer.status_code, answer.json()["type"]) == (507, "/problems/store-full")
        if one_by_one:
            assert {http.delete(f"/v1/arrays/{each}").status_code for each in ids} == {204}
        else:
            assert http.post("/v1/deletions", json={"ids": ids}).json()["count"] == len(ids)
        assert put(http, 512).status_code == 201


def test_files_that_are_kept_for_new_arrays_make_room_for_what_is_recorded(disk):
    with LiveServer(data_dir=disk / "data") as server, server.http() as http:
        ids = [put(http, 512).json()["id"] for _ in range(4)]
        for each in ids[1:]:
            http.delete(f"/v1/arrays/{each}").raise_for_status()
        fill(disk / "filler")
        nothing = BINARY | {"Content-Length": "0"}
        statuses = (http.post("/v1/arrays?dtype=complex64&shape=0", headers=nothing).status_code for _ in range(2000))
        assert 507 in statuses, "the database found room for each"
        assert http.delete(f"/v1/arrays/{ids[0]}").status_code == 204
