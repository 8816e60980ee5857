"""Files of pages: under the digest of what they are, whole or gzipped, kept for ever; nothing else is reachable."""

from __future__ import annotations

import gzip
import hashlib
import re

import httpx
import pytest

from gemmserve_service.http.middleware.access import SidePort
from gemmserve_service.http.pages import assets

FILES = ("site.css", "session.js", "favicon.svg")


def test_modules_import_what_is_served():
    paths = {asset.path for asset in assets._by_name().values()}
    for name, asset in assets._by_name().items():
        if name.endswith(".js"):
            for target in re.findall(r"""(?:from|import\()\s*["']([^"']+)""", asset.content.decode()):
                assert target.startswith("./"), (name, target)
                assert "static/" + target.removeprefix("./") in paths, (name, target)
    assert len(paths) == len(assets._by_name()), "files of one name"


@pytest.mark.parametrize("name", FILES)
async def test_the_name_is_that_of_the_content(client, name):
    address = assets.url(name)
    answer = await client.get(f"/{address}", headers={"Accept-Encoding": "identity"})
    assert answer.status_code == 200
    assert address.split(".")[1] == hashlib.sha256(answer.content).hexdigest()[:16]
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["vary"] == "Accept-Encoding"
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = await client.get(f"/{address}", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_gzip_where_it_is_read(client):
    path = f"/{assets.url('site.css')}"
    plain = (await client.get(path, headers={"Accept-Encoding": "gzip;q=0"})).content
    async with client.stream("GET", path, headers={"Accept-Encoding": "br, gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        sent = b"".join([piece async for piece in answer.aiter_raw()])
    assert gzip.decompress(sent) == plain
    assert len(sent) < len(plain) / 2


@pytest.mark.parametrize(
    "name", ["site.css", "site.0000000000000000.css", "", "..%2fhome_page.py", "%2e%2e/policy.py", "vendor/x.js"]
)
async def test_nothing_else_is_there(client, name):
    assert (await client.get(f"/static/{name}")).status_code == 404


async def test_no_key_is_needed(client, make_key, app):
    make_key()
    assert (await client.get(f"/{assets.url('site.css')}")).status_code == 200
    transport = httpx.ASGITransport(app=SidePort(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as side:
        assert (await side.get(f"/{assets.url('site.css')}")).status_code == 200


def test_circles_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.js").write_text('import { b } from "./b.js";')
    (tmp_path / "b.js").write_text('import { a } from "./a.js";')
    monkeypatch.setattr(assets, "_sources", lambda: {path.name: path for path in tmp_path.iterdir()})
    with pytest.raises(ValueError, match=r"a.js > b.js > a.js"):
        assets._by_name.__wrapped__()


@pytest.mark.parametrize(("name", "kind"), [("favicon.ico", "image/x-icon"), ("favicon.svg", "image/svg+xml")])
async def test_icons_are_where_browsers_look(client, make_key, name, kind):
    make_key()
    answer = await client.get(f"/{name}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.content == assets.named(name).content
    assert "max-age" in answer.headers["cache-control"]
