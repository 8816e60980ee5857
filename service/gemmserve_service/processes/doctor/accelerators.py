"""The doctor's look at drivers, devices and CuPy: whether they fit each other, and what to do where they do not.

Driver bounds: NVIDIA, CUDA compatibility guide, "minor version compatibility".
"""

from __future__ import annotations

import grp
import re
from typing import TYPE_CHECKING, Final

from gemmserve._install import pip_install
from gemmserve_service.processes.doctor.machine import Finding, Machine

if TYPE_CHECKING:
    from collections.abc import Iterator

CUPY: Final = {"cupy-cuda13x": "cuda13", "cupy-cuda12x": "cuda12", "cupy-rocm-7-0": "rocm", "cupy": ""}
"""Wheels of CuPy, and the extra that each belongs to; "cupy" was built from source."""

_OLDEST_DRIVER: Final = {13: 580, 12: 525}
_PROC: Final = "/proc/driver/nvidia/version"
_ROCM: Final = 7  # major version that cupy-rocm-7-0 is built for


def drivers(machine: Machine) -> Iterator[Finding]:
    """The drivers, their devices, and whether this process may use them."""
    nvidia, amd = list(_nvidia(machine)), list(_amd(machine))
    yield from (*nvidia, *amd)
    if not nvidia and not amd:
        yield _nothing(machine)


def libraries(machine: Machine) -> Iterator[Finding]:
    """CuPy and the compiler that it brings, held against the drivers."""
    wheels = {name: version for name in CUPY if (version := machine.version(name))}
    driver, kfd = nvidia_driver(machine), machine.exists("/dev/kfd")
    if not wheels:
        yield _no_cupy(driver, kfd=kfd)
        return
    if len(wheels) > 1:
        names = " and ".join(wheels)
        remove = "pip uninstall " + " ".join(wheels)
        yield Finding("error", "cupy", f"{names} are installed over each other", f"{remove}; then install one of them")
        return
    ((name, version),) = wheels.items()
    yield from _fits(name, driver, kfd=kfd)
    if CUPY[name] == "rocm":
        yield from _rocm(machine, version)
    else:
        yield from _nvrtc(machine, name, version)


