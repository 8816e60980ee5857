"""Places: whether a request goes straight to a cell, and to which; whose word is taken for it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

import gemmserve
from gemmserve import AsyncClient, Client
from gemmserve._calls import places, requests
from gemmserve._calls.places import Places
from gemmserve.wire import CELLS_HEADER, EXCHANGE_HEADER

BASE = "https://router.example"
ID = "01jd2w7m4h8k3n5p6q9r0s1t2v"
KEY = "gs_0123456789_key"
LARGE = np.zeros(1 << 18)  # 2 MiB
CELLS = {"cell": 7, "cells": [{"cell": 0, "url": "https://zero.example"}, {"cell": 7, "url": "https://seven.example/"}]}


@pytest.fixture
def known():
    found = Places(BASE)
    found.learn(CELLS)
    return found


@pytest.mark.parametrize(
    ("request_", "place"),
    [
        (requests.put_array(LARGE), "https://seven.example"),
        (requests.put_array(np.zeros(4)), None),
        (requests.array_info(f"arr_{ID}"), None),
        (requests.array_data(f"arr_{ID}"), None),
        (requests.array_data(f"arr_{ID}", nbytes=2 << 20), "https://zero.example"),
        (requests.array_data(f"arr_{ID}_7", nbytes=2 << 20), "https://seven.example"),
        (requests.array_data(f"arr_{ID}_8", nbytes=2 << 20), None),
        (
            requests.send_part(f"upl_{ID}", 0, memoryview(LARGE).cast("B"), digest=False, label=""),
            "https://zero.example",
        ),
    ],
)
def test_the_place_of_a_request(known, request_, place):
    """New work goes to the owner's cell, what has an id to the cell that made it; what is small to the router."""
    assert known.place_of(request_) == place


def test_nothing_goes_anywhere_else_before_the_cells_are_known():
    assert Places(BASE).place_of(requests.put_array(LARGE)) is None


@pytest.mark.parametrize(
    ("headers", "asks"),
    [(None, True), ({CELLS_HEADER: "1"}, True), ({EXCHANGE_HEADER: "x"}, False), ({}, True)],
)
def test_the_cells_are_asked_for_before_a_large_body(headers, asks):
    """Unless an answer of a server without a router has come."""
    found = Places(BASE)
    if headers is not None:
        found.heard(headers)
    assert found.unknown(requests.put_array(LARGE)) is asks
    assert not found.unknown(requests.put_array(np.zeros(4)))


def test_a_server_that_knows_of_no_cells():
    found = Places(BASE)
    found.learn({"cell": 0, "cells": []})
    assert not found.unknown(requests.put_array(LARGE))
    assert found.urls == []


def test_a_cell_that_could_not_be_reached(known):
    known.heard({CELLS_HEADER: "1"})
    known.forget()
    assert known.place_of(requests.put_array(LARGE)) is None
    assert known.unknown(requests.put_array(LARGE))


@pytest.mark.parametrize("url", ["http://zero.example", "ftp://zero.example", "zero.example", ""])
def test_a_name_that_is_less_safe(url):
    """The key would go there in the clear."""
    with pytest.raises(gemmserve.ProtocolError):
        Places(BASE).learn({"cell": 0, "cells": [{"cell": 0, "url": url}]})


def test_a_name_as_safe_as_the_first():
    found = Places("http://router.example")
    found.learn({"cell": 0, "cells": [{"cell": 0, "url": "http://zero.example"}]})
    assert found.urls == ["http://zero.example"]


@pytest.mark.parametrize("document", [None, [], {}, {"cells": None}, {"cells": "x"}])
def test_answers_that_list_no_cells(document):
    found = Places(BASE)
    found.learn(document)
    assert found.urls == []


@pytest.mark.parametrize("cells", [[None], [{}], [{"cell": "0", "url": "https://zero.example"}], [{"cell": 0}]])
def test_lists_that_make_no_sense(cells):
    with pytest.raises(gemmserve.ProtocolError):
        Places(BASE).learn({"cell": 0, "cells": cells})


