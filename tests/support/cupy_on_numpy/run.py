"""Runs a script as if this machine had an H200: python run.py SCRIPT [ARGUMENTS ...], or -m MODULE [ARGUMENTS ...].

Kernels are neither compiled nor run. What they would have been is appended to the file $CUPY_ON_NUMPY_SOURCES, if that
is set, one JSON object a line, as benchmarks/kernels/precompile.py reads it. The kernel named in $CUPY_ON_NUMPY_FAULT
faults: whoever waits for the device afterwards is told so, until the process ends.
"""

import ctypes
import json
import os
import pathlib
import runpy
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from cupy.cuda import _module, cublas, runtime  # noqa: E402

from gemmserve_kernels.device import compiler, driver  # noqa: E402
from gemmserve_kernels.problem.errors import DeviceError  # noqa: E402

MAX_SHARED = 227 << 10
SOURCES = os.environ.get("CUPY_ON_NUMPY_SOURCES")
FAULT = os.environ.get("CUPY_ON_NUMPY_FAULT")


def launch(config_at, function, pointer, extra):
    """cuLaunchKernelEx: looks at the configuration."""
    config = driver.LaunchConfig.from_address(config_at)
    ok = 0 < config.grid[0] < 1 << 31 and 0 < config.block[0] <= 1024 and config.shared <= MAX_SHARED
    if _module.NAMES[function] == FAULT:
        runtime._lost.append(FAULT)
    return 0 if ok and ctypes.c_void_p.from_address(pointer).value else 1


def fill(address, value, nbytes, stream):
    """cuMemsetD8Async."""
    ctypes.memset(address, value, nbytes)
    return 0


def encode(*arguments):
    """cuTensorMapEncodeTiled: checks what the driver would refuse."""
    _, _, rank, address, extents, strides, box, *_ = arguments
    ok = address.value % 16 == 0 and all(0 < box[i] <= 256 for i in range(rank))
    ok = ok and all(strides[i] % 16 == 0 and strides[i] < 1 << 40 for i in range(rank - 1))
    return 0 if ok and all(0 < extents[i] <= 1 << 32 for i in range(rank)) else 1


def explain(code, text):
    """cuGetErrorString."""
    return 0


FUNCTIONS = {
    "cuLaunchKernelEx": launch,
    "cuMemsetD8Async": fill,
    "cuTensorMapEncodeTiled": encode,
    "cuGetErrorString": explain,
}


def cubin_file(source, arch):
    """The name alone."""
    if SOURCES:
        with pathlib.Path(SOURCES).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": source.name, "defines": source.defines}) + "\n")
    return pathlib.Path(f"{source.name}.cubin")


def function(name):
    """What there is of the driver: it knows nothing of graphs."""
    if name not in FUNCTIONS:
        raise DeviceError(f"the CUDA driver has no {name}")
    return FUNCTIONS[name]


driver._function = function
driver.argument = lambda address: address  # as functions of Python's take it
compiler.cubin_file = compiler.compiled_file = cubin_file


def product(*arguments):
    """cublasGemmEx_64: of which arithmetic is not looked at."""
    cublas.gemmEx(*arguments)
    return 0


def products(*arguments):
    """cublasGemmStridedBatchedEx_64, likewise."""
    cublas.gemmStridedBatchedEx(*arguments)
    return 0


class Blas:
    """cuBLAS for ctypes."""

    cublasGemmEx_64 = staticmethod(product)  # noqa: N815 - the library's own name
    cublasGemmStridedBatchedEx_64 = staticmethod(products)  # noqa: N815

    def __getattr__(self, name):
        return lambda *_: 0


def named(library):
    """Whether that is a cuBLAS, under its own name or that which benchmarks/device/cut_rival.py gives it."""
    return any(part in str(library) for part in ("cublas", "librivals"))


def main(script, *arguments):
    """Runs it."""
    real = ctypes.CDLL
    ctypes.CDLL = lambda name, *args, **kwargs: Blas() if named(name) else real(name, *args, **kwargs)
    if script == "-m":
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = [script, *arguments]
    sys.path.insert(1, str(pathlib.Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
