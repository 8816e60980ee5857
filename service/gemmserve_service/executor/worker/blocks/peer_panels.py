"""Panels of large products that come from other devices of the host, where its memory holds a device up.

Such a panel goes up once for the host: the device that needs it first brings it, the others copy it from there. Where a
device computes for longer than the host takes, nothing is won, and blocks take longer while another's memory is mapped:
so panels come from the host until both have been measured (`SharedSlots.held_up`).

Which devices have what is in the `PanelTable`; memory of another device is mapped into this process for as long as both
are at the same product. Whatever is in doubt, a panel comes from the host's memory: where there is no way between
devices, a worker has ended since, something failed, or it was slower. Bytes are copied and nothing else: a panel is the
same from wherever it came.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_service.executor.worker.blocks.panel_table import MAX_SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_service.executor.worker.blocks.panel_table import Found, Offer, PanelTable, Side

_LOOK_S: Final = 0.001
"""Seconds between two looks at a panel that is under way to another device."""
_LONGEST_S: Final = 1.0
"""For which such a panel is waited for at most."""
_TIMES: Final = 3.0
"""Likewise, times as long as it would take from the host."""
_POLL_S: Final = 0.02
"""Seconds between two looks at whether mapped memory is to be given up."""
_SLOW: Final = 2
"""Panels in a row that came more slowly than from the host: the first copy makes the way ready."""
_LEAST_BYTES: Final = 1 << 20
"""Bytes of a copy from which on its rate says something."""

log = logging.getLogger(__name__)


class PeerLink(Protocol):
    """Ways between a device and others of its host. Callable from every thread that uses the device."""

    bus_id: str

    def offer(self, address: int, nbytes: int) -> Offer:
        """Return how another process finds memory of this device. Raises RuntimeError."""

    def reaches(self, bus_id: str) -> bool:
        """Whether this device copies straight from that one."""

    def open(self, handle: bytes) -> int:
        """Map another device's allocation; return its address. Raises RuntimeError."""

    def close(self, address: int) -> None:
        """End that. Raises RuntimeError."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy to this device, in the caller's stream, and return when it is there. Raises RuntimeError."""

    def enter(self) -> None:
        """Make the calling thread one that uses the device."""


@dataclass(eq=False)
class _Mapped:
    """One allocation of another device's, mapped."""

    found: Found
    """The first panel of it that was copied."""
    address: int
    owner: SharedSlots
    """Slots of the product for which it was mapped."""


