"""Kernels without a device: the sources that host code asks for, compiled by NVRTC and kept."""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
from build_cache import cache_directory, digest, once

from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_kernels.device.tensor_map import TensorMap


@dataclass
class SourceRecorder:
    """A Launcher that runs nothing and keeps what it is asked for: (source, entry, options) of each launch."""

    spec: DeviceSpec = KNOWN["H200"]
    max_grid: int = 2**31 - 1
    launched: list[tuple[compiler.KernelSource, str, dict[str, Any]]] = field(default_factory=list)

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    zeros = empty

    def counters(self, elements):
        return 4096

    def pointer(self, array):
        return array.ctypes.data // 256 * 256 if array.flags.aligned else 1  # as a device allocates

    def tensor_map(self, box, address):
        return TensorMap()

    def launch(self, source, entry, **options):
        self.launched.append((source, entry, options))

    @property
    def sources(self) -> dict[str, compiler.KernelSource]:
        """By the name of the kernel, the last one."""
        return {entry: source for source, entry, _ in self.launched}


def matrix(dtype, *, rows=4096, columns=4096, order="C", planar=False):
    """A matrix that takes no memory."""
    dtype = np.dtype(dtype)
    strides = (columns * dtype.itemsize, dtype.itemsize) if order == "C" else (dtype.itemsize, rows * dtype.itemsize)
    shape = (rows, columns)
    if planar:
        shape, strides = (2, *shape), (rows * columns * dtype.itemsize, *strides)
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)


@functools.cache
def _compiler_digest() -> str:
    """Digest of NVRTC's packages and of how it is called."""
    packages = sorted(f"{it.name} {it.version}" for it in distributions() if "nvrtc" in it.name or "cupy" in it.name)
    return digest(*packages, Path(compiler.__file__).read_text(encoding="utf-8"))


@functools.cache
def compiled(source, arch):
    """The cubin of `source`, for tests that ask for the fixture `nvrtc`."""
    name, text = f"{source.name}.cu", source.text
    target = cache_directory() / f"{digest(_compiler_digest(), name, arch, text)}.cubin"
    path = once(target, lambda out: out.write_bytes(pickle.dumps(compiler.compile_cuda(text, arch, name=name))))
    return pickle.loads(path.read_bytes())
