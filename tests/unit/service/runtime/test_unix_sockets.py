"""Listening sockets with a path: their mode, what is replaced, what is left alone, what is removed."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from gemmserve_service.runtime.start_error import StartError
from gemmserve_service.runtime.unix_sockets import PATH_MAX, listen_unix, peer_of

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")


@pytest.fixture
def tmp_path():
    """With a name that is short enough for a socket, wherever the tests keep their folders."""
    with tempfile.TemporaryDirectory(prefix="gs-") as folder:
        yield Path(folder)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.sock"


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def connect(path, kind=socket.SOCK_STREAM):
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.connect(str(path))
    return connection


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_mode_is_what_was_asked_for_whatever_the_umask(path, stack, mode, umask):
    before = os.umask(umask)
    try:
        listen_unix(path, mode, stack)
        assert os.umask(umask) == umask  # put back
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_it_is_never_open_wider_than_asked_for(path, stack, monkeypatch):
    seen = []
    monkeypatch.setattr(type(path), "chmod", lambda self, mode: seen.append(stat.S_IMODE(self.stat().st_mode)))
    before = os.umask(0)
    try:
        listen_unix(path, 0o600, stack)
    finally:
        os.umask(before)
    assert seen == [0o600]


def test_it_listens_and_goes_with_the_stack(path):
    with contextlib.ExitStack() as stack:
        listener = listen_unix(path, 0o600, stack)
        with connect(path) as connection:
            accepted, _ = listener.accept()
            assert peer_of(accepted) == peer_of(connection) == (os.getpid(), os.getuid())
            accepted.close()
    assert not path.exists()
    assert listener.fileno() == -1


def test_what_a_killed_server_left_is_replaced(path, stack):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.listen()
    left.close()  # the path stays
    assert path.exists()
    listen_unix(path, 0o600, stack)
    connect(path).close()


@pytest.mark.parametrize("backlog", ["empty", "full"])
def test_a_server_that_listens_there_is_left_alone(path, stack, backlog):
    with socket.socket(socket.AF_UNIX) as other, contextlib.ExitStack() as waiting:
        other.bind(str(path))
        other.listen(0)
        if backlog == "full":
            for _ in range(3):
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(str(path))
        identity = path.lstat().st_ino
        with pytest.raises(StartError, match="another"):
            listen_unix(path, 0o600, stack)
        assert path.lstat().st_ino == identity


def test_a_socket_of_another_kind_is_left_alone(path, stack):
    listen_unix(path, 0o600, stack, kind=socket.SOCK_SEQPACKET)
    with pytest.raises(StartError, match="another program"):
        listen_unix(path, 0o600, stack)
    assert path.exists()


@pytest.mark.parametrize("make", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(path, tmp_path, stack, make):
    if make == "file":
        path.write_text("precious")
    elif make == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="is no socket"):
        listen_unix(path, 0o600, stack)
    assert path.is_symlink() or path.exists()


def test_a_path_that_is_too_long(tmp_path, stack):
    fitting = "x" * (PATH_MAX - len(os.fsencode(tmp_path)) - 1)
    listen_unix(tmp_path / fitting, 0o600, stack)
    with pytest.raises(StartError, match=f"too long for a Unix socket: {PATH_MAX + 1} bytes, and {PATH_MAX} fit"):
        listen_unix(tmp_path / (fitting + "x"), 0o600, stack)


def test_a_folder_that_is_not_there(tmp_path, stack):
    with pytest.raises(StartError, match="No such file"):
        listen_unix(tmp_path / "missing" / "s", 0o600, stack)


def test_a_path_that_another_took_meanwhile_is_not_removed(path):
    with contextlib.ExitStack() as stack:
        listen_unix(path, 0o600, stack)
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_no_user_behind_a_tcp_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        assert peer_of(one) is None
    assert peer_of(None) is None
