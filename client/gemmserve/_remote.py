"""Handles of arrays that live on the server. Transposing and conjugating a handle sets flags; nothing is moved.

The flags become `trans_a`/`trans_b` of the product that the handle takes part in, and are applied to the bytes only
when an array is downloaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import numpy as np

from gemmserve import _errors
from gemmserve._calls import params
from gemmserve._pickling import PickledByClient

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gemmserve._model import ArrayInfo
    from gemmserve._transfer.arrays import AnyArray, LocalArray


S = TypeVar("S")


class ArraySession(Protocol):
    """Interface of the client as remote arrays that it made use it: `Client` is one."""

    def _array_info(self, array_id: str) -> ArrayInfo: ...
    def _download(self, array_id: str, nbytes: int = 0) -> AnyArray: ...
    def delete(self, array_id: str) -> None: ...
    def gemm(self, a: Any, b: Any, /) -> Any: ...


class AsyncArraySession(Protocol):
    """Interface of an AsyncClient as its remote arrays use it."""

    async def _array_info(self, array_id: str) -> ArrayInfo: ...
    async def _download(self, array_id: str, nbytes: int = 0) -> AnyArray: ...
    async def delete(self, array_id: str) -> None: ...
    def gemm(self, a: Any, b: Any, /) -> Coroutine[Any, Any, Any]: ...


class ArrayHandle(PickledByClient, Generic[S]):
    """Base of both kinds of handle: an id, two flags, and what follows from them.

    `.T` swaps the last two axes, of batched arrays too (NumPy's `.mT`); `.H` also conjugates; `.conj()` only that.
    """

    # NumPy's binary operators give way to ours, while functions such as numpy.abs still download through __array__.
    __array_priority__ = 1000

    def __init__(
        self,
        client: S,
        array_id: str,
        info: ArrayInfo | None = None,
        *,
        transposed: bool = False,
        conjugated: bool = False,
    ) -> None:
        self._client = client
        self._id = array_id
        self._info = info
        self._transposed = transposed
        self._conjugated = conjugated

    @property
    def id(self) -> str:
        """The stored array's id; views share it."""
        return self._id

    @property
    def info(self) -> ArrayInfo:
        """The stored array, without this view's flags."""
        assert self._info is not None  # a RemoteArray alone may begin without
        return self._info

    @property
    def _nbytes_known(self) -> int:
        """Bytes of data, or 0 where the server would have to be asked."""
        return 0 if self._info is None else self._info.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this view."""
        shape = self.info.shape
        return (*shape[:-2], shape[-1], shape[-2]) if self._transposed else shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, native byte order."""
        return self.info.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.info.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.info.nbytes // self.info.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.info.nbytes

    @property
    def T(self) -> Self:  # noqa: N802 (NumPy's name)
        """The last two axes swapped: a flag. An array of fewer than two dimensions is its own transpose."""
        if self._info is not None and self.ndim < 2:
            return self
        return self._view(transposed=not self._transposed, conjugated=self._conjugated)

    @property
    def mT(self) -> Self:  # noqa: N802 (NumPy's name)
        """The same as `.T`."""
        return self.T

    @property
    def H(self) -> Self:  # noqa: N802 (the field's name)
        """The conjugate transpose: two flags."""
        return self.T.conj()

    def conj(self) -> Self:
        """The complex conjugate: a flag."""
        return self._view(transposed=self._transposed, conjugated=not self._conjugated)

    def _view(self, *, transposed: bool, conjugated: bool) -> Self:
        """The same stored array with these flags."""
        return type(self)(self._client, self._id, self._info, transposed=transposed, conjugated=conjugated)

    def _reduced(self) -> tuple[Any, ...]:
        return self._arrived, self._id, self._info, self._transposed, self._conjugated

    @classmethod
    def _arrived(cls, client: Any, array_id: str, info: ArrayInfo | None, transposed: bool, conjugated: bool) -> Any:
        made: Any = cls
        return made(client, array_id, info, transposed=transposed, conjugated=conjugated)

    def _compose(self, trans: str) -> str:
        """The letter for op(stored array) that means `trans` of this view."""
        return params.compose(trans, transposed=self._transposed, conjugated=self._conjugated)

    def _apply_flags(self, stored: AnyArray) -> AnyArray:
        """The view's elements from the stored ones; a transposed view shares their memory."""
        array = stored.swapaxes(-1, -2) if self._transposed and stored.ndim >= 2 else stored
        return np.conjugate(array) if self._conjugated and np.iscomplexobj(array) else array

    def __repr__(self) -> str:
        known = "" if self._info is None else f" {self._info.dtype.name}{list(self.shape)}"
        flags = {"N": "", "T": ".T", "C": ".H", "R": ".conj()"}[self._compose("N")]
        return f"<{type(self).__name__} {self._id}{known}>{flags}"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError("a remote array has no truth value; download it first")


class RemoteArray(ArrayHandle[ArraySession]):
    """An array on the server, as `Client.put` and products of remote operands return it.

    `.numpy()` or `numpy.asarray(ra)` downloads it, `ra @ rb` multiplies there, `.delete()` frees it (as does leaving a
    `with` block that it opened). Every method may raise GemmserveError; NotFound or Gone once the array is deleted or
    has expired.
    """

    @property
    def info(self) -> ArrayInfo:
        """The stored array, without this view's flags. The first look at a result's handle asks the server."""
        if self._info is None:
            self._info = self._client._array_info(self._id)
        return self._info

    def numpy(self) -> AnyArray:
        """Downloads the array (this view of it) into fresh memory."""
        return self._apply_flags(self._client._download(self._id, self._nbytes_known))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        """Download the array for numpy.asarray. Raises ValueError for copy=False, which cannot be kept."""
        if copy is False:
            raise ValueError("a remote array cannot become a NumPy array without a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def delete(self) -> None:
        """Deletes the stored array, and with it every view; jobs that already use it finish."""
        self._client.delete(self._id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.delete()

    def __matmul__(self, other: RemoteArray | LocalArray) -> RemoteArray:
        product: RemoteArray = self._client.gemm(self, other)
        return product

    def __rmatmul__(self, other: RemoteArray | LocalArray) -> RemoteArray:
        product: RemoteArray = self._client.gemm(other, self)
        return product


class AsyncRemoteArray(ArrayHandle[AsyncArraySession]):
    """A RemoteArray of an AsyncClient: `await ra.numpy()`, `await (ra @ rb)`, `await ra.delete()`."""

    async def numpy(self) -> AnyArray:
        """Downloads the array (this view of it) into fresh memory."""
        return self._apply_flags(await self._client._download(self._id, self._nbytes_known))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        """Refuses: a download has to be awaited."""
        raise TypeError("use `await ra.numpy()`: an AsyncRemoteArray cannot be downloaded without awaiting")

    async def delete(self) -> None:
        """Deletes the stored array, and with it every view; jobs that already use it finish."""
        await self._client.delete(self._id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.delete()

    def __matmul__(self, other: AsyncRemoteArray | LocalArray) -> Coroutine[Any, Any, AsyncRemoteArray]:
        return self._client.gemm(self, other)

    def __rmatmul__(self, other: AsyncRemoteArray | LocalArray) -> Coroutine[Any, Any, AsyncRemoteArray]:
        return self._client.gemm(other, self)


def plain_id(array: ArrayHandle[Any], name: str) -> str:
    """The id of an operand that no flag can be given to (`c`). Raises ParameterInvalid for a view."""
    transposed = array._transposed and (array._info is None or array.ndim >= 2)
    conjugated = array._conjugated and (array._info is None or array.dtype.kind == "c")
    if transposed or conjugated:
        raise _errors.ParameterInvalid(
            f"{name} cannot be a transposed or conjugated view: only a and b have trans flags",
            problem={"parameter": name},
        )
    return array.id
