"""Addresses of servers on a Unix socket."""

from __future__ import annotations

from pathlib import Path

import pytest

import gemmserve
from gemmserve import AsyncClient, Client
from gemmserve._local.addresses import socket_path


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("unix:/run/g.sock", "/run/g.sock"),
        (" unix:/run/g.sock ", "/run/g.sock"),
        ("unix:///run/g.sock", "/run/g.sock"),
        ("http+unix:///run/g.sock", "/run/g.sock"),
        ("http+unix://%2Frun%2Fa%20b.sock", "/run/a b.sock"),
        ("unix:/run/a%20b.sock", "/run/a%20b.sock"),
        ("unix:g.sock", str(Path.cwd() / "g.sock")),
        ("unix:~/g.sock", str(Path.home() / "g.sock")),
        ("http://127.0.0.1:8000", None),
        ("127.0.0.1:8000", None),
        ("unix.example:8000", None),
    ],
)
def test_the_path_in_an_address(url, path) -> None:
    assert socket_path(url) == path


@pytest.mark.parametrize("url", ["unix:", "unix://", "http+unix://", "unix:/run/", "unix:/a\0b"])
def test_addresses_without_a_path(url) -> None:
    with pytest.raises(gemmserve.ParameterInvalid, match="names no socket"):
        Client(url)


def test_the_url_of_a_client() -> None:
    with Client("http+unix:///run/g.sock") as client:
        assert client.url == "unix:/run/g.sock"


def test_nobody_there(tmp_path) -> None:
    with (
        Client(f"unix:{tmp_path}/none.sock", retry=gemmserve.RetryPolicy(attempts=1)) as client,
        pytest.raises(gemmserve.TransportError, match=r"none\.sock"),
    ):
        client.health()


@pytest.mark.parametrize("proxy", ["HTTP_PROXY", "ALL_PROXY"])
def test_no_proxy_is_asked(monkeypatch, proxy) -> None:
    monkeypatch.setenv(proxy, "http://proxy.invalid:1")
    for client in (Client("unix:/run/g.sock"), AsyncClient("unix:/run/g.sock")):
        assert client._io._make()._mounts == {}
