"""Threads that NumPy's BLAS uses for one product: few for a small one.

OpenBLAS wakes its whole pool for any product past about 48 x 48 x 48, and its threads wait for each other by spinning.
While anything else wants the processors (the front does, whenever a request arrives), such a product waits for a time
slice of the kernel's scheduler: 64 x 64 complex64 took 0.03 ms in one thread and 12 ms in two on two busy processors.
OpenBLAS has a function for it, which costs less than a microsecond; other libraries are left as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gemmserve_service.schemas import GemmParams, GemmReduceParams

# About half a millisecond of one core at 100 GFLOP/s: less than that gains less than a lost time slice costs.
_PER_THREAD: Final = 1 << 26
# NumPy's wheels rename the functions; distributions do not, but may have 64-bit integers.
_NAMES: Final = (
    ("scipy_openblas_", "64_"),
    ("scipy_openblas_", ""),
    ("openblas_", "64_"),
    ("openblas_", ""),
)


class BlasThreads:
    """The thread count of this process's OpenBLAS, if NumPy uses one."""

    def __init__(self) -> None:
        self._set: Callable[[int], Any] | None = None
        self.most = 1
        """Threads that a large product gets: what the environment or the machine gave at the start."""
        library = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]
        for prefix, suffix in _NAMES:
            if hasattr(library, f"{prefix}set_num_threads{suffix}"):
                self._set = getattr(library, f"{prefix}set_num_threads{suffix}")
                self.most = int(getattr(library, f"{prefix}get_num_threads{suffix}")())
                break

    @contextlib.contextmanager
    def limited(self, flops: int) -> Iterator[int]:
        """Use as many threads as a call of `flops` operations keeps busy; afterwards `most` again."""
        threads = max(1, min(self.most, flops // _PER_THREAD))
        if self._set is None or threads == self.most:
            yield self.most
            return
        self._set(threads)
        try:
            yield threads
        finally:
            self._set(self.most)


def flops_per_call(params: GemmParams | GemmReduceParams, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    """Operations of one call of the BLAS: of one matrix of a batch, or of all where they share the other operand."""
    rows, columns = a.shape[-2:]
    k = columns if params.trans_a in {"N", "R"} else rows
    if k == 0:
        return 0
    planar = params.layout == "planar"
    lead_a, lead_b = (array.shape[1 if planar else 0 : -2] for array in (a, b))
    fold = 1
    if all(extent == 1 for extent in lead_b):
        fold = math.prod(lead_a)
    complex_ = planar or "c" in {a.dtype.kind, b.dtype.kind}
    return int((8 if complex_ else 2) * fold * (rows * columns // k) * b.shape[-2] * b.shape[-1])
