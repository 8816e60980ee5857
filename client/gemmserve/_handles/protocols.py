"""NumPy's protocols on handles: `numpy.matmul(ra, rb)` runs on the server, what has no form there is refused.

Nothing is downloaded but by `.numpy()` and `numpy.asarray`.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gemmserve._handles import functions
from gemmserve._handles.arithmetic import ArithmeticHandle
from gemmserve._handles.functions import ARITHMETIC, FUNCTIONS, VIEWS, arithmetic, refused
from gemmserve._handles.handle import ArrayHandle, S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class NumpyHandle(ArithmeticHandle[S]):
    """Base of handles that NumPy's functions and operators take."""

    def copy(self, order: Literal["C", "F"] = "C") -> Any:
        """Return an array of its own on the server with this view's elements, one behind the other in `order`."""
        return functions.copy(self, order)

    def reshape(self, *shape: Any, order: Literal["C", "F"] = "C", copy: bool | None = None) -> Any:
        """Return the elements in another shape: a view where that is one, else of a copy on the server.

        Raises ValueError as numpy.reshape; with an AsyncClient TypeError where it takes a copy, which is awaited.
        """
        return self._in_shape(shape[0] if len(shape) == 1 else shape, order, copy=copy)

    def ravel(self, order: Literal["C", "F"] = "C") -> Any:
        """Return the elements in one dimension, as `reshape` does."""
        return self._in_shape(-1, order)

    def dot(self, b: Any) -> Any:
        """Return what numpy.dot does."""
        return functions.dot(self, b)

    def _in_shape(self, shape: int | Sequence[int], order: Literal["C", "F"], *, copy: bool | None = None) -> Any:
        found = None if copy else self._reshaped(shape, order)
        if found is not None:
            return found
        if copy is False:
            raise ValueError(f"a view of shape {self.shape} cannot have shape {shape} without a copy")
        if self._awaited:
            raise TypeError("this shape takes a copy: (await x.copy()).reshape(...)")
        return functions.copy(self, order)._reshaped(shape, order)

    def __matmul__(self, other: Any) -> Any:
        return functions.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return functions.matmul(other, self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute a ufunc of NumPy's on the server. Raises TypeError where it has no form there."""
        name = ufunc.__name__
        if method != "__call__":
            raise refused(f"{name}.{method}")
        if "out" in options:
            raise refused(name, "makes a new array on the server, and fills none (out=, or an operator such as +=)")
        if ufunc in ARITHMETIC:
            if options:
                raise refused(name, f"has no {', '.join(options)} on the server")
            return arithmetic(ARITHMETIC[ufunc], *inputs)
        return self._called(ufunc, name, inputs, options)

    def __array_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a function of NumPy's on the server. Raises TypeError where it has no form there."""
        if not all(issubclass(each, ArrayHandle | np.ndarray) for each in types):
            return NotImplemented
        name = f"{func.__module__}.{func.__name__}".removeprefix("numpy.")
        return self._called(func, name, args, kwargs)

    def _called(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        function = FUNCTIONS.get(func)
        if function is None:
            raise refused(name)
        if self._awaited and func not in VIEWS and func is not np.matmul:
            short = name.rpartition(".")[2]
            owner = "client" if hasattr(self._place, short) else "gemmserve"
            raise TypeError(f"numpy.{name} cannot wait for an AsyncClient: await {owner}.{short}(...)")
        signature = _signature_of(function)
        try:
            signature.bind(*args, **options)
        except TypeError as error:
            raise refused(name, f"is {name.rpartition('.')[2]}{_plain(signature)} on the server, {error}") from None
        return function(*args, **options)


@cache
def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of one of `FUNCTIONS`, worked out once."""
    return inspect.signature(function)


def _plain(signature: inspect.Signature) -> str:
    """A signature without its annotations."""
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))
