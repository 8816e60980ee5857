"""Files that pages load: those under `static/`, each under a name that changes with its content.

`/static/site.css` is served as `/static/site.<digest>.css` and may be kept for ever. Modules import each other by plain
relative names; the digests are put in as they are read, so there is no build step.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from gemmserve_service.http.headers.preferences import weighted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.resources.abc import Traversable

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "ico": "image/x-icon",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_NAMED: Final = re.compile(r"""(\bfrom\s*|\bimport\s*\(?\s*|\bnew URL\(\s*)"\./(?:[\w-]+/)*([\w-]+\.\w+)\"""")
"""A neighbour that a module names: `from "./session.js"`, `import("./vendor/uplot.js")`,
`new URL("./vendor/uplot.css", ...)`."""
_IMPORT: Final = re.compile(r"""\bfrom\s*"\./([\w-]+\.js)\"""")
"""One that is loaded with the module."""


@dataclass(frozen=True)
class Asset:
    """A file as it is served."""

    path: str
    """Relative to the server's root, a proxy's prefix or not: "static/site.0123456789abcdef.css"."""
    media_type: str
    etag: str
    content: bytes
    compressed: bytes | None
    """The content, gzipped; None where that makes it no shorter."""

    def encoded(self, accept_encoding: str | None) -> tuple[bytes, str | None]:
        """Return the bytes for that Accept-Encoding and their Content-Encoding, None for the bytes as they are."""
        if self.compressed is not None and _takes_gzip(accept_encoding):
            return self.compressed, "gzip"
        return self.content, None


def url(name: str, *, base: str = "") -> str:
    """Return the address of the file `name` ("site.css") relative to a page; `base`: "../" for one a level down.

    Raises KeyError.
    """
    return base + named(name).path


def named(name: str) -> Asset:
    """Return the file `name`. Raises KeyError."""
    return _by_name()[name]


@cache
def imported(name: str) -> frozenset[str]:
    """Return the names of every module that `name` has loaded before it runs. Raises KeyError."""
    found: set[str] = set()
    left = [name]
    while left:
        below = set(_IMPORT.findall(_sources()[left.pop()].read_text(encoding="utf-8"))) - found
        found |= below
        left += below
    return frozenset(found)


def find(served: str) -> Asset | None:
    """Return the asset behind the last part of a path, "site.<digest>.css"; None where there is none."""
    return _by_path().get(f"static/{served}")


@cache
def _by_path() -> Mapping[str, Asset]:
    return {asset.path: asset for asset in _by_name().values()}


@cache
def _sources() -> Mapping[str, Traversable]:
    return {file.name: file for file in _below(files(__package__) / "static") if _extension(file.name) in _TYPES}


@cache
def _by_name() -> Mapping[str, Asset]:
    """Every file by its own name, whatever folder it lies in; read once, by the first page that is asked for."""
    sources = _sources()
    made: dict[str, Asset] = {}

    def make(name: str, above: tuple[str, ...] = ()) -> Asset:
        if name in above:
            raise ValueError(f"modules import each other in a circle: {' > '.join((*above, name))}")
        if name not in made:
            content = sources[name].read_bytes()
            if _extension(name) == "js":

                def renamed(match: re.Match[str]) -> str:
                    return f'{match[1]}"./{make(match[2], (*above, name)).path.removeprefix("static/")}"'

                content = _NAMED.sub(renamed, content.decode()).encode()
            made[name] = packed(name, content)
        return made[name]

    for name in sources:
        make(name)
    return made


def packed(name: str, content: bytes) -> Asset:
    """Return the asset of that content, also gzipped."""
    digest = hashlib.sha256(content).hexdigest()[:16]
    stem, _, extension = name.rpartition(".")
    compressed = gzip.compress(content, 9, mtime=0)
    return Asset(
        path=f"static/{stem}.{digest}.{extension}",
        media_type=_TYPES[extension],
        etag=f'"{digest}"',
        content=content,
        compressed=compressed if len(compressed) < len(content) else None,
    )


def _below(folder: Traversable) -> Iterator[Traversable]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _below(entry)
        else:
            yield entry


def _extension(name: str) -> str:
    return name.rpartition(".")[2]


def _takes_gzip(accept_encoding: str | None) -> bool:
    """Whether Accept-Encoding (RFC 9110, section 12.5.3) names gzip, or anything, and does not refuse it."""
    weights = dict(weighted(entry) for entry in (accept_encoding or "").split(",") if entry.strip())
    return weights.get("gzip", weights.get("*", 0.0)) > 0
