"""Addresses of servers, and whose certificates are believed."""

from __future__ import annotations

import ipaddress
import os
import reprlib
import socket
import ssl
import time
from typing import Final

from gemmserve import _errors
from gemmserve._transport.library import as_error, httpx

VARIABLE: Final = "GEMMSERVE_SERVER"
DEFAULT: Final = "http://127.0.0.1:8000"
_MAX_PORT: Final = 65_535
_LEAST_S: Final = 1e-3  # 0 would not wait at all


def server_url(url: str | None) -> str:
    """`url`, or where that is None what GEMMSERVE_SERVER names, or this machine. Raises ParameterInvalid."""
    found = url if url is not None else os.environ.get(VARIABLE) or DEFAULT
    if not isinstance(found, str):
        raise _errors.ParameterInvalid(f"the server's URL is a string, such as {DEFAULT!r}, not {reprlib.repr(found)}")
    return found


def normal_url(url: str) -> str:
    """`url` with its scheme (http where none is given) and without a trailing slash. Raises ParameterInvalid."""
    full = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL as error:
        raise as_error(error, url) from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise _errors.ParameterInvalid(f"{url!r} is no http://, https:// or unix: address")
    if parsed.port is not None and not 0 < parsed.port <= _MAX_PORT:
        raise _errors.ParameterInvalid(f"{url!r}: a port is a number from 1 to {_MAX_PORT}")
    return full.rstrip("/")


def context_of(base: str, verify: bool | str | ssl.SSLContext) -> ssl.SSLContext:
    """Return the SSL context by which httpx believes certificates.

    One serves all connections, for one takes milliseconds to make. Raises ParameterInvalid for a file that holds no
    certificates.
    """
    if isinstance(verify, ssl.SSLContext):
        return verify
    if isinstance(verify, str):
        try:
            return ssl.create_default_context(cafile=verify)
        except OSError as error:  # ssl.SSLError too
            raise _errors.ParameterInvalid(f"{verify!r} is no file of CA certificates: {error}") from error
    if not base.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # believes nobody, and is not asked
    return httpx.create_ssl_context(verify=verify, trust_env=not is_loopback(base))


def speaks_tls(host: str, port: int, timeout: float) -> bool:
    """Whether a server answers a TLS handshake within `timeout`, whatever its certificate: nothing but the handshake is
    sent.
    """
    end = time.monotonic() + timeout
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout) as made:
            made.settimeout(max(end - time.monotonic(), _LEAST_S))
            with context.wrap_socket(made, server_hostname=host):
                return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # an alert is an answer
    except OSError:
        return False


def is_loopback(url: str) -> bool:
    """Whether `url` names this machine: then no HTTP_PROXY is asked, which would look for the server on itself."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
