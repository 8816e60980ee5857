"""The doctor's look at folders and host_limits."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from typing import NamedTuple

import pytest

from gemmserve_service.processes.doctor import host_limits
from gemmserve_service.processes.doctor.machine import Machine
from gemmserve_service.settings import Settings


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def outside(tmp_path):
    return Machine(root=tmp_path / "root", environment={})


@pytest.fixture
def inside(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / ".dockerenv").touch()
    return Machine(root=root, environment={})


@pytest.fixture
def no_permission(monkeypatch):
    monkeypatch.setattr(host_limits.os, "access", lambda path, mode: False)


def test_room_for_arrays(tmp_path, outside, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 1 << 40))
    (finding,) = host_limits.data_dir(tmp_path / "not" / "yet", outside)
    assert (finding.level, finding.subject) == ("ok", "data")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 1000))
    (finding,) = host_limits.data_dir(tmp_path, outside)
    assert finding.level == "note"
    assert "507" in finding.advice


def test_a_data_directory_that_cannot_be_written(tmp_path, outside, no_permission):
    (finding,) = host_limits.data_dir(tmp_path / "not" / "yet", outside)
    assert finding.level == "error"
    assert f"no permission to write {tmp_path}" in finding.text
    assert "--data-dir" in finding.advice


def test_a_volume_that_cannot_be_written(tmp_path, inside, no_permission):
    (finding,) = host_limits.data_dir(tmp_path, inside)
    assert f"chown -R {os.getuid()}:{os.getgid()}" in finding.advice
    assert f"--user {tmp_path.stat().st_uid}" in finding.advice


def test_kernels_that_cannot_be_kept(tmp_path, outside, monkeypatch):
    monkeypatch.setenv("GEMMSERVE_KERNEL_CACHE", str(tmp_path / "kernels"))
    assert not list(host_limits.kernel_cache(outside))
    monkeypatch.setattr(host_limits.os, "access", lambda path, mode: False)
    (finding,) = host_limits.kernel_cache(outside)
    assert finding.level == "note"
    assert "GEMMSERVE_KERNEL_CACHE" in finding.advice


def test_memory_for_results_of_accelerators(monkeypatch):
    assert not list(host_limits.arena(Settings(), ["cpu"]))
    assert not list(host_limits.arena(Settings(), []))
    (finding,) = host_limits.arena(Settings(host_arena_bytes=0), ["cuda:0"])
    assert (finding.level, finding.subject) == ("note", "arena")
    (finding,) = host_limits.arena(Settings(host_arena_bytes=4 << 20, arena_ahead_bytes=0), ["cpu", "cuda:0"])
    assert (finding.level, finding.subject) == ("ok", "arena")
    (finding,) = host_limits.arena(Settings(host_arena_bytes=1 << 60), ["cuda:0"])
    assert finding.level == "note"
    assert "GEMMSERVE_HOST_ARENA_BYTES" in finding.advice


def test_nowhere_for_the_control_socket(tmp_path, monkeypatch):
    assert not list(host_limits.temporary(Settings(data_dir=tmp_path)))
    assert not list(host_limits.temporary(Settings(data_dir=tmp_path, runtime_dir=tmp_path / "run")))

    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    (finding,) = host_limits.temporary(Settings(data_dir=tmp_path))
    assert finding.level == "error"
    assert "--tmpfs /tmp" in finding.advice
    monkeypatch.setattr(host_limits.os, "access", lambda path, mode: False)
    (finding,) = host_limits.temporary(Settings(data_dir=tmp_path, runtime_dir=tmp_path / "run"))
    assert str(tmp_path / "run") in finding.text


def test_little_shared_memory(inside, monkeypatch):
    assert not list(host_limits.shared_memory(inside)), "none is no fault"
    (inside.root / "dev" / "shm").mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 0))
    assert not list(host_limits.shared_memory(inside)), "what Docker gives is enough"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 20, 0, 0))
    (finding,) = host_limits.shared_memory(inside)
    assert "1 MiB" in finding.text
    assert "--shm-size" in finding.advice


@pytest.mark.parametrize(
    ("hard", "connections", "allowed"),
    [(1024, 4096, 384), (4096, 4096, 2688), (16_384, 4096, 4096), (1024, 1, 1), (resource.RLIM_INFINITY, 4096, 4096)],
)
def test_open_files(tmp_path, monkeypatch, hard, connections, allowed):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, hard))
    settings = Settings(data_dir=tmp_path, max_connections=connections)
    (found,) = host_limits.open_files(settings)
    assert f"{allowed} connections" in found.text
    assert found.level == ("ok" if allowed == connections else "note")
    if found.level == "note":
        assert "raise the hard limit to 5974 or more (ulimit -Hn, LimitNOFILE" in found.advice


@pytest.mark.parametrize(
    ("count", "platform", "level"),
    [(0, "linux", None), (0, "darwin", None), (1, "darwin", "error"), (3, "linux", "ok"), (4, "linux", "note")],
)
def test_transfer_processes(tmp_path, monkeypatch, count, platform, level):
    monkeypatch.setattr(host_limits, "cpu_count", lambda: 4)
    monkeypatch.setattr(host_limits.sys, "platform", platform)
    found = list(host_limits.transfers(Settings(data_dir=tmp_path, transfer_processes=count)))
    assert [finding.level for finding in found] == ([] if level is None else [level])
