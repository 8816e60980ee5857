"""put, get, ls, rm."""

from __future__ import annotations

import io
import json

import numpy as np

from gemmserve.cli._arrays import size_text


def test_there_and_back(cli, service, files) -> None:
    done = cli("put", "a.npy", "b.npy", "--ttl", "60", "--digest")
    first, second = done.out.split()
    assert service.requests[0].url.params["ttl_s"] == "60.0"
    assert "content-digest" in service.requests[0].headers
    listed = cli("ls").out
    assert listed.splitlines()[0].split() == ["ID", "DTYPE", "SHAPE", "ORDER", "SIZE", "CREATED", "EXPIRES"]
    assert [line.split()[:5] for line in listed.splitlines()[1:]] == [
        [second, "complex64", "4x5", "C", "160"],
        [first, "complex64", "3x4", "C", "96"],
    ]
    assert cli("get", first, "-o", "back.npy").status == 0
    np.testing.assert_array_equal(np.load("back.npy"), files.a)
    assert cli("rm", first, second).status == 0
    assert not service.arrays
    assert cli("rm", first).status == 1


def test_json(cli, service, files) -> None:
    (put,) = json.loads(cli("put", "a.npy", "--json").out)
    (listed,) = json.loads(cli("ls", "--json", "--limit", "1").out)
    assert put == listed
    assert (listed["dtype"], listed["shape"], listed["created_at"]) == (
        "complex64",
        [3, 4],
        "2025-01-02T03:04:05+00:00",
    )


def test_streams(cli, service, files) -> None:
    with open("a.npy", "rb") as file:  # noqa: PTH123
        array_id = cli("put", "-", stdin=file.read()).out.strip()
    np.testing.assert_array_equal(service.arrays[array_id], files.a)
    done = cli("get", array_id, "-o", "-", binary=True)
    np.testing.assert_array_equal(np.load(io.BytesIO(done.data)), files.a)
    assert cli("get", array_id, "-o", "-", terminal=True).status == 2
    assert cli("put", "-", "-", stdin=b"").status == 2


def test_the_key_comes_from_the_environment(cli, service) -> None:
    cli("ls", api_key="s3cret")
    assert service.requests[0].headers["authorization"] == "Bearer s3cret"


def test_sizes() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30, 7 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB", "7.0 TiB",
    ]  # fmt: skip
