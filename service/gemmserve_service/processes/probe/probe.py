"""Probe of a host: rates of its devices, links, memory and disk, as a document that `gemmserve plan --probe` reads."""

from __future__ import annotations

import math
import os
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from gemmserve_kernels import DeviceSpec
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.device.spec import device_errors
from gemmserve_kernels.planning.rates import COPY_TRAFFIC, RING_TRAFFIC, Rates, Way
from gemmserve_service.processes.probe.amounts import FULL, Amounts, Deadline
from gemmserve_service.processes.probe.host import copy_rates, disk_rates, first_touch_rates
from gemmserve_service.processes.probe.links import LinkedDevice, link_rates
from gemmserve_service.processes.probe.products import DTYPES, fastest, product_times

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def probe(device: str, folder: Path, amounts: Amounts = FULL) -> dict[str, Any]:
    """Return what was measured. `device` as `serve --device` has it; `folder`: whose disk is measured, made if it is
    not there. Products that time or memory does not suffice for are left out, and named. Raises DeviceError, OSError.
    """
    begun = time.perf_counter()
    ordinals = ordinals_of(device)
    spec = DeviceSpec.of(ordinals[0]) if ordinals else DeviceSpec.cpu()
    folder.mkdir(parents=True, exist_ok=True)
    copies = copy_rates(amounts.copied_bytes, amounts.threads)
    host: dict[str, Any] = {
        "cpus": os.cpu_count(),
        "copy": copies,
        "first_touch": first_touch_rates(amounts.copied_bytes, amounts.threads),
        "disk": disk_rates(folder, amounts.file_bytes),
    }
    memory = COPY_TRAFFIC * max(copies.values())
    pinned = pageable = Way(math.inf, math.inf)
    stored: Way | None = None
    links: dict[str, Any] | None = None
    if ordinals:
        links = _links(ordinals, amounts, folder)
        pinned = Way(links["pinned_up"]["alone"], links["pinned_down"]["alone"])
        pageable = Way(*(max(each["alone"] for each in links[name].values()) for name in ("ring_up", "ring_down")))
        stored = Way(**links["stored"])
        rings = [each["together"] for name in ("ring_up", "ring_down") for each in links[name].values()]
        memory = max(memory, RING_TRAFFIC * max(rings), links["pinned_both"]["together"])
    with device_errors() if ordinals else nullcontext():
        if ordinals:
            import cupy

            cupy.cuda.Device(ordinals[0]).use()
        products, skipped = product_times(spec, amounts, Deadline(amounts.seconds))
    found = environment(spec)
    count = max(len(ordinals), 1)
    about = f"{f'{count} x ' if count > 1 else ''}{spec.name}, {os.cpu_count()} cores, measured {found['date'][:10]}"
    rates = Rates(spec, tuple(products), pinned, pageable, memory, None, count, about, stored)
    measured = {"host": host, "links": links, "left_out": skipped, "seconds": time.perf_counter() - begun}
    return rates.document() | {"environment": found, "measured": measured}


def ordinals_of(device: str) -> list[int]:
    """Return the numbers of the GPUs that a setting names; none for the CPU. Raises ValueError."""
    if device == "auto":
        return list(range(len(DeviceSpec.all())))
    if device.startswith("cpu"):
        return []
    return [int(name.strip().partition(":")[2] or 0) for name in device.split(",")]


def _links(ordinals: Sequence[int], amounts: Amounts, folder: Path) -> dict[str, Any]:
    import cupy

    with device_errors():
        devices = [LinkedDevice(cupy, ordinal, amounts.copied_bytes) for ordinal in ordinals]
        return link_rates(devices, amounts.threads) | {"stored": devices[0].stored(folder, amounts.slice_s)}


def summary(document: dict[str, Any]) -> list[str]:
    """Return lines for people: what was measured, in short."""
    from gemmserve_kernels.planning.quantities import bytes_text, digits
    from gemmserve_kernels.planning.rates import rates_of

    rates = rates_of(document)
    host = document["measured"]["host"]
    products = ", ".join(
        f"{dtype} {digits(rate / 1e12)}" for dtype in DTYPES if (rate := fastest(rates.products, dtype))
    )
    shown = [
        f"{rates.about}",
        f"products, Tflop/s: {products}",
        f"host memory: {bytes_text(max(host['copy'].values()))}/s copied",
        f"host memory, first touch: {bytes_text(max(host['first_touch'].values()))}/s",
        f"disk: {bytes_text(host['disk']['write'])}/s written, {bytes_text(host['disk']['read'])}/s read",
    ]
    if not math.isinf(rates.pinned.up):
        shown[2:2] = [
            f"link, pinned: {bytes_text(rates.pinned.up)}/s up, {bytes_text(rates.pinned.down)}/s down",
            f"link, through the ring: {bytes_text(rates.pageable.up)}/s up, {bytes_text(rates.pageable.down)}/s down",
        ]
    if rates.stored is not None:
        both = f"{bytes_text(rates.stored.up)}/s up and {bytes_text(rates.stored.down)}/s down"
        shown.insert(4, f"link, through the ring, parts of files: {both} at once")
    return shown + [f"left out: {each}" for each in document["measured"]["left_out"]]
