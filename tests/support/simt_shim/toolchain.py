"""The C++ compiler behind the shim, and shared objects that are built once.

build() makes one shared object of a kernel source: the device language before it, entry points after it, linked with
the machine of runtime/, which is compiled once for each warp width and mode. build_cache keeps both.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from build_cache import cache_directory, digest, once

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
RUNTIME = ("machine.cpp", "hopper.cpp", "faults.cpp")
CHECKER = "checker.cpp"

# Device code has no exceptions, no type information, no guarded statics; it puns types (NVRTC has no type-based alias
# analysis) and lets integers wrap. No contraction: the same result from every compiler. No C++ library, neither its
# headers nor its thread-local variables (device/language.hpp says why).
OPTIONS = (
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
    "-fno-strict-aliasing", "-fwrapv", "-fno-math-errno", "-ffp-contract=off", "-fno-stack-protector", "-nostdinc++",
    "-U_FORTIFY_SOURCE", "-w",
)  # fmt: skip

# A third of the compiler's time. DWARF 4, since the addr2line of Debian 12 takes the wrong file from version 5 when
# #line renames the first one (seen, not looked up).
_DEBUG = ("-g1", "-gdwarf-4")

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


def _run(commands: Sequence[Sequence[str]], source: str, out: Path) -> None:
    """Runs the commands, in which `{out}` is the path of the result and standard input the source."""
    for command in commands:
        words = [word.replace("{out}", str(out)) for word in command]
        # Debug information names files relative to the working directory (module.py strips the rest).
        where = cache_directory()
        done = subprocess.run(words, input=source, capture_output=True, text=True, check=False, cwd=where)
        if done.returncode != 0:
            raise CompileError(f"{shlex.join(words)}\n{done.stderr[-20000:]}")


@functools.cache
def _shim_digest() -> str:
    files = sorted([*(HERE / "device").glob("*.hpp"), *(HERE / "runtime").glob("*.?pp")])
    return digest(*(f"{path.name}\n{path.read_text()}" for path in files))


def _compile(compiler: Compiler, options: Sequence[str]) -> list[str]:
    """The command that makes an object file of standard input, the same wherever this checkout lies."""
    place = [f"-iquote{HERE}", f"-ffile-prefix-map={HERE}={HERE.name}"]
    return [*compiler.command, *compiler.options, *options, *place, "-x", "c++", "-c", "-"]


def _runtime(compiler: Compiler, name: str, mode: Sequence[str]) -> Path:
    """The object file of one source of runtime/."""
    options, text = [*mode, "-O2"], f'#include "runtime/{name}"\n'
    target = cache_directory() / f"{digest(compiler, compiler.options, options, _shim_digest(), text)}.o"
    return once(target, functools.partial(_run, [[*_compile(compiler, options), "-o", "{out}"]], text))


def build(
    source: str,
    kernels: Sequence[str],
    *,
    warp_size: int = 32,
    defines: Sequence[str] = (),
    checked: bool = False,
    optimize: str = "-Og",
    ucontext: bool = False,
    compiler: Compiler | None = None,
    debug: bool = False,
) -> Path:
    """The shared object of a kernel source.

    `defines` are NAME or NAME=VALUE; `checked` instruments every memory access (runtime/checker.cpp); `ucontext` takes
    the portable fibers even on x86-64; `debug` adds the numbers of lines, and the code is the same (GCC manual, -g).
    Raises CompilerMissing, CompileError.
    """
    compiler = compiler or find_compiler()
    mode = [f"-DSIMT_WARP_SIZE={warp_size}", *(["-DSIMT_CHECKED"] if checked else [])]
    entries = "".join(f"SIMT_KERNEL({name})\n" for name in kernels)
    text = f'#include "device/simt.hpp"\n#line 1 "kernel"\n{source}\n#line 1 "entries"\n{entries}'
    options = [*mode, optimize, *(f"-D{define}" for define in defines), *(["-fsanitize=thread"] if checked else [])]
    options += [*_ALIGNMENT[compiler.family], *(_DEBUG if debug else ())]
    fibers = ["-DSIMT_UCONTEXT"] if ucontext else []
    runtime = [_runtime(compiler, name, [*mode, *fibers]) for name in (*RUNTIME, *([CHECKER] if checked else []))]
    link = [*compiler.command, *compiler.link_options, "-shared", "-Wl,--no-undefined", "{out}.o", *map(str, runtime)]
    commands = [[*_compile(compiler, options), "-o", "{out}.o"], [*link, "-lm", "-lpthread", "-o", "{out}"]]
    key = digest(compiler, compiler.options, options, _shim_digest(), text, *(path.name for path in runtime))
    return once(cache_directory() / f"{key}.so", functools.partial(_run, commands, text))
