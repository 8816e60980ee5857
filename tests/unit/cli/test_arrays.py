"""put, get, ls, rm."""

from __future__ import annotations

import io
import json

import numpy as np


def test_there_and_back(cli, service, files) -> None:
    done = cli("put", "a.npy", "b.npy", "--ttl", "60", "--digest")
    first, second = done.out.split()
    assert service.requests[0].url.params["ttl_s"] == "60.0"
    assert "content-digest" in service.requests[0].headers
    listed = cli("ls").out
    assert listed.splitlines()[0].split() == ["ID", "DTYPE", "SHAPE", "ORDER", "SIZE", "CREATED", "EXPIRES", "NAME"]
    assert [line.split()[:5] for line in listed.splitlines()[1:]] == [
        [second, "complex64", "4x5", "C", "160"],
        [first, "complex64", "3x4", "C", "96"],
    ]
    assert cli("get", first, "-o", "back.npy").status == 0
    np.testing.assert_array_equal(np.load("back.npy"), files.a)
    assert cli("rm", first, second).status == 0
    assert not service.arrays
    assert cli("rm", first).status == 1


def test_everybodys(cli, service, files) -> None:
    cli("put", "a.npy")
    service.requests.clear()
    assert cli("ls", "--all").out.splitlines()[1].split()[2] == "3x4"
    assert cli("jobs", "--all").status == 0
    assert [request.url.params["all"] for request in service.requests] == ["true", "true"]
    cli("ls")
    assert "all" not in service.requests[-1].url.params


def test_the_newest_of_a_name(cli, service, files) -> None:
    cli("put", "a.npy", "--name", "weights")
    cli("put", "b.npy", "--name", "weights")
    assert cli("get", "--name", "weights", "-o", "back.npy").status == 0
    np.testing.assert_array_equal(np.load("back.npy"), files.b)
    done = cli("get", "--name", "nobody", "-o", "none.npy")
    assert done.status == 1
    assert "nobody" in done.err
    for arguments in ([], ["arr_x", "--name", "weights"]):
        assert cli("get", *arguments, "-o", "none.npy").status == 2


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


def test_names_and_labels(cli, service, files) -> None:
    first, second = cli(
        "put", "a.npy", "b.npy", "--name", "weights", "--label", "run=7", "--label", "step=1"
    ).out.split()
    cli("put", "c.npy")
    listed = cli("ls", "--name", "weights").out.splitlines()[1:]
    assert [(line.split()[0], line.split()[-1]) for line in listed] == [(second, "weights"), (first, "weights")]
    assert len(json.loads(cli("ls", "--label", "run=7", "--json").out)) == 2
    assert json.loads(cli("ls", "--label", "run=8", "--json").out) == []
    for wrong in (("put", "a.npy", "--label", "run"), ("ls", "--label", "a=1", "--label", "a=2")):
        assert cli(*wrong).status == 2
    done = cli("rm", "--name", "weights", "--label", "step=1", "--dry-run")
    assert (done.status, done.out, len(service.arrays)) == (0, "2\n", 3)
    assert cli("rm", "--label", "run=7").out == "2\n"
    assert len(service.arrays) == 1


def test_rm_says_what_was_not_there(cli, service, files) -> None:
    first, second = cli("put", "a.npy", "b.npy").out.split()
    cli("rm", first)
    done = cli("rm", first, second)
    assert (done.status, "1 of 2 were no arrays" in done.err) == (1, True)
    assert not service.arrays
    for wrong in ((), (first, "--name", "a"), (first, "--dry-run"), (first, "--older-than", "1")):
        assert cli("rm", *wrong).status == 2
