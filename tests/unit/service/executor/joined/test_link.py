"""A link's writes: what belongs together goes together, so that the node is woken once."""

from __future__ import annotations

import numpy as np
import pytest
from works import packed

from gemmserve_service.executor.join_protocol import TO_AGENT, Bytes, JoinDecoder
from gemmserve_service.executor.joined.door import JoinCounts
from gemmserve_service.executor.joined.link import Link
from gemmserve_service.executor.protocol import ArrayRef, RunBatch
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import GemmParams

A = np.arange(16.0).reshape(4, 4)


class Transport:
    """Transport that keeps what is written."""

    def __init__(self):
        self.writes = []

    def is_closing(self):
        return False

    def get_extra_info(self, name):
        return None

    def write(self, data):
        self.writes.append(bytes(data))


class Door:
    """Door to a store in memory."""

    owner = None

    def __init__(self):
        self.counts = JoinCounts()

    def memory(self, file):
        return memoryview(A).cast("B")


@pytest.fixture
def transport():
    return Transport()


@pytest.fixture
def link(transport):
    return Link(Door(), transport, "there")


def ref(name):
    return ArrayRef(
        extent=f"x-{name}", path=f"/p/{name}", capacity=A.nbytes, nbytes=A.nbytes, dtype="float64", shape=A.shape,
        order="C", cache_id=name,
    )  # fmt: skip


def test_a_task_and_its_operands_are_one_write(link, transport):
    message = packed(Run("t", GemmParams(op="gemm"), "blas", {"a": ref("a"), "b": ref("b")}, {"d": ref("d")}))
    link.send(message)
    (written,) = transport.writes
    frames = JoinDecoder().feed(written)
    assert [type(TO_AGENT.validate_json(frame.body)) for frame in frames] == [Bytes, Bytes, RunBatch]
    assert [frame.raw for frame in frames[:2]] == [A.tobytes()] * 2
