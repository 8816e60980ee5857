"""The compilers behind the CPU shim, and its cache of objects."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from simt_shim import BarrierError, CompileError, CompilerMissing, ShimError, compile_source, find_compiler, toolchain

SOURCE = r"""#line 1 "sum.cu"
extern "C" __global__ void sum(const float* x, float* out, int careful) {
    __shared__ float values[128];
    values[threadIdx.x] = x[threadIdx.x];
    for (int half = 64; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
        if (!careful && threadIdx.x >= half) return;
    }
    if (threadIdx.x == 0) atomicAdd(out, __half2float(__float2half(hypotf(values[0], 0.0f))));
}
"""


@pytest.fixture(params=["gcc", "clang", "zig"])
def compiler(request):
    if request.param == "zig":
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("the ziglang wheel is not installed")
        return find_compiler("zig")
    name = {"gcc": "g++", "clang": "clang++"}[request.param]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    found = find_compiler(name)
    assert found.family == request.param
    return found


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
@pytest.mark.parametrize("warp_size", [32, 64])
def test_every_compiler_runs_a_kernel(compiler, warp_size, checked):
    module = compile_source(SOURCE, warp_size=warp_size, checked=checked, compiler=compiler)
    x, out = np.arange(128, dtype=np.float32) % 16, np.zeros(1, np.float32)
    module.launch("sum", (1,), (128,), [x, out, 1])
    assert out[0] == x.sum()
    with pytest.raises(BarrierError, match=r"sum\.cu:5"):
        module.launch("sum", (1,), (128,), [x, out, 0])


def test_every_compiler_reports_races(compiler):
    source = SOURCE.replace("__syncthreads();", "")
    module = compile_source(source, checked=True, compiler=compiler)
    # The first thread to run finds its neighbour's value not yet written, which is the same mistake.
    where = r"sum\.cu:6" if shutil.which("addr2line") else "module offset"
    with pytest.raises(ShimError, match=rf"(data race in shared memory|the block has not written).* at {where}"):
        module.launch("sum", (1,), (128,), [np.ones(128, np.float32), np.zeros(1, np.float32), 1])


def test_a_source_that_does_not_compile():
    with pytest.raises(CompileError, match=r"sum\.cu:3:.*undeclared_name"):
        compile_source(SOURCE.replace("x[threadIdx.x]", "undeclared_name"))


def test_the_compiler_is_the_one_that_cxx_names(monkeypatch):
    find = toolchain.find_compiler.__wrapped__
    found = find()
    monkeypatch.setenv("CXX", " ".join(found.command))
    assert find().command == found.command
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerMissing, match="'no-such-compiler' cannot be run"):
        find()


def test_no_compiler_at_all(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain, "_version", lambda command: None)
    with pytest.raises(CompilerMissing, match=r"install g\+\+ or clang\+\+, or `pip install ziglang`, or set CXX"):
        toolchain.find_compiler.__wrapped__()


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "cache_directory", lambda: tmp_path)
    return tmp_path


def test_an_object_is_built_once_even_by_many(monkeypatch, empty_cache):
    find_compiler()  # which runs it, once a process
    commands = []
    run = subprocess.run

    def counted(words, **options):
        commands.append(words)
        return run(words, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: toolchain.build(SOURCE, ["sum"]), range(4)))
    assert len(paths) == 1
    assert len(commands) == 5  # the kernel, the machine's three files, the link
    assert toolchain.build(SOURCE, ["sum"]) in paths
    assert len(commands) == 5
    toolchain.build(SOURCE, ["sum"], warp_size=64)
    assert len(commands) == 10
    assert not list(empty_cache.glob("build-*"))


def test_a_failed_build_leaves_nothing(empty_cache):
    with pytest.raises(CompileError):
        toolchain.build("nonsense", [])
    assert {path.suffix for path in empty_cache.iterdir()} == {".lock", ".o"}  # the machine's
