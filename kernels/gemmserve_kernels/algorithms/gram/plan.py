"""Gram matrices planned: how rows are cut into parts and the batch into turns, and which bound the forms have. Pure.

The bound. Let a_k be column k of A as it is reduced, b a column of B, u = 2^-53 and gamma_n = n u / (1 - n u). Products
of two 32-bit numbers are exact in double, so that each part of G = A^H A is a sum of n_G rounded additions, and

    |fl(G)_kl - G_kl| <= gamma_{n_G} |a_k|^T |a_l| <= gamma_{n_G} ||a_k|| ||a_l||,     real and imaginary part each

(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1, and 3.5 for products of matrices;
then the inequality of Cauchy and Schwarz). The form b^H G b is a sum of products again, of
n_B roundings each at most, and with |b_k| = |re b_k| + |im b_k|

    |fl(b^H G b) - ||A b||^2| <= gamma_{n_G + n_B} (sum over k of ||a_k|| |b_k|)^2.

Relative to the result this is without limit where A b is small by cancellation: the condition of the normal equations
(Higham, section 20.4). So each column's bound is made beside its form, and where the form is not large enough for the
error to stay below 2^-27 of it, an eighth of what rounding the result to float32 costs, the product is made in plain
FP32 after all. What is kept is therefore no less accurate than the product's sum of squares. Data without such
cancellation keep a distance: for random elements the form is about 1 / k of the squared sum, the limit some 2^-17.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.simt.tile import SimtTile
from gemmserve_kernels.device.struct_params import own_extents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.device.struct_params import MatrixView

WORKSPACE: Final = 32 << 20
"""Bytes of Gram matrices of one turn through a batch, their parts counted."""
RUN: Final = 512
"""Rows of A that are summed up one after another."""
_FORM_RUN: Final = 64
"""The same for the forms: RUN of cuda/simt/multiply.cuh."""
_PART: Final = 1024
"""Rows of one part at least: enough to pay for adding up the parts, few enough to fill a device."""
_PARTS: Final = 64
ACCURACY: Final = 2.0**-27
"""Error that a form's result may have without the product being made."""
_UNIT: Final = 2.0**-53
_SLACK: Final = 1.01
"""For what rounds in the bound itself, and for gamma_n being a little more than n u."""

FORM_TILES: Final = {
    "float64": SimtTile(32, 64, 8, 4, 4, min_blocks=3),
    "complex128": SimtTile(32, 32, 8, 4, 2, min_blocks=3),
}
"""Tiles of the forms, by the dtype of G."""
DEPTH: Final = 16
"""Rows of A of one stage of gram.cu."""
_NARROW: Final = 0.6
"""Speed of tiles of 32 relative to those of 64: each fragment that is read serves half as many products."""


@dataclass(frozen=True)
class Tile:
    """Tile of Gram matrices: `block` columns of A along both sides."""

    block: int
    min_blocks: int

    @property
    def threads(self) -> int:
        """Threads of one block: two rows of warps, each with 16 columns."""
        return 4 * self.block

    @classmethod
    def of(cls, k: int) -> Tile:
        """For A of k columns: the least work, by the tiles of the triangle and what one of them costs."""
        return min((cls(64, 1), cls(32, 3)), key=lambda tile: tile.cost(k))

    def triangle(self, k: int) -> int:
        """Tiles on and above the diagonal."""
        side = -(-k // self.block)
        return side * (side + 1) // 2

    def cost(self, k: int) -> float:
        """Elements of a Gram matrix that are made, as many as take the time of one of a wide tile."""
        return self.triangle(k) * self.block**2 / (1.0 if self.block == 64 else _NARROW)


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of G, for data of `dtype`."""
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def matrix_bytes(wide: np.dtype[Any], k: int) -> int:
    """Return the bytes of one Gram matrix."""
    return wide.itemsize * k * k


def tolerance_of(roundings: int) -> float:
    """Least ratio of a form to its squared sum at which it is kept, of sums that round so many times."""
    return _SLACK * roundings * _UNIT / ACCURACY


@dataclass(frozen=True)
class Cut:
    """Cut of the rows of A: `parts` of `rows` each, the last one possibly shorter."""

    rows: int
    parts: int

    @classmethod
    def of(cls, rows: int, k: int, wide: np.dtype[Any]) -> Cut:
        """For A of `rows` x k. Follows from one product alone, whatever the batch and the device."""
        parts = max(1, min(_PARTS, -(-rows // _PART), WORKSPACE // matrix_bytes(wide, k)))
        each = math.ceil(rows / (parts * RUN)) * RUN
        return cls(each, -(-rows // each))

    def roundings(self, k: int, wide: np.dtype[Any]) -> int:
        """n_G + n_B: the most additions, one after another, that any term goes through."""
        tile = FORM_TILES[wide.name]
        each = 2 if wide.kind == "c" else 1  # multiply-adds of each part for one product
        gram = each * min(RUN, self.rows) + self.rows // RUN + self.parts
        product = each * _FORM_RUN + -(-k // _FORM_RUN)
        form = each * tile.thread_m + -(-k // tile.block_m) + tile.block_m // tile.thread_m
        return gram + product + form

    def tolerance(self, k: int, wide: np.dtype[Any]) -> float:
        """Least ratio of a form to its squared sum at which it is kept."""
        return tolerance_of(self.roundings(k, wide))


@dataclass(frozen=True)
class Turn:
    """A share of the batch, `first` being the number of its first product; `own`: the extents over which A varies."""

    first: int
    batch_shape: tuple[int, ...]
    own: tuple[int, ...]
    a: MatrixView
    b: MatrixView


def turns(batch_shape: tuple[int, ...], a: MatrixView, b: MatrixView, each: int, first: int = 0) -> Iterator[Turn]:
    """Shares of a batch in order, along its first axis and then the next, whose matrices of `each` bytes fit."""
    own = own_extents(batch_shape, a.batch_strides)
    if math.prod(own) * each <= WORKSPACE or math.prod(batch_shape) == 1:
        yield Turn(first, batch_shape, own, a, b)
        return
    extent, rest = batch_shape[0], batch_shape[1:]
    step = max(1, WORKSPACE // (each * math.prod(own[1:])))
    inner = math.prod(rest)
    for start in range(0, extent, step):
        count = min(step, extent - start)
        shifted = [view.shifted(start * view.batch_strides[0]) for view in (a, b)]
        if count == 1:
            one, other = (replace(view, batch_strides=view.batch_strides[1:]) for view in shifted)
            yield from turns(rest, one, other, each, first + start * inner)
        else:
            shape = (count, *rest)
            yield Turn(first + start * inner, shape, own_extents(shape, a.batch_strides), *shifted)
