"""TLS in this process: a certificate is used from the moment that its files are replaced, and never half of one."""

from __future__ import annotations

import asyncio
import ssl

import numpy as np
import pytest
import uvloop
from certificates import make_certificate
from raw_connection import until

from gemmserve import Client
from gemmserve._transport import direct
from gemmserve_service.http import server
from gemmserve_service.http.protocol.body_receiver import BodyReceiver


@pytest.fixture
def issue(tmp_path):
    """issue("name") puts a fresh self-signed certificate, and its key, into their places."""

    def make(name, *, key=True):
        made, private = make_certificate(tmp_path, name=name, files=("new.pem", "new.key"))
        made.replace(tmp_path / "certificate.pem")
        if key:
            private.replace(tmp_path / "key.pem")

    return make


def shown(live):
    """The certificate that the server shows, as it is."""
    return ssl.get_server_certificate(("127.0.0.1", live.port), timeout=60)


def test_a_renewed_certificate_is_used_without_a_restart(serve, issue, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(server, "_RELOAD_S", 0.05)
    issue("first")
    live = serve(tls_certificate=tmp_path / "certificate.pem", tls_key=tmp_path / "key.pem")
    first = shown(live)
    assert first.split() == (tmp_path / "certificate.pem").read_text().split()
    issue("second", key=False)  # of the pair only one half is there yet
    until(lambda: "could not be loaded again" in caplog.text)
    assert shown(live) == first
    (tmp_path / "new.key").replace(tmp_path / "key.pem")
    until(lambda: shown(live) != first)
    assert shown(live).split() == (tmp_path / "certificate.pem").read_text().split()


def test_a_certificate_that_is_renewed_while_the_server_starts_is_used(serve, issue, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_RELOAD_S", 0.05)
    issue("first")
    first, load = (tmp_path / "certificate.pem").read_text().split(), server.uvicorn.Config.load

    def loaded(config):
        load(config)
        issue("second")

    with monkeypatch.context() as patch:
        patch.setattr(server.uvicorn.Config, "load", loaded)
        live = serve(tls_certificate=tmp_path / "certificate.pem", tls_key=tmp_path / "key.pem")
    until(lambda: shown(live).split() == (tmp_path / "certificate.pem").read_text().split())
    assert shown(live).split() != first


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_large_bodies_land_and_leave(serve, issue, tmp_path, monkeypatch, loop_factory):
    """Through TLS, too, the server reads into the array, and the client into its result."""
    monkeypatch.setattr(direct, "DIRECT_FROM", 1 << 16)
    issue("localhost")
    live = serve(loop_factory=loop_factory, tls_certificate=tmp_path / "certificate.pem", tls_key=tmp_path / "key.pem")
    landed, received = [], []
    receive, land = BodyReceiver.receive_directly, direct.landed

    async def spy(self, view, patience_s):
        landed.append(await receive(self, view, patience_s))
        return landed[-1]

    def watch(*arguments):
        for count in land(*arguments):
            received.append(count)
            yield count

    monkeypatch.setattr(BodyReceiver, "receive_directly", spy)
    monkeypatch.setattr(direct, "landed", watch)
    array = (np.arange(1 << 20) % 251).astype("c8").reshape(1024, 1024)
    with Client(f"https://127.0.0.1:{live.port}", verify=False, progress=False) as client:
        for _ in range(2):
            remote = client.put(array)
            assert np.array_equal(remote.numpy(), array)
    assert sum(landed) > 1.5 * array.nbytes
    assert sum(received) > 1.5 * array.nbytes
