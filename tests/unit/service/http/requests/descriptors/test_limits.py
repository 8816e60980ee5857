"""How many descriptors and sessions there may be, and how much memory of clients is used."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest
from memory_peer import GROW, NEEDS_MEMFD, SHRINK, WRITE, A, B, array_of, memory, open_memory, refused
from works import unpacked

pytestmark = NEEDS_MEMFD


def test_memory_of_clients_counts_against_the_memory_for_scratch(make, peers):
    app = make(max_scratch_bytes=A.nbytes)
    peer = peers(app)
    numbers = [peer.share(memory(A, seals=SHRINK | GROW | WRITE)) for _ in range(2)]
    answer = peer.gemm(shared={"a": (A, numbers[0]), "b": (A, numbers[1])})
    np.testing.assert_allclose(array_of(answer), A @ A, rtol=1e-4, atol=1e-4)
    operands = unpacked(app.executor.sent[0])[0].operands
    assert operands["a"].path.startswith("/proc/"), "in place"
    assert "extents" in operands["b"].path, "no memory left: a copy in a file"


def test_an_array_that_is_too_large(make, peers):
    app = make(max_array_bytes=A.nbytes - 1)
    peer = peers(app)
    number = peer.share(memory(A, seals=SHRINK | GROW | WRITE))
    answer = peer.gemm(shared={"a": (A, number)}, plain={"b": B})
    assert answer.json()["type"] == "/problems/too-large"


def test_descriptors_that_wait_are_counted(make, peers):
    app = make(max_shared_descriptors=3)
    first, second = peers(app), peers(app)
    numbers = [first.share(memory(A)) for _ in range(3)]
    app.until(lambda: app.descriptors.held == 3)
    late = second.share(memory(A))
    assert refused(second.gemm(shared={"a": (A, late)}, plain={"b": B}), "too many")
    array_of(first.gemm(shared={"a": (A, numbers[0])}, plain={"b": B}))
    late = second.share(memory(A))
    array_of(second.gemm(shared={"a": (A, late)}, plain={"b": B}))


def test_thousands_of_descriptors_end_the_session_and_are_closed(app, peer):
    before = open_memory()
    fd = memory(A)
    with pytest.raises(OSError):  # noqa: PT012 (whichever of them it is that fails)
        for _ in range(5000):
            peer.share(fd, close=False)
    os.close(fd)
    app.until(lambda: app.descriptors.sessions == 0)
    assert app.descriptors.held == 0
    app.until(lambda: open_memory() <= before)


def test_the_longest_idle_session_makes_way(app, peers, monkeypatch):
    from gemmserve_service.http.requests import descriptors

    monkeypatch.setattr(descriptors, "_MAX_SESSIONS", 2)
    one, two = peers(app), peers(app)
    array_of(one.gemm(shared={"a": (A, one.share(memory(A)))}, plain={"b": B}))
    three = peers(app)
    assert two.ended()
    for peer in (one, three):
        array_of(peer.gemm(shared={"a": (A, peer.share(memory(A)))}, plain={"b": B}))
    assert refused(two.gemm(shared={"a": (A, 1)}, plain={"b": B}), "no such session")


def test_connections_that_say_nothing(make, monkeypatch):
    from gemmserve_service.http.requests import descriptors

    monkeypatch.setattr(descriptors, "_MAX_SESSIONS", 2)
    app = make(head_timeout_s=0.2)
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for each in silent:
        each.settimeout(60)
        each.connect(f"{app.path}.fds")
    for each in silent:  # the first at once, the others when their time is up
        assert each.recv(10) == b""
        each.close()
