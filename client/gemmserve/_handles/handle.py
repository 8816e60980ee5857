"""Base of all handles of arrays: an id, and a view of what is stored under it. Views are arithmetic: nothing is moved.

A view becomes flags of the product that the handle takes part in (`trans_a`), or an operand by shape and strides; its
elements are picked only when it is downloaded.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import numpy as np

from gemmserve import _errors
from gemmserve._calls.params import compose
from gemmserve._handles.display import line, page
from gemmserve._handles.lifetime import Lifetime
from gemmserve._handles.view import Base, View
from gemmserve._pickling import PickledByClient
from gemmserve._transfer.arrays import as_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gemmserve._model import ArrayInfo
    from gemmserve._transfer.arrays import AnyArray

S = TypeVar("S")


class ArrayHandle(PickledByClient, Generic[S]):
    """Base of both kinds of handle: an array's id, a view of it, and what follows from them.

    Indexing by integers, slices, `...` and None, and the methods below give views of the same array. `==` compares
    handles, not elements: whether both show the same elements of the same array.
    """

    _info: ArrayInfo | None
    _awaited = False
    """Whether what runs on the server has to be awaited."""
    _recorded = False
    """Whether the array is a result in a program that is being recorded."""
    _whole: Base | None = None
    """The stored array as `_info` describes it, once that was asked for."""

    def __init__(
        self,
        client: S,
        array_id: str,
        info: ArrayInfo | None = None,
        *,
        base: Base | None = None,
        view: View | None = None,
        lifetime: Lifetime | None = None,
    ) -> None:
        self._lifetime = lifetime or Lifetime()
        self._client = client
        self._id = array_id
        self._info = info
        self._expected = base
        self._view = view

    @property
    def id(self) -> str:
        """The stored array's id; views share it."""
        return self._id

    @property
    def info(self) -> ArrayInfo:
        """The stored array, whatever of it this handle shows."""
        assert self._info is not None  # a RemoteArray alone may begin without
        return self._info

    if not TYPE_CHECKING:  # to a type checker there are no such attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, which says of what NumPy's arrays have that the array is to be downloaded first."""
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(np.ndarray, name):
                there = "(await x.numpy())" if self._awaited else "x.numpy()"
                call = "()" if callable(getattr(np.ndarray, name)) else ""
                said += f": download the array first, as in {there}.{name}{call}"
            raise AttributeError(said, name=name, obj=self)

    # -- what is known ---------------------------------------------------------------------------------------------

    @property
    def _known(self) -> Base | None:
        """The stored array as far as views need it; None where the server would have to be asked."""
        info = self._info
        if info is None:
            return self._expected
        if self._whole is None:
            self._whole = Base(info.shape, info.dtype, info.order)
        return self._whole

    @property
    def _base(self) -> Base:
        """The stored array as far as views need it, asked for where it is not known."""
        known = self._known
        if known is None:
            info = self.info
            known = Base(info.shape, info.dtype, info.order)
        return known

    @property
    def _seen(self) -> View:
        """The elements that this handle shows."""
        return View.whole(self._base) if self._view is None else self._view

    @property
    def _place(self) -> Any:
        """The client or program that computes what is made of this handle."""
        return self._client

    def _viewed(self, view: View) -> Self:
        """Return a handle of the same stored array that shows `view`."""
        return type(self)(self._client, self._id, self._info, base=self._expected, view=view, lifetime=self._lifetime)

    def _operand(self, reference: str | None = None, trans: str | None = None) -> tuple[str | dict[str, Any], str]:
        """Return what a request names as its operand, and the letter of its trans flag.

        `reference`: how the stored array is named, by its id if not given. `trans`: the letter asked for; None: the
        step has no such flag, and the operand says it all.
        """
        reference = self.id if reference is None else reference
        if trans is None:
            return (reference if self._view is None else self._view.wire(reference, self._base)), "N"
        if self._view is None:
            return reference, compose(trans, transposed=False, conjugated=False)
        turned = self._view.transposition(self._base)
        letter = compose(trans, transposed=bool(turned), conjugated=self._view.conj)
        return (self._view.wire(reference, self._base, conj=False) if turned is None else reference), letter

    # -- NumPy's attributes ----------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this view."""
        return self._base.shape if self._view is None else self._view.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, native byte order."""
        return self._base.dtype if self._view is None else self._view.dtype(self._base.dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of this view."""
        return self._seen.size

    @property
    def nbytes(self) -> int:
        """Bytes of this view's elements."""
        return self.size * self.dtype.itemsize

    @property
    def T(self) -> Self:  # noqa: N802 (NumPy's name)
        """The axes in reverse order, as NumPy's: of matrices the transpose; `.mT` is that of batches too."""
        return self.transpose()

    @property
    def mT(self) -> Self:  # noqa: N802 (NumPy's name)
        """The last two axes swapped. Raises ValueError for fewer than two dimensions."""
        if self.ndim < 2:
            raise ValueError("matrix transpose with ndim < 2 is undefined")
        return self._viewed(self._seen.swapaxes(-1, -2))

    @property
    def H(self) -> Self:  # noqa: N802 (the field's name)
        """The conjugate transpose: the conjugate of `.mT`; of vectors the conjugate."""
        return (self.mT if self.ndim >= 2 else self).conj()

    @property
    def real(self) -> Self:
        """The real part: a view."""
        return self if self.dtype.kind != "c" else self._viewed(self._seen.of_part("real"))

    @property
    def imag(self) -> Self:
        """The imaginary part: a view. Raises TypeError for real arrays, and for conjugates."""
        if self.dtype.kind != "c":
            raise TypeError("the array is real: its imaginary part is zero, and no view of it")
        return self._viewed(self._seen.of_part("imag"))

    def conj(self) -> Self:
        """The complex conjugate: a view."""
        return self._viewed(self._seen.conjugate())

    def conjugate(self) -> Self:
        """The same as `conj`."""
        return self.conj()

    def transpose(self, *axes: Any) -> Self:
        """Return the axes in another order, reversed if none is given. Raises ValueError."""
        order = axes[0] if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], tuple | list)) else axes or None
        return self._viewed(self._seen.transpose(order))

    def swapaxes(self, axis1: int, axis2: int) -> Self:
        """Return two axes exchanged. Raises AxisError."""
        return self._viewed(self._seen.swapaxes(axis1, axis2))

    def squeeze(self, axis: int | Sequence[int] | None = None) -> Self:
        """Return the view without axes of length 1. Raises ValueError."""
        return self._viewed(self._seen.squeeze(axis))

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Self:
        """Return the diagonal of two axes as the last one, as numpy.diagonal. Raises ValueError."""
        return self._viewed(self._seen.diagonal(offset, axis1, axis2))

    def _reshaped(self, shape: int | Sequence[int], order: Literal["C", "F"]) -> Self | None:
        """Return the view in another shape, or None where only a copy can have it. Raises ValueError."""
        if order not in {"C", "F"}:
            raise ValueError(f'order must be "C" or "F", not {order!r}')
        found = self._seen.reshape(shape, order)
        return None if found is None else self._viewed(found)

    def __getitem__(self, key: Any) -> Self:
        """Return a view by integers, slices, `...` and None. Raises IndexError; TypeError for arrays and lists."""
        return self._viewed(self._seen[key])

    def _element(self, index: tuple[Any, ...]) -> Self:
        """Return the view of one element, counted in C order or by all its indices, as numpy.ndarray.item.

        Raises IndexError, and ValueError where the indices do not name one element.
        """
        if not index and self.size == 1:
            return self[(0,) * self.ndim]
        if len(index) == 1 and isinstance(index[0], tuple):
            index = index[0]
        elif len(index) == 1:
            place = operator.index(index[0])
            if not -self.size <= place < self.size:
                raise IndexError(f"index {place} is out of bounds for size {self.size}")
            index = np.unravel_index(place % self.size, self.shape)
        if len(index) != self.ndim:
            raise ValueError(f"{len(index)} indices name no element of an array of shape {self.shape}")
        return self[tuple(map(operator.index, index))]

    def __iter__(self) -> Iterator[Self]:
        """Iterate over views along the first axis. Raises TypeError for 0-d arrays."""
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(self.shape[0]))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __contains__(self, item: object) -> bool:
        raise TypeError("the elements of a remote array are on the server; download it first: item in x.numpy()")

    def __bool__(self) -> bool:
        raise TypeError("a remote array has no truth value; download it first: bool(x.numpy())")

    def __float__(self) -> float:
        raise TypeError("a remote array is no number; download its element first: x.item()")

    def __int__(self) -> int:
        return int(float(self))

    def __complex__(self) -> complex:
        return complex(float(self))

    # -- identity --------------------------------------------------------------------------------------------------

    @property
    def _identity(self) -> Any:
        """Value that handles of the same stored array share, for as long as they live."""
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArrayHandle):
            return NotImplemented
        if self._identity != other._identity:
            return False
        if self._view is None and other._view is None:
            return True
        one, two = self._seen, other._seen
        return one.conj == two.conj and one.same_elements(two)

    def __hash__(self) -> int:
        return hash(self._identity)

    def _reduced(self) -> tuple[Any, ...]:
        return self._arrived, self._id, self._info, self._expected, self._view

    @classmethod
    def _arrived(cls, client: Any, array_id: str, info: ArrayInfo | None, base: Base | None, view: View | None) -> Any:
        made: Any = cls
        return made(client, array_id, info, base=base, view=view, lifetime=client._lifetime(array_id))

    def keep(self) -> Self:
        """Leave the array on the server when its handles go (`Client(auto_delete=True)`); returns the handle itself."""
        self._lifetime.keep()
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the handle by its id and its client's options. From then on the array outlives its handles here."""
        reduced = super().__reduce__()
        self._lifetime.keep()
        return reduced

    # -- how it shows itself ---------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return line(self)

    def _repr_html_(self) -> str:
        """The repr as notebooks show it; with a RemoteArray's some magnitudes as a picture. Never raises."""
        return page(self, self._look)

    def _look(self) -> AnyArray | None:
        """Some elements of what is stored, of its first matrix; None where they cannot be had at once."""
        return None


def local_array(value: Any) -> AnyArray:
    """Return what is to be uploaded, as `as_array` does. Raises ParameterInvalid for what is on the server already."""
    if isinstance(value, ArrayHandle):
        raise _errors.ParameterInvalid(
            f"{value!r} is on the server already: .copy() makes another array there", problem={"parameter": "a"}
        )
    return as_array(value)


def base_of(operand: Any) -> Base | None:
    """Return shape and dtype of an operand as it is seen, of a handle or an array; None where they are not known."""
    if not isinstance(operand, ArrayHandle):
        return Base(operand.shape, operand.dtype.newbyteorder("="))
    return None if operand._known is None else Base(operand.shape, operand.dtype)
