"""From the .cu and .cuh files of this package to a function on the device.

The text that reaches the compiler is one piece: a prelude of ``#define GEMM_...`` lines from the configuration, then
the source with its own includes put in place (each once, with ``#line``, so that messages name the right file). So the
text alone decides what is compiled, and caches need to look at nothing else.

CUDA: NVRTC to a cubin for the exact architecture. ROCm: HIPRTC to a code object. Either is kept on disk under its
digest, and needs no device. The digest is of the text, the architecture, the options and the major version of CUDA or
HIP: within one, what any compiler made runs under any driver (CUDA Compatibility, minor version compatibility), so
that what was shipped or compiled before an update of the compiler stays, bits of results included. CuPy's own compiler
path is not used because it flushes subnormals (``-ftz=true``, ``-fcuda-flush-denormals-to-zero``): they must survive,
as they do in the vendor's BLAS.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.device import shipped_kernels
from gemmserve_kernels.problem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SOURCES: Final = Path(__file__).parents[1] / "cuda"
_INCLUDE: Final = re.compile(r'\s*#\s*include\s+"([^"]+)"\s*')
_OPTIONS: Final = ("--std=c++17", "--device-as-default-execution-space")
ROCM_OPTIONS: Final = ("-std=c++17",)
CACHE_VARIABLE: Final = "GEMMSERVE_KERNEL_CACHE"


class CompileError(DeviceError):
    """A kernel source did not compile; the message is the compiler's log."""


