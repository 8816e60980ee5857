"""Table of panels on the devices of one host, in memory that their workers share: who has which, where, and who reads.

Every worker has a row and writes no other. A row names the process, its device, the large product whose panels it has,
and for each of its slots the panel, how far that is, and the allocation of the device (a handle, an offset). What is
there is hints for whoever comes: that a panel is what it seems to be follows from locks.

- A reader has a shared lock on the slot (`lease`) and looks at the row again: only then does what it says hold. Whoever
  owns the slot strikes the panel out first, and then fills the slot anew only if it gets that lock alone (`retract`).
- Whoever has mapped a row's memory has a shared lock on the generation of the row (`hold_mapping`), and has looked
  again whether it is that one still; the memory stays until its owner, which has begun another generation first (for a
  new product, for fewer slots, for none), gets that lock alone (`mapped`).
- The owner has a lock on its row for as long as it lives.

The locks are those of open files on bytes of the table's (fcntl(2), F_OFD_SETLK): the kernel takes them from a process
that dies, however it does. A process's files are closed one after the other as it ends, the device's perhaps before the
table; so `lasts` also asks the kernel whether the process has begun to end.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from gemmserve_service.runtime.mapping import Mapping
from gemmserve_service.store.extents.memfd import PANEL_ROW_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Side = Literal["a", "b"]

_SIDES: Final[tuple[Side, ...]] = ("a", "b")
_HEAD: Final = struct.Struct("<QQQI32s16s")
"""Incarnation of the worker (0: none), generation, process, slots, device's bus id, digest of the product."""
_SLOT: Final = struct.Struct("<BBiQQQ64s")
"""State, side, panel, number of the fill, offset, bytes, handle."""
_HEAD_BYTES: Final = 128
_SLOT_BYTES: Final = 96
MAX_SLOTS: Final = (PANEL_ROW_BYTES - _HEAD_BYTES) // _SLOT_BYTES
"""Slots of a row; what a device has beyond is not shared."""
_EMPTY, _COMING, _READY = range(3)
_STATE: Final = struct.Struct("<B")

_FLOCK: Final = struct.Struct("hhqqi0q")
"""struct flock: type, whence, start, length, process (0 for these locks)."""
_ROW_LOCKS: Final = 1 << 20
"""Bytes that a row's locks are apart; the first is held while its worker lives."""
_MAPPED_LOCKS: Final = 1 << 19
"""The first of those on generations, of which so many differ at a time; before them those on slots."""
_EXITING: Final = 4
"""PF_EXITING (include/linux/sched.h), among the flags in /proc/<process>/stat."""
_FLAGS: Final = 6
"""Place of the flags behind the name there."""


@dataclass(frozen=True, slots=True)
class PanelsFile:
    """The table as a worker finds it, and the row that is its own."""

    path: str
    row: int
    always: bool = False
    """Whether what another device has comes from there even where the host's memory is fast enough."""


@dataclass(frozen=True)
class Offer:
    """Memory of a slot, as another process finds it: allocation, offset in it, bytes."""

    handle: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Found:
    """Panel in a slot of another worker's."""

    row: int
    slot: int
    incarnation: int
    generation: int
    process: int
    bus_id: str
    fills: int
    offer: Offer
    ready: bool
    """Whether it is there, or under way from the host."""


@dataclass(frozen=True)
class _Head:
    incarnation: int
    generation: int
    process: int
    slots: int
    bus_id: bytes
    parent: bytes


