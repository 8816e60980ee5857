"""Handles of arrays that live on the server, as both clients give them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from gemmserve import _errors
from gemmserve._calls.exchanges import TEMPORARY_TTL_S
from gemmserve._handles.protocols import NumpyHandle
from gemmserve._handles.view import Base

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve._handles.lifetime import Lifetime
    from gemmserve._handles.view import View
    from gemmserve._model import ArrayInfo
    from gemmserve._transfer.arrays import AnyArray


class ArraySession(Protocol):
    """Interface of the client as remote arrays that it made use it: `Client` is one."""

    def _array_info(self, array_id: str) -> ArrayInfo: ...
    def _download(self, array_id: str, nbytes: int = 0, out: AnyArray | None = None) -> AnyArray: ...
    def _download_view(self, array_id: str, base: Base, view: View) -> AnyArray | None: ...
    def _step(
        self, op: str, operands: Mapping[str, Any], params: Mapping[str, Any], made: Base, *, ttl_s: float | None = None
    ) -> RemoteArray: ...
    def _implicit(self, nbytes: int) -> None: ...
    def _lifetime(self, array_id: str, *, made: bool = False) -> Lifetime: ...
    def _look(self, array_id: str, info: ArrayInfo | None) -> tuple[ArrayInfo, AnyArray | None]: ...
    def delete(self, array: Any, /) -> int: ...


class AsyncArraySession(Protocol):
    """Interface of an AsyncClient as its remote arrays use it."""

    async def _array_info(self, array_id: str) -> ArrayInfo: ...
    async def _download(self, array_id: str, nbytes: int = 0, out: AnyArray | None = None) -> AnyArray: ...
    async def _download_view(self, array_id: str, base: Base, view: View) -> AnyArray | None: ...
    async def _step(
        self, op: str, operands: Mapping[str, Any], params: Mapping[str, Any], made: Base, *, ttl_s: float | None = None
    ) -> AsyncRemoteArray: ...
    def _lifetime(self, array_id: str, *, made: bool = False) -> Lifetime: ...
    async def delete(self, array: Any, /) -> int: ...


class RemoteArray(NumpyHandle[ArraySession]):
    """An array on the server, or a view of one, as `Client.put` and products of remote operands return it.

    `.numpy()` or `numpy.asarray(ra)` downloads it, `ra @ rb` and NumPy's functions of that kind compute there,
    `.delete()` frees it (as does leaving a `with` block that it opened). Every method may raise GemmserveError: once
    the array is deleted or has expired, NotFound or Gone.
    """

    @property
    def info(self) -> ArrayInfo:
        """The stored array, whatever of it this handle shows. The first look at a result's handle asks the server."""
        if self._info is None:
            self._info = self._client._array_info(self.id)
        return self._info

    def refresh(self) -> Self:
        """Asks for the stored array anew, which `info` describes then; returns the handle itself."""
        self._info = self._client._array_info(self.id)
        return self

    def numpy(self, *, out: AnyArray | None = None) -> AnyArray:
        """Downloads the array (this view of it) into fresh memory, or into `out`, an array of the same shape and dtype,
        and returns it.

        Memory that was used before saves its first touch, which takes longer than a large download's copies. What is
        contiguous in the array's order is received into as it comes: where the download fails, some of it may be
        written. Raises TypeError, ValueError for an `out` that does not fit, before anything is downloaded.
        """
        if out is not None:
            _check_out(out, self.shape, self.dtype)
            return _placed(self._numpy(out), out)
        return self._numpy()

    def _numpy(self, out: AnyArray | None = None) -> AnyArray:
        if self._view is None:
            known = self._known
            return self._client._download(self.id, 0 if known is None else known.size * known.dtype.itemsize, out)
        array = self._client._download_view(self.id, self._base, self._view)
        if array is None:
            made = Base(self.shape, self.dtype)
            with self._client._step("add", {"a": self}, {}, made, ttl_s=TEMPORARY_TTL_S) as gathered:
                return gathered.numpy()
        return array

    def item(self, *index: Any) -> Any:
        """Downloads one element as a Python scalar: by its indices, by its place in C order, or the only one there is.

        Raises IndexError, and ValueError where that names no element.
        """
        return self._element(index).numpy().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        """Download the array for numpy.asarray; warns once where it is large (`Client(warn_download=...)`).

        Raises ValueError for copy=False, which cannot be kept.
        """
        if copy is False:
            raise ValueError("a remote array cannot become a NumPy array without a copy")
        self._client._implicit(self.nbytes)
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def delete(self) -> None:
        """Deletes the stored array, and with it every view; jobs that already use it finish."""
        self._client.delete(self)

    def _look(self) -> AnyArray | None:
        self._info, sample = self._client._look(self.id, self._info)
        return sample

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(_errors.NotFound, _errors.Gone):  # deleted within the block, or expired
            self.delete()


def _check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise TypeError, ValueError where a download of that shape and dtype cannot go into `out`."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(out).__name__}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the array {shape}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, the array {dtype}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")


def _placed(array: AnyArray, out: AnyArray) -> AnyArray:
    """Return `out` with the elements of what was downloaded, which may be it."""
    if array is not out:
        out[...] = array
    return out


class AsyncRemoteArray(NumpyHandle[AsyncArraySession]):
    """A RemoteArray of an AsyncClient: `await ra.numpy()`, `await (ra @ rb)`, `await ra.delete()`."""

    _awaited = True

    @property
    def info(self) -> ArrayInfo:
        """The stored array, whatever of it this handle shows, as the server told of it last. Raises RuntimeError where
        it has not been asked yet, as of a result.
        """
        if self._info is None:
            raise RuntimeError("use `await ra.refresh()` first: the server has not been asked about the array yet")
        return self._info

    async def refresh(self) -> Self:
        """Asks for the stored array, which `info` describes then; returns the handle itself. Raises NotFound, Gone."""
        self._info = await self._client._array_info(self.id)
        return self

    async def numpy(self, *, out: AnyArray | None = None) -> AnyArray:
        """Downloads the array (this view of it) into fresh memory, or into `out`: see `RemoteArray.numpy`."""
        if out is not None:
            _check_out(out, self.shape, self.dtype)
            return _placed(await self._numpy(out), out)
        return await self._numpy()

    async def _numpy(self, out: AnyArray | None = None) -> AnyArray:
        if self._view is None:
            known = self._known
            return await self._client._download(self.id, 0 if known is None else known.size * known.dtype.itemsize, out)
        array = await self._client._download_view(self.id, self._base, self._view)
        if array is None:
            made = Base(self.shape, self.dtype)
            async with await self._client._step("add", {"a": self}, {}, made, ttl_s=TEMPORARY_TTL_S) as gathered:
                return await gathered.numpy()
        return array

    async def item(self, *index: Any) -> Any:
        """Downloads one element as a Python scalar, as `RemoteArray.item`."""
        return (await self._element(index).numpy()).item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        """Refuses: a download has to be awaited."""
        raise TypeError("use `await ra.numpy()`: an AsyncRemoteArray cannot be downloaded without awaiting")

    async def delete(self) -> None:
        """Deletes the stored array, and with it every view; jobs that already use it finish."""
        await self._client.delete(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        with contextlib.suppress(_errors.NotFound, _errors.Gone):
            await self.delete()
