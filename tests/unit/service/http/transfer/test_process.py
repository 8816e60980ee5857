"""A transfer process: what it moves, where it stops, and what it says of it."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from pathlib import Path

import pytest
from live_server import until

from gemmserve_service.http.transfer.process import TransferProcess
from gemmserve_service.http.transfer.protocol import MAX_PACKET, TO_FRONT, End, Forget, Hello, Stop, Transfer

LONG_S = 600.0
SIZE = 1 << 20


class Scene:
    """A transfer process in a thread, an extent, and a connection whose far end is `client`."""

    def __init__(self) -> None:
        self.front, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.front.settimeout(60)
        self.transfer = TransferProcess(theirs, "0")
        self.thread = threading.Thread(target=self.transfer.run, daemon=True)
        self.thread.start()
        self.extent = os.memfd_create("extent")
        os.ftruncate(self.extent, SIZE)
        self.connection, self.client = socket.socketpair()
        self.connection.setblocking(False)
        self.client.settimeout(60)

    def tell(self, order, *fds):
        socket.send_fds(self.front, [order.model_dump_json().encode()], fds)

    def move(self, direction, offset, count, *, patience_s=LONG_S, name="x", number=1, fds=None):
        move = Transfer(id=number, direction=direction, extent=name, offset=offset, count=count, patience_s=patience_s)
        self.tell(move, *((self.connection.fileno(), self.extent) if fds is None else fds))

    def said(self):
        return TO_FRONT.validate_json(self.front.recv(MAX_PACKET))

    def close(self):
        self.front.close()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.transfer.close()
        self.connection.close()
        self.client.close()
        os.close(self.extent)


@pytest.fixture
def scene():
    scene = Scene()
    assert scene.said() == Hello(name="0")
    yield scene
    scene.close()


def test_what_comes_lands_at_its_offset_and_not_a_byte_more(scene):
    scene.client.sendall(b"0123456789GET / HTTP/1.1")
    scene.move("in", 100, 10)
    said = scene.said()
    assert (said.id, said.count, said.end) == (1, 10, End.DONE)
    assert os.pread(scene.extent, 12, 99) == b"\x000123456789\x00"
    assert scene.connection.recv(100) == b"GET / HTTP/1.1"  # of the next request, which is the front's to read


def test_what_goes_is_the_stretch(scene):
    os.pwrite(scene.extent, b"0123456789", 50)
    scene.move("out", 51, 8)
    said = scene.said()
    assert (said.count, said.end) == (8, End.DONE)
    assert scene.client.recv(100) == b"12345678"


@pytest.mark.parametrize("count", [0, 5])
def test_patience_ends_it_with_what_came(scene, count):
    scene.client.sendall(b"x" * count)
    scene.move("in", 0, 10, patience_s=0.05)
    said = scene.said()
    assert (said.count, said.end) == (count, End.PATIENCE)
    scene.client.sendall(b"y" * 10)  # and it reads no more
    scene.move("in", 20, 10, number=2)
    assert scene.said().count == 10
    assert os.pread(scene.extent, 10, count) == bytes(10)


def test_a_client_that_takes_nothing(scene):
    scene.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    scene.move("out", 0, SIZE, patience_s=0.05)
    said = scene.said()
    assert said.end is End.PATIENCE
    assert 0 < said.count < SIZE


@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_client_that_hangs_up(scene, direction):
    scene.client.close()
    scene.move(direction, 0, 10)
    assert scene.said().end is End.HANGUP


def test_a_client_that_breaks_its_connection_in_the_middle(scene):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
    connection.setblocking(False)
    with connection:
        scene.move("in", 0, 10, fds=(connection.fileno(), scene.extent))
        client.sendall(b"abc")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert scene.said().end is End.HANGUP


@pytest.fixture
def tcp():
    """The two ends of a connection by TCP: the front's, and its client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
    connection.setblocking(False)
    client.settimeout(60)
    with connection, client:
        yield connection, client


