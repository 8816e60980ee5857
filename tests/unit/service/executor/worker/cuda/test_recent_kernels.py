"""The record of kernels that were used last."""

from __future__ import annotations

import pytest

from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_service.executor.worker.cuda import recent_kernels


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def kernel(number):
    return KernelSource("gemm", (("BLOCK_M", str(number)), ("BLOCK_N", "32"))), "gemm_kernel"


def test_what_was_written_is_read_newest_first(cache):
    assert recent_kernels.read("sm_90a") == []
    recent_kernels.write("sm_90a", [kernel(1), kernel(2)])
    recent_kernels.write("sm_90a", [kernel(3), kernel(1)])
    assert recent_kernels.read("sm_90a") == [kernel(3), kernel(1), kernel(2)]
    assert recent_kernels.read("sm_80") == []
    assert [path.name for path in cache.iterdir()] == ["recent-sm_90a.json"]


def test_the_record_is_bounded(cache):
    recent_kernels.write("sm_90a", map(kernel, range(1000)))
    recent_kernels.write("sm_90a", [kernel(1001)])
    found = recent_kernels.read("sm_90a")
    assert found[:2] == [kernel(1001), kernel(0)]
    assert len(found) == 256


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 1}', '[{"name": "gemm"}]', "\0"])
def test_a_damaged_record_is_none(cache, text):
    cache.mkdir()
    (cache / "recent-sm_90a.json").write_text(text)
    assert recent_kernels.read("sm_90a") == []
    recent_kernels.write("sm_90a", [kernel(1)])
    assert recent_kernels.read("sm_90a") == [kernel(1)]
