"""Record beside an object of the tier: what an array is besides its bytes, so that another server can adopt it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_service.runtime import clock
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store.tier.objects import CHUNK, DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_service.store.record import ArraySpec


def record_of(info: ArrayInfo | ArraySpec) -> dict[str, object]:
    """Return what the record beside an object says; the digests are added as it is written."""
    created, expires = _times_of(info)
    name, labels = (info.name, info.labels) if isinstance(info, ArrayInfo) else (info.tags.name, info.tags.labels)
    return {
        "id": info.id,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "order": info.order,
        "nbytes": info.nbytes,
        "created_at": created,
        "expires_at": expires,
        "owner": info.owner,
        "name": name,
        "labels": labels,
    }


def read_record(beside: Mapping[str, Any]) -> tuple[ArrayInfo, bytes] | None:
    """Return what such a record says: the array, and the digests of its chunks. None: nothing that makes sense."""
    try:
        fields = {name: beside[name] for name in ("id", "dtype", "shape", "order", "nbytes", "owner", "name", "labels")}
        expires = beside["expires_at"]
        info = ArrayInfo(
            **fields,
            sha256=None,
            created_at=datetime.fromtimestamp(beside["created_at"], UTC),
            expires_at=None if expires is None else datetime.fromtimestamp(expires, UTC),
        )
        digests = b"".join(bytes.fromhex(each) for each in beside["sha256"])
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None
    size = math.prod(info.shape) * np.dtype(info.dtype).itemsize
    whole = size == info.nbytes and beside.get("chunk") == CHUNK and len(digests) == DIGEST_BYTES * -(-size // CHUNK)
    return (info, digests) if whole else None


def _times_of(info: ArrayInfo | ArraySpec) -> tuple[float, float | None]:
    """Return when an array was made, and when it expires: of an upload that becomes one now, nearly."""
    if isinstance(info, ArrayInfo):
        return info.created_at.timestamp(), None if info.expires_at is None else info.expires_at.timestamp()
    created = clock.time()
    return created, None if info.ttl_s is None else created + info.ttl_s
