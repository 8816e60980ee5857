"""What the doctor finds, and what it says to do."""

from __future__ import annotations

import os
import shutil
from typing import NamedTuple

import numpy as np
import pytest

from gemmserve_service import doctor
from gemmserve_service.worker.device import CpuBackend


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def found(iterator):
    return [(finding.level, finding.subject) for finding in iterator]


def test_the_cpu_is_verified():
    finding = doctor._verify("cpu")
    assert finding.level == "ok"
    assert "verified product" in finding.text
    assert "fp64" in finding.text


def test_a_wrong_product_is_an_error(monkeypatch):
    def wrong(self, params, operands, results):
        results["d"][...] = np.float32(1)

    monkeypatch.setattr(CpuBackend, "run", wrong)
    finding = doctor._verify("cpu")
    assert finding.level == "error"
    assert "came out wrong" in finding.text


def test_a_device_that_is_not_there_is_an_error():
    assert doctor._verify("rocm:7").level == "error"


def test_the_data_directory(tmp_path, monkeypatch):
    assert found(doctor._data_dir(tmp_path / "not" / "yet")) == [("ok", "data")]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 1000))
    assert found(doctor._data_dir(tmp_path)) == [("note", "data")]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding,) = doctor._data_dir(tmp_path)
    assert finding.level == "error"
    assert "--data-dir" in finding.advice


@pytest.fixture
def fake_smi(tmp_path, monkeypatch):
    def make(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def test_a_driver_is_named(fake_smi):
    fake_smi("echo 'NVIDIA H200, 580.65, 143771 MiB'")
    findings = list(doctor._driver())
    assert ("ok", "nvidia") in found(findings)
    assert "580.65" in findings[0].text


def test_a_driver_that_fails_is_told_in_its_own_words(fake_smi):
    fake_smi("echo 'Failed to initialize NVML'; exit 9")
    findings = list(doctor._driver())
    assert findings[0].level == "note"
    assert "Failed to initialize NVML" in findings[0].text


def test_a_driver_without_cupy_says_what_to_install(fake_smi, monkeypatch):
    fake_smi("echo 'NVIDIA H200, 580.65, 143771 MiB'")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    advice = [finding.advice for finding in doctor._driver() if finding.subject == "cupy"]
    assert advice == ["install the extra gemmserve[cuda13 (or cuda12, for a driver before 580)]"]


def test_a_finding_is_a_line_and_its_advice():
    finding = doctor.Finding("error", "data", "no room", "make some")
    assert str(finding) == "ERROR data         no room\n        make some"
    assert finding.as_dict() == {"level": "error", "subject": "data", "text": "no room", "advice": "make some"}


def test_cxx_compilers_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/opt/bin/g++" if name == "g++" else None)
    (finding,) = doctor._cxx()
    assert (finding.level, finding.text) == ("ok", "g++ at /opt/bin/g++")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    (finding,) = doctor._cxx()
    assert finding.level == "note"
    assert "none" in finding.text
