"""Findings on the tier below the store: whether it answers, with the credentials that there are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gemmserve_service.errors import TierUnavailable
from gemmserve_service.processes.doctor.machine import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_service.settings import Settings

_ADVICE = "look at GEMMSERVE_TIER, at the credentials in the environment, and at the bucket's policy"


def tier(settings: Settings) -> Iterator[Finding]:
    """Whether the tier can be read; nothing without one. Writes nothing."""
    if settings.tier is None:
        return
    from gemmserve_service.store.tier.objects import Objects, TierUnusableError

    try:
        owner = Objects(settings.tier).owner()
    except (TierUnusableError, TierUnavailable) as error:
        yield Finding("error", "tier", str(error), _ADVICE)
        return
    if settings.max_store_bytes is None and settings.durability != "replicated":
        advice = "set GEMMSERVE_MAX_STORE_BYTES: without it nothing ever leaves for the tier"
        yield Finding("note", "tier", f"{settings.tier} answers, and is never used", advice)
        return
    text = "holds nothing yet" if owner is None else f"holds arrays of the data directory {json.dumps(owner)}"
    yield Finding("ok", "tier", f"{settings.tier} answers, and {text}")
