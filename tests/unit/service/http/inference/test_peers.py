"""The user at the other end of a connection, as the kernel says."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from gemmserve_service.http.inference.peers import connected_uid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sock_diag is Linux's")


@pytest.fixture(params=["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def connection(request):
    """Both ends of a connection."""
    host = request.param
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host.startswith("::ffff"))
    except OSError as error:
        pytest.skip(f"no socket at {host}: {error}")
    with listener, socket.socket(family) as client:
        client.connect(listener.getsockname()[:2])
        server, _ = listener.accept()
        with server:
            yield client, server


def test_the_other_end_is_this_user(connection):
    _, server = connection
    assert connected_uid(server.getpeername()[:2], server.getsockname()[:2]) == os.geteuid()


def test_one_that_has_ended_is_nobody(connection):
    """A socket in TIME_WAIT is listed with the user 0."""
    client, server = connection
    ends = server.getpeername()[:2], server.getsockname()[:2]
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    server.close()
    client.close()
    assert connected_uid(*ends) is None


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "", "/run/x", "127.0.0.1"])
def test_strangers_are_nobody(host):
    assert connected_uid((host, 1), ("127.0.0.1", 1)) is None
    assert connected_uid((host, 1), (host, 0)) is None
