"""The NumPy backend: alpha op(A) op(B) + beta C through NumPy's BLAS, with the semantics of the device kernels.

Operands stay where they are: transposition is a view, batches broadcast inside `np.matmul`. Only what BLAS cannot read
(mixed dtypes, float16, planar operands, strides both ways, a lone conjugation) is copied, one block at a time. Blocks
are bounded by `BLOCK_BYTES`, so no temporary grows with the product.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

    Array = np.ndarray[Any, Any]

BLOCK_BYTES: Final = 32 << 20
"""Bytes of a block of the product, or of a copied block of an operand, at most."""

_CACHED_BYTES: Final = 1 << 20
"""The same where few multiplications an element leave memory as the bottleneck: alpha and beta then meet the block
while it is in the second-level cache."""

_SHORT_K: Final = 64
"""Below this k a product moves bytes rather than multiplies. From no source; twice or half of it measured the same."""

_MIN_SIDE: Final = 64
"""Rows and columns of the smallest block that is cut for its many multiplications."""
_A_CALL: Final = 1 << 12
"""Multiplications that take as long as NumPy's way to one matrix of a batch."""

_LONG_K: Final = 1 << 15
"""Terms of a sum that one call of the BLAS forms at most. The smallest block that is worth a call, 64 x 64 elements,
takes some ten milliseconds so; the sums of several calls are added in their order."""

Block = tuple[slice, ...]


def run_gemm(problem: GemmProblem, a: Array, b: Array, c: Array | None, out: Array) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, an array of the result's shape and dtype and of any strides.

    The arrays are those of `problem`, native and aligned; `out` shares no memory with them. `c` is not read where beta
    is 0.
    """
    if out.size == 0:
        return
    multiply = one_call(problem, a, b, out)
    if multiply is not None:
        with np.errstate(all="ignore"):
            multiply(a, b, out)
        return
    target = Planes.of(out, problem.planar)
    addend = Planes.of(c, problem.planar) if c is not None and problem.beta != 0 else None
    product = Product(problem, a, b)
    if addend is not None:
        addend = addend.broadcast(target.shape)
    if product.can_fold and target.folds and (addend is None or addend.folds):
        product, target = product.folded(), target.folded()
        addend = addend.folded() if addend is not None else None
    dtype = problem.accumulate
    direct = target.im is None and target.re.dtype == dtype and is_blas_matrix(target.re)
    scaled = problem.alpha != 1 or addend is not None or product.conjugate_result
    limit: float = BLOCK_BYTES if problem.k >= _SHORT_K else _CACHED_BYTES
    if direct and not scaled and not product.copies and problem.k <= _LONG_K:
        limit = math.inf  # one call of the BLAS
    scratch = Scratch(dtype)
    with np.errstate(all="ignore"):
        for block in product.blocks(limit):
            checkpoint()
            here = target.at(block)
            tile = here.re if direct else scratch.get(here.re.shape)
            product.multiply(block, tile)
            _scale(tile, problem.alpha)
            if addend is not None:
                _add_scaled(tile, addend.at(block), problem.beta)
            if not direct:
                here.store(tile)


def one_call(problem: GemmProblem, a: Array, b: Array, out: Array) -> Callable[[Array, Array, Array], None] | None:
    """Return the function that multiplies these matrices, and others that lie alike, where one call of the BLAS is all
    there is to do.

    NumPy warns of what overflows there, unless its caller sees to it (`np.errstate`).
    """
    if not _is_one_call(problem, a, b, out):
        return None
    turn_a, turn_b = problem.trans_a in "TC", problem.trans_b in "TC"
    multiply = _multiplier(problem.k)
    if not turn_a and not turn_b:
        return multiply  # type: ignore[no-any-return]  # NumPy's
    return lambda a, b, out: multiply(a.T if turn_a else a, b.T if turn_b else b, out)


def _is_one_call(problem: GemmProblem, a: Array, b: Array, out: Array) -> bool:
    """Whether the product is one call of the BLAS on matrices as they are: what small products mostly are, and what
    they need not be looked at more closely for.
    """
    dtype = problem.dtype
    return bool(
        a.ndim == 2
        and b.ndim == 2
        and problem.k <= _LONG_K
        and a.dtype == dtype
        and b.dtype == dtype
        and dtype == problem.accumulate
        and not problem.planar
        and problem.alpha == 1
        and problem.beta == 0
        and (dtype.kind != "c" or (problem.trans_a in "NT" and problem.trans_b in "NT"))
        and all(each.flags.forc and is_blas_matrix(each) for each in (a, b, out))
    )


@dataclass(frozen=True)
class Planes:
    """A batched matrix: one array, or the real and the imaginary parts apart where it is planar."""

    re: Array
    im: Array | None = None

    @classmethod
    def of(cls, array: Array, planar: bool) -> Planes:
        """The matrix that `array` holds."""
        return cls(array[0], array[1]) if planar else cls(array)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The one or two arrays."""
        return (self.re,) if self.im is None else (self.re, self.im)

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., rows, columns)."""
        shape: tuple[int, ...] = self.re.shape
        return shape

    @property
    def is_complex(self) -> bool:
        """Whether there are imaginary parts."""
        return self.im is not None or self.re.dtype.kind == "c"

    def at(self, block: Block) -> Planes:
        """The part inside `block`; axes of length 1 are whole whatever the block says."""
        index = tuple(part if extent > 1 else slice(None) for part, extent in zip(block, self.shape, strict=True))
        return Planes(*(array[index] for array in self.arrays))

    def broadcast(self, shape: tuple[int, ...]) -> Planes:
        """Broadcast to `shape`, without a copy."""
        return Planes(*(np.broadcast_to(array, shape) for array in self.arrays))

    @property
    def folds(self) -> bool:
        """Whether the batch and the rows are one axis in memory."""
        return all(_one_axis(array) for array in self.arrays)

    def folded(self) -> Planes:
        """The same elements as one matrix of batch times rows."""
        shape = (math.prod(self.shape[:-1]), self.shape[-1])
        return Planes(*(array.reshape(shape) for array in self.arrays))

    def store(self, value: Array) -> None:
        """Writes `value`, rounding to this array's dtype."""
        if self.im is None:
            np.copyto(self.re, value, casting="unsafe")
        else:
            np.copyto(self.re, value.real)
            np.copyto(self.im, value.imag)


