"""Kernels: looked up in the cubin, their launches checked and noted, never run."""

from pathlib import Path

LIMIT_THREADS = 1024
LIMIT_GRID = 2**31 - 1
LIMIT_SHARED = 227 << 10
UNASKED_SHARED = 48 << 10


class RawModule:
    def __init__(self, *, code=None, path=None, options=(), **_):
        self.name = Path(path or "code").name

    def get_function(self, name):
        return RawKernel(self.name, name)


NAMES = []
"""Names of the kernels that were looked up; a function's address is its place here."""


class Handle:
    def __init__(self, name):
        NAMES.append(name)
        self.ptr = len(NAMES) - 1


class RawKernel:
    def __init__(self, module, name):
        self.module, self.name, self.kernel = module, name, Handle(name)
        self._shared = UNASKED_SHARED

    @property
    def max_dynamic_shared_size_bytes(self):
        return self._shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value):
        assert value <= LIMIT_SHARED, f"{self.name}: {value} bytes of shared memory"
        self._shared = value

    def __call__(self, grid, block, args, *, shared_mem=0):
        check_launch(self.name, grid[0], block[0], shared_mem, self._shared)


def check_launch(name, grid, block, shared, allowed):
    assert 0 < grid <= LIMIT_GRID, f"{name}: {grid} blocks"
    assert 0 < block <= LIMIT_THREADS, f"{name}: {block} threads"
    assert shared <= allowed, f"{name}: {shared} bytes of shared memory without asking"
