"""The doctor on machines that are not here: each thing that is missing is named, with what to do about it."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass, field

import pytest

from gemmserve_service.processes.doctor import accelerators
from gemmserve_service.processes.doctor.accelerators import drivers, libraries
from gemmserve_service.processes.doctor.machine import Machine

GOOD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:25:31 UTC 2025\n"
OLD = GOOD.replace("580.65.06", "535.104.05")
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n"


@dataclass(frozen=True)
class Fake(Machine):
    """A machine below a folder: its programs are answers, its packages are versions, some of its files are refused."""

    programs: dict[str, tuple[int, str]] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()

    def which(self, program):
        return f"/usr/bin/{program}" if program in self.programs else None

    def run(self, *command):
        return self.programs[command[0]]

    def version(self, package):
        return self.packages.get(package)

    def usable(self, name):
        return name not in self.refused


@pytest.fixture
def machine(tmp_path):
    """machine(files={path: text}, ...) -> a Fake with these files and nothing else."""

    def make(files=(), **parts):
        for name, text in dict(files).items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Fake(root=tmp_path, environment=parts.pop("environment", {}), **parts)

    return make


@pytest.fixture
def compiler(monkeypatch):
    """compiler(version, log="" or an exception): what NVRTC is here, and that its headers are there."""

    def be(version, log=""):
        def compile_():
            if isinstance(log, Exception):
                raise log
            return version, log

        monkeypatch.setattr(accelerators, "_compile", compile_)
        monkeypatch.setattr(accelerators, "_headers", lambda machine, major: True)

    return be


def said(findings):
    return [(finding.level, finding.subject) for finding in findings]


def errors(findings):
    return [finding for finding in findings if finding.level == "error"]


NVIDIA = {"/proc/driver/nvidia/version": GOOD, "/dev/nvidiactl": ""}
AMD = {"/sys/module/amdgpu/initstate": "live", "/dev/kfd": "", "/dev/dri/renderD128": ""}
SMI = {"nvidia-smi": (0, "NVIDIA H200, 580.65.06, 143771 MiB")}


def test_no_driver_is_no_fault(machine):
    here = machine()
    assert said(drivers(here)) == [("note", "driver")]
    assert said(libraries(here)) == [("note", "cupy")]


@pytest.mark.parametrize(("text", "version"), [(GOOD, (580, 65, 6)), (OPEN, (575, 57, 8)), (OLD, (535, 104, 5))])
def test_the_kernel_module_says_its_version(machine, text, version):
    assert accelerators.nvidia_driver(machine({"/proc/driver/nvidia/version": text})) == version


def test_nvidia_smi_says_it_where_the_module_does_not(machine):
    assert accelerators.nvidia_driver(machine(programs={"nvidia-smi": (0, "580.65.06\n")})) == (580, 65, 6)
    assert accelerators.nvidia_driver(machine(programs={"nvidia-smi": (9, "No devices were found")})) is None


def test_a_driver_and_its_devices_are_named(machine):
    here = machine(NVIDIA, programs=SMI)
    (finding,) = drivers(here)
    assert (finding.level, finding.subject, finding.text) == ("ok", "nvidia", SMI["nvidia-smi"][1])
    assert "without nvidia-smi" in next(drivers(machine(NVIDIA))).text


def test_a_driver_that_fails_is_told_in_its_own_words(machine):
    failing = machine(programs={"nvidia-smi": (9, "Failed to initialize NVML: Unknown Error")})
    (finding,) = errors(drivers(failing))
    assert "Failed to initialize NVML" in finding.text
    assert "modprobe" in finding.advice
    half = machine(programs={"nvidia-smi": (18, "Failed to initialize NVML: Driver/library version mismatch")})
    (finding,) = errors(drivers(half))
    assert "restart the machine" in finding.advice


def test_a_container_that_was_given_no_device(machine):
    """The kernel's /proc shows the driver in every container; the device files come with the toolkit alone."""
    here = machine({"/proc/driver/nvidia/version": GOOD, "/.dockerenv": ""})
    (finding,) = drivers(here)
    assert finding.level == "error"
    assert "580.65.6" in finding.text
    assert "--gpus all" in finding.advice
    assert "NVIDIA Container Toolkit" in finding.advice


