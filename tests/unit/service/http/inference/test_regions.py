"""Regions of shared memory: whose they are, what may be named, and what clients do to them meanwhile."""

from __future__ import annotations

import os
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import httpx
import numpy as np
import pytest

from gemmserve_service.errors import DescriptorRefused
from gemmserve_service.http.inference import regions
from gemmserve_service.http.inference.messages import RegionRegistration
from gemmserve_service.http.inference.regions import Regions

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")

A = np.arange(6, dtype="<f4").reshape(2, 3)


@pytest.fixture
def memory():
    """memory(nbytes) -> POSIX shared memory; gone with the test."""
    made = []

    def make(nbytes=1024):
        made.append(shared_memory.SharedMemory(f"gemmserve-test-{uuid.uuid4().hex}", create=True, size=nbytes))
        return made[-1]

    yield make
    for each in made:
        each.close()
        if Path("/dev/shm", each.name).exists():
            each.unlink()


@pytest.fixture
def registry():
    found = Regions(128)
    yield found
    found.close()


def wanted(key, byte_size=1024, offset=0):
    return RegionRegistration(key=key, byte_size=byte_size, offset=offset)


@pytest.mark.parametrize(
    "key",
    ["", "/", "..", "/../etc/passwd", "a/b", "/a/../b", "a\0b", "x" * 256, "\ud800", "/.", "missing-for-sure"],
    ids=lambda key: ascii(key)[:20],
)
def test_keys_name_memory_and_nothing_else(registry, key):
    with pytest.raises(DescriptorRefused):
        registry.register("", "r", RegionRegistration.model_construct(key=key, byte_size=1, offset=0))
    assert registry.status("") == []


def test_links_pipes_and_folders_are_no_memory(registry, memory):
    target = memory()
    names = [f"gemmserve-test-{uuid.uuid4().hex}" for _ in range(3)]
    paths = [Path("/dev/shm", name) for name in names]
    try:
        paths[0].symlink_to(Path("/dev/shm", target.name))
        os.mkfifo(paths[1])
        paths[2].mkdir()
        for name in names:
            with pytest.raises(DescriptorRefused):
                registry.register("", "r", wanted(name, 1))
    finally:
        paths[0].unlink()
        paths[1].unlink()
        paths[2].rmdir()


