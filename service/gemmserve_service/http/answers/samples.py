"""Samples of arrays: elements at even distances, gathered from the bytes as they lie without a pass over the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gemmserve.wire import RESULT_DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gemmserve_service.schemas import ArrayInfo


def sample(data: memoryview, info: ArrayInfo, rows: int, columns: int) -> np.ndarray:
    """Return at most `rows` x `columns` elements of the array `info` in `data`, as a C-ordered copy in its dtype.

    Always two-dimensional: a vector is one row, a scalar one element, and of more than two dimensions it is the first
    matrix. Element (i, j) is that at row i m // min(rows, m) of m, and so for columns.
    """
    stored = np.frombuffer(data, RESULT_DTYPES[info.dtype]).reshape(info.shape, order=info.order)
    while stored.ndim > 2:
        stored = stored[0] if len(stored) else stored.reshape(0, stored.shape[-1])
    matrix = stored.reshape(1, -1) if stored.ndim < 2 else stored  # a view: there is one row
    return np.ascontiguousarray(matrix[np.ix_(_even(matrix.shape[0], rows), _even(matrix.shape[1], columns))])


def _even(length: int, most: int) -> NDArray[np.intp]:
    """Indices at even distances, at most so many."""
    count = min(length, most)
    return np.arange(count, dtype=np.intp) * length // max(count, 1)
