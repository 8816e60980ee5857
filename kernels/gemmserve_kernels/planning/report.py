"""Report of a prediction: lines for people, JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.planning.quantities import bytes_text, digits, seconds_text

if TYPE_CHECKING:
    from gemmserve_kernels.planning.model import Cut, Prediction
    from gemmserve_kernels.planning.rates import Rates


def as_json(found: Prediction, rates: Rates, times: float) -> dict[str, Any]:
    """Return everything about a prediction. `times`: as fast as one device."""
    return asdict(found) | {
        "seconds": found.seconds,
        "flops_per_s": found.rate,
        "bound": found.bound,
        "device": rates.spec.name,
        "rates": rates.about,
        "times_one_device": times,
        "efficiency": times / found.hosts.count,
    }


def lines(found: Prediction, rates: Rates, times: float) -> list[str]:
    """Return the lines that `gemmserve plan` prints."""
    product, hosts = found.product, found.hosts
    where = f"{hosts.count} x {rates.spec.name}" if hosts.count > 1 else rates.spec.name
    nodes = f" on {hosts.nodes} nodes" if hosts.nodes > 1 else ""
    waits = {
        "products": found.compute_s,
        "waiting for panels": found.start_s,
        "uneven shares": found.uneven_s,
        "last window": found.end_s,
    }
    table = {
        "product": f"{product.dtype} {product.m} x {product.n} x {product.k}, {product.compute}: {found.algorithm}",
        "devices": f"{where}{nodes}; rates: {rates.about}",
        "time": f"{seconds_text(found.seconds)}, {digits(found.rate / 1e12)} Tflop/s",
        "one device": f"{digits(times)} times as fast, efficiency {times / hosts.count:.0%}",
        "bound by": found.bound,
        "made of": ", ".join(f"{seconds_text(value)} {name}" for name, value in waits.items() if value),
        "cut": _cut_text(found),
        "memory": _memory_text(found, rates),
        "transfers": _transfers_text(found),
    }
    shown = [f"{name:<11} {text}" for name, text in table.items()]
    return shown + [f"{'note':<11} {note}" for note in found.notes]


def _cut_text(found: Prediction) -> str:
    rows, columns = found.blocks
    if found.block_count == 1:
        return "none: one block"
    blocks = f"{found.block_count} blocks of {rows} x {columns}"
    k = "k whole" if found.k_parts * found.cut.layers == 1 else f"k in {found.k_parts * found.cut.layers} parts"
    return f"{blocks}, {k}{_grid_text(found.cut)}"


def _grid_text(cut: Cut) -> str:
    parts = []
    if cut.node_rows * cut.node_columns > 1:
        parts.append(f"nodes {cut.node_rows} x {cut.node_columns}")
    if cut.rows * cut.columns > 1:
        parts.append(f"devices {cut.rows} x {cut.columns}" + (" (row shares)" if cut.columns == 1 else ""))
    return "".join(f", {part}" for part in parts)


def _memory_text(found: Prediction, rates: Rates) -> str:
    whole = rates.spec.memory_bytes if found.hosts.device_memory is None else found.hosts.device_memory
    streams = {None: "everything stays", "a": "A streams", "b": "B streams", "both": "one panel of each at a time"}
    return f"{bytes_text(found.memory.used_bytes)} of {bytes_text(whole)} a device; {streams[found.memory.streams]}"


def _transfers_text(found: Prediction) -> str:
    if not found.uploaded and not found.network:
        return "none"
    parts = [f"{bytes_text(found.uploaded)} up and {bytes_text(found.downloaded)} down a device"]
    if found.hosts.devices > 1:
        parts.append(f"{bytes_text(found.from_host)} out of a host's memory")
    if found.network:
        parts.append(f"{bytes_text(found.network)} to a node")
    return ", ".join(parts)
