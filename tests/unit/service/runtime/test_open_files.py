"""The limit of open files: what it allows, and that arrays, however many, do not use it up."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from gemmserve_service.http.protocol.connections import Connections
from gemmserve_service.runtime.open_files import OpenFiles


@pytest.mark.parametrize("limit", [64, 256, 1024, 4096, 12_800, 1 << 20])
@pytest.mark.parametrize("connections", [1, 100, 4096, 100_000])
def test_what_is_allowed_fits(make_settings, limit, connections):
    settings = make_settings(max_connections=connections)
    files = OpenFiles.of(settings, limit)
    assert 1 <= files.connections <= connections
    assert files.memory >= 1
    assert files.connections + files.memory <= limit
    if limit >= 1024:
        assert files.connections + files.memory + settings.max_shared_descriptors + 256 <= limit
    assert OpenFiles.of(settings, files.wanted).connections == connections
    if files.wanted <= limit:
        assert files.connections == connections
    assert f"at most {limit} open files: {files.connections} connections" in str(files)


def test_without_a_limit_there_is_none(make_settings):
    files = OpenFiles.of(make_settings(), resource.RLIM_INFINITY)
    assert files.connections == make_settings().max_connections
    assert str(files).startswith("no limit of open files: 4096 connections")


@pytest.fixture
def few_files(make_settings):
    """So many descriptors as are open now, those that requests may have in memory, and some forty more."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("looks at /proc")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = limit = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    settings = make_settings()
    while limit < highest + 40 + OpenFiles.of(settings, limit).memory:
        limit += 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, hard), hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_arrays_take_no_descriptors(real, put, fetch, gemm, few_files):
    """4,068 arrays of 8 bytes shut everybody out where 4,096 files may be open."""
    count = 4 * few_files
    held = [await put(real.store, np.full(1, index)) for index in range(count)]
    pins = [real.store.pin(info) for info in held]
    views = [pin.view for pin in pins]
    assert [int(np.frombuffer(view, int)[0]) for view in views] == list(range(count))
    a = await put(real.store, np.ones((4, 4)))
    job, _ = await real.jobs.submit(gemm(a, a))
    ended = await real.jobs.wait(job.id, 60)
    assert ended.state == "succeeded"
    assert (fetch(real.store, ended.result["d"]) == 4).all()
    for pin in pins:
        pin.release()


async def test_memory_of_requests_beyond_the_limit_lies_in_files(make_store, make_settings, put, few_files):
    store = await make_store(make_settings(recycle_bytes=0))
    most = OpenFiles.of(store.settings).memory
    count = 4 * few_files
    uploads = [await put(store, np.full(1, index), scratch=True) for index in range(count)]
    assert sum(upload.extent.fd is not None for upload in uploads) == most
    assert [int(np.frombuffer(upload.view, int)[0]) for upload in uploads] == list(range(count))
    for upload in uploads:
        upload.abort()
    assert (store.scratch_bytes, store.used_bytes) == (0, 0)
    assert (await put(store, np.ones(1), scratch=True)).extent.fd is not None


def test_connections_are_as_many_as_the_limit_allows(make_settings, few_files):
    settings = make_settings(max_connections=10_000)
    assert Connections(settings).most == OpenFiles.of(settings).connections < few_files
