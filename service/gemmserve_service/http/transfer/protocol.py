"""Messages between the front and a transfer process: packets (SOCK_SEQPACKET), each a JSON object.

A transfer process says hello, once. Every `Transfer` brings two descriptors (SCM_RIGHTS), the connection's and the
extent's, and is answered by one `Transferred`; by then the process has closed both and touches neither any more. A
transfer is short: it ends when its patience does, whatever has come, so that the front hears often enough of every body
for its rates, offsets and deadlines, and holds all of their state itself.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

MAX_PACKET: Final = 16 << 10
DESCRIPTORS: Final = 2
"""Descriptors that come with a `Transfer`: the connection, then the extent."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hello(_Message):
    """A transfer process's first packet."""

    kind: Literal["hello"] = "hello"
    name: str = Field(max_length=16)


class End(StrEnum):
    """Reason for which a transfer is over."""

    DONE = "done"
    """All bytes were moved."""
    PATIENCE = "patience"
    STOPPED = "stopped"
    HANGUP = "hangup"
    """The client has closed its connection, or broken it."""
    FAILED = "failed"
    """Something else; `detail` says what."""


class Transfer(_Message):
    """Front to process: bytes [offset, offset + count) of an extent's file, from the connection ("in") or to it
    ("out").
    """

    kind: Literal["transfer"] = "transfer"
    id: int
    direction: Literal["in", "out"]
    extent: str
    """The file's name (`Extent.file`). No other ever had it, so a mapping may be kept under it."""
    offset: int = Field(ge=0)
    count: int = Field(gt=0)
    patience_s: float = Field(ge=0)


class Stop(_Message):
    """Front to process: that transfer is to end. It is answered as any other, if it was not before."""

    kind: Literal["stop"] = "stop"
    id: int


class Forget(_Message):
    """Front to process: that extent is gone; its pages are given back when the process's mapping goes too."""

    kind: Literal["forget"] = "forget"
    extent: str


class Transferred(_Message):
    """Process to front: a transfer is over, and `count` bytes were moved."""

    kind: Literal["transferred"] = "transferred"
    id: int
    count: int = Field(ge=0)
    end: End
    detail: str = Field("", max_length=500)


TO_PROCESS: Final[TypeAdapter[Transfer | Stop | Forget]] = TypeAdapter(
    Annotated[Transfer | Stop | Forget, Field(discriminator="kind")]
)
TO_FRONT: Final[TypeAdapter[Hello | Transferred]] = TypeAdapter(
    Annotated[Hello | Transferred, Field(discriminator="kind")]
)
