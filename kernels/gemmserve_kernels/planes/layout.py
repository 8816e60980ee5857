"""Operands split into float16 planes: what the tensor-core kernels multiply.

`Planes` is the contract between the pre-pass that makes them (`split`) and the kernels that read them (`wgmma`, `mma`).
A row stands for a row of op(A) or a *column* of op(B): both sides are stored with k running fastest. Conjugation is
already in the planes. With `scale = 2 ** exponent` of its row, an element is

    (sum of its planes) * 2 ** exponent

where every row was scaled so that its largest magnitude lies in [2**14, 2**15) (for `3xfp16-3m`, [2**13, 2**14), so
that the sums of real and imaginary parts fit).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

Scheme = Literal["3xfp16", "3xfp16-3m", "1xfp16"]

PLANES: Final[dict[tuple[str, bool, str], tuple[str, ...]]] = {
    ("3xfp16", True, "a"): ("re_hi", "im_hi", "re_lo", "im_lo"),
    ("3xfp16", True, "b"): ("re_hi", "im_hi", "re_lo", "im_lo"),
    ("3xfp16", False, "a"): ("hi", "lo"),
    ("3xfp16", False, "b"): ("hi", "lo"),
    ("1xfp16", True, "a"): ("re", "im"),
    ("1xfp16", True, "b"): ("re", "im"),
    ("1xfp16", False, "a"): ("x",),
    ("1xfp16", False, "b"): ("x",),
    ("3xfp16-3m", True, "a"): ("re_hi", "re_lo", "im_hi", "im_lo", "re+im_hi", "re+im_lo"),
    ("3xfp16-3m", True, "b"): ("re_hi", "re_lo", "im-re_hi", "im-re_lo", "re+im_hi", "re+im_lo"),
}
"""The planes in their order, by scheme, whether the data are complex, and side."""

SCHEMES: Final[dict[str, Scheme]] = {
    "auto": "3xfp16",
    "3xfp16": "3xfp16",
    "3xfp16-3m": "3xfp16-3m",
    "tf32": "1xfp16",
}
"""The scheme of each compute mode that has one."""

PITCH: Final = 64
"""Rows of a plane begin at multiples of this many elements (128 bytes); what lies between k and the pitch is zero."""


@dataclass(frozen=True)
class Planes:
    """One operand of a product as float16 planes.

    `data`: float16 (matrices, planes, rows, pitch), C-contiguous, aligned to 256 bytes; pitch = k rounded up to PITCH.
    `exponents`: int32 (matrices, rows). `batch_strides`: for each axis of the product's batch shape, matrices to step
    in `data` (0 where the operand is broadcast).
    """

    scheme: Scheme
    complex: bool
    side: Literal["a", "b"]
    data: Any
    exponents: Any
    matrices: int
    rows: int
    k: int
    pitch: int
    batch_strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """Planes of one matrix."""
        return len(PLANES[self.scheme, self.complex, self.side])
