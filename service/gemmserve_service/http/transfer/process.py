"""A transfer process: one thread that moves bytes for the front, for as many connections at a time as it is told.

A connection's socket does not block, whichever process reads it: what cannot go on waits in a selector, and those that
can take turns. Bytes go from and to a mapping, which is kept from one transfer to the next: touching fresh pages costs
two thirds of what the copy does. `sendfile` was no faster, and leaves pages of the extent in the socket's queue
after it has returned: an extent that was freed and filled anew would then be sent to the wrong client.

The kernel wakes who reads a TCP socket for every segment, 64 KiB by the loopback, if he is faster than the client:
forty times for 16 MiB, which took a fifth longer. So a transfer that waits says for how many bytes (SO_RCVLOWAT of
socket(7)); that is part of the connection, and is taken back before the front has it again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import socket
import time
from collections import OrderedDict, deque
from typing import Final

from gemmserve_service.http.transfer.protocol import (
    DESCRIPTORS,
    MAX_PACKET,
    TO_PROCESS,
    End,
    Forget,
    Hello,
    Stop,
    Transfer,
    Transferred,
)

_AT_ONCE: Final = 1 << 20  # bytes of one system call
_IN_A_TURN: Final = 4 << 20  # bytes of one connection before the next has its turn
_WORTH_WAKING: Final = 1 << 20  # bytes that a transfer waits for, unless it asks for less
_MAX_MAPPED: Final = 256  # extents; the front keeps no more than some hundreds of free ones either


class Mappings:
    """Extents by name, mapped once; those that were not used for longest go when there are too many."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()

    def view(self, name: str, fd: int, offset: int, count: int) -> memoryview:
        """A part of the extent whose descriptor is `fd`. Raises ValueError past its end, and OSError."""
        known = self._maps.get(name)
        if known is None:
            known = self._maps[name] = mmap.mmap(fd, os.fstat(fd).st_size)
            if len(self._maps) > _MAX_MAPPED:
                self._maps.popitem(last=False)
        self._maps.move_to_end(name)
        if offset + count > len(known):
            raise ValueError(f"bytes up to {offset + count} of an extent of {len(known)}")
        return memoryview(known)[offset : offset + count]

    def forget(self, name: str) -> None:
        """Drops it; a transfer that is under way keeps it for as long."""
        self._maps.pop(name, None)

    def __len__(self) -> int:
        return len(self._maps)


class _Running:
    """A transfer and its connection."""

    __slots__ = ("_low_water", "_tcp", "connection", "count", "deadline", "inward", "order", "view", "waiting")

    def __init__(self, order: Transfer, connection: socket.socket, view: memoryview) -> None:
        self.order = order
        self.connection = connection
        self.view = view
        self.inward = order.direction == "in"
        self.deadline = time.monotonic() + order.patience_s
        self.count = 0
        self.waiting = False
        self._tcp = connection.family in {socket.AF_INET, socket.AF_INET6}
        self._low_water = 1

    def turn(self) -> End | None:
        """Moves what can be moved now, though not too much. None: there is more to do."""
        most = min(self.count + _IN_A_TURN, len(self.view))
        try:
            while self.count < most:
                piece = self.view[self.count : min(self.count + _AT_ONCE, most)]
                # Never past its count: what follows is the next request's, and the front's to read.
                moved = self.connection.recv_into(piece) if self.inward else self.connection.send(piece)
                if not moved:
                    return End.HANGUP
                self.count += moved
        except BlockingIOError:
            self.waiting = True
            if self.inward and self._tcp:
                self._wake_for(min(len(self.view) - self.count, _WORTH_WAKING))
            return None
        except ConnectionError:
            return End.HANGUP
        return End.DONE if self.count == len(self.view) else None

    def close(self) -> None:
        """Let go of the connection, as it was, and of the extent."""
        self._wake_for(1)
        self.connection.close()
        self.view.release()

    def _wake_for(self, count: int) -> None:
        """Have the selector wait until so many bytes have come, where the system knows how."""
        if count != self._low_water:
            with contextlib.suppress(OSError):  # of a connection that is broken, too: its next read says so
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water = count


