"""What the doctor finds, and what it says to do."""

from __future__ import annotations

import numpy as np

from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.processes.doctor import doctor
from gemmserve_service.processes.doctor.machine import Finding, Machine
from gemmserve_service.settings import Settings


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


def test_a_finding_is_a_line_and_its_advice():
    finding = Finding("error", "data", "no room", "make some")
    assert str(finding) == "ERROR data         no room\n        make some"
    assert finding.as_dict() == {"level": "error", "subject": "data", "text": "no room", "advice": "make some"}


def test_cxx_compilers_are_named(tmp_path):
    nothing = Machine(root=tmp_path, environment={"PATH": str(tmp_path)})
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    assert f"g++ at {compiler}" in next(doctor._cxx(nothing)).text
    compiler.unlink()
    finding = next(doctor._cxx(nothing))
    assert finding.level == "note" if "none" in finding.text else "ziglang" in finding.text


def test_everything_is_looked_at(tmp_path):
    found = doctor.examine(Settings(data_dir=tmp_path), Machine(root=tmp_path, environment={}))
    assert [finding.subject for finding in found][:2] == ["python", "packages"]
    assert {"driver", "c++", "data", "cpu"} <= {finding.subject for finding in found}


def test_a_program_that_cannot_be_started_or_fails(tmp_path):
    machine = Machine()
    assert machine.run("sh", "-c", "echo no; exit 3") == (3, "no")
    assert machine.run(str(tmp_path / "none"))[0] == 127
