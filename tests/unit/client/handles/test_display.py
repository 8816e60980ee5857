"""Handles that show themselves: the line, the picture, and that neither fails."""

from __future__ import annotations

import base64
import re

import httpx
import numpy as np
import pytest
from fake_service import problem
from png import levels

import gemmserve
from gemmserve import AsyncClient, Client
from gemmserve._handles.display import size_text


def picture(page: str) -> np.ndarray:
    found = re.search(r'src="data:image/png;base64,([^"]+)"', page)
    assert found, page
    return levels(base64.b64decode(found[1]))


def test_the_line_says_what_is_known(client):
    remote = client.put(np.ones((3, 1000), np.complex64), name="weights")
    assert repr(remote) == (f"<RemoteArray {remote.id} 'weights' complex64[3, 1000] 23.4 KiB at http://127.0.0.1:8000>")
    assert repr(remote.T).endswith("complex64[1000, 3] 23.4 KiB at http://127.0.0.1:8000>.T")
    view = remote.conj()
    remote.delete()
    assert repr(view) == (
        f"<RemoteArray {remote.id} 'weights' complex64[3, 1000] 23.4 KiB deleted at http://127.0.0.1:8000>.conj()"
    )


def test_what_has_expired_says_so(client, service):
    remote = client.put(np.ones(3))
    info = service._info(remote.id) | {"expires_at": "2025-01-02T03:04:06Z"}
    assert "expired" in repr(gemmserve.RemoteArray(client, remote.id, gemmserve.ArrayInfo.parse(info)))


def test_the_page_has_a_picture(client, service):
    remote = client.put(np.array([[0, 1], [2, 4j], [-4, 3]]))
    service.requests.clear()
    page = remote._repr_html_()
    assert picture(page).tolist() == [[0, 63], [127, 254], [254, 190]]
    assert f"&lt;RemoteArray {remote.id}" in page
    assert picture(remote.T._repr_html_()).shape == (2, 3)
    assert set(service.calls) == {"GET /v1/arrays/arr/sample"}, "nothing else is asked for"


@pytest.mark.parametrize(("shape", "shown"), [((), (1, 1)), ((5,), (1, 5)), ((5, 1), (5, 1)), ((300, 2), (64, 2))])
def test_shapes(client, shape, shown):
    remote = client.put(np.ones(shape))
    assert picture(remote._repr_html_()).shape == shown
    assert picture(remote.H._repr_html_()).shape == (shown if len(shape) < 2 else shown[::-1])


def test_a_result_is_looked_at_once(client, service):
    remote = client.put(np.eye(2))
    product = remote @ remote
    service.requests.clear()
    assert picture(product._repr_html_()).shape == (2, 2)
    assert service.calls == ["GET /v1/arrays/arr", "GET /v1/arrays/arr/sample"]
    assert "float64[2, 2]" in repr(product)


def test_without_a_picture_there_is_the_line(client, service):
    remote = client.put(np.ones((2, 3)))
    plain = f"<div><code>{repr(remote).replace('<', '&lt;').replace('>', '&gt;')}</code></div>"
    service.on_device = True
    assert remote._repr_html_() == plain
    service.on_device = False
    for trouble in (
        problem(500, "internal"), problem(404, "not-found"), httpx.ConnectError("down"), ValueError("a bug"),
        httpx.Response(200, headers={"content-type": "application/x-npy"}, content=b"nonsense"),
    ):  # fmt: skip
        service.requests.clear()
        service.script.append(trouble)
        assert remote._repr_html_() == plain
        assert len(service.requests) == 1, "it is not repeated"
    assert client.put(np.ones((0, 3)))._repr_html_().endswith("</code></div>")
    remote.delete()
    service.requests.clear()
    assert "deleted" in remote._repr_html_()
    assert not service.requests


def test_names_are_no_html(client, service):
    remote = client.put(np.ones(2), name="a<b>")
    assert "a&lt;b&gt;" in remote._repr_html_()
    assert "<b>" not in remote._repr_html_()


async def test_awaited_handles_show_the_line(async_client, service):
    remote = await async_client.put(np.ones((2, 3)))
    service.requests.clear()
    assert f"&lt;AsyncRemoteArray {remote.id} float64[2, 3] 48 B" in remote._repr_html_()
    assert not service.requests


def test_a_program_s_results(client):
    remote = client.put(np.eye(2))
    with client.program() as program:
        product = program.gemm(remote, remote)
        assert "$s0" in repr(product)
        assert "$s0" in product._repr_html_()
    assert picture(product._repr_html_()).shape == (2, 2)


def test_of_the_real_server(app_url):
    with Client(app_url) as live:
        array = np.arange(200.0 * 90).reshape(200, 90)
        remote = live.put(array)
        found = picture(remote._repr_html_())
        expected = array[np.ix_(np.arange(64) * 200 // 64, np.arange(64) * 90 // 64)]
        assert np.array_equal(found, (254 * (expected / expected.max())).astype(np.uint8))
        remote.delete()


async def test_an_awaited_client_of_the_real_server(app_url):
    async with AsyncClient(app_url) as live:
        remote = await live.put(np.eye(3), name="shown")
        assert "'shown'" in repr(await live["shown"])
        await remote.delete()
        assert "deleted" in repr(remote)


def test_sizes():
    assert [size_text(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30, 7 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB", "7.0 TiB",
    ]  # fmt: skip
