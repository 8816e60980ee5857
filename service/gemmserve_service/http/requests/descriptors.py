"""Shared memory from clients of this machine: memfds that come over a Unix socket of their own, beside HTTP.

A connection to that socket is a session. The client says hello with its API key and is told the session's secret; from
then on each packet that it sends carries one descriptor and the number by which a request will name it. Requests go by
HTTP as ever, with the secret in a header; only the bytes of their arrays lie in the memory. Nothing is answered on the
session: what was sent before a request is read, at the latest, when the request asks for it.

A packet (SOCK_SEQPACKET keeps their bounds) is a JSON object, never a pickle, with at most one descriptor (SCM_RIGHTS).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
from collections import OrderedDict
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gemmserve_service.errors import DescriptorRefused, ServiceError, describe
from gemmserve_service.runtime.acceptor import Acceptor
from gemmserve_service.store.extents.shared_memory import Memory
from gemmserve_service.tenancy.identity import identify

if TYPE_CHECKING:
    from gemmserve_service.settings import Settings
    from gemmserve_service.tenancy.keyring import KeyringWatch

_MAX_PACKET: Final = 16 << 10
_MAX_SESSIONS: Final = 256  # beyond them the one that has done nothing for longest ends
_MAX_OF_SESSION: Final = 64  # pieces that one session may have passed and not used; a request uses four at most
_MAX_RECEIVED: Final = 4  # descriptors that are taken from one packet; it should have one

log = logging.getLogger(__name__)


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Hello(_Frame):
    """The first packet, without a descriptor."""

    kind: Literal["hello"]
    version: Literal[1]
    api_key: str | None = Field(None, max_length=4096)


class _Memory(_Frame):
    """A descriptor. The request that names `number` uses it, and nobody after that."""

    kind: Literal["memory"]
    number: int = Field(ge=0, le=1 << 53)
    offset: int = Field(0, ge=0, le=1 << 62, description="where the array begins")


_FRAME: Final[TypeAdapter[_Hello | _Memory]] = TypeAdapter(Annotated[_Hello | _Memory, Field(discriminator="kind")])


class Descriptors:
    """Every session of one front; belongs to the event loop's thread."""

    def __init__(self, settings: Settings, keyring: KeyringWatch) -> None:
        self._settings = settings
        self._keyring = keyring
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._greeting: OrderedDict[int, Session] = OrderedDict()
        self._acceptor: Acceptor | None = None

    @property
    def held(self) -> int:
        """Descriptors that wait for their request."""
        return sum(session.held for session in self._sessions.values())

    @property
    def sessions(self) -> int:
        """Clients that have said hello."""
        return len(self._sessions)

    def start(self, listener: socket.socket) -> None:
        """Takes connections from now on."""
        self._acceptor = Acceptor(listener, self._take, "connections for shared memory")

    def stop(self) -> None:
        """Ends every session; the listener stays open, for it is the supervisor's."""
        if self._acceptor is not None:
            self._acceptor.stop()
            self._acceptor = None
        for session in [*self._sessions.values(), *self._greeting.values()]:
            session.close()

    def session(self, secret: str, owner: str) -> Session:
        """The session of that secret, if it belongs to `owner`. Raises DescriptorRefused."""
        session = self._sessions.get(secret)
        if session is None or session.owner != owner:
            raise DescriptorRefused("no such session: its connection has ended, or was another key's")
        self._sessions.move_to_end(secret)
        return session

    def room(self) -> bool:
        """Whether one more descriptor may wait."""
        return self.held < self._settings.max_shared_descriptors

    def greeted(self, session: Session, hello: _Hello) -> str:
        """A secret for a session that has said hello. Raises Unauthorized."""
        keys = [] if hello.api_key is None else [hello.api_key]
        session.owner = identify(self._keyring.current, (), keys).owner
        self._greeting.pop(id(session), None)
        secret = secrets.token_hex(32)
        self._sessions[secret] = session
        if len(self._sessions) > _MAX_SESSIONS:
            next(iter(self._sessions.values())).close()
        return secret

    def closed(self, session: Session) -> None:
        """Forgets a session."""
        self._greeting.pop(id(session), None)
        self._sessions.pop(session.secret, None)

    def _take(self, connection: socket.socket) -> None:
        session = Session(self, connection, self._settings.head_timeout_s)
        self._greeting[id(session)] = session
        if len(self._greeting) > _MAX_SESSIONS:
            next(iter(self._greeting.values())).close()


class Session:
    """One client's connection and the memory that it has passed and not used."""

    def __init__(self, registry: Descriptors, connection: socket.socket, greeting_s: float) -> None:
        self.owner = ""
        self.secret = ""
        self._registry = registry
        self._connection: socket.socket | None = connection
        self._memory: dict[int, Memory | DescriptorRefused] = {}
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection.fileno(), self._read)
        self._deadline: asyncio.TimerHandle | None = loop.call_later(greeting_s, self.close)

    @property
    def held(self) -> int:
        """Descriptors that wait."""
        return len(self._memory)

    def take(self, number: int) -> Memory:
        """The memory passed under `number`, the caller's from here on. Raises DescriptorRefused."""
        if number not in self._memory:
            self._read()  # it was sent before the request, so it is there even if the loop has not looked yet
        memory = self._memory.pop(number, None)
        if memory is None:
            raise DescriptorRefused(f"no descriptor {number} was passed, or it was used before")
        if isinstance(memory, DescriptorRefused):
            raise memory
        return memory

    def close(self) -> None:
        """Ends the session and lets go of what was not used."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
        for memory in self._memory.values():
            if isinstance(memory, Memory):
                memory.close()
        self._memory.clear()
        self._registry.closed(self)

    def _read(self) -> None:
        """Reads every packet that has come."""
        while self._connection is not None:
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._connection, _MAX_PACKET, _MAX_RECEIVED, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            with contextlib.ExitStack() as unused:
                for fd in fds:
                    unused.callback(os.close, fd)
                if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > 1:
                    self.close()  # its end; or more than a client would send, or than this process could open
                    return
                if self._packet(data, fds):
                    unused.pop_all()

    def _packet(self, data: bytes, fds: list[int]) -> bool:
        """Reads one packet. True: the descriptor is kept."""
        try:
            frame = _FRAME.validate_json(data)
            if isinstance(frame, _Hello) and not self.secret and not fds:
                self._greet(frame)
                return False
            if isinstance(frame, _Memory) and self.secret and fds and frame.number not in self._memory:
                return self._keep(frame, fds[0])
        except ValidationError:
            pass  # as for what has no place here
        log.warning("a client for shared memory speaks nonsense: its session ends")
        self.close()
        return False

    def _keep(self, frame: _Memory, fd: int) -> bool:
        if self.held >= 2 * _MAX_OF_SESSION:  # refusals too take memory
            self.close()
            return False
        if self.held >= _MAX_OF_SESSION or not self._registry.room():
            self._memory[frame.number] = DescriptorRefused("too many descriptors wait for their requests")
            return False
        try:
            self._memory[frame.number] = Memory.examine(fd, frame.offset)
        except DescriptorRefused as refusal:
            self._memory[frame.number] = refusal
            return False
        return True

    def _greet(self, hello: _Hello) -> None:
        assert self._connection is not None
        answer: dict[str, object]
        try:
            self.secret = self._registry.greeted(self, hello)
            answer = {"kind": "welcome", "session": self.secret}
        except ServiceError as refusal:
            answer = {"kind": "refused", "problem": describe(refusal).problem().model_dump(mode="json")}
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        try:
            self._connection.send(json.dumps(answer).encode())
        except OSError:
            self.close()
        if not self.secret:
            self.close()
