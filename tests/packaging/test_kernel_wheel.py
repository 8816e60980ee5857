"""tools/kernel_wheel.py: a wheel of kernels that pip installs and gemmserve finds."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from gemmserve_kernels import precompile
from gemmserve_kernels.device import compiler

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kernel_wheel():
    spec = importlib.util.spec_from_file_location("kernel_wheel", ROOT / "tools" / "kernel_wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernels(tmp_path):
    (tmp_path / "kernels").mkdir()
    paths = [tmp_path / "kernels" / name for name in ("gemm-1.cubin", "split-2.cubin")]
    for number, path in enumerate(paths):
        path.write_bytes(b"\x7fELF" + bytes([number]) * 1000)
    return paths


def test_pip_installs_it_and_its_folder_is_found(kernel_wheel, kernels, tmp_path):
    wheel = kernel_wheel.build("sm_90a", kernels, "1.2.3", tmp_path / "dist")
    assert wheel.name == "gemmserve_kernels_sm_90a-1.2.3-py3-none-any.whl"
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, wheel]
    subprocess.run(pip, check=True, timeout=240)
    found = sorted((site / "gemmserve_kernels_sm_90a").glob("*.cubin"))
    assert [path.read_bytes() for path in found] == [path.read_bytes() for path in kernels]
    code = "from gemmserve_kernels.device.shipped_kernels import folders; print(*folders(), sep='\\n')"
    path = ":".join([str(site), *map(str, (ROOT / "kernels", ROOT / "service", ROOT / "client"))])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, text=True, capture_output=True, check=True, timeout=240
    )
    assert str(site / "gemmserve_kernels_sm_90a") in done.stdout.splitlines()


def test_the_same_kernels_make_the_same_bytes(kernel_wheel, kernels, tmp_path):
    one, two = (kernel_wheel.build("sm_90a", kernels, "1", tmp_path / name) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_it_holds_the_documented_kernels(kernel_wheel, kernels, monkeypatch, tmp_path, capsys):
    pytest.importorskip("cupy")
    sources = precompile.documented("sm_80")
    monkeypatch.setattr(precompile, "compile_all", lambda arch, sources: [])
    monkeypatch.setattr(
        compiler, "compiled_file", lambda source, arch: dict(zip(sources, kernels, strict=False))[source]
    )
    kernel_wheel.main(["sm_80", "--first", "2", "--out", str(tmp_path)])
    assert "2 kernels" in capsys.readouterr().out
    monkeypatch.setattr(precompile, "compile_all", lambda arch, sources: ["an error"])
    with pytest.raises(SystemExit):
        kernel_wheel.main(["sm_80", "--first", "2", "--out", str(tmp_path)])
