"""As much of HTTP/1.1 as a load generator needs: requests that are built once, heads of answers parsed and checked."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_HEAD = 1 << 16


class AnswerError(Exception):
    """An answer that breaks HTTP, or is not what was asked for."""


@dataclass(frozen=True)
class Head:
    """Head of an answer. `size`: its own bytes; `length`: the body's, from Content-Length."""

    status: int
    length: int
    size: int
    closes: bool
    server_timing: str


def request(method, path, headers=None, *, length=None, host="127.0.0.1"):
    """A request's line and headers."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_head(data):
    """The head of an answer, or None while it is not whole. Raises AnswerError."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) >= LARGEST_HEAD:
            raise AnswerError(f"a head of more than {LARGEST_HEAD} bytes")
        return None
    line, *fields = data[:end].split(b"\r\n")
    version, _, rest = line.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise AnswerError(f"no HTTP/1 answer: {line[:60]!r}")
    status = int(rest[:3])
    headers = {}
    for field in fields:
        name, _, value = field.partition(b":")
        headers[name.strip().lower()] = value.strip()
    length = headers.get(b"content-length")
    if length is None:
        if status != 204:
            raise AnswerError(f"an answer {status} without Content-Length")
        length = b"0"
    if not length.isdigit():
        raise AnswerError(f"Content-Length: {length[:40]!r}")
    return Head(
        status=status,
        length=int(length),
        size=end + 4,
        closes=headers.get(b"connection", b"").lower() == b"close",
        server_timing=headers.get(b"server-timing", b"").decode("latin-1"),
    )


def server_timing(text):
    """Milliseconds by name of a Server-Timing field. Entries without a duration are left out."""
    found = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "dur":
                found[name] = found.get(name, 0.0) + float(value.strip().strip('"'))
    return found