@dataclass(frozen=True)
class KernelSource:
    """One .cu file, by its name without folder, and the defines that make it concrete.

    Two equal sources compile to the same code.
    """

    name: str
    defines: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The whole text for the compiler."""
        return kernel_source(self.name, dict(self.defines))


@dataclass(frozen=True)
class Cubin:
    """Machine code of one source for one architecture, and what the assembler said about it."""

    code: bytes
    log: str

    @property
    def registers(self) -> dict[str, int]:
        """Registers per thread of each kernel."""
        return {name: int(count) for name, count in re.findall(r"'(\w+)' for '.*?Used (\d+) registers", self._lines)}

    @property
    def spill_bytes(self) -> dict[str, int]:
        """Bytes of spill stores and loads of each kernel."""
        found = re.findall(r"'(\w+)' for '.*?(\d+) bytes spill stores, (\d+) bytes spill loads", self._lines)
        return {name: int(stores) + int(loads) for name, stores, loads in found}

    @property
    def _lines(self) -> str:
        return " ".join(self.log.split())


@cache
def _file(path: str) -> str:
    return (_SOURCES / path).read_text(encoding="utf-8")


def _flatten(path: str, seen: set[str]) -> str:
    if path in seen:
        return ""
    seen.add(path)
    out = [f'#line 1 "{path}"']
    for number, line in enumerate(_file(path).splitlines(), 1):
        if match := _INCLUDE.fullmatch(line):
            included = os.path.normpath(PurePosixPath(path).parent / match[1])
            out += [_flatten(included, seen), f'#line {number + 1} "{path}"']
        else:
            out.append("" if line.strip() == "#pragma once" else line)
    return "\n".join(out)


@lru_cache(maxsize=256)
def flattened(path: str) -> str:
    """Return a file under cuda/ with its includes in place, each once."""
    return _flatten(path, set())


@cache
def source_files() -> dict[str, str]:
    """Return the path under cuda/ of each .cu file by its name, which no two share."""
    return {path.stem: path.relative_to(_SOURCES).as_posix() for path in _SOURCES.glob("*/*.cu")}


def kernel_source(name: str, defines: Mapping[str, str]) -> str:
    """The text of cuda/*/`name`.cu behind one ``#define GEMM_key value`` line for each of `defines`. Pure."""
    prelude = "".join(f"#define GEMM_{key} {value}\n" for key, value in defines.items())
    return f"{prelude}{flattened(source_files()[name])}\n"


@contextmanager
def _compiled(text: str, name: str, arch: str, options: tuple[str, ...]) -> Iterator[Any]:
    """A program of NVRTC, or of HIPRTC where CuPy is built for ROCm. Raises CompileError."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        yield program
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{name} for {arch}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def compile_cuda(text: str, arch: str, *, name: str = "kernel.cu") -> Cubin:
    """Compiles with NVRTC for `arch` ("sm_80", "sm_90a", ...); needs no device. Raises CompileError."""
    from cupy.cuda import nvrtc

    with _compiled(text, name, arch, (*_OPTIONS, f"-arch={arch}", "--ptxas-options=-v")) as program:
        # CuPy takes the last byte off, as if the cubin were a string.
        return Cubin(nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program))


def compile_rocm(text: str, arch: str, *, name: str = "kernel.cu") -> bytes:
    """The code object that HIPRTC makes for `arch` ("gfx942"); needs no device. Raises CompileError."""
    from cupy.cuda import nvrtc

    with _compiled(text, name, arch, (*ROCM_OPTIONS, f"--gpu-architecture={arch}")) as program:
        # CuPy takes the last byte off, as if the code object were a string; it is the upper half of a small number.
        return bytes(nvrtc.getPTX(program)) + b"\0"


def is_rocm(arch: str) -> bool:
    """Whether it is an AMD architecture."""
    return arch.startswith("gfx")


def cache_directory() -> Path:
    """Return the folder where cubins are kept: $GEMMSERVE_KERNEL_CACHE, or gemmserve/kernels in the user's cache
    directory.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gemmserve" / "kernels"


@lru_cache(maxsize=4096)
def file_name(source: KernelSource, arch: str) -> str:
    """Return the name of the cubin (on ROCm of the code object) of `source` for `arch`, which no other one has."""
    from cupy.cuda import runtime

    rocm = is_rocm(arch)
    # CuPy's runtime has the major version of the compiler that it takes; to ask the compiler itself would load it.
    options, major = (ROCM_OPTIONS, 10_000_000) if rocm else (_OPTIONS, 1000)
    key = "\0".join([source.text, arch, *options, str(runtime.runtimeGetVersion() // major)])
    return f"{source.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.{'hsaco' if rocm else 'cubin'}"


def compiled_file(source: KernelSource, arch: str) -> Path | None:
    """Return the cubin (on ROCm the code object) of `source` for `arch` where it is in the cache or shipped."""
    name = file_name(source, arch)
    folders = (cache_directory(), *shipped_kernels.folders(), *_private_directories())
    return next((path for folder in folders if (path := folder / name).is_file()), None)


def cubin_file(source: KernelSource, arch: str) -> Path:
    """The cubin (on ROCm the code object) of `source` for `arch` on disk, compiled unless it is there.

    Threads that want the same one wait for the first of them; of processes each compiles, and the last one's stays.
    Raises CompileError.
    """
    if (path := compiled_file(source, arch)) is not None:
        return path
    began = time.perf_counter()
    try:
        with _turn(file_name(source, arch)):
            return compiled_file(source, arch) or _compile(source, arch)
    finally:
        _waited.seconds = waited_s() + time.perf_counter() - began


_waited: Final = threading.local()


def waited_s() -> float:
    """Return the seconds for which this thread has waited for the compiler since it began."""
    return float(getattr(_waited, "seconds", 0.0))


@cache
def _turn(name: str) -> threading.Lock:
    del name
    return threading.Lock()


def _compile(source: KernelSource, arch: str) -> Path:
    name, directory = file_name(source, arch), cache_directory()
    compiler_name = f"{source.name}.cu"
    if is_rocm(arch):
        code = compile_rocm(source.text, arch, name=compiler_name)
    else:
        code = compile_cuda(source.text, arch, name=compiler_name).code
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return publish(directory, name, code)
    except OSError:  # a home that cannot be written, a full disk: compile once a process
        return publish(_private_directory(), name, code)


_private: list[tempfile.TemporaryDirectory[str]] = []


def _private_directories() -> list[Path]:
    return [Path(each.name) for each in _private]


def _private_directory() -> Path:
    """Return this process's own folder of kernels."""
    if not _private:
        _private.append(tempfile.TemporaryDirectory(prefix="gemmserve-kernels-"))
    return Path(_private[0].name)


def publish(directory: Path, name: str, code: bytes) -> Path:
    """Write a file of that folder under another name and rename it: another process sees all of it or none. Raises
    OSError.
    """
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".", suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())  # a name whose bytes a power failure took would be found ever after
        Path(temporary).replace(directory / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return directory / name


@lru_cache(maxsize=1024)
def load(source: KernelSource, entry: str, arch: str, device: int) -> Any:
    """The kernel `entry` of `source` as a `cupy.RawKernel`, for the current device, whose ordinal is `device`.

    Raises CompileError. `device` is part of the key because a loaded module belongs to one context.
    """
    import cupy

    if device != cupy.cuda.Device().id:
        raise ValueError(f"device {device} is not the current one")
    return cupy.RawModule(path=str(cubin_file(source, arch))).get_function(entry)