def test_a_307_is_followed_to_names_in_the_list_alone(known):
    asked = requests.array_data(f"arr_{ID}")
    assert known.follow(asked, f"https://zero.example{asked.path}?all=true") == "https://zero.example"
    assert known.place_of(asked) == "https://zero.example"  # from now on
    for location in (
        f"https://evil.example{asked.path}",
        f"https://zero.example.evil.example{asked.path}",
        "https://zero.example/v1/arrays/other/data",
        f"http://zero.example{asked.path}",
        asked.path,
    ):
        with pytest.raises(gemmserve.ProtocolError, match="none of its cells"):
            known.follow(asked, location)


class Handler(BaseHTTPRequestHandler):
    """A router and a cell on one port, below two paths of it."""

    protocol_version = "HTTP/1.1"

    def do(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append((self.path, self.headers.get("authorization"), len(body)))
        self.server.body = body
        answer, status, fields = self.server.answer(self.command, self.path)
        content = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **fields}.items():
            self.send_header(name, value)
        self.send_header(EXCHANGE_HEADER, self.headers[EXCHANGE_HEADER])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = do  # noqa: N815 (its base's names)

    def log_message(self, *_):
        pass


INFO = {"id": f"arr_{ID}", "dtype": "float64", "shape": [1 << 18], "order": "C", "nbytes": 1 << 21, "sha256": None,
        "created_at": "2026-01-01T00:00:00Z", "expires_at": None}  # fmt: skip


@pytest.fixture
def servers():
    """A router and a cell: (router, cell), whose `seen` are the requests."""
    made = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    for server in made:
        server.seen, server.daemon_threads = [], True
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.fixture
def routed(servers):
    """The pair, of which the router sends everything but the list to the cell."""
    router, cell = servers

    def answer(_method, path):
        if path == places.PATH:
            return {"cell": 0, "cells": [{"cell": 0, "url": cell.url}]}, 200, {CELLS_HEADER: "1"}
        return {"type": "/problems/other-cell"}, 307, {"Location": cell.url + path, CELLS_HEADER: "1"}

    router.answer = answer
    cell.answer = lambda method, _path: (INFO, 201 if method == "POST" else 200, {})
    return router, cell


def test_a_large_body_is_sent_once_and_straight(routed):
    router, cell = routed
    with Client(router.url, api_key=KEY) as client:
        client.put(LARGE)
        client.put(LARGE)
    assert [path for path, _, _ in router.seen] == [places.PATH]
    assert [path for path, _, _ in cell.seen] == ["/v1/arrays"] * 2
    assert {key for _, key, _ in router.seen + cell.seen} == {f"Bearer {KEY}"}


async def test_and_so_it_is_awaited(routed):
    router, cell = routed
    async with AsyncClient(router.url, api_key=KEY) as client:
        await client.put(LARGE)
    assert [path for path, _, _ in router.seen] == [places.PATH]
    assert [path for path, _, _ in cell.seen] == ["/v1/arrays"]


def test_what_is_small_is_sent_on_with_its_body(routed):
    router, cell = routed
    with Client(router.url, api_key=KEY) as client:
        client.put(np.zeros(4))
    assert [path for path, _, _ in router.seen] == ["/v1/arrays", places.PATH]
    ((path, key, length),) = cell.seen
    assert (path, key, length) == ("/v1/arrays", f"Bearer {KEY}", router.seen[0][2])


async def test_and_so_it_is_sent_on_awaited(routed):
    router, cell = routed
    async with AsyncClient(router.url, api_key=KEY) as client:
        await client.put(np.zeros(4))
    assert cell.seen == [("/v1/arrays", f"Bearer {KEY}", router.seen[0][2])]


