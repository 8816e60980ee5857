"""Out of device memory: make room, try again, compute in panels, and only then give up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from gemmserve_kernels.problem.errors import OutOfDeviceMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_MAX_PANELS: Final = 256


def within_memory(
    whole: Callable[[], T],
    in_panels: Callable[[int], T | None],
    rooms: Sequence[Callable[[], bool]],
    errors: tuple[type[BaseException], ...],
) -> T:
    """Return what `whole` returns, or `in_panels(count)` for the fewest panels that fit.

    `errors` say that memory has run out; `rooms` are ways to make room, the cheapest first, which return whether there
    may be more then. `in_panels` returns None where the product cannot be cut so far. Raises OutOfDeviceMemory once
    nothing of this helped.
    """
    reason = ""
    for make_room in (None, *rooms):
        # Here, where the failed attempt's frames are gone, nothing refers to its arrays any more.
        if make_room is not None and not make_room():
            continue
        try:
            return whole()
        except errors as error:
            reason = str(error)
    count = 2
    while count <= _MAX_PANELS:
        for make_room in rooms:
            make_room()
        try:
            done = in_panels(count)
        except errors as error:
            reason, done = str(error), None
            count *= 2
            continue
        if done is None:
            break
        return done
    raise OutOfDeviceMemory(
        f"the product does not fit into the device's memory, with every cached copy dropped and cut as far as it can "
        f"be: {reason}"
    )
