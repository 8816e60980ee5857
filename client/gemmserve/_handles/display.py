"""Handles that show themselves: in the interpreter by a line, in notebooks by a line and a small picture of |x|."""

from __future__ import annotations

import base64
import html
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve._handles.handle import ArrayHandle
    from gemmserve._handles.view import Base, View
    from gemmserve._transfer.arrays import AnyArray

_PIXELS: Final = 192
"""Pixels of a notebook that the longer side of a picture has."""
_LEAST: Final = 8
"""Pixels of the shorter side, at least."""


def size_text(nbytes: int) -> str:
    """Bytes for people: 512 B, 3.2 MiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def shown_url(client: Any) -> str:
    """The URL of a client's server as it may be shown: without a name and a password."""
    url = str(getattr(client, "url", ""))
    if "@" not in url or url.startswith("unix:"):
        return url
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def at(client: Any) -> str:
    """Where something is, for a repr: " at http://host:8000"."""
    url = shown_url(client)
    return f" at {url}" if url else ""


def line(handle: ArrayHandle[Any]) -> str:
    """The repr of a handle on an array, as far as it is known here: no server is asked."""
    words = [type(handle).__name__, handle._id]
    name = None if handle._info is None else handle._info.name
    words += [] if name is None else [repr(name)]
    suffix = ""
    if (base := handle._known) is not None:
        shown, suffix = _shown(handle._seen, base)
        words += [f"{handle.dtype.name}{list(handle.shape)}", size_text(handle.nbytes) + shown]
    if state := _state(handle):
        words.append(state)
    return f"<{' '.join(words)}{at(handle._client)}>{suffix}"


def _shown(view: View, base: Base) -> tuple[str, str]:
    """How a view differs from what is stored: in words, as ", imag of complex64[3, 4]", or by a suffix, as ".H"."""
    turned = view.transposition(base)
    if turned is not None:
        letter = ".T" if view.ndim == 2 else ".mT"
        return "", {(False, True): ".conj()", (True, False): letter, (True, True): ".H"}.get((turned, view.conj), "")
    kind = view.part or ("conj" if view.conj else "a view")
    return f", {kind} of {base.dtype.name}{list(base.shape)}", ""


def _state(handle: ArrayHandle[Any]) -> str:
    if handle._lifetime.deleted:
        return "deleted"
    expires = None if handle._info is None else handle._info.expires_at
    return "expired" if expires is not None and expires <= datetime.now(UTC) else ""


def page(handle: ArrayHandle[Any], look: Callable[[], AnyArray | None]) -> str:
    """The line as HTML, and beneath it the magnitudes of some elements. `look` fetches those of what is stored, and the
    array's info where it is not known; where it has none, or raises, there is the line alone.
    """
    try:
        picture = "" if _state(handle) else _picture(handle, look())
    except Exception:  # a handle is shown whatever is wrong with it or its server
        picture = ""
    return f"<div><code>{html.escape(repr(handle))}</code>{picture}</div>"


def _picture(handle: ArrayHandle[Any], stored: AnyArray | None) -> str:
    info = handle._info
    if stored is None or info is None or not stored.size:
        return ""
    from gemmserve._handles.picture import magnitudes

    turned = len(info.shape) > 1 and handle._seen.transposition(handle._base)
    sample = stored.swapaxes(-1, -2) if turned else stored
    rows, columns = sample.shape
    scale = _PIXELS / max(rows, columns)
    width, height = (max(_LEAST, round(side * scale)) for side in (columns, rows))
    note = f"|x| of {rows} x {columns} elements" + (", first matrix" if len(info.shape) > 2 else "")
    note += ", of the whole array" if _shown(handle._seen, handle._base)[0] else ""
    data = base64.b64encode(magnitudes(sample)).decode("ascii")
    return (
        f'<br><img alt="{note}" title="{note}" width="{width}" height="{height}" '
        f'style="image-rendering: pixelated" src="data:image/png;base64,{data}">'
    )
