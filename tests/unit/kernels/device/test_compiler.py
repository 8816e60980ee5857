"""The text that reaches a compiler, and the cache of what comes back."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.compiler import Cubin, KernelSource, kernel_source

SOURCES = Path(compiler.__file__).parents[1] / "cuda"


@pytest.mark.parametrize("name", ["gemm", "gemm_reduce"])
def test_one_text_with_each_file_once(name):
    text = kernel_source(name, {"BLOCK_M": "64", "INDEX": "long long"})
    assert text.startswith("#define GEMM_BLOCK_M 64\n#define GEMM_INDEX long long\n#line 1")
    assert not re.search(r"^\s*#\s*(include|pragma once)", text, re.MULTILINE)
    first_lines = re.findall(r'#line 1 "([^"]+)"', text)
    assert len(first_lines) == len(set(first_lines))
    assert "common/platform.cuh" in first_lines


def test_line_directives_point_at_the_lines():
    """Each line of the text is the line of the file that the directives say."""
    file, number, seen = None, 0, 0
    for line in kernel_source("gemm_reduce", {}).splitlines():
        if match := re.fullmatch(r'#line (\d+) "([^"]+)"', line):
            file, number = (SOURCES / match[2]).read_text().splitlines(), int(match[1])
            continue
        if line:
            assert file[number - 1] == line
            seen += 1
        number += 1
    assert seen > 500


def files_of(kernel: str) -> set[str]:
    return set(re.findall(r'#line 1 "([^"]+)"', kernel_source(kernel, {})))


def test_every_device_file_is_used():
    used = set().union(*(files_of(path.stem) for path in SOURCES.rglob("*.cu")))
    assert used == {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cu*")}


def test_no_two_kernel_files_share_a_name():
    assert sorted(compiler.source_files().values()) == sorted(
        path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cu")
    )


def test_no_header_is_included_from_outside():
    for path in SOURCES.rglob("*.cu*"):
        assert not re.search(r"#\s*include\s*<", path.read_text()), path


@pytest.mark.parametrize("kernel", ["gemm", "gemm_reduce"])
def test_kernels_for_every_device_are_portable(kernel):
    """What differs between the compilers is in one file. (Tensor cores are one vendor's, and their kernels too.)"""
    for name in files_of(kernel) - {"common/platform.cuh"}:
        assert not re.search(r"\basm\b|__CUDACC|__HIP|GEMM_SHIM|__shfl", (SOURCES / name).read_text()), name


def test_sources_are_keys():
    a, b = (KernelSource("gemm", (("BLOCK_M", "64"),)) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != KernelSource("gemm", (("BLOCK_M", "32"),))


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm_reduce_finish' for 'sm_90a'
ptxas info    : Function properties for gemm_reduce_finish
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
ptxas info    : Compiling entry function 'gemm_reduce' for 'sm_90a'
ptxas info    : Function properties for gemm_reduce
    48 bytes stack frame, 44 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 48 bytes cumulative stack size
"""


def test_the_assembler_log_is_read():
    cubin = Cubin(b"", LOG)
    assert cubin.registers == {"gemm_reduce_finish": 32, "gemm_reduce": 128}
    assert cubin.spill_bytes == {"gemm_reduce_finish": 0, "gemm_reduce": 64}


def test_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiler.CACHE_VARIABLE, raising=False)
    assert compiler.cache_directory() == tmp_path / "gemmserve" / "kernels"
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "mine"))
    assert compiler.cache_directory() == tmp_path / "mine"


@pytest.fixture
def compiles(monkeypatch):
    """NVRTC's place taken by a counter: what is tested here is when it is called."""
    cupy = pytest.importorskip("cupy", reason="the CuPy wheel is not installed")
    calls = []

    def compile_cuda(text, arch, *, name):
        calls.append(arch)
        return Cubin(f"{arch} {len(text)}".encode(), "")

    monkeypatch.setattr(compiler, "compile_cuda", compile_cuda)
    monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda: 13000)
    compiler.file_name.cache_clear()
    yield calls
    compiler.file_name.cache_clear()


def test_a_source_is_compiled_once_per_architecture_and_text(compiles, monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    small, large = (KernelSource("gemm", (("BLOCK_M", size),)) for size in ("32", "64"))
    path = compiler.cubin_file(small, "sm_90a")
    assert path.read_bytes().startswith(b"sm_90a ")
    assert compiler.cubin_file(small, "sm_90a") == path
    assert compiles == ["sm_90a"]
    others = {compiler.cubin_file(small, "sm_80"), compiler.cubin_file(large, "sm_90a")}
    assert len(others | {path}) == 3
    assert sorted(tmp_path.glob("cache/*")) == sorted(others | {path})  # no temporary file is left


@pytest.mark.parametrize(("version", "same"), [(13020, True), (14000, False)])
def test_an_update_of_the_compiler_leaves_what_is_there(compiles, monkeypatch, tmp_path, version, same):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    source = KernelSource("gemm", (("BLOCK_M", "32"),))
    path = compiler.cubin_file(source, "sm_90a")
    monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda: version)
    compiler.file_name.cache_clear()
    assert (compiler.cubin_file(source, "sm_90a") == path) is same
    assert len(compiles) == 2 - same


def test_threads_that_want_the_same_kernel_wait_for_one(compiles, monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    source = KernelSource("gemm", (("BLOCK_M", "32"),))
    at_it, go_on = threading.Event(), threading.Event()
    compile_cuda = compiler.compile_cuda

    def held(text, arch, *, name):
        at_it.set()
        assert go_on.wait(60)
        return compile_cuda(text, arch, name=name)

    monkeypatch.setattr(compiler, "compile_cuda", held)

    def wanted():
        before = compiler.waited_s()
        return compiler.cubin_file(source, "sm_90a"), compiler.waited_s() - before

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(wanted) for _ in range(3)]
        assert at_it.wait(60)
        go_on.set()
        found = [future.result() for future in futures]
    assert len({path for path, _ in found}) == 1
    assert compiles == ["sm_90a"]
    assert any(waited > 0 for _, waited in found)
    before = compiler.waited_s()
    compiler.cubin_file(source, "sm_90a")
    assert compiler.waited_s() == before


def test_code_for_amd_devices_is_hiprtcs(compiles, monkeypatch, tmp_path):
    """Through CuPy's binding, which takes the last byte off; beside the cubins, under the version of HIP."""
    cupy = pytest.importorskip("cupy")
    options, freed = [], []
    nvrtc = cupy.cuda.nvrtc
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda: 70200000)
    monkeypatch.setattr(nvrtc, "createProgram", lambda text, name, headers, names: name)
    monkeypatch.setattr(nvrtc, "compileProgram", lambda program, given: options.append(given))
    monkeypatch.setattr(nvrtc, "getPTX", lambda program: b"\x7fELF...")
    monkeypatch.setattr(nvrtc, "destroyProgram", freed.append)
    path = compiler.cubin_file(KernelSource("gemm", ()), "gfx942")
    assert (path.suffix, path.read_bytes()) == (".hsaco", b"\x7fELF...\0")
    assert options == [("-std=c++17", "--gpu-architecture=gfx942")]
    assert freed == ["gemm.cu"]
    assert compiler.cubin_file(KernelSource("gemm", ()), "gfx942") == path
    for version, same in ((70300000, True), (80000000, False)):
        monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda version=version: version)
        compiler.file_name.cache_clear()
        assert (compiler.cubin_file(KernelSource("gemm", ()), "gfx942") == path) is same
    assert compiles == []


def test_a_cache_that_cannot_be_written(compiles, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(blocked))
    path = compiler.cubin_file(KernelSource("gemm", ()), "sm_80")
    assert path.read_bytes().startswith(b"sm_80 ")
    assert blocked.read_text() == "not a directory"


@pytest.mark.usefixtures("nvrtc")
def test_the_compiler_says_where_it_failed():
    with pytest.raises(compiler.CompileError, match=r"gemm.cu for sm_80.*(?s:.)*common/|mma/"):
        compiler.compile_cuda(kernel_source("gemm", {}), "sm_80", name="gemm.cu")
