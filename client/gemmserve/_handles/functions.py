"""NumPy's functions on handles, by NumPy's names and rules: views are free, anything else runs on the server.

autoray, opt_einsum and cotengra find them as `gemmserve.NAME`, for the classes of handles belong to the package
`gemmserve`. Arrays beside a handle are uploaded for the while; where no argument is a handle, a function is NumPy's.
With handles of an AsyncClient what runs on the server is awaited: `await gemmserve.matmul(ra, rb)`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import numpy as np

from gemmserve import _errors
from gemmserve._handles.handle import ArrayHandle
from gemmserve._handles.view import Base
from gemmserve._transfer.arrays import as_array

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

F = TypeVar("F", bound="Callable[..., Any]")

FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {}
"""Functions on handles, by those of NumPy (ufuncs too) that they stand for."""

VIEWS: Final[set[Any]] = set()
"""Those of `FUNCTIONS` that ask the server for nothing."""


def _as(*names: str, view: bool = False) -> Callable[[F], F]:
    """Register a function as NumPy's of these names, and give calls without a handle to the first of them."""
    numpys = [found for name in names if (found := _numpys(name)) is not None]

    def registered(function: F) -> F:
        for each in numpys:
            FUNCTIONS[each] = function
        if view:
            VIEWS.update(numpys)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            remote = place_of(*args, *kwargs.values()) is not None or not numpys
            return (function if remote else numpys[0])(*args, **kwargs)

        return cast("F", called)

    return registered


def _numpys(name: str) -> Any:
    try:
        return operator.attrgetter(name)(np)
    except AttributeError:
        return None  # an older NumPy's


def place_of(*operands: Any) -> Any:
    """Return what computes with these operands: the program that records one of them, else the client of the first
    handle. None where no operand is a handle, nor a list or tuple of some.
    """
    found = None
    for x in operands:
        for each in x if isinstance(x, list | tuple) else (x,):
            if isinstance(each, ArrayHandle):
                if each._recorded:
                    return each._place
                found = each._place if found is None else found
    return found


def refused(name: str, why: str = "has no form on the server") -> TypeError:
    """Return the error of a function that handles have not: nothing is downloaded in silence."""
    return TypeError(f"numpy.{name} {why}: download the array first, as in numpy.{name}(x.numpy())")


def _then(value: Any, view: Callable[[Any], Any]) -> Any:
    """Return `view` of a handle, or of the one that an awaitable gives."""
    if not inspect.isawaitable(value):
        return view(value)

    async def viewed() -> Any:
        return view(await value)

    return viewed()


def _operand(x: Any, name: str) -> Any:
    return x if isinstance(x, ArrayHandle) else as_array(x, name)


def _ndim(x: Any) -> int:
    """The dimensions of an operand; those of a result that is still recorded, and of unknown shape, are a matrix's."""
    if isinstance(x, ArrayHandle):
        return 2 if x._recorded and x._known is None else x.ndim
    return np.ndim(x)


# -- products ------------------------------------------------------------------------------------------------------


@_as("matmul", "linalg.matmul")
def matmul(x1: Any, x2: Any) -> Any:
    """Matrix product, of batches and of vectors, as numpy.matmul. Raises ShapeMismatch and what `Client.gemm` does."""
    a, b = _operand(x1, "a"), _operand(x2, "b")
    left, right = _ndim(a), _ndim(b)
    if 0 in {left, right}:
        raise _errors.ShapeMismatch("matmul takes arrays of at least one dimension; a * b scales")
    product = place_of(a, b).gemm(a[None, :] if left == 1 else a, b[:, None] if right == 1 else b)
    if left > 1 and right > 1:
        return product
    return _then(product, lambda d: d[(..., *[0] * (left == 1), *([slice(None)] * (right > 1)), *[0] * (right == 1))])


@_as("dot")
def dot(a: Any, b: Any) -> Any:
    """Sum over the last axis of `a` and the last but one of `b`, as numpy.dot; scalars scale."""
    if 0 in {_ndim(a), _ndim(b)}:
        return arithmetic("multiply", a, b)
    a, b = _operand(a, "a"), _operand(b, "b")
    return matmul(a, b) if _ndim(b) <= 2 or _ndim(a) == 1 else tensordot(a, b, axes=([-1], [-2]))


