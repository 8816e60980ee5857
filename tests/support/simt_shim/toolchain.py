"""The C++ compiler behind the shim, and shared objects that are built once.

build() makes one shared object of a kernel source: the device language before it, entry points after it, linked with
the machine of runtime/, which is compiled once for each warp width and mode.


An object's name is a digest of everything that goes into it: sources, options, the compiler's identity. It is built in
a temporary file and renamed, under a lock per object, so that several test processes neither see half an object nor
build the same one at once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
RUNTIME = ("machine.cpp", "hopper.cpp", "faults.cpp")
CHECKER = "checker.cpp"

# Device code has no exceptions, no type information, no guarded statics; it puns types (NVRTC has no type-based alias
# analysis) and lets integers wrap. No contraction: the same result from every compiler. No C++ library, neither its
# headers nor its thread-local variables (device/language.hpp says why). DWARF 4, since the addr2line of Debian 12 takes
# the wrong file from version 5 when #line renames the first one (seen, not looked up).
OPTIONS = (
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
    "-fno-strict-aliasing", "-fwrapv", "-fno-math-errno", "-ffp-contract=off", "-fno-stack-protector", "-nostdinc++",
    "-U_FORTIFY_SOURCE", "-g1", "-gdwarf-4", "-w",
)  # fmt: skip

# gcc: statics of templates stay this module's own. zig: traps on undefined behaviour are its default in debug builds,
# and it would compile a whole C++ library at the first use (two minutes).
_FAMILY_OPTIONS = {
    "gcc": ("-fno-gnu-unique",),
    "clang": (),
    "zig": ("-fno-sanitize=undefined", "-nostdlib++"),
}

# Of device code alone: a vector at an address that is no multiple of its size is a fault on a GPU, and here a SIGILL,
# which becomes one (runtime/faults.cpp).
_ALIGNMENT = {
    "gcc": ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
    "clang": ("-fsanitize=alignment", "-fsanitize-trap=alignment"),
    "zig": ("-fsanitize=alignment", "-fsanitize-trap=alignment"),
}


class CompilerMissing(RuntimeError):  # noqa: N818 - what is missing is the point
    """No C++ compiler on this machine, or not the one that was asked for."""


class CompileError(RuntimeError):
    """The compiler refused a source; the message holds its diagnostics."""


@dataclass(frozen=True)
class Compiler:
    """A C++17 compiler: the command, and what differs between the three that are known to work."""

    command: tuple[str, ...]
    family: str  # gcc, clang or zig
    version: str

    @property
    def options(self) -> tuple[str, ...]:
        return (*OPTIONS, *_FAMILY_OPTIONS[self.family], *_cpu_options())

    @property
    def link_options(self) -> tuple[str, ...]:
        return ("-nostdlib++",) if self.family == "zig" else ()


@functools.cache
def find_compiler(name: str | None = None) -> Compiler:
    """The compiler to use: `name`, else $CXX, else the first of g++, clang++ and the ziglang wheel.

    `name` is a command line, or "zig" for the ziglang wheel. Raises CompilerMissing.
    """
    wanted = name or os.environ.get("CXX")
    candidates = [_command(wanted)] if wanted else [("g++",), ("clang++",), _command("zig")]
    for command in candidates:
        if (version := _version(command)) is not None:
            zig = "ziglang" in command or Path(command[0]).name == "zig"
            return Compiler(command, "zig" if zig else "clang" if "clang" in version else "gcc", version)
    if wanted:
        raise CompilerMissing(f"the C++ compiler {wanted!r} cannot be run")
    raise CompilerMissing(
        "the CPU shim needs a C++17 compiler: install g++ or clang++, or `pip install ziglang`, or set CXX"
    )


def _command(text: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "ziglang", "c++") if text == "zig" else tuple(shlex.split(text))


def _version(command: tuple[str, ...]) -> str | None:
    if "ziglang" in command and importlib.util.find_spec("ziglang") is None:
        return None
    if shutil.which(command[0]) is None:
        return None
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.splitlines()[0] if answer.returncode == 0 and answer.stdout else None


@functools.cache
def _cpu_options() -> tuple[str, ...]:
    """Fused multiply-add and float16 conversion in hardware where the machine has them: fmaf is the inner loop."""
    if platform.machine() != "x86_64":
        return ()
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    have = set(flags.split())
    return tuple(f"-m{name}" for name in ("avx", "avx2", "fma", "f16c") if name in have)


@functools.cache
def cache_directory() -> Path:
    """Where objects are kept: $GEMM_SHIM_CACHE, else a directory of this user's alone under the temporary one."""
    if chosen := os.environ.get("GEMM_SHIM_CACHE"):
        path = Path(chosen)
        path.mkdir(parents=True, exist_ok=True)
        return path
    path = Path(tempfile.gettempdir()) / f"gemm-simt-shim-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or path.is_symlink():
        raise PermissionError(f"{path} is not this user's alone: objects from it are not loaded")
    return path


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:32]