class PanelTable:
    """The table, and one row that is this process's. Methods on one's own slots are called by one thread at a time for
    each slot; leases and mappings are for one thread at a time.
    """

    def __init__(self, file: PanelsFile, bus_id: str) -> None:
        """Raises OSError where the table cannot be mapped or locked, or the row is not free; ValueError for one that is
        none.
        """
        row = file.row
        fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(fd).st_size
            self._memory = Mapping(fd, nbytes).view(nbytes)
        finally:
            os.close(fd)
        self.rows = nbytes // PANEL_ROW_BYTES
        if not 0 <= row < self.rows:
            raise ValueError(f"row {row} of {self.rows}")
        self._fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)  # another open file: a mapping would keep its locks
        if not self._lock(fcntl.F_WRLCK, row * _ROW_LOCKS):
            os.close(self._fd)
            raise BlockingIOError(f"row {row} of the table of panels is another process's")
        self.row = row
        self._incarnation = 0
        self._generation = self._head(row).generation
        self._bus_id = bus_id.encode()
        self._parent = bytes(16)
        self._slots = 0
        self._write_head()
        self._incarnation = secrets.randbits(63) | 1
        self._fills = 0

    def close(self) -> None:
        """Leave the table, as the process's end does."""
        os.close(self._fd)

    # -- one's own row ----------------------------------------------------------------------------------------------

    def begin(self, parent: str, offers: Sequence[Offer]) -> int:
        """Have slots of that product, all empty; return the generation."""
        self.end()
        base = self._base(self.row)
        for number, offer in enumerate(offers[:MAX_SLOTS]):
            fields = (_EMPTY, 0, 0, 0, offer.offset, offer.nbytes, offer.handle)
            _SLOT.pack_into(self._memory, base + number * _SLOT_BYTES, *fields)
        self._slots = min(len(offers), MAX_SLOTS)
        self._parent = _digest(parent)
        return self.renew()

    def renew(self) -> int:
        """Begin another generation with the slots that there are: mappings of the one before are to be given up."""
        self._generation += 1
        self._write_head()
        return self._generation

    def end(self) -> None:
        """Have no slots any more: another generation, of which nothing can be mapped."""
        for slot in range(self._slots):
            self._put_state(slot, _EMPTY)
        self._slots, self._parent = 0, bytes(16)
        self.renew()

    def coming(self, slot: int, side: Side, panel: int) -> None:
        """Say that a panel comes to a slot that was `retract`ed."""
        self._fills += 1
        place = self._place(self.row, slot)
        _, _, _, _, *offer = _SLOT.unpack_from(self._memory, place)
        _SLOT.pack_into(self._memory, place, _EMPTY, _SIDES.index(side), panel, self._fills, *offer)
        self._put_state(slot, _COMING)

    def ready(self, slot: int) -> None:
        """Say that it is there."""
        self._put_state(slot, _READY)

    def retract(self, slot: int) -> bool:
        """Strike out what is in a slot; return whether nobody reads it. What is not struck out may be read again."""
        self._put_state(slot, _EMPTY)
        return self._alone(self._lease(self.row, slot))

    def mapped(self, generation: int) -> bool:
        """Whether anybody has memory of a generation of this row mapped."""
        return not self._alone(self._mapping(self.row, generation))

    # -- others' rows -----------------------------------------------------------------------------------------------

    def find(self, parent: str, side: Side, panel: int) -> Iterator[Found]:
        """Yield where that panel is, or is under way to, by what rows seem to say."""
        digest = _digest(parent)
        for row in range(self.rows):
            head = self._head(row)
            if row == self.row or head.parent != digest or not head.incarnation:
                continue
            for slot in range(min(head.slots, MAX_SLOTS)):
                found = self._found(row, slot, head, side, panel)
                if found is not None:
                    yield found

    def lease(self, found: Found) -> bool:
        """Keep a panel where it is until `release`; False: it may not be there any more."""
        if not self._lock(fcntl.F_RDLCK, self._lease(found.row, found.slot)):
            return False
        if found.ready and self._state(found.row, found.slot) == _READY and self.lasts(found):
            return True
        self.release(found)
        return False

    def release(self, found: Found) -> None:
        """Let it go."""
        self._lock(fcntl.F_UNLCK, self._lease(found.row, found.slot))

    def lasts(self, found: Found) -> bool:
        """Whether a panel on which there is a lease is what it was, and its worker lived until now."""
        head = self._head(found.row)
        fills = _SLOT.unpack_from(self._memory, self._place(found.row, found.slot))[3]
        same = (head.incarnation, head.generation, fills) == (found.incarnation, found.generation, found.fills)
        return same and self.lives(found)

    def lives(self, found: Found) -> bool:
        """Whether its worker has not begun to end."""
        return self._locked(found.row * _ROW_LOCKS) and not _ends(found.process)

    def current(self, row: int) -> tuple[int, int]:
        """Return incarnation and generation of a row."""
        head = self._head(row)
        return head.incarnation, head.generation

    def hold_mapping(self, found: Found) -> bool:
        """Keep memory of that generation while it is mapped; False: it may be gone."""
        place = self._mapping(found.row, found.generation)
        if not self._lock(fcntl.F_RDLCK, place):
            return False
        if self.current(found.row) == (found.incarnation, found.generation):
            return True
        self._lock(fcntl.F_UNLCK, place)
        return False

    def drop_mapping(self, row: int, generation: int) -> None:
        """Say that nothing of it is mapped any more."""
        self._lock(fcntl.F_UNLCK, self._mapping(row, generation))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _head(self, row: int) -> _Head:
        return _Head(*_HEAD.unpack_from(self._memory, row * PANEL_ROW_BYTES))

    def _write_head(self) -> None:
        fields = (self._incarnation, self._generation, os.getpid(), self._slots, self._bus_id, self._parent)
        _HEAD.pack_into(self._memory, self.row * PANEL_ROW_BYTES, *fields)

    def _found(self, row: int, slot: int, head: _Head, side: Side, panel: int) -> Found | None:
        fields = _SLOT.unpack_from(self._memory, self._place(row, slot))
        state, of_side, number, fills, offset, nbytes, handle = fields
        if state == _EMPTY or _SIDES[of_side] != side or number != panel:
            return None
        bus_id = head.bus_id.rstrip(b"\0").decode()
        offer = Offer(handle, offset, nbytes)
        return Found(row, slot, head.incarnation, head.generation, head.process, bus_id, fills, offer, state == _READY)

    @staticmethod
    def _base(row: int) -> int:
        return row * PANEL_ROW_BYTES + _HEAD_BYTES

    def _place(self, row: int, slot: int) -> int:
        return self._base(row) + slot * _SLOT_BYTES

    def _state(self, row: int, slot: int) -> int:
        return int(_STATE.unpack_from(self._memory, self._place(row, slot))[0])

    def _put_state(self, slot: int, state: int) -> None:
        _STATE.pack_into(self._memory, self._place(self.row, slot), state)

    @staticmethod
    def _lease(row: int, slot: int) -> int:
        return row * _ROW_LOCKS + 1 + slot

    @staticmethod
    def _mapping(row: int, generation: int) -> int:
        return row * _ROW_LOCKS + _MAPPED_LOCKS + generation % _MAPPED_LOCKS

    def _alone(self, place: int) -> bool:
        """Whether nobody else has a lock there at this moment."""
        if not self._lock(fcntl.F_WRLCK, place):
            return False
        self._lock(fcntl.F_UNLCK, place)
        return True

    def _lock(self, kind: int, place: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _locked(self, place: int) -> bool:
        """Whether somebody else has a lock there."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))
        return bool(kind != fcntl.F_UNLCK)


def _digest(parent: str) -> bytes:
    return hashlib.blake2b(parent.encode(), digest_size=16).digest()


def _ends(process: int) -> bool:
    """Whether a process has begun to end. The first thread's flags say so: none of its files is closed before."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    fields = text.rpartition(")")[2].split()
    return bool(int(fields[_FLAGS]) & _EXITING)