def low_water(connection):
    """Bytes from which on who waits for the connection is woken."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@pytest.mark.parametrize(("count", "low"), [(10, 10), (SIZE, SIZE)])
def test_it_is_woken_when_what_it_waits_for_has_come(scene, tcp, count, low):
    connection, client = tcp
    scene.move("in", 0, count, fds=(connection.fileno(), scene.extent))
    until(lambda: low_water(connection) == low)
    client.sendall(b"x" * count)
    assert scene.said().end is End.DONE
    assert low_water(connection) == 1  # the next request is shorter


def test_where_the_system_does_not_know_how_it_is_woken_for_whatever_comes(scene, tcp, monkeypatch):
    def refuse(self, level, option, value):
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    monkeypatch.setattr(socket.socket, "setsockopt", refuse)
    connection, client = tcp
    scene.move("in", 0, 1000, fds=(connection.fileno(), scene.extent))
    for piece in (b"x" * 10, b"y" * 990):
        client.sendall(piece)
    said = scene.said()
    assert (said.count, said.end) == (1000, End.DONE)


def test_patience_ends_with_what_came_though_it_waits_for_more(scene, tcp):
    connection, client = tcp
    scene.move("in", 0, SIZE, patience_s=0.5, fds=(connection.fileno(), scene.extent))
    client.sendall(b"x" * 1000)
    said = scene.said()
    assert (said.count, said.end) == (1000, End.PATIENCE)
    assert low_water(connection) == 1
    assert os.pread(scene.extent, 1001, 0) == b"x" * 1000 + b"\0"


@pytest.mark.parametrize("sent", [0, 1000])
def test_one_that_is_stopped_leaves_the_connection_as_it_was(scene, tcp, sent):
    connection, client = tcp
    scene.move("in", 0, SIZE, fds=(connection.fileno(), scene.extent))
    until(lambda: low_water(connection) == SIZE)
    client.sendall(b"x" * sent)
    scene.tell(Stop(id=1))
    assert scene.said().end is End.STOPPED
    assert low_water(connection) == 1


def test_a_client_that_hangs_up_with_less_than_is_waited_for(scene, tcp):
    connection, client = tcp
    scene.move("in", 0, SIZE, fds=(connection.fileno(), scene.extent))
    until(lambda: low_water(connection) == SIZE)
    client.sendall(b"x" * 1000)
    client.close()
    said = scene.said()
    assert (said.count, said.end) == (1000, End.HANGUP)


def test_it_stops_when_it_is_told(scene):
    scene.client.sendall(b"abc")
    scene.move("in", 0, 10)
    scene.tell(Stop(id=1))
    said = scene.said()
    assert (said.id, said.end) == (1, End.STOPPED)
    scene.tell(Stop(id=1))  # crossed the answer on its way
    scene.client.sendall(b"z" * 10)
    scene.move("in", 100, 10, number=2)
    assert scene.said().id == 2
    assert os.pread(scene.extent, 97, 3) == bytes(97)


def test_many_at_a_time_and_a_still_one_holds_nobody_up(scene):
    pairs = [socket.socketpair() for _ in range(20)]
    for number, (near, _) in enumerate(pairs):
        near.setblocking(False)
        scene.move("in", 100 * number, 100, number=number, fds=(near.fileno(), scene.extent))
    for number, (_, far) in enumerate(pairs[1:], 1):
        far.sendall(bytes([number]) * 100)
    assert {scene.said().id for _ in range(19)} == set(range(1, 20))
    pairs[0][1].sendall(bytes([99]) * 100)
    assert scene.said().id == 0
    data = os.pread(scene.extent, 2000, 0)
    assert [data[100 * n : 100 * n + 100] for n in range(20)] == [bytes([n or 99]) * 100 for n in range(20)]
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.mark.parametrize(("offset", "count"), [(SIZE - 9, 10), (SIZE, 1), (1 << 60, 1)])
def test_past_the_end_of_the_extent(scene, offset, count):
    scene.move("in", offset, count)
    said = scene.said()
    assert (said.end, said.count) == (End.FAILED, 0)
    assert "of an extent of" in said.detail


def test_what_is_no_extent_or_no_connection(scene):
    scene.move("in", 0, 10, fds=(scene.connection.fileno(),))
    assert scene.said().end is End.FAILED
    scene.move("in", 0, 10, number=2, name="y", fds=(scene.extent, scene.extent))
    assert scene.said().end is End.FAILED
    scene.client.sendall(b"0123456789")  # and it goes on
    scene.move("in", 0, 10, number=3)
    assert scene.said().end is End.DONE


def test_a_mapping_is_kept_until_its_extent_is_gone(scene):
    scene.client.sendall(b"0123456789")
    scene.move("in", 0, 5)
    scene.said()
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 (the descriptor alone is wanted): it looks at the name
        scene.move("in", 5, 5, number=2, fds=(scene.connection.fileno(), nothing.fileno()))
        assert scene.said().end is End.DONE
        assert os.pread(scene.extent, 10, 0) == b"0123456789"
        scene.tell(Forget(extent="x"))
        scene.tell(Forget(extent="never seen"))
        scene.move("in", 5, 5, number=3, fds=(scene.connection.fileno(), nothing.fileno()))
        assert scene.said().end is End.FAILED


def test_it_keeps_no_descriptor_of_what_is_over(scene):
    def kept():
        return sum(_is(path, connection) for path in Path("/proc/self/fd").iterdir())

    connection = os.fstat(scene.connection.fileno())
    scene.client.sendall(b"0123456789")
    scene.move("in", 0, 10)
    scene.said()
    assert kept() == 1


def _is(path, status):
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:  # closed since, as the folder's own
        return False
