"""Base of both clients: connections, flows, and the options by which they are pickled."""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, Self, TypeVar

import numpy as np

from gemmserve._calls.flows import Flows
from gemmserve._errors import DownloadWarning, NotFound, ParameterInvalid
from gemmserve._handles.display import at
from gemmserve._handles.handle import ArrayHandle
from gemmserve._handles.lifetime import AutoDelete, Lifetime
from gemmserve._pickling import made_of, reduced_client
from gemmserve._transfer.arrays import as_array
from gemmserve._transfer.parts import pays_on_one_host
from gemmserve._transport.connection import Connection
from gemmserve._transport.content_coding import check
from gemmserve._transport.digests import check_digests
from gemmserve._transport.retry import RetryPolicy
from gemmserve._transport.urls import server_url

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from gemmserve._calls.params import Order
    from gemmserve._handles.lifetime import OpenDelete
    from gemmserve._transfer.arrays import AnyArray, LocalArray
    from gemmserve._transport.digests import Digests

WARN_DOWNLOAD: Final = 64 << 20
"""Bytes above which a download by numpy.asarray warns: half a second at 1 Gbit/s, more than a call looks like."""

IO = TypeVar("IO", bound=Connection)
Transport = TypeVar("Transport")
H = TypeVar("H")


class ClientBase(Generic[IO, Transport]):
    """A client of either kind, before anything is awaited or not. `Transport`: httpx's, of that kind."""

    _connect: ClassVar[Callable[..., Any]]
    """Makes its connections."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        verify: bool | str | ssl.SSLContext = True,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        progress: bool = True,
        connections: int = 3,
        compression: Literal["zstd"] | None = None,
        digests: Digests = "known",
        pickle_key: bool = False,
        warn_download: int | None = WARN_DOWNLOAD,
        auto_delete: bool = False,
        transport: Transport | None = None,
    ) -> None:
        if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
            raise ParameterInvalid(f"timeout is a number of seconds above 0, not {reprlib.repr(timeout)}")
        if not isinstance(connections, int) or connections < 0:
            raise ParameterInvalid(f"connections is a number from 0 on, not {reprlib.repr(connections)}")
        compress = check(compression)
        check_digests(digests)
        retry = retry or RetryPolicy()
        self._io: IO = self._connect(
            server_url(url),
            api_key=api_key,
            verify=verify,
            timeout=timeout,
            progress=progress,
            digests=digests,
            transport=transport,
        )
        self._flows = Flows(
            retry,
            connections=connections if self._io.socket is None or pays_on_one_host() else 0,
            goes_whole=self._io.goes_whole,
            comes_whole=self._io.comes_whole,
            compression=compress and self._io.socket is None,
            digests=digests,
        )
        self._warn_download = warn_download
        self._options = made_of(
            self._io.url,
            api_key=api_key,
            key=None if self._io.auth is None else self._io.auth.key,
            verify=verify,
            own_transport=transport is not None,
            pickle_key=pickle_key,
            warn_download=warn_download,
            timeout=timeout,
            retry=retry,
            progress=progress,
            connections=connections,
            compression=compression,
            digests=digests,
            auto_delete=auto_delete,
        )
        self._auto_delete = AutoDelete(self._open_delete(transport)) if auto_delete else None

    def _open_delete(self, transport: Transport | None) -> OpenDelete:
        """Return what `AutoDelete` is made with. Raises ParameterInvalid where arrays cannot be deleted beside."""
        raise NotImplementedError

    def _lifetime(self, array_id: str, *, made: bool = False) -> Lifetime:
        """Return what the handles on an array share. `made`: this client has made it, and nobody else is told of it."""
        return Lifetime() if self._auto_delete is None else self._auto_delete.lifetime(array_id, made=made)

    def _deleted(self, arrays: Iterable[str | ArrayHandle[Any]]) -> None:
        """Note that arrays were deleted."""
        for array in arrays:
            if isinstance(array, ArrayHandle):
                array._lifetime.end()
            elif self._auto_delete is not None:
                self._auto_delete.deleted(array)

    def __repr__(self) -> str:
        closed = " closed" if self._io.closed else ""
        return f"<{type(self).__name__}{at(self)}{closed}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the client by its URL and options, without the key unless `pickle_key`.

        Raises TypeError for options that belong to this process.
        """
        return reduced_client(type(self), self._options)

    def __copy__(self) -> Self:
        """Return the client itself: a client is what it is connected to."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the client itself."""
        return self

    @property
    def url(self) -> str:
        """The server's base URL."""
        return self._io.url

    def _implicit(self, nbytes: int) -> None:
        """Warn, once, of a large download that nobody asked for by name."""
        limit = self._warn_download
        if limit is not None and nbytes > limit:
            self._warn_download = None
            warnings.warn(
                f"numpy.asarray of a remote array downloads {nbytes / 2**20:.0f} MiB; .numpy() does so without a "
                "warning, Client(warn_download=None) never warns",
                DownloadWarning,
                stacklevel=3,
            )

    def empty(self, shape: int | Sequence[int], dtype: Any = float, order: Order = "C") -> AnyArray:
        """An array to be filled, as numpy.empty's, in memory that needs no copy on this side when it is sent.

        Only towards a server on a Unix socket is it special; an ordinary array otherwise. It may be filled anew and
        sent again at any time. Processes forked later share it.
        """
        return self._io.empty(shape, dtype, order)

    def freeze(self, a: LocalArray) -> AnyArray:
        """A read-only array with the same elements, which a server on a Unix socket uses where it lies.

        An operand that goes into several products is neither sent nor copied again. The memory of an array from `empty`
        is taken over without a copy; that array keeps its elements, and what is written to it later is its own affair.
        """
        return self._io.freeze(as_array(a))


def flattened(arrays: Iterable[Any]) -> list[Any]:
    """Ids and handles, those of lists among them. Raises NotFound for what is neither."""
    found: list[Any] = []
    for each in arrays:
        if isinstance(each, str | ArrayHandle):
            found.append(each)
        elif isinstance(each, Iterable) and not isinstance(each, bytes | np.ndarray):
            found += flattened(each)
        else:
            raise NotFound(f"{each!r} is no id")
    return found


def newest(found: Sequence[H], name: str) -> H:
    """The first of a listing by name. Raises NotFound."""
    if not found:
        raise NotFound(f"there is no array of the name {name!r}")
    return found[0]