def test_a_location_that_the_list_does_not_have_gets_nothing(servers):
    """Neither the key nor the array."""
    router, thief = servers
    thief.answer = lambda *_: (INFO, 201, {})

    def answer(_method, path):
        if path == places.PATH:
            return {"cell": 0, "cells": [{"cell": 0, "url": router.url}]}, 200, {CELLS_HEADER: "1"}
        return {"type": "/problems/other-cell"}, 307, {"Location": thief.url + path, CELLS_HEADER: "1"}

    router.answer = answer
    with Client(router.url, api_key=KEY) as client, pytest.raises(gemmserve.ProtocolError, match="none of its cells"):
        client.put(np.zeros(4))
    assert thief.seen == []


def test_cells_that_send_on_to_each_other_for_ever(servers):
    router, cell = servers
    for one, other in ((router, cell), (cell, router)):

        def answer(_method, path, other=other):
            if path == places.PATH:
                cells = [{"cell": number, "url": server.url} for number, server in enumerate(servers)]
                return {"cell": 0, "cells": cells}, 200, {CELLS_HEADER: "1"}
            return {"type": "/problems/other-cell"}, 307, {"Location": other.url + path, CELLS_HEADER: "1"}

        one.answer = answer
    with Client(router.url, api_key=KEY) as client, pytest.raises(gemmserve.ProtocolError, match="to each other"):
        client.put(np.zeros(4))


def test_another_server_s_redirect_is_none_of_a_cell(servers):
    router, _ = servers
    router.answer = lambda _method, path: ({}, 307, {"Location": f"https://elsewhere.example{path}"})
    with Client(router.url, api_key=KEY) as client, pytest.raises(gemmserve.ProtocolError, match="redirects"):
        client.put(np.zeros(4))


def test_ids_by_the_cell_that_made_them():
    ids = [f"arr_{ID}_7", f"arr_{ID}", f"arr_{ID}_255", f"arr_{ID[::-1]}_7", "arr_x_7", f"arr_{ID}_0"]
    assert places.by_cell(ids) == [[ids[0], ids[3]], [ids[1], ids[4], ids[5]], [ids[2]]]
    assert places.by_cell([]) == []


@pytest.fixture
def deleting(servers):
    """(Router and cell 0, cell 7), either of which deletes what is its own; `asked` are the ids of each."""
    for number, server in zip((0, 7), servers, strict=True):

        def answer(method, path, server=server, number=number):
            if path == places.PATH:
                cells = [{"cell": cell, "url": each.url} for cell, each in zip((0, 7), servers, strict=True)]
                return {"cell": 0, "cells": cells}, 200, {CELLS_HEADER: "1"}
            assert (method, path) == ("POST", "/v1/deletions")
            ids = json.loads(server.body)["ids"]
            if number == 0 and all(each.endswith("_7") for each in ids):
                return {"type": "/problems/other-cell"}, 307, {"Location": servers[1].url + path, CELLS_HEADER: "1"}
            server.asked.append(ids)
            answer = {"count": len(ids), "nbytes": 0, "missing": [], "elsewhere": [], "more": False}
            return server.fails or (answer, 200, {CELLS_HEADER: "1"})

        server.answer, server.asked, server.fails = answer, [], None
    return servers


def test_each_cell_deletes_its_own(deleting):
    zero, seven = deleting
    ids = [f"arr_{ID}_7", f"arr_{ID}", f"arr_{ID[::-1]}_7"]
    with Client(zero.url, api_key=KEY) as client:
        assert client.delete(*ids) == 3
    assert (zero.asked, seven.asked) == ([[ids[1]]], [[ids[0], ids[2]]])


def test_a_cell_that_fails_keeps_no_other_s_arrays(deleting):
    zero, seven = deleting
    seven.fails = {"type": "/problems/store-full", "title": "full", "status": 507}, 507, {}
    with Client(zero.url, api_key=KEY) as client, pytest.raises(gemmserve.StoreFull):
        client.delete(f"arr_{ID}_7", f"arr_{ID}")
    assert zero.asked == [[f"arr_{ID}"]]
