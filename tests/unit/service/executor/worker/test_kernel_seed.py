"""A worker fills its kernel cache before it opens its device, and goes on where it cannot."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from gemmserve_service.executor.worker import __main__ as worker
from gemmserve_service.settings import Settings


def test_a_cache_that_cannot_be_written_is_said_and_no_reason_to_end(monkeypatch, caplog):
    def refused():
        raise PermissionError(13, "Permission denied", "/var/cache/gemmserve")

    monkeypatch.setattr(worker, "seed_cache", refused)
    with caplog.at_level(logging.WARNING):
        worker._seed_kernels()
    assert "/var/cache/gemmserve" in caplog.text


@pytest.mark.parametrize("device", ["rocm:9"])
def test_it_comes_before_the_device(tmp_path, device):
    """A worker whose device is missing has filled the cache by then."""
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "gemm-0.cubin").write_bytes(b"code")
    read, write = os.pipe()
    settings = Settings(data_dir=tmp_path / "data")
    handoff = {
        "settings": json.loads(settings.model_dump_json()),
        "pipe_fd": read,
        "device": device,
        "control_path": str(tmp_path / "control.sock"),
    }
    environment = os.environ | {
        "GEMMSERVE_KERNEL_SEED": str(tmp_path / "shipped"),
        "GEMMSERVE_KERNEL_CACHE": str(tmp_path / "cache"),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gemmserve_service.executor.worker"],
            input=json.dumps(handoff), text=True, capture_output=True, pass_fds=[read], env=environment, timeout=240,
            check=False,
        )  # fmt: skip
    finally:
        os.close(read)
        os.close(write)
    assert done.returncode == os.EX_UNAVAILABLE, done.stderr
    assert (tmp_path / "cache" / "gemm-0.cubin").read_bytes() == b"code"
