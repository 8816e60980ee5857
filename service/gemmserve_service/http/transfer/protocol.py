"""What the front and a transfer process say to each other: packets (SOCK_SEQPACKET), each a JSON object.

A mover says hello, once. Every `Move` brings two descriptors (SCM_RIGHTS), the connection's and the extent's, and is
answered by one `Moved`; by then the mover has closed both and touches neither the connection nor the extent any more.
A move is short: it ends when its patience does, whatever has come, so that the front hears often enough of every body
for its rates, offsets and deadlines, and holds all of their state itself.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

MAX_PACKET: Final = 16 << 10
DESCRIPTORS: Final = 2
"""That a `Move` brings: the connection, then the extent."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hello(_Message):
    """The mover's first packet."""

    kind: Literal["hello"] = "hello"
    name: str = Field(max_length=16)


class End(StrEnum):
    """Why a move is over."""

    DONE = "done"
    """All bytes were moved."""
    PATIENCE = "patience"
    STOPPED = "stopped"
    HANGUP = "hangup"
    """The client has closed its connection, or broken it."""
    FAILED = "failed"
    """Something else; `detail` says what."""


class Move(_Message):
    """Front to mover: bytes [offset, offset + count) of an extent, from the connection ("in") or to it ("out")."""

    kind: Literal["move"] = "move"
    id: int
    direction: Literal["in", "out"]
    extent: str
    """Its name. No other extent ever had it, so a mapping may be kept under it."""
    offset: int = Field(ge=0)
    count: int = Field(gt=0)
    patience_s: float = Field(ge=0)


class Stop(_Message):
    """Front to mover: that move is to end. It is answered as any other, if it was not before."""

    kind: Literal["stop"] = "stop"
    id: int


class Forget(_Message):
    """Front to mover: that extent is gone; its pages are given back when the mover's mapping goes too."""

    kind: Literal["forget"] = "forget"
    extent: str


class Moved(_Message):
    """Mover to front: a move is over, and `count` bytes were moved."""

    kind: Literal["moved"] = "moved"
    id: int
    count: int = Field(ge=0)
    end: End
    detail: str = Field("", max_length=500)


TO_MOVER: Final[TypeAdapter[Move | Stop | Forget]] = TypeAdapter(
    Annotated[Move | Stop | Forget, Field(discriminator="kind")]
)
TO_FRONT: Final[TypeAdapter[Hello | Moved]] = TypeAdapter(Annotated[Hello | Moved, Field(discriminator="kind")])
