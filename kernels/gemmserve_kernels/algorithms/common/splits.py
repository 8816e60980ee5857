"""Operands split into planes of float16 or bfloat16: what the tensor-core kernels multiply.

`Planes` is the contract between the pre-pass that makes them (`split`) and the kernels that read them (`wgmma`, `mma`).
A row stands for a row of op(A) or a *column* of op(B): both sides are stored with k running fastest. Conjugation is
already in the planes. With `scale = 2 ** exponent` of its row, an element is

    (sum of its planes) * 2 ** exponent

where every row was scaled so that its largest magnitude lies in [2**14, 2**15) (for `3xfp16-3m`, [2**13, 2**14), so
that the sums of real and imaginary parts fit; for bfloat16, [2**30, 2**31)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from gemmserve_kernels.algorithms.common.verdict import GROUP, GROUP_WORDS, groups
from gemmserve_kernels.device.struct_params import MatrixView
from gemmserve_kernels.device.tensor_map import Box

Scheme = Literal["3xfp16", "3xfp16-3m", "1xfp16", "6xbf16", "9xbf16", "3xbf16"]
"""Schemes; of bfloat16 three parts of an element and six or nine products of them; or the first two and three products.
"""

DEPTHS: Final[dict[str, int]] = {"3xfp16": 2, "3xfp16-3m": 2, "1xfp16": 1, "6xbf16": 3, "9xbf16": 3, "3xbf16": 2}
"""Planes of one value."""

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
    **{
        (scheme, is_complex, side): tuple(f"{part}{depth}" for depth in range(DEPTHS[scheme]) for part in parts)
        for scheme in ("6xbf16", "9xbf16", "3xbf16")
        for is_complex, parts in ((True, ("re_", "im_")), (False, ("x_",)))
        for side in "ab"
    },
}
"""The planes in their order, by scheme, whether the data are complex, and side."""


def is_wide(scheme: str) -> bool:
    """Whether its planes are bfloat16."""
    return scheme.endswith("bf16")


SCHEMES: Final[dict[str, Scheme]] = {
    "auto": "3xfp16",
    "3xfp16": "3xfp16",
    "3xfp16-3m": "3xfp16-3m",
    "tf32": "1xfp16",
    "6xbf16": "6xbf16",
    "9xbf16": "9xbf16",
}
"""The scheme of each compute mode that has one."""

WIDE: Final[dict[Scheme, Scheme]] = {"3xfp16": "6xbf16", "3xfp16-3m": "6xbf16", "1xfp16": "3xbf16"}
"""Scheme that takes the tiles that a scheme's float16 planes do not serve."""

PITCH: Final = 64
"""Rows of a plane begin at multiples of this many elements (128 bytes); what lies between k and the pitch is zero."""


@dataclass(frozen=True)
class Planes:
    """One operand of a product as planes.

    `data`: float16, or the bits of bfloat16, (matrices, planes, rows, pitch) in C order, aligned to 256 bytes; pitch is
    k rounded up to PITCH. `exponents`: int32 (matrices, rows). `batch_strides`: for each axis of the product's batch
    shape, matrices to step in `data` (0 where the operand is broadcast).
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

    def layout(self) -> Planes:
        """The same without the arrays: plans are kept by it."""
        return replace(self, data=None, exponents=None)

    def first_plane(self) -> MatrixView:
        """The first plane, as rows x k; addresses count from `data`."""
        steps = tuple(step * self.count * self.rows * self.pitch for step in self.batch_strides)
        return MatrixView(0, 0, np.dtype(np.float16), self.rows, self.k, self.pitch, 1, steps)

    def row_exponents(self) -> MatrixView:
        """The exponents of the rows, as a matrix of one column."""
        steps = tuple(step * self.rows for step in self.batch_strides)
        return MatrixView(0, 0, np.dtype(np.int32), self.rows, 1, 1, 0, steps)

    def group_deficits(self) -> MatrixView:
        """Deficits of the rows' groups (common.verdict), as a matrix of one row."""
        count = groups(self.rows) * GROUP_WORDS
        return MatrixView(0, 0, np.dtype(np.int32), 1, count, 0, 1, tuple(step * count for step in self.batch_strides))

    @property
    def across(self) -> bool:
        """See wgmma.plan.WgmmaSide: planes lie along k."""
        return False

    def view(self) -> MatrixView:
        """See WgmmaSide."""
        return MatrixView(0, 0, np.dtype(np.uint8), self.rows, self.k, 0, 0, self.batch_strides)

    def box(self, block_k: int, rows: int, planes: int) -> Box:
        """See WgmmaSide."""
        return Box((self.pitch, self.rows, self.count, self.matrices), (block_k, rows, planes, 1))


def strip_shape(m: int, n: int, strips: int) -> tuple[int, int]:
    """Return rows and columns of a strip, but for the last ones: the result is cut across columns no less often than
    across rows, as evenly as can be. The tiles by which accuracy is judged lie within one strip.
    """
    down = next(count for count in range(math.isqrt(strips), 0, -1) if strips % count == 0)
    return _strip(m, down), _strip(n, strips // down)


def _strip(extent: int, count: int) -> int:
    even = -(-extent // count)
    return -(-even // GROUP) * GROUP