def nvidia_driver(machine: Machine) -> tuple[int, ...] | None:
    """The version of NVIDIA's driver, as its kernel module or nvidia-smi says; None: there is none."""
    if (text := machine.read(_PROC)) and (found := re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", text)):
        return tuple(map(int, found[1].split(".")))
    if machine.which("nvidia-smi"):
        status, text = machine.run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if status == 0 and (found := re.match(r"[\d.]+", text)):
            return tuple(map(int, found[0].split(".")))
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _nvidia(machine: Machine) -> Iterator[Finding]:
    driver = nvidia_driver(machine)
    if driver is not None and machine.container and not machine.exists("/dev/nvidiactl"):
        yield Finding(
            "error",
            "nvidia",
            f"the machine has NVIDIA's driver {_dotted(driver)}, and this container was given no device",
            "start it with --gpus all (docker compose --profile cuda does). If Docker knows no such option or runtime: "
            "install the NVIDIA Container Toolkit on the machine, run `nvidia-ctk runtime configure --runtime=docker`, "
            "and restart Docker",
        )
        return
    if driver is not None and machine.exists("/dev/nvidiactl") and not machine.usable("/dev/nvidiactl"):
        yield Finding(
            "error", "nvidia", "no permission on /dev/nvidiactl", "its mode is commonly 666: `ls -l /dev/nvidia*`"
        )
    if not machine.which("nvidia-smi"):
        if driver is not None:
            yield Finding("ok", "nvidia", f"driver {_dotted(driver)}, without nvidia-smi")
        return
    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    status, text = machine.run(*query)
    if status == 0:
        for line in text.splitlines():
            yield Finding("ok", "nvidia", line)
        return
    advice = "the driver is not loaded, or was not reached: `sudo modprobe nvidia`, and `dmesg | grep -i nvrm`"
    if "version mismatch" in text.lower():
        advice = "the driver was updated and the old one is still loaded: restart the machine"
    yield Finding("error", "nvidia", f"nvidia-smi fails: {text}", advice)


def _amd(machine: Machine) -> Iterator[Finding]:
    loaded = machine.exists("/sys/module/amdgpu")
    if not machine.exists("/dev/kfd"):
        if loaded and machine.container and machine.version("cupy-rocm-7-0"):
            advice = "start it with --device /dev/kfd --device /dev/dri (docker compose --profile rocm does)"
            text = "the machine has AMD's driver, and this container was given no device"
            yield Finding("error", "amd", text, advice)
        return
    nodes = sorted(machine.path("/dev/dri").glob("renderD*")) if machine.exists("/dev/dri") else []
    names = ["/dev/kfd", *(f"/dev/dri/{node.name}" for node in nodes)]
    if not nodes:
        advice = "start it with --device /dev/dri too" if machine.container else "`sudo modprobe amdgpu`, and dmesg"
        yield Finding("error", "amd", "/dev/kfd is there, and no /dev/dri/renderD*", advice)
    refused = [name for name in names if not machine.usable(name)]
    for name in refused:
        yield Finding("error", "amd", f"no permission on {name}", _group_advice(machine, name))
    if nodes and not refused:
        yield Finding("ok", "amd", f"{', '.join(names)} can be used")


def _group_advice(machine: Machine, name: str) -> str:
    """Return the advice for joining the group that a device belongs to."""
    number = machine.group_of(name)
    if machine.container:
        return f"start the container with --group-add {number} (compose: GEMMSERVE_RENDER_GROUP={number})"
    try:
        group = grp.getgrgid(number).gr_name
    except KeyError:
        group = str(number)
    return f"`sudo usermod -aG {group} $USER` (commonly render and video), then log in again"


def _nothing(machine: Machine) -> Finding:
    text = "no NVIDIA or AMD driver: products run on the CPU"
    wheel = next((name for name in CUPY if machine.version(name)), None)
    if wheel is None:
        return Finding("note", "driver", text)
    if machine.container:
        device = "--device /dev/kfd --device /dev/dri" if CUPY[wheel] == "rocm" else "--gpus all"
        advice = f"with a GPU in the machine, start this container with {device}, and see to the driver outside of it"
    else:
        advice = f"{wheel} is installed and has no use here" if CUPY[wheel] else ""
    return Finding("note", "driver", text, advice)


def _no_cupy(driver: tuple[int, ...] | None, *, kfd: bool) -> Finding:
    if driver is not None:
        extra = next((f"cuda{major}" for major, oldest in _OLDEST_DRIVER.items() if driver[0] >= oldest), None)
        if extra is None:
            text = f"not installed, and the driver {_dotted(driver)} is too old for its wheels"
            return Finding("error", "cupy", text, f"update the driver to {_OLDEST_DRIVER[12]} or newer")
        advice = pip_install(f"server,{extra}")
        return Finding("error", "cupy", "not installed: the device is not used", advice)
    if kfd:
        advice = pip_install("server,rocm")
        return Finding("error", "cupy", "not installed: the device is not used", advice)
    return Finding("note", "cupy", "not installed: needed for CUDA and ROCm devices only")


def _fits(name: str, driver: tuple[int, ...] | None, *, kfd: bool) -> Iterator[Finding]:
    """Whether the wheel is for the driver that is here."""
    extra = CUPY[name]
    if driver is None:
        if kfd and extra.startswith("cuda"):
            advice = f"pip uninstall {name}; {pip_install('server,rocm')}"
            yield Finding("error", "cupy", f"{name} is for NVIDIA's devices, and this one is AMD's", advice)
        return
    if extra == "rocm":
        wanted = "cuda13" if driver[0] >= _OLDEST_DRIVER[13] else "cuda12"
        advice = f"pip uninstall {name}; {pip_install(f'server,{wanted}')}"
        if not kfd:
            yield Finding("error", "cupy", f"{name} is for AMD's devices, and this one is NVIDIA's", advice)
        return
    oldest = _OLDEST_DRIVER[int(extra.removeprefix("cuda") or 12)]
    if driver[0] < oldest:
        text = f"the driver {_dotted(driver)} is too old for {name}, which wants {oldest} or newer"
        advice = f"update the driver to {oldest} or newer"
        if extra == "cuda13" and driver[0] >= _OLDEST_DRIVER[12]:
            advice += f"; or: pip uninstall {name}; {pip_install('server,cuda12')}"
        yield Finding("error", "driver", text, advice)


def _nvrtc(machine: Machine, name: str, version: str) -> Iterator[Finding]:
    """The compiler: that it can be loaded, is of CuPy's major version, compiles, and has the headers CuPy wants."""
    extra = CUPY[name] or "cuda13"
    again = pip_install(f"server,{extra}").replace("install", "install --force-reinstall", 1)
    try:
        found, log = _compile()
    except (ImportError, RuntimeError, OSError) as error:
        yield Finding("error", "nvrtc", f"{name} {version}: {error}", again)
        return
    wanted = int(extra.removeprefix("cuda"))
    if found[0] != wanted:
        text = f"NVRTC {_dotted(found)} beside {name} {version}, which wants CUDA {wanted}"
        advice = f'pip install "cuda-toolkit[nvrtc,cudart]=={wanted}.*"; and what do CUDA_PATH and LD_LIBRARY_PATH say?'
        yield Finding("error", "nvrtc", text, advice)
    elif log:
        yield Finding("error", "nvrtc", f"{_dotted(found)} does not compile: {log}", again)
    else:
        yield Finding("ok", "nvrtc", f"{_dotted(found)} compiles, through {name} {version}")
    if not _headers(machine, wanted):
        parts = "cudart,crt" if wanted >= 13 else "cudart"
        text = "the headers of the CUDA runtime are missing: what CuPy itself compiles will fail"
        advice = f'pip install "cuda-toolkit[{parts}]=={wanted}.*"; or CUDA_PATH=the toolkit\'s folder'
        yield Finding("error", "headers", text, advice)


def _compile() -> tuple[tuple[int, ...], str]:
    """NVRTC's version, and what it says against an empty kernel. Raises ImportError, OSError, RuntimeError."""
    from cupy.cuda import nvrtc

    from gemmserve_kernels.device.compiler import CompileError, compile_cuda

    try:
        compile_cuda('extern "C" __global__ void nothing() {}', "sm_80")
    except CompileError as error:
        return nvrtc.getVersion(), str(error).strip()
    return nvrtc.getVersion(), ""


def _headers(machine: Machine, major: int) -> bool:
    """Whether cuda_runtime.h is where CuPy looks: in the wheels' folder, CUDA_PATH, or /usr/local/cuda."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    candidates = [f"{folder}/{part}/include" for folder in folders for part in (f"cu{major}", "cuda_runtime")]
    candidates += [f"{machine.environment.get('CUDA_PATH', '/usr/local/cuda')}/include"]
    return any(machine.exists(f"{folder}/cuda_runtime.h") for folder in candidates)


def _rocm(machine: Machine, version: str) -> Iterator[Finding]:
    """ROCm itself, which CuPy's wheel does not bring."""
    home = machine.environment.get("ROCM_HOME", "/opt/rocm")
    text = machine.read(f"{home}/.info/version")
    if text is None:
        advice = f"install ROCm {_ROCM} with its libraries (rocm-hip-sdk), or set ROCM_HOME; the image rocm has them"
        yield Finding("error", "rocm", f"no ROCm at {home}: cupy-rocm-7-0 {version} cannot be loaded", advice)
        return
    major = int(re.match(r"\d+", text)[0]) if re.match(r"\d+", text) else 0  # type: ignore[index]  # it just matched
    if major != _ROCM:
        advice = f"install ROCm {_ROCM}, or set ROCM_HOME to it"
        yield Finding("error", "rocm", f"ROCm {text.strip()} beside cupy-rocm-7-0, which wants {_ROCM}", advice)
    if not machine.exists(f"{home}/bin/hipcc") and not machine.which("hipcc"):
        advice = "install the package hipcc, or rocm-hip-sdk"
        yield Finding("error", "rocm", "no hipcc, with which CuPy compiles", advice)
    elif major == _ROCM:
        yield Finding("ok", "rocm", f"{text.strip()} at {home}")
