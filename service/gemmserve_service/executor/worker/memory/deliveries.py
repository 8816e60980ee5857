"""Deliveries: arrays that the device has, copied straight into memory of clients on this host, by a thread for that.

A client's memory is mapped and registered with the device's driver, which takes as long as two or three copies to it,
and stays so for as long as it is used again: a client keeps what it receives results in. The driver holds its pages, so
nothing that the client does to it reaches this process. No processor touches the mapping, where a page that the client
has taken away would end the process (SIGBUS): only the device writes there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from gemmserve_service.runtime.mapping import Mapping
from gemmserve_service.store.extents.shared_memory import has_holes

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from gemmserve_service.executor.protocol import Deliver

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAX_BYTES: Final = 8 << 30
"""Bytes of clients' memory that stay registered: four clients of this project's use so much at most for transfers."""
PIECE_BYTES: Final = 64 << 20
"""Bytes that are registered by one call, for which others of the driver may have to wait: some three milliseconds. A
copy goes to one piece, so there are several to a large array.
"""
KEPT_S: Final = 10.0
"""Seconds after its last use for which memory stays registered. Its client may have closed it: then it is freed."""
_LOOKS: Final = 8  # in that time, at most, at which memory is unused
_MAX_STUCK: Final = 8
"""Memories that the driver has not let go of, after which no more is registered."""

log = logging.getLogger(__name__)


class Copies(Protocol):
    """Copies on a device (`DeviceCopies`), as far as deliveries use them; of the calling thread."""

    def start_store(self, array: Any, memory: Bytes, start: int) -> None:
        """Start to copy bytes of a contiguous array of the device, from byte `start` on, to the host."""

    def mark(self) -> Any:
        """Return a mark behind what this thread began."""

    def wait(self, mark: Any) -> None:
        """Return when all before a mark is there."""


class Link(Protocol):
    """Driver of a device, as far as deliveries use it."""

    def register(self, address: int, nbytes: int) -> None:
        """Make pages known to the driver. Raises where that cannot be."""

    def unregister(self, address: int) -> None:
        """End that."""


@dataclass(eq=False, slots=True)
class _Memory:
    """A client's memory: registered."""

    pieces: list[Bytes]
    """All of it, as registered."""
    used: float
    """Time of its last use (time.monotonic)."""
    copies: int = 0
    """Copies to it that are under way."""

    @property
    def nbytes(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy that is under way."""

    number: int
    memory: _Memory
    value: Any
    """Array of the device: it lives until the copy is over, whoever drops it meanwhile."""
    mark: Any


class Deliveries:
    """Those of one device. Every method may be called from any thread; `begin` comes first."""

    def __init__(
        self, find: Callable[[str], Any], copies: Copies, link: Link, enter: Callable[[], None] = lambda: None
    ) -> None:
        """`find` returns the device's copy of an array, contiguous, None where there is none. `enter` is called once in
        the delivering thread before anything else.
        """
        self.nbytes = 0
        """Bytes of clients' memory that are registered."""
        self._find = find
        self._copies = copies
        self._link = link
        self._enter = enter
        self._tell: Callable[[list[int], list[int]], None] = lambda *_: None
        self._failed: Callable[[], None] = lambda: None
        self._orders: deque[Deliver] = deque()
        self._open = 0
        """Orders that are not answered."""
        self._memories: OrderedDict[str, _Memory] = OrderedDict()
        """By name, the longest unused first; the delivering thread's."""
        self._next_look = 0.0
        """Time at which memory is looked for again that nobody uses (time.monotonic)."""
        self._stuck: list[list[Bytes]] = []
        """Pieces, by memory, that the driver has not let go of: other pages there would be taken for them."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, tell: Callable[[list[int], list[int]], None], failed: Callable[[], None]) -> None:
        """A front is there. In the delivering thread `tell(delivered, refused)` is called with numbers of orders, and
        before that `failed()` after an error of the device, which returns if the device can be used nevertheless, and
        nothing is under way there any more.
        """
        with self._changed:
            self._tell, self._failed = tell, failed

    def put(self, order: Deliver) -> None:
        """Take an order."""
        with self._changed:
            self._orders.append(order)
            self._open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gemmserve-deliver", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def abandon(self) -> None:
        """The front is gone, and nobody hears of its orders. Return when nothing is written to clients any more."""
        with self._changed:
            self._tell = lambda *_: None
            self._open -= len(self._orders)
            self._orders.clear()
            while self._open:
                self._changed.wait()

    # -- the delivering thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Copy, the next array begun before the one before is over."""
        self._enter()
        under_way: _Copy | None = None
        while True:
            order = self._next(wait=under_way is None)
            if under_way is not None and order is not None and order.memory not in self._memories:
                self._end(under_way)  # before memory is registered, which takes longer than a copy
                under_way = None
            begun = None if order is None else self._start(order)
            if under_way is not None:
                self._end(under_way)
            under_way = begun  # and nothing else: who waits for orders keeps no array of the device

    def _next(self, *, wait: bool) -> Deliver | None:
        """Return the next order; `wait` for one, and let memory go meanwhile that is not used."""
        while True:
            with self._changed:
                if wait and not self._orders:
                    self._changed.wait(KEPT_S / _LOOKS if self._memories else None)
                if self._orders:
                    return self._orders.popleft()
            if not wait:
                return None
            self._let_go()

    def _start(self, order: Deliver) -> _Copy | None:
        """Begin a copy; None: there is none, and the order is answered."""
        try:
            value = self._find(order.array)
            memory = None if value is None or value.nbytes != order.nbytes else self._memory(order)
        except Exception as error:
            log.info("array %s does not go straight to its client's memory: %s", order.array, error)
            memory = None
        if memory is not None:
            try:
                for start in range(0, order.nbytes, PIECE_BYTES):
                    piece = memory.pieces[start // PIECE_BYTES]
                    self._copies.start_store(value, piece[: order.nbytes - start], start)
                copy = _Copy(order.number, memory, value, self._copies.mark())
            except Exception:
                log.exception("array %s could not be copied to its client's memory", order.array)
                self._failed()
                self._drop(order.memory)
            else:
                memory.copies += 1
                return copy
        self._answer([], [order.number])
        return None

    def _end(self, copy: _Copy) -> None:
        delivered, refused = [copy.number], []
        try:
            self._copies.wait(copy.mark)
        except Exception:
            log.exception("an array could not be copied to its client's memory")
            self._failed()
            delivered, refused = [], delivered
        copy.memory.copies -= 1
        copy.memory.used = time.monotonic()
        self._answer(delivered, refused)
        if self._next_look <= copy.memory.used:
            self._let_go()

    def _answer(self, delivered: list[int], refused: list[int]) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
            tell = self._tell
        tell(delivered, refused)

    def _memory(self, order: Deliver) -> _Memory | None:
        """Return the memory of an order, registered; None: it is too large, or the driver has enough. No copy is under
        way where it is new. Raises what `register` raises, and OSError and ValueError where it cannot be mapped.
        """
        found = self._memories.get(order.memory)
        if found is not None:
            self._memories.move_to_end(order.memory)
            return found if order.nbytes <= found.nbytes else None
        if not order.nbytes <= order.capacity <= MAX_BYTES or len(self._stuck) >= _MAX_STUCK:
            return None
        self._let_go()
        while self.nbytes + order.capacity > MAX_BYTES:
            self._drop(next(iter(self._memories)))
        fd = os.open(order.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if order.memory != f"{status.st_dev}:{status.st_ino}":  # the front has closed it, and opened another file
                raise ValueError("it is no longer there")
            if has_holes(fd, order.capacity):
                raise ValueError("it has holes, whose pages would be the server's")
            mapped = Mapping(fd, order.capacity).array()
        finally:
            os.close(fd)
        memory = _Memory([], time.monotonic())
        try:
            for start in range(0, mapped.size, PIECE_BYTES):
                piece = mapped[start : start + PIECE_BYTES]
                self._link.register(piece.ctypes.data, piece.size)
                self.nbytes += piece.size
                memory.pieces.append(piece)
        except Exception:
            self._unregister(memory)
            raise
        self._memories[order.memory] = memory
        return memory

    def _let_go(self) -> None:
        """End the registration of memory that has not been used for a while."""
        now = time.monotonic()
        before, self._next_look = now - KEPT_S, now + KEPT_S / _LOOKS
        for name in [name for name, memory in self._memories.items() if memory.used < before and not memory.copies]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        """End the registration of a memory."""
        self._unregister(self._memories.pop(name))

    def _unregister(self, memory: _Memory) -> None:
        stuck = []
        for piece in memory.pieces:
            self.nbytes -= piece.size
            try:
                self._link.unregister(piece.ctypes.data)
            except Exception as error:
                log.warning("a client's memory could not be unregistered: %s", error)
                stuck.append(piece)
        if stuck:
            self._stuck.append(stuck)
