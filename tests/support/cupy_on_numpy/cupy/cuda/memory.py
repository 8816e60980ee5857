from cupy._array import MemoryPointer

__all__ = ["MemoryPointer", "OutOfMemoryError"]


class OutOfMemoryError(MemoryError):
    pass
