"""Arrays in the tier over HTTP: whole, by ranges, and what is said when the tier does not answer."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("obstore", reason="the extra tier is not installed")

from gemmserve.wire import format_npy_header
from gemmserve_service.errors import TierUnavailable
from gemmserve_service.store.tier.objects import Objects

A = np.arange(64 * 128, dtype="c8").reshape(64, 128)


@pytest.fixture
def settings(make_settings, tmp_path):
    return make_settings(tier=(tmp_path / "tier").as_uri(), max_store_bytes=3 * A.nbytes)


def npy(array):
    return format_npy_header(array.dtype, array.shape) + array.tobytes()


@pytest.fixture
async def cold(client, core, eventually):
    """Id of an array that is in the tier alone."""
    ids = []
    for number in range(5):
        answer = await client.post("/v1/arrays", content=npy(A + number), headers={"Content-Type": "application/x-npy"})
        assert answer.status_code == 201, answer.text
        ids.append(answer.json()["id"])
    await eventually(lambda: core.store._catalog.get(ids[0]).cold is not None)
    return ids[0]


async def test_a_download_has_it_back(client, core, cold):
    answer = await client.get(f"/v1/arrays/{cold}/data")
    assert answer.content == npy(A)
    assert core.store._catalog.get(cold).cold is None


@pytest.mark.parametrize("accept", ["application/x-npy", "application/octet-stream"])
@pytest.mark.parametrize("span", ["bytes=100-199", "bytes=0-300", "bytes=-5", "bytes=65000-"])
async def test_a_range_leaves_it_there(client, core, cold, accept, span):
    whole = npy(A) if accept == "application/x-npy" else A.tobytes()
    first, _, last = span.removeprefix("bytes=").partition("-")
    expected = whole[int(first) : int(last) + 1 if last else None] if first else whole[-int(last) :]
    answer = await client.get(f"/v1/arrays/{cold}/data", headers={"Range": span, "Accept": accept})
    assert (answer.status_code, answer.content) == (206, expected)
    start = int(first) if first else len(whole) - int(last)
    assert answer.headers["content-range"] == f"bytes {start}-{start + len(expected) - 1}/{len(whole)}"
    in_header = accept == "application/x-npy" and start + len(expected) <= 128
    assert (core.store._catalog.get(cold).cold is None) == in_header


async def test_what_no_bytes_are_needed_for(client, core, cold):
    assert (await client.head(f"/v1/arrays/{cold}/data")).headers["content-length"] == str(len(npy(A)))
    assert (await client.get(f"/v1/arrays/{cold}")).json()["nbytes"] == A.nbytes
    assert (await client.get(f"/v1/arrays/{cold}/sample")).status_code == 204
    assert (await client.get(f"/v1/arrays/{cold}/data", headers={"Range": "bytes=9999999-"})).status_code == 416
    found = (await client.get("/metrics")).text
    assert "gemmserve_tier_arrays" in found
    assert core.store.tier.bytes_out >= A.nbytes


async def test_the_tier_does_not_answer(client, cold, monkeypatch):
    def unreachable(*_):
        raise TierUnavailable("nothing answers", retry_after_s=5.0)

    monkeypatch.setattr(Objects, "read", unreachable)
    for headers in ({}, {"Range": "bytes=200-300"}):
        answer = await client.get(f"/v1/arrays/{cold}/data", headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/tier-unavailable")
        assert int(answer.headers["retry-after"]) > 0