def test_memory_of_another_user_is_refused(registry, memory, monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(regions.os, "geteuid", lambda: uid + 1)
    with pytest.raises(DescriptorRefused, match="server's own user"):
        registry.register("", "r", wanted(memory().name))


@pytest.mark.parametrize(("byte_size", "offset"), [(1025, 0), (1024, 1), (1, 1 << 62), (1 << 62, 0)])
def test_regions_lie_within_their_memory(registry, memory, byte_size, offset):
    made = memory(1024)
    size = Path("/dev/shm", made.name).stat().st_size
    with pytest.raises(DescriptorRefused, match="go past"):
        registry.register("", "r", wanted(made.name, byte_size + size - 1024, offset))


def test_names_are_their_owners(registry, memory):
    one, other = memory(), memory()
    registry.register("alice", "r", wanted(one.name, 16))
    registry.register("bob", "r", wanted(other.name, 32))
    with pytest.raises(DescriptorRefused, match="registered already"):
        registry.register("alice", "r", wanted(other.name, 32))
    assert [each.byte_size for each in registry.status("alice")] == [16]
    registry.unregister("alice")
    with pytest.raises(DescriptorRefused, match="no shared memory region"):
        registry.memory("alice", "r", 0, 1)
    registry.memory("bob", "r", 0, 32).close()
    with pytest.raises(DescriptorRefused, match="go past"):
        registry.memory("bob", "r", 1, 32)


def test_there_are_not_too_many(registry, memory, monkeypatch):
    made = memory()
    for number in range(64):
        registry.register("alice", f"r{number}", wanted(made.name))
    with pytest.raises(DescriptorRefused, match="too many"):
        registry.register("alice", "one more", wanted(made.name))
    for number in range(64):
        registry.register("bob", f"r{number}", wanted(made.name))
    with pytest.raises(DescriptorRefused, match="too many"):
        registry.register("carol", "r", wanted(made.name))


def test_no_descriptor_is_left(memory):
    made = memory()
    before = len(list(Path("/proc/self/fd").iterdir()))
    registry = Regions(8)
    registry.register("", "r", wanted(made.name))
    for byte_size in (1 << 40,):
        with pytest.raises(DescriptorRefused):
            registry.register("", "s", wanted(made.name, byte_size))
        with pytest.raises(DescriptorRefused):
            registry.memory("", "r", 0, byte_size)
    registry.memory("", "r", 0, 8).close()
    registry.unregister("", "missing")
    registry.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class TestOverHttp:
    @pytest.fixture
    def http(self, live):
        with live.http() as client:
            yield client

    def register(self, http, made, name="r", **fields):
        body = {"key": f"/{made.name}", "offset": 0, "byte_size": 1024} | fields
        return http.post(f"/v2/systemsharedmemory/region/{name}/register", json=body)

    def infer(self, http, *, offset=0, result=None, size=24):
        place = {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": offset}
        inputs = [
            {"name": "a", "shape": [2, 3], "datatype": "FP32", "parameters": place},
            {"name": "b", "shape": [3, 2], "datatype": "FP32", "data": [1, 0, 0, 1, 0, 0]},
        ]
        outputs = [{"name": "d", "parameters": {} if result is None else result}]
        return http.post("/v2/models/gemm/infer", json={"inputs": inputs, "outputs": outputs})

    def into(self, offset, size=16):
        return {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": offset}

    def test_results_may_take_the_place_of_operands(self, http, memory):
        made = memory()
        np.ndarray((2, 3), "<f4", made.buf)[:] = A
        assert self.register(http, made).status_code == 200
        answer = self.infer(http, result=self.into(0))
        assert answer.status_code == 200, answer.text
        np.testing.assert_array_equal(np.ndarray((2, 2), "<f4", made.buf), A[:, :2])

    def test_regions_that_vanish_stay_what_they_were(self, http, memory):
        made = memory()
        np.ndarray((2, 3), "<f4", made.buf)[:] = A
        self.register(http, made)
        made.unlink()
        answer = self.infer(http)
        assert answer.json()["outputs"][0]["data"] == A[:, :2].ravel().tolist()

    def test_regions_that_are_cut_short(self, live, http, memory):
        made = memory()
        self.register(http, made)
        os.truncate(f"/dev/shm/{made.name}", 8)
        for answer in (self.infer(http), self.infer(http, result=self.into(512))):
            assert answer.status_code == 422
            assert "bytes" in answer.json()["error"]
        assert live.core.store.scratch_bytes == 0
        os.truncate(f"/dev/shm/{made.name}", 1024)

    def test_places_that_are_not_in_the_region(self, http, memory):
        self.register(http, memory())
        assert "go past" in self.infer(http, offset=1008).json()["error"]
        assert "go past" in self.infer(http, result=self.into(1020)).json()["error"]
        assert "shared_memory_byte_size is 15" in self.infer(http, result=self.into(0, 15)).json()["error"]
        assert self.infer(http, size=23).status_code == 400
        assert self.infer(http, offset=-1).status_code == 422
        assert self.infer(http, result=self.into(0) | {"binary_data": True}).status_code == 422

    @pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
    def test_what_came_by_a_proxy_names_no_memory(self, http, memory, header):
        made = memory()
        http.headers[header] = "127.0.0.1"
        assert "by a proxy" in self.register(http, made).json()["error"]
        del http.headers[header]
        self.register(http, made)
        http.headers[header] = "127.0.0.1"
        assert "by a proxy" in self.infer(http).json()["error"]

    def test_other_users_name_no_memory(self, http, memory, monkeypatch):
        made = memory()
        self.register(http, made)
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        for answer in (self.register(http, made, "s"), self.infer(http)):
            assert (answer.status_code, "server's own user" in answer.json()["error"]) == (422, True)

    async def test_who_is_not_of_this_machine_names_no_memory(self, client, app, memory):
        """A connection whose other end is no socket here; httpx says of itself that it came from elsewhere."""
        made = memory()
        for address in ("127.0.0.1", "192.0.2.7", "/run/socket"):
            transport = httpx.ASGITransport(app=app, client=(address, 123))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as other:
                answer = self.register(other, made)
                assert "clients of this machine" in (await answer).json()["error"]

    def test_malformed_registrations(self, http, memory):
        made = memory()
        for fields in (
            {"byte_size": -1},
            {"byte_size": "1"},
            {"offset": 1.5},
            {"key": 7},
            {"more": 1},
            {"key": "x" * 999},
        ):
            assert self.register(http, made, **fields).status_code == 422, fields
        answer = http.post("/v2/systemsharedmemory/region/r/register", content=b"x" * 5000)
        assert answer.status_code == 413
        assert http.get("/v2/systemsharedmemory/region/r/status").status_code == 404
