"""tools/environment.py and the Makefile: what a fresh machine gets."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment():
    spec = importlib.util.spec_from_file_location("environment", ROOT / "tools" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12"
PROC_OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)"


@pytest.mark.parametrize(
    ("proc", "smi", "driver"),
    [
        (PROC, None, 535),
        (PROC_OPEN, None, 580),
        (None, "570.124.06\n570.124.06\n", 570),
        (None, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", None),
        (None, None, None),
    ],
)
def test_driver_version(environment, proc, smi, driver) -> None:
    assert environment.nvidia_driver(proc, smi) == driver


@pytest.mark.parametrize(
    ("driver", "kfd", "extra"),
    [
        (580, False, "cuda13"),
        (600, False, "cuda13"),
        (579, False, "cuda12"),
        (525, False, "cuda12"),
        (470, False, None),
        (None, True, "rocm"),
        (None, False, None),
        (580, True, "cuda13"),
    ],
)
def test_extra_for_the_device(environment, driver, kfd, extra) -> None:
    assert environment.accelerator_extra(driver, kfd=kfd) == extra


def test_extras_exist(environment) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in text for extra in (*environment.ACCELERATORS, "demo", "dev", "server", "cli"))


def test_a_moved_or_broken_environment_is_not_usable(environment, tmp_path) -> None:
    assert not environment.usable(tmp_path / "none")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "one"], check=True)
    assert not environment.usable(tmp_path / "one"), "pip is missing"
    (site,) = (tmp_path / "one").glob("lib/python*/site-packages")
    (site / "pip.py").touch()  # to install the real one would take most of the test's time
    assert environment.usable(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    assert not environment.usable(tmp_path / "one")
    (tmp_path / "two" / "bin" / "python").unlink()
    assert not environment.usable(tmp_path / "two")


def test_a_complete_environment_is_left_alone(environment, tmp_path, monkeypatch) -> None:
    """The second run installs nothing, and a new pyproject.toml installs again."""
    installs = []
    monkeypatch.setattr(environment, "usable", lambda venv: True)
    monkeypatch.setattr(environment, "detected_accelerator", lambda: None)
    monkeypatch.setattr(environment, "pip_install", lambda venv, extras, *_: installs.append(set(extras)) or True)
    environment.prepare(tmp_path, {"demo"}, None)
    environment.prepare(tmp_path, {"demo"}, None)
    environment.prepare(tmp_path, {"dev"}, None)
    environment.prepare(tmp_path, {"demo"}, None)
    assert installs == [{"demo"}, {"demo", "dev"}]
    monkeypatch.setattr(environment, "fingerprint", lambda constraints: "another")
    environment.prepare(tmp_path, {"demo"}, None)
    assert installs[2:] == [{"demo"}]


def test_a_device_library_that_does_not_install_leaves_the_cpu(environment, tmp_path, monkeypatch, capsys) -> None:
    tried = []

    def pip_install(venv, extras, *_) -> bool:
        tried.append(set(extras))
        return "cuda13" not in extras

    monkeypatch.setattr(environment, "usable", lambda venv: True)
    monkeypatch.setattr(environment, "detected_accelerator", lambda: "cuda13")
    monkeypatch.setattr(environment, "pip_install", pip_install)
    environment.prepare(tmp_path, {"demo"}, None)
    assert "cuda13 could not be installed" in capsys.readouterr().out
    environment.prepare(tmp_path, {"demo"}, None)  # not tried again each time
    assert tried == [{"demo", "cuda13"}, {"demo"}]
    with pytest.raises(SystemExit, match="pip could not install"):  # but asking for it by name is an error
        environment.prepare(tmp_path, {"cuda13"}, None)


make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@make
def test_make_without_python_says_what_is_missing() -> None:
    done = subprocess.run(["make", "test", "PYTHON="], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "Python 3.11 or newer" in done.stderr


@make
def test_make_lists_its_targets() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"make {name} " in done.stdout for name in ("demo", "test", "serve", "gpu-test", "bench", "lint"))