@dataclass
class Scratch:
    """One buffer that is used again for every block."""

    dtype: np.dtype[Any]
    _buffer: Array | None = field(default=None, init=False)

    def get(self, shape: tuple[int, ...]) -> Array:
        """An array of that shape; its content is whatever the last user left."""
        size = math.prod(shape)
        if self._buffer is None or self._buffer.size < size:
            self._buffer = np.empty(size, self.dtype)
        return self._buffer[:size].reshape(shape)


class Factor:
    """op(A) or op(B) as BLAS is to see it: (batch..., rows, columns), batch axes of stride 0 shrunk to length 1."""

    def __init__(self, array: Array, trans: str, problem: GemmProblem | GemmReduceProblem) -> None:
        batch_ndim = len(problem.batch_shape)
        self.planes = Planes(*(_stack(part, trans, batch_ndim) for part in Planes.of(array, problem.planar).arrays))
        self.dtype = problem.accumulate
        self.conjugate = trans in {"C", "R"} and self.planes.is_complex
        self._copied: tuple[Block, Array] | None = None

    @property
    def must_copy(self) -> bool:
        """Whether BLAS cannot read it in place, conjugation apart."""
        re = self.planes.re
        return self.planes.im is not None or re.dtype != self.dtype or not is_blas_matrix(re)

    @property
    def copies(self) -> bool:
        """Whether blocks of it are copied."""
        return self.must_copy or self.conjugate

    @property
    def size(self) -> int:
        """Elements, broadcast ones once."""
        return self.planes.re.size

    def tile(self, block: Block) -> Array:
        """The part inside `block`, fit for BLAS; the last copy is kept, for neighbours that need it again."""
        if not self.copies:
            return self.planes.at(block).re
        if self._copied is None or self._copied[0] != block:
            self._copied = (block, self._copy(self.planes.at(block)))
        return self._copied[1]

    def _copy(self, part: Planes) -> Array:
        shape = part.shape
        along_rows = abs(part.re.strides[-2]) < abs(part.re.strides[-1])
        copy = np.empty((*shape[:-2], shape[-1], shape[-2]) if along_rows else shape, self.dtype)
        copy = copy.swapaxes(-1, -2) if along_rows else copy
        if part.im is not None:
            copy.real = part.re
            copy.imag = part.im
            # Not np.negative into copy.imag: NumPy 2.4 reads the wrong elements for some strides of both.
            if self.conjugate:
                np.conjugate(copy, out=copy)
        elif self.conjugate:
            np.conjugate(part.re, out=copy)
        else:
            np.copyto(copy, part.re)
        return copy


