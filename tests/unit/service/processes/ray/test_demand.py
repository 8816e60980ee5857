"""Demand in a pipe: the newest line counts, nobody waits."""

from __future__ import annotations

import os

import pytest

from gemmserve_service.processes.ray.demand import Demand, Listener, tell


@pytest.fixture
def pipe():
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    yield ends
    for fd in ends:
        os.close(fd)


def test_the_newest_is_heard(pipe):
    listener = Listener(pipe[0])
    assert listener.last() is None
    assert tell(pipe[1], Demand(1.0, 2, 3))
    assert tell(pipe[1], Demand(2.0, 4, 5))
    assert listener.last() == Demand(2.0, 4, 5)
    assert listener.last() == Demand(2.0, 4, 5), "stays until there is another"


def test_a_line_in_pieces(pipe):
    listener = Listener(pipe[0])
    os.write(pipe[1], b'{"at": 1.5, "queu')
    assert listener.last() is None
    os.write(pipe[1], b'ed": 7, "running": 1}\n{"at"')
    assert listener.last() == Demand(1.5, 7, 1)


def test_a_full_pipe_holds_nobody_up(pipe):
    told = 0
    while tell(pipe[1], Demand(float(told), told, 0)):
        told += 1
    listener = Listener(pipe[0])
    assert listener.last() == Demand(float(told - 1), told - 1, 0)
    assert tell(pipe[1], Demand(-1.0, 0, 0))
    assert listener.last() == Demand(-1.0, 0, 0)
