"""Uploads in parts over HTTP: begun, gone on with, refused, stored."""

from __future__ import annotations

import pytest
from upload_parts import BARE, A


@pytest.fixture
def begin(client):
    """begin(array) -> the URL of an upload of bare bytes."""

    async def make(array=A, http=client, **query):
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        fields = {"dtype": array.dtype.name, "shape": ",".join(map(str, array.shape)), "order": order, **query}
        answer = await http.post("/v1/uploads", params=fields, headers={**BARE, "Content-Length": "0"})
        assert answer.status_code == 201, answer.text
        return answer.headers["location"]

    return make


@pytest.fixture
def put(client):
    async def send(url, data, start, end, **headers):
        return await client.put(f"{url}/parts/{start}", content=data[start:end], headers={**BARE, **headers})

    return send


@pytest.fixture
def refused():
    def check(answer, status, slug):
        found = answer.json()
        assert (answer.status_code, found["type"].rpartition("/")[2]) == (status, slug), answer.text
        return found

    return check


@pytest.fixture
def stored(client, read_npy):
    async def download(answer):
        assert answer.status_code == 201, answer.text
        data = await client.get(f"{answer.headers['location']}/data")
        return read_npy(data.content)

    return download
