"""Runs CUDA and HIP kernel sources on the CPU, unmodified, to find what a GPU would hide.

    module = compile_source(text, warp_size=64)
    module.launch("kernel", grid=(4,), block=(256,), args=[x, y, 1000], order=Order("shuffled", 7))

The source is compiled as C++17 behind a header that supplies the device language (device/), and linked with a machine
(runtime/) in which each GPU thread is a fiber. What it finds:

- a missing barrier: threads run in several orders (ORDERS), each as far as it can before the next, and shared memory is
  NaN before every block; a checked build reports the race itself, whatever the order;
- a divergent barrier, a warp operation whose mask names lanes that do not come: BarrierError, WarpError, with places;
- an access out of bounds: guard pages and poison around buffers; every access is compared with the buffers in a checked
  build: MemoryFault;
- traps, failed assertions, endless loops, integer division by zero, stack overflow: Trap, MemoryFault.

It shows nothing of speed, of weak memory ordering, of the hardware's own instructions (inline PTX does not compile).
"""

from __future__ import annotations

from .launcher import ShimLauncher
from .memory import GuardedBlock
from .module import (
    FORWARD,
    ORDERS,
    REVERSE,
    BarrierError,
    DataRace,
    LaunchError,
    MemoryFault,
    Order,
    Region,
    ShimError,
    ShimModule,
    Trap,
    WarpError,
    compile_source,
    kernel_names,
)
from .toolchain import CompileError, Compiler, CompilerMissing, find_compiler

__all__ = [
    "FORWARD",
    "ORDERS",
    "REVERSE",
    "BarrierError",
    "CompileError",
    "Compiler",
    "CompilerMissing",
    "DataRace",
    "GuardedBlock",
    "LaunchError",
    "MemoryFault",
    "Order",
    "Region",
    "ShimError",
    "ShimLauncher",
    "ShimModule",
    "Trap",
    "WarpError",
    "compile_source",
    "find_compiler",
    "kernel_names",
]
