"""Bound by which elements of a product are ruled out as the extreme of a row. Pure.

Lines x (rows of op(A)) and y (columns of op(B)) are scaled by powers of two and rounded to float16: x + d and y + e.
By Cauchy and Schwarz, for real numbers and for complex ones,

    |(x + d) . (y + e) - x . y| <= |x| |e| + |d| |y + e|                                            (1)

and all of |x|, |d|, |y + e| and |e| are known of each line (`norm` is no less than |x| and |x + d|, `residual` no less
than |d|). The tensor core adds 16 products to a float32 sum and truncates each, and what comes out, by less than 2^-23
of the largest of them: 18 * 2^-23 |x| |y| every 16 steps, of those steps' norms where sums are promoted. Together that
is less than `accumulated` |x| |y|, sqrt(2) times as much for a complex number's magnitude. The product is rounded to
float16, 2^-11 of it at most.

Let E be the sum of that. An element that is further than its E and the largest one's E from the largest is not the
largest: what is left is made in double precision, usually one or two elements of a row. For normal data E is about
2^-11 sqrt(k) of an element's standard deviation.
"""

from __future__ import annotations

import math
from typing import Final

MOST: Final = 16
"""Candidates of a row that are made one by one; of a row with more the full product is made."""
MAX_K: Final = 1 << 14
"""Numbers along k at most, two for a complex element: beyond it E is a large part of an element."""
_SHORT: Final = 2048
"""Numbers along k from which on sums that are not promoted would be most of E."""
_RUN: Final = 64
_FITS: Final = 6.9
"""Binary logarithm of what no norm of a line exceeds: its square is less than float16's largest number, 65504."""


def exponent(numbers: int) -> int:
    """Return that of a line's largest number, scaled: of so many the norm then fits."""
    return math.floor(_FITS - math.log2(numbers) / 2)


def promotion(numbers: int) -> int | None:
    """Return steps of k between promotions of the tensor core's sums to float32; None: there are none."""
    return _RUN if numbers > _SHORT else None


def accumulated(numbers: int, *, complex_: bool) -> float:
    """Return the bound of what sums are off by, over both norms."""
    run = promotion(numbers)
    truncated = 1.25 * ((run or numbers) + 16) + (numbers / run if run else 0)
    return truncated * 2.0**-23 * (math.sqrt(2) if complex_ else 1.0)
