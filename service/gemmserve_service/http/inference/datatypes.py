"""Datatypes of the protocol and of arrays.

The protocol has no complex datatype: a complex tensor is one of FP32 or FP64 with a trailing dimension of 2, the real
and the imaginary part, which is how complex numbers lie in memory: no byte of it is moved.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gemmserve.wire import RESULT_DTYPES, NpyDtypeError

OPERANDS: Final[dict[str, np.dtype[Any]]] = {
    "FP16": np.dtype("float16"),
    "FP32": np.dtype("float32"),
    "FP64": np.dtype("float64"),
}
"""Datatypes of inputs."""
_COMPLEX: Final[dict[str, np.dtype[Any]]] = {"FP32": np.dtype("complex64"), "FP64": np.dtype("complex128")}
_NAMES: Final = {"i": "INT", "f": "FP"}


def operand_dtype(datatype: str, *, is_complex: bool) -> np.dtype[Any]:
    """The dtype of an input's elements. Raises NpyDtypeError (422) for a datatype that is not multiplied."""
    known = _COMPLEX if is_complex else OPERANDS
    if datatype not in known:
        listed = ", ".join(known)
        if is_complex:
            raise NpyDtypeError(f"complex tensors are {listed} with a trailing dimension of 2, not {datatype[:20]}")
        hint = "; bfloat16 data can be sent as FP32, without loss" if datatype == "BF16" else ""
        raise NpyDtypeError(f"datatype {datatype[:20]} is not multiplied here, {listed} are{hint}")
    return known[datatype]


def tensor_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    """Return datatype, shape and NumPy's dtype of the tensor that an array of `dtype` and `shape` is answered as."""
    if dtype.kind == "c":
        shape = (*shape, 2)
        dtype = np.dtype(f"f{dtype.itemsize // 2}")
    return f"{_NAMES[dtype.kind]}{8 * dtype.itemsize}", shape, dtype


RESULTS: Final = tuple(dict.fromkeys(tensor_of(dtype, ())[0] for dtype in RESULT_DTYPES.values()))
"""Datatypes of outputs."""
