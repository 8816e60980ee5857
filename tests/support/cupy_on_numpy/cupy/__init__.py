"""See README.md beside this package."""

import numpy as _np

from cupy import _array
from cupy._array import ndarray
from cupy._array import plain as _plain
from cupy._array import wrap as _wrap

__version__ = "0+numpy"

from cupy import cuda, linalg, random
from cupy.cuda._module import RawModule

uint8, int32, int64, uint32 = _np.uint8, _np.int32, _np.int64, _np.uint32
float16, float32, float64 = _np.float16, _np.float32, _np.float64
complex64, complex128 = _np.complex64, _np.complex128
nan, inf, pi, newaxis = _np.nan, _np.inf, _np.pi, None

FUNCTIONS = (
    "abs", "absolute", "all", "any", "arange", "argmax", "argmin", "argsort", "ascontiguousarray", "broadcast_to",
    "concatenate", "conj", "conjugate", "copyto", "cos", "diagonal", "empty_like", "exp", "exp2", "expand_dims",
    "eye", "floor", "frexp", "hypot", "isfinite", "isnan", "ldexp", "linspace", "log2", "matmul", "max", "maximum",
    "may_share_memory", "mean", "min", "moveaxis", "ones_like", "rint", "sin", "sqrt", "square", "stack", "sum",
    "tile", "tril", "triu", "where", "zeros_like",
)  # fmt: skip


def _function(name):
    def call(*args, **kwargs):
        return _wrap(getattr(_np, name)(*[_plain(x) for x in args], **{k: _plain(x) for k, x in kwargs.items()}))

    call.__name__ = name
    return call


for _name in FUNCTIONS:
    globals()[_name] = _function(_name)


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype, order)


def ones(shape, dtype=float, order="C"):
    return full(shape, 1, dtype, order)


def full(shape, value, dtype=None, order="C"):
    array = ndarray(shape, _np.asarray(value).dtype if dtype is None else dtype, order=order)
    array._n[...] = _plain(value)
    return array


def asarray(values, dtype=None, order=None):
    if isinstance(values, ndarray) and (dtype is None or values.dtype == dtype):
        return values
    return array(values, dtype, order=order)


def array(values, dtype=None, copy=True, order=None):
    host = _np.asarray(values._n if isinstance(values, ndarray) else values, dtype)
    made = ndarray(host.shape, host.dtype, order="F" if order == "F" else "C")
    made._n[...] = host
    return made


def asnumpy(values):
    return values.get() if isinstance(values, ndarray) else _np.asarray(values)


class _Pool:
    def free_all_blocks(self):
        _array.ACCOUNT.release()

    def used_bytes(self):
        return _array.ACCOUNT.used

    def set_limit(self, size=None):
        _array.ACCOUNT.limit = size or 0

    def total_bytes(self):
        return 0


def get_default_memory_pool():
    return _Pool()


def get_default_pinned_memory_pool():
    return _Pool()