def _build(target: Path, commands: Sequence[Sequence[str]], source: str = "") -> Path:
    """Runs the commands, in which `{out}` is the temporary name of the result, unless the target is there."""
    if target.exists():
        return target
    with target.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            out = str(Path(folder) / target.name)
            for command in commands:
                words = [word.replace("{out}", out) for word in command]
                # Debug information names files relative to the working directory (module.py strips the rest).
                where = target.parent
                done = subprocess.run(words, input=source, capture_output=True, text=True, check=False, cwd=where)
                if done.returncode != 0:
                    raise CompileError(f"{shlex.join(words)}\n{done.stderr[-20000:]}")
            Path(out).rename(target)
    return target


@functools.cache
def _shim_digest() -> str:
    files = sorted([*(HERE / "device").glob("*.hpp"), *(HERE / "runtime").glob("*.?pp")])
    return _digest(*(f"{path.name}\n{path.read_text()}" for path in files))


def _compile(compiler: Compiler, options: Sequence[str], text: str) -> Path:
    """The object file of one C++ text."""
    target = cache_directory() / f"{_digest(compiler, compiler.options, options, _shim_digest(), text)}.o"
    command = [*compiler.command, *compiler.options, *options, "-x", "c++", "-c", "-", "-o", "{out}"]
    return _build(target, [command], text)


def build(
    source: str,
    kernels: Sequence[str],
    *,
    warp_size: int = 32,
    defines: Sequence[str] = (),
    checked: bool = False,
    optimize: str = "-O2",
    ucontext: bool = False,
    compiler: Compiler | None = None,
) -> Path:
    """The shared object of a kernel source.

    `defines` are NAME or NAME=VALUE; `checked` instruments every memory access (runtime/checker.cpp); `ucontext` takes
    the portable fibers even on x86-64. Raises CompilerMissing, CompileError.
    """
    compiler = compiler or find_compiler()
    mode = [f"-DSIMT_WARP_SIZE={warp_size}", *(["-DSIMT_CHECKED"] if checked else [])]
    device = HERE / "device"
    entries = "".join(f"SIMT_KERNEL({name})\n" for name in kernels)
    text = f'#include "{device}/simt.hpp"\n#line 1 "kernel"\n{source}\n#line 1 "entries"\n{entries}'
    options = [*mode, optimize, *(f"-D{define}" for define in defines), *(["-fsanitize=thread"] if checked else [])]
    objects = [_compile(compiler, [*options, *_ALIGNMENT[compiler.family]], text)]
    for name in (*RUNTIME, *([CHECKER] if checked else [])):
        include = f'#include "{HERE}/runtime/{name}"\n'
        objects.append(_compile(compiler, [*mode, "-O2", *(["-DSIMT_UCONTEXT"] if ucontext else [])], include))
    target = cache_directory() / f"{_digest(compiler, *objects)}.so"
    linker = [*compiler.command, *compiler.link_options, "-shared", "-Wl,--no-undefined"]
    return _build(target, [[*linker, *map(str, objects), "-lm", "-lpthread", "-o", "{out}"]])
