"""Clients and handles in other processes: pickled as what they were made of, without the key.

A client is pickled as its URL and options and makes its own connections where it arrives; a handle as its id, what was
last known of it, and its client. The key stays behind unless the client was made with `pickle_key=True`: what arrives
takes the key of its own process, as a new client does (GEMMSERVE_API_KEY). All handles that arrive in a process from
one client share one there.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from gemmserve._transport.retry import RetryPolicy

_SHARED: Final = 16
"""Clients that are kept for handles that may yet arrive."""


@dataclass(frozen=True)
class Options:
    """Options that a client was made with, as far as they can go elsewhere."""

    url: str
    api_key: str | None = field(repr=False)
    """Key to send; None: that of the process; "": none."""
    verify: bool | str
    timeout: float
    retry: RetryPolicy
    progress: bool
    connections: int
    compression: str | None
    digests: str
    pickle_key: bool
    warn_download: int | None
    auto_delete: bool = False


def made_of(
    url: str, *, api_key: str | None, key: str | None, verify: Any, own_transport: bool, pickle_key: bool, **others: Any
) -> Options | str:
    """The options of a client, or why it cannot be pickled. `api_key`: as given; `key`: what it came to."""
    if own_transport:
        return "its transport belongs to this process"
    if not isinstance(verify, bool | str):
        return "its SSLContext belongs to this process; name a file of certificates instead (verify=path)"
    kept = key if pickle_key else None
    if api_key is not None and not api_key.strip():
        kept = ""  # no key, wherever it arrives
    return Options(url, api_key=kept, verify=verify, pickle_key=pickle_key, **others)


def reduced_client(kind: type[Any], options: Options | str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the value of a client's `__reduce__`. Raises TypeError."""
    return new_client, (kind, options_of(kind, options))


def options_of(kind: type[Any], options: Options | str) -> Options:
    """The options of a client that can be pickled. Raises TypeError."""
    if isinstance(options, str):
        raise TypeError(f"this {kind.__name__} cannot be pickled: {options}")
    return options


def new_client(kind: Callable[..., Any], options: Options) -> Any:
    """A client made of `options` in this process."""
    fields = {**asdict(options), "retry": options.retry}
    client = kind(fields.pop("url"), **fields)
    client._io.answered = True  # another process has met the server
    return client


@lru_cache(_SHARED)
def shared_client(kind: Hashable, options: Options) -> Any:
    """A client of the process, for all handles that arrive from one made of `options`."""
    return new_client(cast("type[Any]", kind), options)


def new_handle(make: Callable[..., Any], kind: Hashable, options: Options, *arguments: Any) -> Any:
    """A handle that has arrived: `make(client, *arguments)`."""
    return make(shared_client(kind, options), *arguments)


class PickledByClient:
    """A handle: pickled as its client's options and what `_reduced` says. Copies share its client.

    No `abc.ABC`: to ask whether something is a handle, as every call does several times, would take ten times as long.
    """

    @abstractmethod
    def _reduced(self) -> tuple[Any, ...]:
        """Return a function (a class, say) and what it is called with, after the client, to make the handle anew."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the handle by its id and its client's options."""
        make, *arguments = self._reduced()
        client: Any = self.__dict__["_client"]
        return new_handle, (make, type(client), options_of(type(client), client._options), *arguments)

    def __copy__(self) -> Any:
        """Copy the handle, with the same client, in this process."""
        make, *arguments = self._reduced()
        return make(self.__dict__["_client"], *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the handle as `__copy__` does: the data on the server are not copied."""
        return self.__copy__()
