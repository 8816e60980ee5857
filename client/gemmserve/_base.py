"""Base of both clients: connections, flows, and the options by which they are pickled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

from gemmserve._calls.flows import Flows
from gemmserve._pickling import made_of, reduced_client
from gemmserve._transfer.arrays import as_array
from gemmserve._transport.connection import Connection
from gemmserve._transport.content_coding import check
from gemmserve._transport.digests import check_digests
from gemmserve._transport.retry import RetryPolicy
from gemmserve._transport.urls import server_url

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from gemmserve._calls.params import Order
    from gemmserve._transfer.arrays import AnyArray, LocalArray
    from gemmserve._transport.digests import Digests

IO = TypeVar("IO", bound=Connection)
Transport = TypeVar("Transport")


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
        transport: Transport | None = None,
    ) -> None:
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
        # What shared memory carries does not go in parts.
        self._flows = Flows(
            retry,
            connections=connections if self._io.socket is None else 0,
            compression=compress and self._io.socket is None,
            digests=digests,
        )
        self._options = made_of(
            self._io.url,
            api_key=api_key,
            key=None if self._io.auth is None else self._io.auth.key,
            verify=verify,
            own_transport=transport is not None,
            pickle_key=pickle_key,
            timeout=timeout,
            retry=retry,
            progress=progress,
            connections=connections,
            compression=compression,
            digests=digests,
        )

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