class TransferProcess:
    """The process's work, on its connection to the front."""

    def __init__(self, control: socket.socket, name: str) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._running: dict[int, _Running] = {}
        self._turns: deque[_Running] = deque()
        self._mappings = Mappings()
        self._open = True
        control.send(Hello(name=name).model_dump_json().encode())
        control.setblocking(False)  # `recv_fds` knows no other way before Python 3.12: it drops its flags

    def run(self) -> None:
        """Move bytes until the front is gone."""
        while self._open:
            self._wait()
            for _ in range(len(self._turns)):
                running = self._turns.popleft()
                if running.order.id in self._running:
                    self._turn(running)
            now = time.monotonic()
            for running in [one for one in self._running.values() if one.deadline <= now]:
                if running.waiting:
                    self._turn(running, last=True)
                else:
                    self._end(running, End.PATIENCE)

    def close(self) -> None:
        """Lets go of everything."""
        for running in list(self._running.values()):
            running.close()
        self._selector.close()
        self._control.close()

    def _wait(self) -> None:
        """Wait for something to do; orders come before bytes."""
        timeout = None
        if self._turns:
            timeout = 0.0
        elif self._running:
            timeout = max(0.0, min(one.deadline for one in self._running.values()) - time.monotonic())
        ready = self._selector.select(timeout)
        if any(key.fileobj is self._control for key, _ in ready):
            self._read_orders()
        for key, _ in ready:
            running = key.data
            if running is not None and running.order.id in self._running and running.waiting:
                self._selector.unregister(running.connection)
                running.waiting = False
                self._turns.append(running)

    def _read_orders(self) -> None:
        while self._open:
            try:
                data, fds, flags, _ = socket.recv_fds(self._control, MAX_PACKET, DESCRIPTORS)
            except BlockingIOError:
                return
            except ConnectionError:
                self._open = False
                return
            with contextlib.ExitStack() as stack:
                for fd in fds:
                    stack.callback(os.close, fd)
                if not data:
                    self._open = False
                    return
                if flags & socket.MSG_CTRUNC:  # this process may open no more files
                    fds = []
                self._order(TO_PROCESS.validate_json(data), fds)

    def _order(self, order: Transfer | Stop | Forget, fds: list[int]) -> None:
        if isinstance(order, Forget):
            self._mappings.forget(order.extent)
        elif isinstance(order, Stop):
            running = self._running.get(order.id)
            if running is not None:
                self._end(running, End.STOPPED)
        else:
            if len(fds) != DESCRIPTORS:
                self._tell(Transferred(id=order.id, count=0, end=End.FAILED, detail=f"{len(fds)} descriptors came"))
                return
            try:
                view = self._mappings.view(order.extent, fds[1], order.offset, order.count)
                connection = socket.socket(fileno=os.dup(fds[0]))
            except (OSError, ValueError) as error:
                self._tell(Transferred(id=order.id, count=0, end=End.FAILED, detail=str(error)[:500]))
                return
            connection.setblocking(False)  # as it is: the flag is the connection's, not the descriptor's
            self._running[order.id] = running = _Running(order, connection, view)
            self._turns.append(running)

    def _turn(self, running: _Running, *, last: bool = False) -> None:
        """`last`: its patience is at an end, and it may have less than it waits for."""
        try:
            end = running.turn()
        except OSError as error:
            self._end(running, End.FAILED, str(error))
            return
        if end is None and last:
            end = End.PATIENCE
        if end is not None:
            self._end(running, end)
        elif running.waiting:
            event = selectors.EVENT_READ if running.inward else selectors.EVENT_WRITE
            self._selector.register(running.connection, event, running)
        else:
            self._turns.append(running)

    def _end(self, running: _Running, end: End, detail: str = "") -> None:
        """Lets go of connection and extent first, then says so."""
        del self._running[running.order.id]
        if running.waiting:
            self._selector.unregister(running.connection)
            running.waiting = False
        running.close()
        self._tell(Transferred(id=running.order.id, count=running.count, end=end, detail=detail[:500]))

    def _tell(self, moved: Transferred) -> None:
        packet = moved.model_dump_json().encode()
        try:
            try:
                self._control.send(packet)
            except BlockingIOError:  # a front that is very busy
                self._control.setblocking(True)
                self._control.send(packet)
                self._control.setblocking(False)
        except ConnectionError:
            self._open = False
