"""What the doctor finds, and what it says to do."""

from __future__ import annotations

import numpy as np

from gemmserve_kernels import DeviceSpec
from gemmserve_kernels.blocks.reach import reach_of
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.processes.doctor import doctor
from gemmserve_service.processes.doctor.machine import Finding, Machine
from gemmserve_service.settings import Settings


def test_the_cpu_is_verified():
    finding, large = doctor._verify("cpu", Settings())
    assert (finding.level, large.level) == ("ok", "ok")
    assert "verified product" in finding.text
    assert "fp64" in finding.text


def test_a_wrong_product_is_an_error(monkeypatch):
    def wrong(self, params, operands, results):
        results["d"][...] = np.float32(1)

    monkeypatch.setattr(CpuBackend, "run", wrong)
    (finding,) = doctor._verify("cpu", Settings())
    assert finding.level == "error"
    assert "came out wrong" in finding.text


def test_a_device_that_is_not_there_is_an_error():
    (finding,) = doctor._verify("rocm:7", Settings())
    assert finding.level == "error"


def test_the_memory_for_large_products_is_said():
    *_, large = doctor._verify("cpu", Settings(device_memory_bytes=3 << 30))
    reach = reach_of(DeviceSpec.cpu(), 3 << 30)
    assert reach.resident < reach.streamed
    assert f"{(3 << 30) / 1e9:.3g} GB" in large.text
    assert f"up to n = {reach.resident} lie there" in large.text
    assert f"up to n = {reach.streamed}" in large.text


def test_too_little_memory_for_large_products_is_said():
    finding = doctor._large("cuda:0", KNOWN["H200"], 1 << 20, 4096)
    assert finding.level == "note"
    assert "too little" in finding.text
    assert "GEMMSERVE_DEVICE_MEMORY_BYTES" in finding.advice


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
