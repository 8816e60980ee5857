"""The app on a Unix socket with the one for shared memory beside it, and clients by hand."""

from __future__ import annotations

import contextlib

import pytest
from local_app import LocalApp
from memory_peer import Peer


@pytest.fixture
def sockets(tmp_path_factory):
    return tmp_path_factory.mktemp("s") / "g.sock"


@pytest.fixture
def make(sockets, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(**settings):
            return stack.enter_context(LocalApp(sockets, tmp_path / "data", **settings))

        yield start


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    with LocalApp(folder / "g.sock", folder / "data") as app:
        yield app


@pytest.fixture
def app(running):
    """One for all tests that leave it as it was."""
    running.executor.release()  # should a test before have failed
    running.executor.sent.clear()
    yield running
    running.end_sessions()
    running.until(lambda: running.descriptors.sessions == running.descriptors.held == 0)
    running.until(lambda: running.core.store.scratch_bytes == 0)


@pytest.fixture
def peers():
    with contextlib.ExitStack() as stack:

        def connect(app, key=None):
            peer = Peer(app, key)
            stack.callback(peer.close)
            return peer

        yield connect


@pytest.fixture
def peer(app, peers):
    return peers(app)