class Product:
    """op(A) op(B), without alpha, a block at a time."""

    def __init__(self, problem: GemmProblem | GemmReduceProblem, a: Array, b: Array) -> None:
        self.extents = (*problem.batch_shape, problem.m, problem.n)
        self.k = problem.k
        self.dtype = problem.accumulate
        self.a = Factor(a, problem.trans_a, problem)
        self.b = Factor(b, problem.trans_b, problem)
        self.conjugate_result = False
        self._place_conjugations()
        self._scratch = Scratch(self.dtype)

    def _place_conjugations(self) -> None:
        """conj(A) conj(B) = conj(A B), conj(A) B = conj(A conj(B)): BLAS has no conjugation without a copy here, so it
        goes where the fewest elements are touched.
        """
        a, b = self.a, self.b

        def price(conjugate_a: bool, conjugate_b: bool, conjugate_result: bool) -> int:
            copies = sum(f.size for f, flag in ((a, conjugate_a), (b, conjugate_b)) if flag and not f.must_copy)
            return copies + conjugate_result * math.prod(self.extents)

        either = (a.conjugate, b.conjugate, False)
        other = (not a.conjugate, not b.conjugate, True)
        both_complex = a.planes.is_complex and b.planes.is_complex
        if any(either) and both_complex and price(*other) < price(*either):
            either = other
        a.conjugate, b.conjugate, self.conjugate_result = either

    @property
    def copies(self) -> bool:
        """Whether blocks of an operand are copied."""
        return self.a.copies or self.b.copies

    @property
    def can_fold(self) -> bool:
        """Whether a batch of products with one B is one product with more rows."""
        return (
            len(self.extents) > 2
            and all(extent == 1 for extent in self.b.planes.shape[:-2])
            and self.a.planes.shape[:-2] == self.extents[:-2]
            and self.a.planes.folds
        )

    def folded(self) -> Product:
        """Fold the batch into that one product and return it."""
        self.a.planes = self.a.planes.folded()
        self.b.planes = self.b.planes.folded()
        self.extents = (math.prod(self.extents[:-1]), self.extents[-1])
        return self

    def blocks(self, limit: float, work: float = math.inf) -> Iterator[Block]:
        """Blocks of the product in a fixed order: the batch outermost, then columns, then rows.

        None holds more than `limit` bytes of the product, nor of a copy of an operand, nor takes more than `work`
        multiplications unless it is one matrix of 64 x 64 or less. Rows and columns are cut only where every batch axis
        is.
        """
        sizes = self._block_sizes(limit, work)
        *batch, rows, columns = (
            [slice(start, min(start + size, extent)) for start in range(0, extent, size)]
            for extent, size in zip(self.extents, sizes, strict=True)
        )
        for *outer, column, row in itertools.product(*batch, columns, rows):
            yield (*outer, row, column)

    def _block_sizes(self, limit: float, work: float) -> list[int]:
        sizes = list(self.extents)
        batch_ndim = len(sizes) - 2
        item = self.dtype.itemsize

        def copied(factor: Factor, extent: int) -> int:
            if not factor.copies:
                return 0
            own = (min(size, had) for size, had in zip(sizes[:-2], factor.planes.shape[:-2], strict=True))
            return math.prod(own) * extent * min(self.k, _k_step(limit, item)) * item

        def laborious() -> bool:
            """Whether the multiplications, or the calls that they come in, are too many and can be fewer."""
            least = all(extent == 1 for extent in sizes[:-2]) and max(sizes[-2:]) <= _MIN_SIDE
            many = math.prod(sizes) * max(self.k, 1) > work or math.prod(sizes[:-2]) * _A_CALL > work
            return many and not least

        while True:
            product = math.prod(sizes) * item > limit or laborious()
            cut_m, cut_n = copied(self.a, sizes[-2]) > limit, copied(self.b, sizes[-1]) > limit
            if not (product or cut_m or cut_n):
                return sizes
            axis = next((i for i in range(batch_ndim) if sizes[i] > 1), None)
            if axis is None:
                wide = sizes[-1] >= sizes[-2]
                axis = (-1 if wide else -2) if product else (-2 if cut_m else -1)
            if sizes[axis] == 1:
                return sizes
            sizes[axis] = -(-sizes[axis] // 2)

    def multiply(self, block: Block, out: Array) -> None:
        """op(A) op(B) inside `block` into `out`, an array of `dtype` that BLAS can write."""
        *batch, rows, columns = block
        step = min(self.k, _LONG_K, _k_step(BLOCK_BYTES, self.dtype.itemsize) if self.copies else _LONG_K)
        for start in range(0, max(self.k, 1), max(step, 1)):
            checkpoint()
            depth = slice(start, min(start + step, self.k))
            a = self.a.tile((*batch, rows, depth))
            b = self.b.tile((*batch, depth, columns))
            if start == 0:
                _matmul(a, b, out)
            else:
                part = self._scratch.get(out.shape)
                _matmul(a, b, part)
                np.add(out, part, out=out)
        if self.conjugate_result:
            np.conjugate(out, out=out)


def _k_step(limit: float, itemsize: int) -> int:
    """Columns of op(A) that are copied at a time: a block of 64 rows of them stays within the limit."""
    return max(1, int(min(limit, BLOCK_BYTES)) // (64 * itemsize))


def _matmul(a: Array, b: Array, out: Array) -> None:
    if a.shape[-1]:
        _multiplier(a.shape[-1])(a, b, out)
    else:  # NumPy would look at each matrix of a batch
        out.fill(0)


def _multiplier(k: int) -> Any:
    """NumPy's function of two matrices and the place for their product."""
    # An outer product: NumPy has no BLAS call for it and would loop element by element.
    return np.multiply if k == 1 else np.matmul


def _stack(array: Array, trans: str, batch_ndim: int) -> Array:
    """op() as a view of `batch_ndim` + 2 axes; batch axes of stride 0 become length 1."""
    if trans in {"T", "C"}:
        array = array.swapaxes(-1, -2)
    one = tuple(
        slice(0, 1) if stride == 0 and extent > 1 else slice(None)
        for stride, extent in zip(array.strides[:-2], array.shape[:-2], strict=True)
    )
    return array[(None,) * (batch_ndim + 2 - array.ndim) + one]


def is_blas_matrix(array: Array) -> bool:
    """Whether BLAS can address every matrix of the stack: one unit stride, the other at least a row's length."""
    rows, columns = array.shape[-2:]
    item = array.dtype.itemsize

    def leading(unit: int, other: int, extent: int) -> bool:
        return bool(unit == item and other % item == 0 and max(extent, 1) <= other // item < 2**31)

    row, column = array.strides[-2:]
    return leading(column, row, columns) or leading(row, column, rows)


def _one_axis(array: Array) -> bool:
    """Whether all axes but the last are one axis in memory."""
    axes = [(n, s) for n, s in zip(array.shape[:-1], array.strides[:-1], strict=True) if n > 1]
    return all(outer == inner * n for (_, outer), (n, inner) in itertools.pairwise(axes))


def scalar(value: complex, dtype: np.dtype[Any]) -> Any:
    """`value` in `dtype`."""
    return dtype.type(value if dtype.kind == "c" else value.real)


def _scale(tile: Array, alpha: complex) -> None:
    if alpha != 1:
        np.multiply(tile, scalar(alpha, tile.dtype), out=tile)


def _add_scaled(tile: Array, addend: Planes, beta: complex) -> None:
    if addend.im is None:
        part = addend.re
        if beta != 1:
            part = np.multiply(part, scalar(beta, tile.dtype), dtype=tile.dtype)
        np.add(tile, part, out=tile)
        return
    real = real_dtype(tile.dtype).type
    for plane, re, im in ((tile.real, beta.real, -beta.imag), (tile.imag, beta.imag, beta.real)):
        for part, factor in ((addend.re, re), (addend.im, im)):
            if factor:
                np.add(plane, part if factor == 1 else np.multiply(part, real(factor)), out=plane)
