import os

is_hip = False
CUDA_R_16F, CUDA_R_32F, CUDA_R_64F, CUDA_C_32F, CUDA_C_64F, CUDA_R_8I = 2, 0, 1, 4, 5, 3


class CUDARuntimeError(RuntimeError):
    pass


_lost = []
"""Not empty once a kernel has faulted: nothing works after that."""


def _wait():
    if _lost:
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


def getDeviceCount():
    return int(os.environ.get("CUPY_ON_NUMPY_DEVICES", "1"))


def deviceGetPCIBusId(ordinal):
    return f"0000:{ordinal:02X}:00.0"


def deviceGetByPCIBusId(bus_id):
    ordinal = int(bus_id.split(":")[1], 16)
    if ordinal >= getDeviceCount():
        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    return ordinal


def deviceCanAccessPeer(device, peer):
    return int(os.environ.get("CUPY_ON_NUMPY_PEERS", "1"))


def getDeviceProperties(ordinal):
    """An H200, or what CUPY_ON_NUMPY_L2_MIB makes of it."""
    return {
        "name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132, "warpSize": 32,
        "sharedMemPerBlock": 48 << 10, "sharedMemPerBlockOptin": 227 << 10, "sharedMemPerMultiprocessor": 228 << 10,
        "regsPerMultiprocessor": 65536, "regsPerBlock": 65536, "totalGlobalMem": 141 << 30,
        "l2CacheSize": int(os.environ.get("CUPY_ON_NUMPY_L2_MIB", "60")) << 20,
    }  # fmt: skip


def memGetInfo():
    return 100 << 30, 141 << 30


def runtimeGetVersion():
    return 13000


def driverGetVersion():
    return 13000


def getDevice():
    return 0


def deviceSynchronize():
    _wait()


def memsetAsync(pointer, value, nbytes, stream):
    import ctypes

    ctypes.memset(pointer, value, nbytes)


_registered = []
"""(address, bytes) of what was registered."""


def hostRegister(address, nbytes, flags):
    _registered.append((address, nbytes))


def hostUnregister(address):
    _registered[:] = [entry for entry in _registered if entry[0] != address]


memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3  # noqa: N816


def memcpyAsync(target, source, nbytes, kind, stream):
    import ctypes

    assert kind in (memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice)
    ctypes.memmove(target, source, nbytes)


def memcpy2DAsync(target, target_pitch, source, source_pitch, width, height, kind, stream):
    assert width <= min(target_pitch, source_pitch)
    for row in range(height):
        memcpyAsync(target + row * target_pitch, source + row * source_pitch, width, kind, stream)


_HANDLE_BYTES = 64
_opened = {}
"""Memory of other processes that is mapped, by address."""


def _allocation_of(address):
    from cupy._array import ALLOCATIONS

    for start, (_, nbytes) in ALLOCATIONS.items():
        if start <= address < start + nbytes:
            return start, nbytes
    raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")


def ipcGetMemHandle(address):
    from cupy._array import ALLOCATIONS

    start, _ = _allocation_of(address)
    assert start == address, "not where an allocation begins"
    handle = ALLOCATIONS[start][0].name.encode()
    return handle.ljust(_HANDLE_BYTES, b"\0")


def ipcOpenMemHandle(handle, flags=1):
    import numpy as np

    from cupy._array import SHARED

    assert len(handle) == _HANDLE_BYTES
    try:
        memory = np.memmap(SHARED / handle.rstrip(b"\0").decode(), np.uint8, "r")
    except OSError as error:
        raise CUDARuntimeError(f"cudaErrorInvalidResourceHandle: {error}") from error
    _opened[memory.ctypes.data] = memory
    return memory.ctypes.data


def ipcCloseMemHandle(address):
    del _opened[address]
