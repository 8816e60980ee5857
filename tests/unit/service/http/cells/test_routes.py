"""GET /v1/cells."""

from __future__ import annotations

import json


async def test_a_server_alone(client):
    assert (await client.get("/v1/cells")).json() == {"cell": 0, "cells": []}


async def test_every_cell(make_settings, tmp_path, spy):
    import httpx

    from gemmserve_service.http.app import create_app
    from gemmserve_service.jobs.core import Core

    path = tmp_path / "cells.json"
    urls = {"0": "http://127.0.0.1:1", "3": "http://127.0.0.1:2"}
    path.write_text(json.dumps({"cells": urls, "secret": "x" * 32}))
    settings = make_settings(cell=3, cells_file=path)
    app = create_app(settings, Core(settings, spy))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answer = (await client.get("/v1/cells")).json()
    assert answer == {"cell": 3, "cells": [{"cell": int(cell), "url": url} for cell, url in urls.items()]}
