"""The API key on its way: into the requests to the server that it is for, and to its cells, and nowhere else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from gemmserve import _errors
from gemmserve._transport.library import httpx

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

VARIABLE: Final = "GEMMSERVE_API_KEY"

_MAX_LENGTH: Final = 4096  # a proxy in front may want a token of its own kind instead of our 63 characters


class KeyAuth(httpx.Auth):
    """httpx's hook for each request. The key is in no header that outlives a request, no repr and no message."""

    __slots__ = ("_key", "_origins")

    def __init__(self, key: str, url: str) -> None:
        self._key = key
        self._origins = frozenset({_origin(httpx.URL(url))})

    @property
    def key(self) -> str:
        """The key itself, for a connection to the same server that is no request."""
        return self._key

    def trust(self, urls: Iterable[str]) -> None:
        """Send the key there, too: to the names of cells that the server itself has listed (`places`)."""
        self._origins |= {_origin(httpx.URL(url)) for url in urls}

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Adds the key if the request goes to the server that the client was made for, or to a cell of it."""
        if _origin(request.url) in self._origins:
            request.headers["Authorization"] = f"Bearer {self._key}"
        yield request

    def __repr__(self) -> str:
        return "KeyAuth(***)"

    def __reduce__(self) -> str:
        raise TypeError("an API key is not to be pickled")


def auth_of(api_key: str | None, url: str) -> KeyAuth | None:
    """Return the authentication that sends `api_key`, or where that is None GEMMSERVE_API_KEY; "" sends none.

    Raises ParameterInvalid.
    """
    if not isinstance(api_key, str | None):
        raise _errors.ParameterInvalid(f"the API key is a string, gs_..., not {type(api_key).__name__}")
    key = (os.environ.get(VARIABLE, "") if api_key is None else api_key).strip()
    if not key:
        return None
    if len(key) > _MAX_LENGTH or not all("!" <= character <= "~" for character in key):
        raise _errors.ParameterInvalid("the API key has characters that no key has") from None
    return KeyAuth(key, url)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
