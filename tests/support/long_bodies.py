"""Bodies as long as a route takes them, of whatever costs a parser most: what the front may not stand still for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ID = "arr_" + "0" * 26
FORM = "multipart/form-data; boundary=X"
JSON = "application/json"
_BATCH = 16 << 20
_JOB = 1 << 20


def _names(count: int, before: str = "") -> str:
    return ",".join(f'"{before}{number:07x}":1' for number in range(count))


def _items(count: int, more: Callable[[int], str]) -> str:
    return '{"items":[' + ",".join(f'{{"a":"{ID}","b":"{ID}"{more(n)}}}' for n in range(count)) + "]}"


def _program(count: int, more: Callable[[int], str]) -> str:
    steps = ",".join(f'{{"id":"x{n}","op":"gemm"{more(n)}}}' for n in range(count))
    return f'{{"op":"program","steps":[{steps}]}}'


def _part(name: str, content: str) -> str:
    return f'--X\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{content}\r\n'


# By name: path, content type, and what makes the body.
BODIES: dict[str, tuple[str, str, Callable[[], str]]] = {
    "batch of unknown names": ("/v1/batch", JSON, lambda: "{" + _names(_BATCH // 12) + "}"),
    "item of unknown names": ("/v1/batch", JSON, lambda: '{"items":[{' + _names(_BATCH // 13) + "}]}"),
    "items of unknown names": ("/v1/batch", JSON, lambda: _items(9999, lambda n: "," + _names(60, f"{n:x}_"))),
    "plain items": ("/v1/batch", JSON, lambda: _items(10_000, lambda _: "")),
    "items without end": ("/v1/batch", JSON, lambda: '{"items":[' + "{}," * (_BATCH // 3 - 10) + "{}]}"),
    "numbers for items": ("/v1/batch", JSON, lambda: '{"items":[' + "1," * (_BATCH // 2 - 10) + "1]}"),
    "arrays within arrays": ("/v1/batch", JSON, lambda: '{"items":' + "[" * (_BATCH - 100)),
    "objects within objects": ("/v1/batch", JSON, lambda: '{"params":' + '{"a":' * (_BATCH // 6)),
    "white space": ("/v1/batch", JSON, lambda: '{"items":' + " " * (_BATCH - 100) + "[]}"),
    "one string": ("/v1/batch", JSON, lambda: '{"items":"' + "x" * (_BATCH - 100) + '"}'),
    "one string of four bytes a character": ("/v1/batch", JSON, lambda: '["' + "\U0001f600" * (_BATCH // 4 - 9) + '"]'),
    "escaped quotes": ("/v1/batch", JSON, lambda: '{"items":["' + '\\"' * (_BATCH // 2 - 100)),
    "job of unknown names": ("/v1/jobs", JSON, lambda: "{" + _names(_JOB // 12 - 10) + "}"),
    "short job of unknown names": ("/v1/jobs", JSON, lambda: "{" + _names(5000) + "}"),
    "steps of unknown names": ("/v1/jobs", JSON, lambda: _program(1000, lambda _: "," + _names(60))),
    "short steps of unknown names": ("/v1/jobs", JSON, lambda: _program(80, lambda _: "," + _names(55))),
    "whole steps": ("/v1/jobs", JSON, lambda: _program(1000, lambda _: f',"a":"{ID}","b":"{ID}","beta":[0,1]')),
    "steps without end": ("/v1/jobs", JSON, lambda: _program(40_000, lambda _: "")),
    "parameters of unknown names": ("/v1/gemm", FORM, lambda: _part("params", "{" + _names(5000) + "}") + "--X--\r\n"),
    "empty parts": ("/v1/batch", FORM, lambda: _part("a", "") * 300_000 + "--X--\r\n"),
    "delimiters that are none": ("/v1/gemm", FORM, lambda: _part("params", "\r\n--" * (_BATCH // 4)) + "--X--\r\n"),
    "line ends in front": ("/v1/gemm", FORM, lambda: "\r\n" * (_BATCH // 2)),
}  # fmt: skip


def request(name: str, host: str = "127.0.0.1", *fields: str) -> bytes:
    """A whole request with that body."""
    path, kind, make = BODIES[name]
    body = make().encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *fields]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