def test_a_pod_is_a_container(machine):
    here = machine({"/proc/driver/nvidia/version": GOOD}, environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert errors(drivers(here))


def test_no_permission_on_nvidias_device(machine):
    here = machine(NVIDIA, programs=SMI, refused=frozenset({"/dev/nvidiactl"}))
    (finding,) = errors(drivers(here))
    assert "/dev/nvidiactl" in finding.text


def test_no_permission_on_kfd_names_the_group(machine):
    here = machine(AMD, refused=frozenset({"/dev/kfd"}))
    (finding,) = errors(drivers(here))
    assert finding.text == "no permission on /dev/kfd"
    assert "usermod -aG root " in finding.advice if os.getgid() == 0 else "usermod -aG" in finding.advice
    inside = machine({**AMD, "/.dockerenv": ""}, refused=frozenset({"/dev/kfd", "/dev/dri/renderD128"}))
    first, second = errors(drivers(inside))
    assert f"--group-add {inside.group_of('/dev/kfd')}" in first.advice
    assert "/dev/dri/renderD128" in second.text


def test_amds_devices_can_be_used(machine):
    assert said(drivers(machine(AMD))) == [("ok", "amd")]


def test_no_render_node(machine):
    here = machine({"/dev/kfd": "", "/.dockerenv": ""})
    (finding,) = drivers(here)
    assert "--device /dev/dri" in finding.advice


def test_an_amd_container_without_devices(machine):
    files = {"/sys/module/amdgpu/initstate": "live", "/.dockerenv": ""}
    (finding,) = errors(drivers(machine(files, packages={"cupy-rocm-7-0": "14.2.0"})))
    assert "--device /dev/kfd --device /dev/dri" in finding.advice
    assert not errors(drivers(machine(files))), "a container without CuPy for ROCm wants no device"


@pytest.mark.parametrize(("text", "extra"), [(GOOD, "cuda13"), (OLD, "cuda12")])
def test_cupy_is_missing_beside_a_driver(machine, text, extra):
    (finding,) = libraries(machine({"/proc/driver/nvidia/version": text}))
    assert finding.level == "error"
    assert f"[server,{extra}]" in finding.advice


def test_cupy_is_missing_beside_a_driver_that_is_too_old_for_any(machine):
    (finding,) = libraries(machine({"/proc/driver/nvidia/version": OLD.replace("535", "470")}))
    assert finding.level == "error"
    assert "update the driver" in finding.advice


def test_cupy_is_missing_beside_amds_driver(machine):
    (finding,) = libraries(machine(AMD))
    assert "[server,rocm]" in finding.advice


def test_the_driver_is_too_old_for_the_wheel(machine, compiler):
    compiler((13, 0))
    here = machine({"/proc/driver/nvidia/version": OLD}, packages={"cupy-cuda13x": "14.2.0"})
    (finding,) = errors(libraries(here))
    assert "535.104.5 is too old for cupy-cuda13x, which wants 580" in finding.text
    assert "[server,cuda12]" in finding.advice
    compiler((12, 9))
    assert not errors(libraries(machine({"/proc/driver/nvidia/version": OLD}, packages={"cupy-cuda12x": "14.2.0"})))


def test_the_wheel_is_for_the_other_maker(machine, compiler):
    compiler((13, 0))
    (finding,) = errors(libraries(machine(AMD, packages={"cupy-cuda13x": "14.2.0"})))
    assert "this one is AMD's" in finding.text


def test_a_rocm_wheel_on_an_nvidia_machine(machine):
    files = {**NVIDIA, "/opt/rocm/.info/version": "7.0.2-56\n", "/opt/rocm/bin/hipcc": ""}
    (finding,) = errors(libraries(machine(files, packages={"cupy-rocm-7-0": "14.2.0"})))
    assert "this one is NVIDIA's" in finding.text
    assert "[server,cuda13]" in finding.advice


def test_two_wheels_over_each_other(machine):
    here = machine(packages={"cupy-cuda13x": "14.2.0", "cupy-cuda12x": "14.2.0"})
    (finding,) = libraries(here)
    assert finding.level == "error"
    assert "pip uninstall cupy-cuda13x cupy-cuda12x" in finding.advice


def test_a_compiler_of_another_major_version(machine, compiler):
    compiler((12, 9))
    (finding,) = errors(libraries(machine(NVIDIA, packages={"cupy-cuda13x": "14.2.0"})))
    assert "NVRTC 12.9 beside cupy-cuda13x 14.2.0, which wants CUDA 13" in finding.text
    assert "cuda-toolkit[nvrtc,cudart]==13.*" in finding.advice


def test_a_compiler_that_does_not_compile_or_is_not_there(machine, compiler):
    here = machine(NVIDIA, packages={"cupy-cuda13x": "14.2.0"})
    compiler((13, 0), "nvrtc: error: failed to open libnvrtc-builtins.so.13.0")
    (finding,) = errors(libraries(here))
    assert "libnvrtc-builtins" in finding.text
    compiler((0, 0), ImportError("libnvrtc.so.13: cannot open shared object file"))
    (finding,) = errors(libraries(here))
    assert "libnvrtc.so.13" in finding.text
    assert "--force-reinstall" in finding.advice


def test_the_headers_that_cupy_compiles_with(machine, compiler, monkeypatch):
    compiler((13, 0))
    monkeypatch.undo()
    monkeypatch.setattr(accelerators, "_compile", lambda: ((13, 0), ""))
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    wheels = {"cupy-cuda13x": "14.2.0"}
    (finding,) = errors(libraries(machine(NVIDIA, packages=wheels)))
    assert finding.subject == "headers"
    assert "cuda-toolkit[cudart,crt]==13.*" in finding.advice
    there = machine({**NVIDIA, "/usr/local/cuda/include/cuda_runtime.h": ""}, packages=wheels)
    assert not errors(libraries(there))
    folder = types.SimpleNamespace(submodule_search_locations=["/site/nvidia"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: folder)
    (there.root / "usr/local/cuda/include/cuda_runtime.h").unlink()
    assert errors(libraries(there))
    in_wheels = machine({"/site/nvidia/cu13/include/cuda_runtime.h": ""}, packages=wheels)
    assert not errors(libraries(in_wheels))


def test_rocm_itself(machine):
    wheel = {"cupy-rocm-7-0": "14.2.0"}
    (finding,) = errors(libraries(machine(AMD, packages=wheel)))
    assert "no ROCm at /opt/rocm" in finding.text
    other = {**AMD, "/opt/rocm/.info/version": "6.4.1-83\n", "/opt/rocm/bin/hipcc": ""}
    (finding,) = errors(libraries(machine(other, packages=wheel)))
    assert "ROCm 6.4.1-83 beside cupy-rocm-7-0" in finding.text


def test_rocm_without_hipcc(machine):
    wheel = {"cupy-rocm-7-0": "14.2.0"}
    here = machine({**AMD, "/opt/rocm/.info/version": "7.0.2-56\n"}, packages=wheel)
    (finding,) = errors(libraries(here))
    assert "hipcc" in finding.text
    assert said(libraries(machine({"/opt/rocm/bin/hipcc": ""}, packages=wheel))) == [("ok", "rocm")]


def test_this_machines_own_compiler(machine):
    """With the CUDA extra installed, as in continuous integration: NVRTC compiles, and its headers are there."""
    pytest.importorskip("cupy")
    assert not errors(libraries(Machine())), [str(finding) for finding in libraries(Machine())]
