"""The array: NumPy's, behind a type that does not mix with NumPy's."""

import itertools
import numbers
import os
import threading
import weakref
from pathlib import Path

import numpy as np

ALIGNMENT = 512


class MemoryPointer:
    """An address, and what keeps it alive."""

    device_id = 0

    def __init__(self, ptr, owner):
        self.ptr, self.owner = ptr, owner

    def __add__(self, offset):
        return MemoryPointer(self.ptr + int(offset), self.owner)


class Chunk:
    """Part of what was taken from the device at once: `before` and `after` are its neighbours there."""

    __slots__ = ("after", "arena", "before", "free", "nbytes")

    def __init__(self, nbytes, arena):
        self.nbytes, self.arena, self.free = nbytes, arena, False
        self.before = self.after = None


class Account:
    """Bytes of arrays that are alive, the most there were, and how many may be taken from the device; 0: any number.

    Freed memory is given again as CuPy's pool does it: in the order of the stream that it was allocated in (here: to
    the thread), the smallest piece that is long enough, of which the rest is a piece of its own; where there is none,
    more is taken from the device, up to the limit, whatever is free; and what was cut goes back to the device only when
    it is whole again.
    """

    def __init__(self):
        self.used = self.peak = self.limit = self.taken = 0
        self._free = []
        self._lock = threading.RLock()  # what is collected while it is held gives its bytes back

    def take(self, memory, nbytes):
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            chunk = self._chunk(nbytes) if nbytes else Chunk(0, None)
            self.used += nbytes
            self.peak = max(self.peak, self.used)
        weakref.finalize(memory, self._give, chunk).atexit = False

    def release(self):
        """Give to the device what is free and whole."""
        with self._lock:
            for chunk in [each for each in self._free if each.before is None and each.after is None]:
                self._free.remove(chunk)
                self.taken -= chunk.nbytes

    def _chunk(self, nbytes):
        arena = threading.get_ident()
        fitting = [each for each in self._free if each.arena == arena and each.nbytes >= nbytes]
        if not fitting:
            if self.limit and self.taken + nbytes > self.limit:
                from cupy.cuda.memory import OutOfMemoryError

                raise OutOfMemoryError(nbytes, self.taken, self.limit)
            self.taken += nbytes
            return Chunk(nbytes, arena)
        chunk = min(fitting, key=lambda each: each.nbytes)
        self._free.remove(chunk)
        chunk.free = False
        if chunk.nbytes > nbytes:
            rest = Chunk(chunk.nbytes - nbytes, arena)
            rest.before, rest.after, rest.free = chunk, chunk.after, True
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.after, chunk.nbytes = rest, nbytes
            self._free.append(rest)
        return chunk

    def _give(self, chunk):
        with self._lock:
            self.used -= chunk.nbytes
            if not chunk.nbytes:
                return
            for first, second in ((chunk, chunk.after), (chunk.before, chunk)):
                if first is None or second is None or not (first.free or first is chunk):
                    continue
                if not (second.free or second is chunk):
                    continue
                if first.free:
                    self._free.remove(first)
                if second.free:
                    self._free.remove(second)
                first.nbytes += second.nbytes
                first.after = second.after
                if first.after is not None:
                    first.after.before = first
                chunk = first
                chunk.free = False
            chunk.free = True
            self._free.append(chunk)


ACCOUNT = Account()


SHARED = Path(os.environ["CUPY_ON_NUMPY_SHARED"]) if "CUPY_ON_NUMPY_SHARED" in os.environ else None
"""Folder of files that a device's memory is then, so that other processes can map it."""
ALLOCATIONS = {}
"""Files by the address at which they are mapped, with their bytes."""
NUMBERS = itertools.count()


def shared(nbytes):
    path = SHARED / f"{os.getpid()}-{next(NUMBERS)}"
    memory = np.memmap(path, np.uint8, "w+", shape=(nbytes,))
    ALLOCATIONS[memory.ctypes.data] = path, nbytes
    weakref.finalize(memory, freed, memory.ctypes.data, path)
    return memory


def freed(address, path):
    ALLOCATIONS.pop(address, None)
    path.unlink()


def aligned(nbytes):
    """Memory as CuPy's pool gives it: 512-byte aligned, of arbitrary content (here 0xff, NaN)."""
    whole = max(1, nbytes) + ALIGNMENT
    memory = shared(whole) if SHARED else np.empty(whole, np.uint8)
    ACCOUNT.take(memory, nbytes)
    start = -memory.ctypes.data % ALIGNMENT
    memory = memory[start : start + max(1, nbytes)]
    if nbytes < 1 << 22:
        memory.fill(0xFF)
    return memory


