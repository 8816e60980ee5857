"""Out of device memory: make room, try again, compute in panels, and only then give up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from gemmserve_kernels.problem.errors import OutOfDeviceMemory

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_MAX_PANELS: Final = 256


def within_memory(
    whole: Callable[[], T],
    in_panels: Callable[[int], T | None],
    make_room: Callable[[], None],
    errors: tuple[type[BaseException], ...],
) -> T:
    """Return what `whole` returns, or `in_panels(count)` for the fewest panels that fit.

    `errors` say that memory has run out; `make_room` drops every copy that could be made again. `in_panels` returns
    None where the product cannot be cut so far. Raises OutOfDeviceMemory once nothing of this helped.
    """
    reason = ""
    for attempt in (0, 1):
        if attempt:
            make_room()  # here, where the failed attempt's frames are gone, nothing refers to its arrays any more
        try:
            return whole()
        except errors as error:
            reason = str(error)
    count = 2
    while count <= _MAX_PANELS:
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