@_as("inner")
def inner(a: Any, b: Any) -> Any:
    """Sum over the last axes of both, nothing conjugated, as numpy.inner; scalars scale."""
    if 0 in {_ndim(a), _ndim(b)}:
        return arithmetic("multiply", a, b)
    a, b = _operand(a, "a"), _operand(b, "b")
    if _ndim(b) <= 2:
        return matmul(a, b.T)
    return matmul(b, a) if _ndim(a) == 1 else tensordot(a, b, axes=([-1], [-1]))


@_as("vdot")
def vdot(a: Any, b: Any) -> Any:
    """Sum of conj(a) * b over all elements, as numpy.vdot: a handle of shape ()."""
    return matmul(ravel(_operand(a, "a")).conj(), ravel(_operand(b, "b")))


@_as("outer")
def outer(a: Any, b: Any) -> Any:
    """Products of all pairs of elements, as numpy.outer."""
    return matmul(ravel(_operand(a, "a"))[:, None], ravel(_operand(b, "b"))[None, :])


@_as("linalg.outer")
def _outer_of_vectors(x1: Any, x2: Any, /) -> Any:
    if (_ndim(x1), _ndim(x2)) != (1, 1):
        raise _errors.ShapeMismatch("linalg.outer takes two vectors; outer takes their elements in a row")
    return outer(x1, x2)


@_as("vecdot", "linalg.vecdot")
def vecdot(x1: Any, x2: Any, *, axis: int = -1) -> Any:
    """Sums of conj(x1) * x2 along an axis, as numpy.vecdot."""
    a, b = moveaxis(_operand(x1, "a"), axis, -1), moveaxis(_operand(x2, "b"), axis, -1)
    return _then(matmul(a[..., None, :].conj(), b[..., :, None]), lambda d: d[..., 0, 0])


@_as("matvec")
def matvec(x1: Any, x2: Any) -> Any:
    """Products of matrices and vectors, as numpy.matvec. Raises ShapeMismatch."""
    a = _matrices(x1, "a")
    return _then(matmul(a, _operand(x2, "b")[..., :, None]), lambda d: d[..., 0])


@_as("vecmat")
def vecmat(x1: Any, x2: Any) -> Any:
    """Products of conjugated vectors and matrices, as numpy.vecmat. Raises ShapeMismatch."""
    b = _matrices(x2, "b")
    return _then(matmul(_operand(x1, "a")[..., None, :].conj(), b), lambda d: d[..., 0, :])


def _matrices(x: Any, name: str) -> Any:
    found = _operand(x, name)
    if _ndim(found) < 2:
        raise _errors.ShapeMismatch(f"{name} {found.shape} has to be matrices")
    return found


@_as("tensordot", "linalg.tensordot")
def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Sum over several axes, as numpy.tensordot: see `Client.tensordot`."""
    return place_of(a, b).tensordot(_operand(a, "a"), _operand(b, "b"), axes=axes)


@_as("einsum")
def einsum(*operands: Any, **options: Any) -> Any:
    """Sum of products by an equation, as numpy.einsum: see `Client.einsum`, which the options are of."""
    return place_of(*operands).einsum(*operands, **options)


@_as("linalg.multi_dot")
def multi_dot(arrays: Sequence[Any]) -> Any:
    """Product of several matrices in the order that takes the fewest operations, as numpy.linalg.multi_dot.

    The first and the last may be vectors. One job; what passes between its products stays on the device. Raises
    ShapeMismatch.
    """
    found = [_operand(x, f"arrays[{i}]") for i, x in enumerate(arrays)]
    if len(found) < 2:
        raise _errors.ShapeMismatch("multi_dot takes at least two arrays")
    first, last = found[0].ndim == 1, found[-1].ndim == 1
    found[0] = found[0][None, :] if first else found[0]
    found[-1] = found[-1][:, None] if last else found[-1]
    shapes = [x.shape for x in found]
    if any(len(shape) != 2 for shape in shapes):
        raise _errors.ShapeMismatch(f"multi_dot takes matrices, and vectors first and last, not shapes {shapes}")
    if any(one[1] != other[0] for one, other in itertools.pairwise(shapes)):
        raise _errors.ShapeMismatch(f"multi_dot of shapes {shapes}: inner lengths differ")
    pairs = cheapest_order([shapes[0][0], *(shape[1] for shape in shapes)])
    product = place_of(*found)._in_one_job(found, pairs)
    return _then(product, lambda d: d[(0 if first else slice(None)), (0 if last else slice(None))])


def cheapest_order(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs to multiply, one after the other, for matrices of lengths[i] x lengths[i + 1]: numbers of the
    matrices, then of the products. By dynamic programming (Cormen et al., Introduction to Algorithms, section 14.2).
    """
    count = len(lengths) - 1
    cost = {(i, i): 0 for i in range(count)}
    cut: dict[tuple[int, int], int] = {}
    for reach in range(1, count):
        for i in range(count - reach):
            j = i + reach
            costs = [cost[i, k] + cost[k + 1, j] + lengths[i] * lengths[k + 1] * lengths[j + 1] for k in range(i, j)]
            cost[i, j] = min(costs)
            cut[i, j] = i + costs.index(cost[i, j])
    pairs: list[tuple[int, int]] = []

    def product(i: int, j: int) -> int:
        if i == j:
            return i
        pairs.append((product(i, cut[i, j]), product(cut[i, j] + 1, j)))
        return count + len(pairs) - 1

    product(0, count - 1)
    return pairs