class PeerPanels:
    """Ways of one worker's panels to and from others. Every method may be called from any thread that uses the
    device.
    """

    def __init__(self, table: PanelTable, link: PeerLink, *, always: bool = False) -> None:
        self.table = table
        self.link = link
        self.always = always
        """Whether panels come from other devices however fast the host's memory is."""
        self.host_rate = 0.0
        """Bytes a second of the last panel that came from the host's memory; 0: none has."""
        self.block: tuple[Grid | None, float] = None, 0.0
        """Grid of the last product, and seconds for which the device computed the last block of it."""
        self.copied = 0
        """Panels that came from other devices."""
        self.row_lock = threading.Lock()
        """Held while the table's row of this worker is written."""
        self._lock = threading.RLock()
        """Held while something is copied or mapped, and while mappings are looked at."""
        self._changed = threading.Condition(self._lock)
        self._mapped: dict[tuple[int, int, int, bytes], _Mapped] = {}
        self._refused: set[tuple[int, int]] = set()
        """Row and incarnation of workers from which nothing is copied any more."""
        self._slow: dict[tuple[int, int], int] = {}
        """Panels of a generation, by its row, that came more slowly than the host's memory gives them, in a row."""
        self._kept: list[tuple[int, Any]] = []
        """Memory that was let go, and generation in which others may have it mapped."""
        self._janitor: threading.Thread | None = None

    def share(self, parent: str, memory: Sequence[tuple[int, int]]) -> SharedSlots | None:
        """Share slots of a product: `memory`, address and bytes of each. None: they cannot be."""
        try:
            offers = [self.link.offer(*place) for place in memory[:MAX_SLOTS]]
        except RuntimeError as error:
            log.warning("panels are not shared with other devices: %s", error)
            return None
        with self.row_lock:
            return SharedSlots(self, parent, self.table.begin(parent, offers))

    def sweep(self, wait_s: float = 0.0) -> None:
        """Let memory go that nobody has mapped any more; wait so long for what somebody has."""
        until = time.monotonic() + wait_s
        while True:
            with self._lock:
                mapped = {generation: self.table.mapped(generation) for generation, _ in self._kept}
                self._kept = [each for each in self._kept if mapped[each[0]]]
                if not self._kept or time.monotonic() >= until:
                    return
            time.sleep(_LOOK_S)

    # -- for shared slots -------------------------------------------------------------------------------------------

    def keep(self, generation: int, memory: Sequence[Any]) -> None:
        """Keep memory that others may have mapped in that generation until they do not."""
        with self._lock:
            self._kept += [(generation, each) for each in memory]
        self.sweep()
        with self._lock:
            self._tend()

    def copy(self, found: Found, target: int, nbytes: int, owner: SharedSlots) -> bool:
        """Copy a panel from another device; False: it is not known to be there, or did not come."""
        with self._lock:
            if found.offer.nbytes < nbytes or not self.table.lease(found):
                return False
            try:
                address = self._address(found, owner)
                if address is None:
                    return False
                began = time.perf_counter()
                self.link.copy(target, address + found.offer.offset, nbytes)
                seconds = time.perf_counter() - began
                if not self.table.lasts(found):
                    log.info("device %s went while a panel came from it", found.bus_id)
                    return False
            except RuntimeError as error:
                self._refuse(found, str(error))
                return False
            finally:
                self.table.release(found)
            self.copied += 1
            self._judge(found, nbytes, seconds)
            return True

    def places(self, parent: str, side: Side, panel: int) -> list[Found]:
        """Return where that panel is, or is under way to, of devices from which panels may come."""
        return [found for found in self.table.find(parent, side, panel) if not self._is_refused(found)]

    # -- inside -----------------------------------------------------------------------------------------------------

    def _is_refused(self, found: Found) -> bool:
        key = found.row, found.incarnation
        if key not in self._refused and not self.link.reaches(found.bus_id):
            self._refuse(found, "there is no way from there to this device")
        return key in self._refused or self._slow.get((found.row, found.generation), 0) >= _SLOW

    def _refuse(self, found: Found, reason: str) -> None:
        self._refused.add((found.row, found.incarnation))
        log.info("panels do not come from device %s: %s", found.bus_id, reason)

    def _judge(self, found: Found, nbytes: int, seconds: float) -> None:
        """Copy no more of a product from a device that was slower than the host's memory twice in a row."""
        rate, key = nbytes / max(seconds, 1e-9), (found.row, found.generation)
        if nbytes < _LEAST_BYTES:
            return
        slow = self._slow.get(key, 0) + 1 if rate < self.host_rate else 0
        self._slow = {each: count for each, count in self._slow.items() if each[0] != found.row} | {key: slow}
        if slow == _SLOW:
            rates = rate / 1e9, self.host_rate / 1e9
            log.info("panels come more slowly from device %s than from the host: %.1f GB/s, %.1f", found.bus_id, *rates)

    def _address(self, found: Found, owner: SharedSlots) -> int | None:
        """Return the address of a panel's allocation, mapped if it is not yet; None: it may be gone."""
        key = found.row, found.incarnation, found.generation, found.offer.handle
        mapped = self._mapped.get(key)
        if mapped is None:
            first = not self._holds(found.row, found.generation)
            if first and not self.table.hold_mapping(found):
                return None
            try:
                address = self.link.open(found.offer.handle)
            except BaseException:
                if first:
                    self.table.drop_mapping(found.row, found.generation)
                raise
            mapped = self._mapped[key] = _Mapped(found, address, owner)
            self._tend()
        return mapped.address

    def _holds(self, row: int, generation: int) -> bool:
        return any((key[0], key[2]) == (row, generation) for key in self._mapped)

    def _tend(self) -> None:
        """Have somebody look after what is mapped and kept."""
        if (self._kept or self._mapped) and self._janitor is None:
            self._janitor = threading.Thread(target=self._clean, name="gemmserve-peers", daemon=True)
            self._janitor.start()
        self._changed.notify_all()

    def _clean(self) -> None:
        """Give mapped memory up once either worker is at something else, and memory that others had mapped."""
        self.link.enter()
        while True:
            try:
                with self._lock:
                    self._changed.wait(_POLL_S if self._mapped or self._kept else None)
                    self._unmap()
                self.sweep()
            except OSError:
                log.exception("the table of panels cannot be looked at")

    def _unmap(self) -> None:
        for key, mapped in list(self._mapped.items()):
            row, incarnation, generation, _ = key
            current = self.table.current(row) == (incarnation, generation) and self.table.lives(mapped.found)
            if current and not mapped.owner.closed:
                continue
            del self._mapped[key]
            try:
                self.link.close(mapped.address)
            except RuntimeError as error:
                log.warning("memory of another device could not be unmapped: %s", error)
            if not self._holds(row, generation):
                self.table.drop_mapping(row, generation)


