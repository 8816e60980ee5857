"""Interruption of a long computation on the host: between two blocks of it `checkpoint` is called.

Whoever wants to be asked there says so with `interruptible`, for the calls that this thread makes inside. What the
callback raises ends the computation; what was written by then is left half done.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_asked: Final[ContextVar[Callable[[], object] | None]] = ContextVar("gemmserve_checkpoint", default=None)


@contextlib.contextmanager
def interruptible(callback: Callable[[], object]) -> Iterator[None]:
    """Has `callback` called at every `checkpoint` that this thread comes to inside; the innermost one counts."""
    token = _asked.set(callback)
    try:
        yield
    finally:
        _asked.reset(token)


def checkpoint() -> None:
    """Asks whether to go on; raises what the callback raises. Without one it costs a tenth of a microsecond."""
    callback = _asked.get()
    if callback is not None:
        callback()


def pieces(array: Any, nbytes: int) -> Iterator[Any]:
    """Views of a NumPy or CuPy array that together are the array, of at most `nbytes` unless they are single elements,
    with a `checkpoint` before each.
    """
    if array.nbytes <= nbytes or array.size <= 1:
        checkpoint()
        yield array
        return
    axis = max(range(array.ndim), key=lambda i: array.shape[i])
    half = array.shape[axis] // 2
    for part in (slice(half), slice(half, None)):
        yield from pieces(array[(slice(None),) * axis + (part,)], nbytes)
