"""Folders of kernels compiled ahead of time: of the environment, then of installed wheels."""

from __future__ import annotations

import os
import sys

import pytest

from gemmserve_kernels.device import compiler, shipped_kernels
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.shipped_kernels import SEED_VARIABLE, folders

SOURCE = KernelSource("gemm", (("BLOCK_M", "32"),))


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """install("sm_99", "package") -> what a wheel would have put into site-packages."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def install(arch, package, *, whole=True):
        info = tmp_path / "site" / f"{package}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{shipped_kernels.ENTRY_POINTS}]\n{arch} = {package}\n")
        if whole:
            (tmp_path / "site" / package).mkdir()
            (tmp_path / "site" / package / "__init__.py").write_text("")
        return tmp_path / "site" / package

    shipped_kernels._installed.cache_clear()
    yield install
    shipped_kernels._installed.cache_clear()
    for name in ("kernels_whole", "kernels_broken"):
        sys.modules.pop(name, None)


def test_folders_of_the_environment_come_first(monkeypatch, tmp_path, installed):
    package = installed("sm_99", "kernels_whole")
    shipped_kernels._installed.cache_clear()
    monkeypatch.setenv(SEED_VARIABLE, os.pathsep.join([str(tmp_path / "one"), "", str(tmp_path / "two")]))
    assert folders()[:2] == (tmp_path / "one", tmp_path / "two")
    assert package in folders()[2:]
    monkeypatch.delenv(SEED_VARIABLE)
    assert tmp_path / "one" not in folders()


def test_a_wheel_that_is_damaged_is_left_out(monkeypatch, caplog, installed):
    monkeypatch.delenv(SEED_VARIABLE, raising=False)
    package = installed("sm_99", "kernels_broken", whole=False)
    assert package not in folders()
    assert "kernels_broken" in caplog.text


def test_a_shipped_kernel_is_loaded_from_where_it_lies(monkeypatch, tmp_path):
    pytest.importorskip("cupy")
    monkeypatch.setenv(SEED_VARIABLE, str(tmp_path / "shipped"))
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    assert compiler.compiled_file(SOURCE, "sm_90a") is None
    (tmp_path / "shipped").mkdir()
    path = tmp_path / "shipped" / compiler.file_name(SOURCE, "sm_90a")
    path.write_bytes(b"code")

    def compile_again(*_, **__):
        raise AssertionError("it was compiled ahead of time")

    monkeypatch.setattr(compiler, "compile_cuda", compile_again)
    assert compiler.cubin_file(SOURCE, "sm_90a") == path
    assert not (tmp_path / "cache").exists()