def alloc(nbytes):
    memory = aligned(nbytes)
    return MemoryPointer(memory.ctypes.data, memory)


class Flags:
    def __init__(self, flags):
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, flags.owndata


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801
    __module__ = "cupy"
    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if isinstance(shape, numbers.Integral) else tuple(int(n) for n in shape)
        dtype = np.dtype(dtype)
        if memptr is None:
            nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
            self._n = np.ndarray(shape, dtype, aligned(nbytes), 0, strides, order)
            return
        offset = memptr.ptr - memptr.owner.ctypes.data
        self._n = np.ndarray(shape, dtype, memptr.owner, offset, strides, order)

    @classmethod
    def of(cls, array):
        made = cls.__new__(cls)
        made._n = array
        return made

    # ---- what it says of itself
    shape = property(lambda self: self._n.shape)
    dtype = property(lambda self: self._n.dtype)
    strides = property(lambda self: self._n.strides)
    ndim = property(lambda self: self._n.ndim)
    size = property(lambda self: self._n.size)
    nbytes = property(lambda self: self._n.nbytes)
    itemsize = property(lambda self: self._n.itemsize)
    flags = property(lambda self: Flags(self._n.flags))
    T = property(lambda self: ndarray.of(self._n.T))

    @property
    def base(self):
        return self._n.base

    @property
    def data(self):
        owner = self._n
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        flat = owner if owner.dtype == np.uint8 and owner.ndim == 1 else owner.reshape(-1).view(np.uint8)
        return MemoryPointer(self._n.ctypes.data, flat)

    @property
    def device(self):
        from cupy.cuda import Device

        return Device(0)

    real = property(lambda self: ndarray.of(self._n.real))
    imag = property(lambda self: ndarray.of(self._n.imag))

    @real.setter
    def real(self, value):
        self._n.real = plain(value)

    @imag.setter
    def imag(self, value):
        self._n.imag = plain(value)

    def __repr__(self):
        return repr(self._n)

    def __len__(self):
        return len(self._n)

    def __bool__(self):
        return bool(self._n)

    def __float__(self):
        return float(self._n)

    def __int__(self):
        return int(self._n)

    def __complex__(self):
        return complex(self._n)

    def __iter__(self):
        return (ndarray.of(np.asarray(part)) for part in self._n)

    __hash__ = None

    # ---- conversions
    def __array__(self, *_, **__):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__":
            raise TypeError(f"CuPy's ufuncs have no {method} here")
        out = tuple(plain(x) for x in kwargs.pop("out", ()))
        return wrap(ufunc(*[plain(x) for x in inputs], **({"out": out} if out else {}), **kwargs))

    def __array_function__(self, function, _, args, kwargs):
        return wrap(function(*[plain(x) for x in args], **{name: plain(x) for name, x in kwargs.items()}))

    def get(self, stream=None, order="C", out=None, blocking=True):
        """As CuPy's: `out` must be contiguous in the order asked for."""
        from cupy.cuda import runtime

        if blocking:
            runtime._wait()
        if out is None:
            return np.array(self._n, order=order)
        assert out.flags.c_contiguous if order == "C" else out.flags.f_contiguous
        out[...] = self._n
        return out

    def set(self, array):
        """As CuPy's: shape and dtype must agree, the layout is made to."""
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        self._n[...] = array

    def __getitem__(self, index):
        return ndarray.of(np.asarray(self._n[plain_index(index)]))

    def __setitem__(self, index, value):
        self._n[plain_index(index)] = plain(value)

    def fill(self, value):
        self._n.fill(value)


def _method(name):
    def call(self, *args, **kwargs):
        return wrap(getattr(self._n, name)(*[plain(x) for x in args], **{k: plain(x) for k, x in kwargs.items()}))

    call.__name__ = name
    return call


METHODS = (
    "astype", "copy", "view", "reshape", "ravel", "swapaxes", "transpose", "conj", "conjugate", "sum", "max", "min",
    "mean", "argmax", "argmin", "any", "all", "squeeze", "dot", "item", "tolist", "take",
)  # fmt: skip
for _name in METHODS:
    setattr(ndarray, _name, _method(_name))


def plain_index(index):
    if isinstance(index, tuple):
        return tuple(plain_index(part) for part in index)
    return index._n if isinstance(index, ndarray) else index


def plain(value):
    """What NumPy takes; an array of NumPy is refused, as CuPy refuses it."""
    if isinstance(value, ndarray):
        return value._n
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, tuple | list):
        return type(value)(plain(part) for part in value)
    return value


def wrap(value):
    if isinstance(value, np.ndarray | np.generic):
        return ndarray.of(np.asarray(value))
    if isinstance(value, tuple):
        return tuple(wrap(part) for part in value)
    return value