class SharedSlots:
    """Slots of one large product, by their numbers, as others see them; and the way to theirs."""

    def __init__(self, peers: PeerPanels, parent: str, generation: int) -> None:
        self.closed = False
        self._peers = peers
        self._parent = parent
        self._generation = generation

    def bring(self, side: Side, panel: int, array: Any) -> bool:
        """Bring a panel to an array of the device from another one that has it, or soon will; False: it did not come,
        and what is in the array is anything.
        """
        peers, nbytes = self._peers, int(array.nbytes)
        rate = peers.host_rate
        until = time.monotonic() + (min(_LONGEST_S, _TIMES * nbytes / rate) if rate else _LONGEST_S)
        tried: set[tuple[int, int, int]] = set()
        while not self.closed:
            checkpoint()
            waits = False
            for found in peers.places(self._parent, side, panel):
                key = found.row, found.incarnation, found.fills
                if key in tried:
                    continue
                if found.ready:
                    if peers.copy(found, array.data.ptr, nbytes, self):
                        return True
                    tried.add(key)
                else:
                    waits = waits or peers.table.lives(found)
            if not waits or time.monotonic() > until:
                return False
            time.sleep(_LOOK_S)
        return False

    def is_coming(self, side: Side, panel: int) -> bool:
        """Whether a panel is under way to another device, and there in none."""
        places = self._peers.places(self._parent, side, panel)
        return not any(found.ready for found in places) and any(map(self._peers.table.lives, places))

    def held_up(self, grid: Grid, nbytes: int, blocks: int) -> bool:
        """Whether the device would wait for such a panel from the host: as long as that took last, it does not compute
        so many blocks. False where nothing is known of blocks of that grid yet, from this product or the one before.
        """
        peers, (measured, seconds) = self._peers, self._peers.block
        if peers.always:
            return True
        return measured == grid and peers.host_rate > 0 and nbytes / peers.host_rate > blocks * seconds

    def computed(self, grid: Grid, seconds: float) -> None:
        """Note for how long the device has computed a block of that grid."""
        self._peers.block = grid, seconds

    def came(self, nbytes: int, seconds: float) -> None:
        """Note how long a panel took from the host."""
        if nbytes >= _LEAST_BYTES:
            self._peers.host_rate = nbytes / max(seconds, 1e-9)

    def coming(self, slot: int, side: Side, panel: int) -> None:
        """See `PanelTable.coming`."""
        with self._peers.row_lock:
            if slot < MAX_SLOTS and not self.closed:
                self._peers.table.coming(slot, side, panel)

    def ready(self, slot: int) -> None:
        """See `PanelTable.ready`."""
        with self._peers.row_lock:
            if slot < MAX_SLOTS and not self.closed:
                self._peers.table.ready(slot)

    def retract(self, slot: int) -> bool:
        """See `PanelTable.retract`."""
        with self._peers.row_lock:
            return slot >= MAX_SLOTS or self.closed or self._peers.table.retract(slot)

    def drop(self, memory: Sequence[Any]) -> None:
        """Let go of memory of slots that were `retract`ed, once nobody has it mapped; the others stay."""
        with self._peers.row_lock:
            if self.closed:
                return
            generation, self._generation = self._generation, self._peers.table.renew()
        self._peers.keep(generation, memory)

    def close(self, memory: Sequence[Any]) -> None:
        """Let go of all of it, likewise, and of others' memory."""
        with self._peers.row_lock:
            if self.closed:
                return
            self.closed = True
            self._peers.table.end()
        self._peers.keep(self._generation, memory)
