"""The HTTP library: httpx2 where it is installed, else httpx, which it goes on from and whose names it has.

This alone imports either; all others take `httpx` from here. The variable GEMMSERVE_HTTP_LIBRARY chooses one of them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from gemmserve import _errors

__all__ = ["ERRORS", "KNOWN", "OTHER", "VARIABLE", "as_error", "check_transport", "httpx", "other_scheme"]

VARIABLE: Final = "GEMMSERVE_HTTP_LIBRARY"
KNOWN: Final = ("httpx2", "httpx")


def _chosen(name: str | None) -> Any:
    """The library of that name; None: the first there is. Raises ImportError."""
    if not name:
        try:
            return import_module(KNOWN[0])
        except ModuleNotFoundError:
            return import_module(KNOWN[1])
    if name not in KNOWN:
        raise ImportError(f"{VARIABLE} is {name!r}; there are {' and '.join(KNOWN)}")
    return import_module(name)


if TYPE_CHECKING:
    import httpx
else:
    httpx = _chosen(os.environ.get(VARIABLE))

OTHER: Final = next(name for name in KNOWN if name != httpx.__name__)
"""Name of the library that is not used."""
ERRORS: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, httpx.CookieConflict)
"""Exceptions that can be raised while a request is made or an answer is read."""

_OTHER_NAME: Final = ("Hostname mismatch", "IP address mismatch")
"""Words of OpenSSL for a certificate that is good, and somebody else's."""
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "HTTP_REQUEST")
"""Names that versions of OpenSSL give to an answer which is no TLS: a server's without it."""


def check_transport(transport: object) -> None:
    """Raises ParameterInvalid for a transport of the other library, which would fail in the middle of a request."""
    other: Any = sys.modules.get(OTHER)
    if other in {None, httpx}:  # httpx2 may stand in for httpx in a whole process (httpx2.alias_httpx)
        return
    if isinstance(transport, (other.BaseTransport, other.AsyncBaseTransport)):
        raise _errors.ParameterInvalid(
            f"transport is one of {OTHER}, and this client uses {httpx.__name__}; {VARIABLE}={OTHER} chooses the other",
            problem={"parameter": "transport"},
        )


def other_scheme(url: str) -> str:
    """`url` with https:// instead of http://, or the other way round, and the port that it was: by default another."""
    asked = httpx.URL(url)
    secure = asked.scheme == "https"
    return str(asked.copy_with(scheme="http" if secure else "https", port=asked.port or (443 if secure else 80)))


def _without_tls(url: str, said: str, proxy: str | None) -> str:
    """Words for an answer that is no TLS. By which scheme a server is asked is said where no proxy may have sent it:
    beside the server's own TLS, a key would go in clear text.
    """
    if proxy is None:
        return f"{url} does not speak TLS: {said}; a server without it is asked by {other_scheme(url)}"
    if not proxy:
        return f"{url} does not speak TLS, or a proxy before it does not: {said}"
    if httpx.URL(url).scheme == "http":
        return f"the proxy {proxy} before {url} does not speak TLS: {said}"
    if proxy.startswith("https:"):
        return f"the proxy {proxy} does not speak TLS, or else {url} behind it does not: {said}"
    return f"{url} does not speak TLS behind the proxy {proxy}: {said}"


def as_error(error: Exception, url: str, *, answered: bool = False, proxy: str | None = None) -> _errors.GemmserveError:
    """The error that an exception of the library stands for; the caller raises it `from` the original. `answered`:
    whether the server ever did. `proxy`: URL of the one before it; empty where there may be one that is not known.
    """
    said = str(error) or type(error).__name__
    match error:
        case httpx.ConnectError() if any(words in said for words in _OTHER_NAME):
            return _errors.TransportError(
                f"{url} shows a certificate for other names than the one it is asked by: {said}; ask by a name of the "
                "certificate, or have one made with this name (subjectAltName)",
                retriable=False,
            )
        case httpx.ConnectError() if "CERTIFICATE_VERIFY_FAILED" in said:
            return _errors.TransportError(
                f"{url} shows a certificate that is not trusted here: {said}; `verify` of a client takes the file of "
                "its authority, as do --ca-file and GEMMSERVE_CA_FILE of the command line",
                retriable=False,
            )
        case httpx.ConnectError() if not answered and any(reason in said for reason in _NO_TLS):
            return _errors.TransportError(_without_tls(url, said, proxy), retriable=False)
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return _errors.TransportError(
                f"cannot reach {url}: {said}; is `gemmserve serve` running there?",
                unmet=not answered,
                sent=False,
            )
        case httpx.TimeoutException():
            return _errors.TransportTimeout(f"{url} was silent for too long ({type(error).__name__})")
        case httpx.UnsupportedProtocol() | httpx.LocalProtocolError():
            return _errors.TransportError(f"the request to {url} cannot be sent: {said}", retriable=False)
        case httpx.TransportError():
            plain = url.startswith("http://") and not answered and proxy is None
            secure = "" if not plain else "; a server with TLS is asked by https://"
            sent = not isinstance(error, httpx.ProxyError)  # a proxy that makes no tunnel
            return _errors.TransportError(f"the exchange with {url} broke: {said}{secure}", sent=sent)
        case httpx.InvalidURL():
            return _errors.ParameterInvalid(f"{url!r} is not a URL: {said}")
        case _:
            return _errors.ProtocolError(f"{url}: {said}")
