"""Cells: the file that lists them, and by what they know each other."""

from __future__ import annotations

import json

import pytest

from gemmserve_service.errors import Unauthorized
from gemmserve_service.settings import Settings
from gemmserve_service.tenancy.cells import Cells, CellsError, read_cells

SECRET = "x" * 32
URLS = {"0": "https://zero.example", "7": "https://seven.example:8443/"}
ARRAY = "arr_01jd2w7m4h8k3n5p6q9r0s1t2v"


@pytest.fixture
def read(tmp_path):
    """read({"cells": ...}, cell=7) -> Cells."""

    def reading(document, cell=0):
        path = tmp_path / "cells.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return read_cells(Settings(data_dir=tmp_path, cell=cell, cells_file=path))

    return reading


def test_a_server_alone(tmp_path):
    cells = read_cells(Settings(data_dir=tmp_path, cell=3))
    assert (cells.number, cells.urls, cells.others, cells.count) == (3, {}, [], 1)
    assert cells.elsewhere(ARRAY) is None


def test_the_cells_of_a_file(read):
    cells = read({"cells": URLS, "secret": SECRET}, cell=7)
    assert cells.urls == {0: "https://zero.example", 7: "https://seven.example:8443"}
    assert (cells.url, cells.others, cells.count) == ("https://seven.example:8443", [0], 2)
    assert SECRET not in repr(cells)


@pytest.mark.parametrize(("identifier", "cell"), [(ARRAY, 0), (f"{ARRAY}_7", None), (f"{ARRAY}_8", None)])
def test_what_is_another_cell_s(read, identifier, cell):
    """Not what this one made, nor what a cell made that nobody knows."""
    assert read({"cells": URLS, "secret": SECRET}, cell=7).elsewhere(identifier) == cell


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "no JSON"),
        ([], "no object"),
        ({"cells": URLS}, "secret"),
        ({"cells": URLS, "secret": "short"}, "secret"),
        ({"cells": URLS, "secret": SECRET, "urls": {}}, "unknown fields urls"),
        ({"cells": {"0": "zero.example"}, "secret": SECRET}, "no http"),
        ({"cells": {"0": "ftp://zero.example"}, "secret": SECRET}, "no http"),
        ({"cells": {"0": "https://me:secret@zero.example"}, "secret": SECRET}, "says who asks"),
        ({"cells": {"00": "https://zero.example"}, "secret": SECRET}, "'00' is no number"),
        ({"cells": {"256": "https://zero.example"}, "secret": SECRET}, "'256' is no number"),
        ({"cells": {"7": "https://zero.example"}, "secret": SECRET}, "does not list cell 0"),
        ({"cells": {"0": "https://a.example", "1": "https://a.example/"}, "secret": SECRET}, "the same URL"),
    ],
)
def test_files_that_make_no_sense(read, document, said):
    with pytest.raises(CellsError, match=said):
        read(document)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CellsError, match="cannot be read"):
        read_cells(Settings(data_dir=tmp_path, cells_file=tmp_path / "none.json"))


@pytest.fixture
def pair():
    urls = {0: "https://zero.example", 7: "https://seven.example"}
    return Cells(0, urls, SECRET.encode()), Cells(7, urls, SECRET.encode())


def test_one_cell_asks_another(pair):
    zero, seven = pair
    token = zero.token("GET", "/internal/x", "0123456789", clock=1e9)
    assert seven.owner_of(token, "GET", "/internal/x", clock=1e9 + 20) == "0123456789"


@pytest.mark.parametrize(
    ("method", "path", "clock"),
    [("POST", "/internal/x", 0), ("GET", "/internal/y", 0), ("GET", "/internal/x", 61), ("GET", "/internal/x", -61)],
)
def test_leave_is_for_one_request_and_a_moment(pair, method, path, clock):
    zero, seven = pair
    token = zero.token("GET", "/internal/x", "0123456789", clock=1e9)
    with pytest.raises(Unauthorized):
        seven.owner_of(token, method, path, clock=1e9 + clock)


@pytest.mark.parametrize(
    "change",
    [
        lambda token: token.replace("0123456789", "9876543210"),
        lambda token: "8" + token[1:],
        lambda token: token[:-1],
        lambda token: token + ":",
        lambda _: "",
        lambda _: ":::",
        lambda token: "²" + token[1:],
        lambda token: token[:-1] + "é",
    ],
)
def test_what_no_cell_made(pair, change):
    zero, seven = pair
    with pytest.raises(Unauthorized):
        seven.owner_of(change(zero.token("GET", "/internal/x", "0123456789")), "GET", "/internal/x")


def test_a_cell_does_not_ask_itself(pair):
    zero, _ = pair
    with pytest.raises(Unauthorized):
        zero.owner_of(zero.token("GET", "/internal/x", ""), "GET", "/internal/x")


def test_a_server_alone_believes_nobody(pair):
    zero, _ = pair
    with pytest.raises(Unauthorized):
        Cells(7).owner_of(zero.token("GET", "/internal/x", ""), "GET", "/internal/x")
