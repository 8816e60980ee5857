"""Record: one array as the store keeps it in memory, and the descriptions of arrays that are not stored yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from gemmserve.wire import RESULT_DTYPES, format_npy_header
from gemmserve_service.runtime import clock

if TYPE_CHECKING:
    from datetime import datetime

    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pending import PendingResults
    from gemmserve_service.store.tier.cold import Cold

State = Literal["live", "deleted", "expired"]


@dataclass(frozen=True, slots=True)
class Tags:
    """Name and labels of an array; also what a search asks for. None and {}: none."""

    name: str | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is a name or a label."""
        return self.name is not None or bool(self.labels)

    def part(self, name: str, *, single: bool) -> Tags:
        """Tags of one of several results: that of the name `x` is called `x.<name>`; a single one `x`."""
        return self if single or self.name is None else Tags(f"{self.name}.{name}", self.labels)


NO_TAGS: Final = Tags()


class ArraySpec(NamedTuple):
    """Reserved array: `dtype` is a name of `wire.DTYPES`, `order` "C" or "F", `ttl_s` None for ever.

    One of `scratch` is no more than this: an array of one request has no row and no expiry, and is gone when released.
    """

    id: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    nbytes: int
    ttl_s: float | None
    scratch: bool
    owner: str = ""
    sha256: str | None = None
    expires_at: datetime | None = None
    tags: Tags = NO_TAGS


class Reservation(NamedTuple):
    """Array of the store for which there is to be room."""

    dtype: str
    shape: tuple[int, ...]
    order: str
    nbytes: int
    """Bytes that it has."""
    capacity: int
    """Bytes of the extent that it takes; 0: none."""
    tags: Tags = NO_TAGS

    def spec(self, array_id: str, ttl_s: float | None, owner: str) -> ArraySpec:
        """Return it as the reserved array of that id."""
        return ArraySpec(
            array_id, self.dtype, self.shape, self.order, self.nbytes, ttl_s, scratch=False, owner=owner, tags=self.tags
        )


@dataclass(slots=True)
class Record:
    """One array."""

    info: ArrayInfo | ArraySpec
    extent: Extent | None
    state: State = "live"
    pins: int = 0
    hidden: bool = False
    """Committed as deleted or expired: the extent may go with the last pin."""
    freed: bool = False
    recorded: bool = True
    """Whether it has a row, as far as is known."""
    lost: bool = False
    """Whether it is lost for good, and has no space any more."""
    npy_sha256: str | None = None
    """SHA-256 of the .npy file; None: not known."""
    pending: PendingResults | None = None
    """The pending results that it is one of; None: its bytes are in the extent."""
    tainted: bool = False
    """Whether a process that was lost may still write to the extent: it serves no other array."""

    users: int = 0
    """Pins whose holders were told where the bytes are."""
    tier: bytes | None = None
    """SHA-256 of the chunks of its object in the tier; None: it has none."""
    cold: Cold | None = None
    """Set while its bytes are in the tier alone."""

    def expired(self, now: float | None = None) -> bool:
        """Whether its time has passed."""
        expires = self.info.expires_at
        return expires is not None and expires.timestamp() <= (clock.time() if now is None else now)


def npy_header(dtype: str, shape: tuple[int, ...], order: str) -> bytes:
    """Return the header of an array's .npy file."""
    return format_npy_header(RESULT_DTYPES[dtype], shape, fortran_order=order == "F")
