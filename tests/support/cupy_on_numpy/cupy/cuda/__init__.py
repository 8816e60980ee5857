import contextlib
import ctypes
import time

from cupy._array import alloc
from cupy.cuda import compiler, cublas, device, driver, memory, nvrtc, runtime
from cupy.cuda.device import Device
from gemmserve_kernels.device import driver as _driver_calls

__all__ = [
    "Device", "Event", "MemoryPool", "Stream", "alloc", "alloc_pinned_memory", "compiler", "cublas", "device", "driver",
    "memory", "nvrtc", "runtime", "using_allocator",
]  # fmt: skip


class PinnedMemoryPointer(bytearray):
    """Memory of the host; `ptr` is its address."""

    @property
    def ptr(self):
        return ctypes.addressof((ctypes.c_char * len(self)).from_buffer(self))


def alloc_pinned_memory(nbytes):
    return PinnedMemoryPointer(nbytes)


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.at = None
        self.ptr = 0

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        runtime._wait()
        assert self.at is not None, "an event that was never recorded"

    done = True


def get_elapsed_time(start, end):
    """Milliseconds."""
    return 1e3 * (end.at - start.at)


class Graph:
    def launch(self, stream=None):
        pass

    def upload(self, stream=None):
        pass


class Stream:
    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.ptr = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def use(self):
        return self

    def synchronize(self):
        pass

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def begin_capture(self, mode=None):
        pass

    def end_capture(self):
        return Graph()


Stream.null = Stream()


def get_current_stream(device_id=-1):
    return Stream.null


class MemoryPool:
    """Memory is NumPy's here, whoever asks for it."""

    def malloc(self, nbytes):
        return alloc(nbytes)

    def total_bytes(self):
        return 0


def using_allocator(allocator=None):
    return contextlib.nullcontext(allocator)


def set_allocator(allocator=None):
    pass


# A driver that is there all the same knows nothing of these streams and events.
_driver_calls.quick_calls = lambda: None
_driver_calls.allocation_of = runtime._allocation_of
