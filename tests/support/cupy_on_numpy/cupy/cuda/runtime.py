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
    return 1


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


memcpyHostToDevice, memcpyDeviceToHost = 1, 2  # noqa: N816


def memcpyAsync(target, source, nbytes, kind, stream):
    import ctypes

    assert kind in (memcpyHostToDevice, memcpyDeviceToHost)
    ctypes.memmove(target, source, nbytes)
