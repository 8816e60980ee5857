"""The HTTP library: which one it is, and that its exceptions become ours."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import gemmserve
from gemmserve._transport import library


def httpx_exceptions() -> list[type[Exception]]:
    found = [value for value in vars(httpx).values() if inspect.isclass(value) and issubclass(value, Exception)]
    return [cls for cls in found if cls is not httpx.HTTPStatusError]  # only raise_for_status raises it


@pytest.mark.parametrize("cls", httpx_exceptions())
def test_every_exception_is_mapped(cls) -> None:
    assert issubclass(cls, library.ERRORS)
    takes_text = cls not in {httpx.StreamConsumed, httpx.StreamClosed, httpx.ResponseNotRead, httpx.RequestNotRead}
    error = library.as_error(cls("x") if takes_text else cls(), "http://host")
    assert isinstance(error, gemmserve.GemmserveError)
    if issubclass(cls, httpx.TransportError):
        assert isinstance(error, gemmserve.TransportError)
        silent = issubclass(cls, httpx.TimeoutException) and cls is not httpx.ConnectTimeout
        assert isinstance(error, TimeoutError) == silent


def test_what_is_amiss_with_tls_is_said():
    untrusted = library.as_error(httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), "https://host")
    assert "--ca-file" in str(untrusted)
    assert not untrusted.retriable
    others = "[SSL: CERTIFICATE_VERIFY_FAILED] Hostname mismatch, certificate is not valid for 'host'"
    other = library.as_error(httpx.ConnectError(others), "https://host")
    assert "subjectAltName" in str(other)
    assert "--ca-file" not in str(other)
    assert not other.retriable
    plain = httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number")
    assert not library.as_error(plain, "https://host").retriable
    passing = library.as_error(plain, "https://host", answered=True)
    assert passing.retriable, "it has TLS: what answers is something before it, while it begins again"
    assert "does not speak TLS" not in str(passing)
    assert str(library.as_error(plain, "https://host/p")).endswith("is asked by http://host:443/p"), "the port it was"
    broken = httpx.RemoteProtocolError("closed")
    assert str(library.as_error(broken, "http://host")).endswith("is asked by https://")
    assert "https" not in str(library.as_error(broken, "http://host", answered=True))


@pytest.mark.parametrize(
    ("url", "proxy", "said"),
    [
        (
            "https://host",
            "https://proxy:1",
            "the proxy https://proxy:1 does not speak TLS, or else https://host behind",
        ),
        ("https://host", "http://proxy:1", "https://host does not speak TLS behind the proxy http://proxy:1"),
        ("http://host", "https://proxy:1", "the proxy https://proxy:1 before http://host does not speak TLS"),
        ("https://host", "", "https://host does not speak TLS, or a proxy before it"),
    ],
)
def test_where_a_proxy_may_be_in_between_no_other_scheme_is_recommended(url, proxy, said) -> None:
    error = library.as_error(httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong"), url, proxy=proxy)
    assert str(error).startswith(said)
    assert "asked by" not in str(error)
    assert not error.retriable
    assert "asked by" not in str(library.as_error(httpx.RemoteProtocolError("closed"), "http://host", proxy=proxy))


@pytest.mark.parametrize(
    ("url", "other"),
    [
        ("http://host", "https://host:80"),
        ("https://host/path", "http://host:443/path"),
        ("http://[::1]:8000", "https://[::1]:8000"),
    ],
)
def test_the_other_scheme_is_at_the_same_port(url, other) -> None:
    assert library.other_scheme(url) == other


def test_one_module_imports_it():
    root = Path(gemmserve.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.partition(".")[0] for name in names} & {"httpx", "httpx2", "httpcore", "httpcore2"}:
                found.add(str(path.relative_to(root)))
    assert found == {"_transport/library.py"}


def imported(tmp_path, variable: str | None, *present: str) -> str:
    """The library that a new process takes where those of `present` are installed; or what it says instead."""
    for name in ("httpx", "httpx2"):
        there = "from __main__ import real\nglobals().update({n: v for n, v in vars(real).items() if n[:2] != '__'})"
        text = there if name in present else "raise ModuleNotFoundError"
        (tmp_path / f"{name}.py").write_text(text)
    script = f"""
import importlib, sys
real = importlib.import_module({httpx.__name__!r})
for name in ("httpx", "httpx2"):
    sys.modules.pop(name, None)
sys.path.insert(0, {str(tmp_path)!r})
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__.partition(".")[0] != "httpx2"]
from gemmserve._transport import library
print(library.httpx.__name__)
"""
    environment = {name: value for name, value in os.environ.items() if name != library.VARIABLE}
    environment |= {} if variable is None else {library.VARIABLE: variable}
    done = subprocess.run([sys.executable, "-c", script], check=False, env=environment, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_the_newer_one_serves_where_it_is_installed(tmp_path):
    assert imported(tmp_path, None, "httpx", "httpx2") == "httpx2"
    assert imported(tmp_path, "", "httpx") == "httpx"
    assert imported(tmp_path, "httpx", "httpx", "httpx2") == "httpx"
    assert imported(tmp_path, "httpx2", "httpx").startswith("ModuleNotFoundError")
    assert "httpx2 and httpx" in imported(tmp_path, "requests", "httpx")


def test_a_transport_of_the_other_library(monkeypatch):
    class Other:
        """A module, as far as it is looked at."""

        class BaseTransport:
            """That library's."""

        class AsyncBaseTransport:
            """That library's."""

    monkeypatch.setitem(sys.modules, library.OTHER, Other)
    with pytest.raises(gemmserve.ParameterInvalid, match="GEMMSERVE_HTTP_LIBRARY"):
        gemmserve.Client(transport=Other.BaseTransport())  # type: ignore[arg-type]
    with pytest.raises(gemmserve.ParameterInvalid, match="GEMMSERVE_HTTP_LIBRARY"):
        gemmserve.AsyncClient(transport=Other.AsyncBaseTransport())  # type: ignore[arg-type]