@_as("linalg.matrix_power")
def _matrix_power(a: Any, n: int) -> Any:
    return place_of(a).matrix_power(a, n)


@_as("linalg.solve")
def _solve(a: Any, b: Any) -> Any:
    return place_of(a, b).solve(a, b)


@_as("linalg.inv")
def _inv(a: Any) -> Any:
    return place_of(a).inv(a)


@_as("linalg.cholesky")
def _cholesky(a: Any) -> Any:
    return place_of(a).cholesky(a)


@_as("tril")
def tril(m: Any, k: int = 0) -> Any:
    """Lower triangles, as numpy.tril, of the main diagonal alone (k = 0)."""
    return _triangle(m, k, "lower")


@_as("triu")
def triu(m: Any, k: int = 0) -> Any:
    """Upper triangles likewise, as numpy.triu."""
    return _triangle(m, k, "upper")


def _triangle(m: Any, k: int, fill: str) -> Any:
    if k != 0:
        raise TypeError("triangles of handles end at the main diagonal (k = 0); .numpy() downloads an array")
    return place_of(m).triangle(m, fill)


@_as("sum")
def sum(a: Any, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Any:  # noqa: A001 (NumPy's name)
    """Sums over axes, all of them by default, as numpy.sum: see `RemoteArray.sum`."""
    return a.sum(axis, keepdims=keepdims)


@_as("trace")
def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Sum over the diagonal of two axes, as numpy.trace."""
    return a.diagonal(offset, axis1, axis2).sum(-1)


@_as("linalg.trace")
def _matrix_trace(x: Any, /, *, offset: int = 0) -> Any:
    return trace(x, offset, -2, -1)


_OPERATORS: Final = {
    "add": ("__add__", "__radd__"),
    "subtract": ("__sub__", "__rsub__"),
    "multiply": ("__mul__", "__rmul__"),
    "divide": ("__truediv__", "__rtruediv__"),
    "negative": ("__neg__", ""),
    "positive": ("__pos__", ""),
}
ARITHMETIC: Final = {getattr(np, name): name for name in _OPERATORS}
"""NumPy's ufuncs that are operators of handles, and their names."""


def arithmetic(name: str, x: Any, *other: Any) -> Any:
    """Return what the operator of a handle gives, on whichever side that is. Raises TypeError where it has none."""
    forward, backward = _OPERATORS[name]
    value: Any = NotImplemented
    if isinstance(x, ArrayHandle) and hasattr(x, forward):
        value = getattr(x, forward)(*other)
    elif other and hasattr(other[0], backward):
        value = getattr(other[0], backward)(x)
    if value is NotImplemented:
        raise refused(name)
    return value


# -- views ---------------------------------------------------------------------------------------------------------


@_as("transpose", view=True)
def transpose(a: Any, axes: Sequence[int] | None = None) -> Any:
    """Return a view with the axes in another order, reversed by default."""
    return a.transpose(axes)


@_as("matrix_transpose", "linalg.matrix_transpose", view=True)
def matrix_transpose(x: Any, /) -> Any:
    """Return a view with the last two axes swapped."""
    return x.mT


@_as("swapaxes", view=True)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """Return a view with two axes exchanged."""
    return a.swapaxes(axis1, axis2)


@_as("moveaxis", view=True)
def moveaxis(a: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Any:
    """Return a view with some axes at other places."""
    return a._viewed(a._seen.moveaxis(source, destination))


@_as("squeeze", view=True)
def squeeze(a: Any, axis: int | Sequence[int] | None = None) -> Any:
    """Return a view without axes of length 1."""
    return a.squeeze(axis)


@_as("expand_dims", view=True)
def expand_dims(a: Any, axis: int | Sequence[int]) -> Any:
    """Return a view with new axes of length 1."""
    return a._viewed(a._seen.expand_dims(axis))


@_as("broadcast_to", view=True)
def broadcast_to(array: Any, shape: int | Sequence[int]) -> Any:
    """Return a view of another shape in which elements are repeated."""
    return array._viewed(array._seen.broadcast_to(shape))


@_as("diagonal", view=True)
def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Return a view of the diagonal of two axes."""
    return a.diagonal(offset, axis1, axis2)


@_as("linalg.diagonal", view=True)
def _matrix_diagonal(x: Any, /, *, offset: int = 0) -> Any:
    return x.diagonal(offset, -2, -1)


@_as("flip", view=True)
def flip(m: Any, axis: int | Sequence[int] | None = None) -> Any:
    """Return a view with the elements in reverse along all axes, or those given."""
    return m._viewed(m._seen.flip(axis))


@_as("conjugate", view=True)
def conjugate(x: Any) -> Any:
    """Return a view of the conjugated elements."""
    return x.conj()


conj = conjugate


@_as("real", view=True)
def real(val: Any) -> Any:
    """Return a view of the real part."""
    return val.real


@_as("imag", view=True)
def imag(val: Any) -> Any:
    """Return a view of the imaginary part. Raises TypeError for real arrays, and for conjugates."""
    return val.imag


@_as("shape", view=True)
def shape(a: Any) -> tuple[int, ...]:
    """Return the shape."""
    return tuple(a.shape)


@_as("ndim", view=True)
def ndim(a: Any) -> int:
    """Return the number of dimensions."""
    return int(a.ndim)


@_as("size", view=True)
def size(a: Any, axis: int | None = None) -> int:
    """Return the number of elements, or the length of an axis."""
    return int(a.size if axis is None else a.shape[axis])


@_as("iscomplexobj", view=True)
def _iscomplexobj(x: Any) -> bool:
    return bool(x.dtype.kind == "c")


@_as("isrealobj", view=True)
def _isrealobj(x: Any) -> bool:
    return bool(x.dtype.kind != "c")


@_as("result_type", view=True)
def _result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    return np.result_type(*(x.dtype if isinstance(x, ArrayHandle) else x for x in arrays_and_dtypes))


# -- views where they can be, copies on the server where not --------------------------------------------------------


@_as("copy")
def copy(a: Any, order: Literal["C", "F"] = "C") -> Any:
    """Return an array of its own on the server with the elements of a view, one behind the other."""
    if order not in {"C", "F"}:
        raise ValueError(f'order must be "C" or "F", not {order!r}')
    made = Base(a.shape, a.dtype, order)
    return a._place._step("add", {"a": a}, {} if order == "C" else {"order": order}, made)


@_as("reshape", view=True)
def reshape(a: Any, /, shape: int | Sequence[int], order: Literal["C", "F"] = "C", *, copy: bool | None = None) -> Any:
    """Return the elements in another shape: a view where that is one, else of a copy on the server, as numpy.reshape.

    `copy`: True always makes one, False never. Raises ValueError where the sizes differ, or a copy is needed and not
    wanted; TypeError where one is needed and would have to be awaited.
    """
    return a._in_shape(shape, order, copy=copy)


@_as("ravel", view=True)
def ravel(a: Any, order: Literal["C", "F"] = "C") -> Any:
    """Return the elements in one dimension, as `reshape` does."""
    return reshape(a, -1, order)


def to_numpy(x: Any) -> Any:
    """Download a handle; an array stays itself. autoray's name for it."""
    return cast("Any", x).numpy() if isinstance(x, ArrayHandle) else np.asarray(x)
