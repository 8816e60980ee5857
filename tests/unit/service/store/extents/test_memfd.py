"""The host arena's size, and its memory."""

from __future__ import annotations

import os

import pytest

from gemmserve_service.settings import Settings
from gemmserve_service.store.extents import memfd as module
from gemmserve_service.store.extents.memfd import (
    arena_ahead_bytes,
    arena_bytes,
    create_arena,
    memory_extents_supported,
    shares_panels,
)

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not memory_extents_supported(), reason="this system has no memfd")


def test_its_size_is_a_setting_or_a_quarter_of_the_memory(monkeypatch):
    monkeypatch.setattr(module, "host_memory", lambda: 1 << 30)
    assert arena_bytes(Settings(), ["cpu"]) == 0
    assert arena_bytes(Settings(), ["cpu", "cuda:0"]) == 1 << 28
    assert arena_bytes(Settings(host_arena_bytes=5 * MIB), ["rocm:0"]) == 4 * MIB
    assert arena_bytes(Settings(host_arena_bytes=0), ["cuda:0"]) == 0
    assert arena_ahead_bytes(Settings(), 1 << 40) == 1 << 27
    assert arena_ahead_bytes(Settings(arena_ahead_bytes=7), 1 << 40) == 7
    assert arena_ahead_bytes(Settings(arena_ahead_bytes=1 << 50), MIB) == MIB


def test_it_takes_no_memory_before_it_is_written():
    fd = create_arena(1 << 40)
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    assert (found.st_size, found.st_blocks) == (1 << 40, 0)


@pytest.mark.parametrize(
    ("devices", "shared"),
    [(["cuda:0", "cuda:1"], True), (["cuda:0"], False), (["cuda:0", "cpu"], False), (["rocm:0", "rocm:1"], False)],
)
def test_panels_are_shared_by_cuda_devices(devices, shared):
    assert shares_panels(Settings(), devices) == shared
    assert not shares_panels(Settings(peer_copies="never"), devices)
