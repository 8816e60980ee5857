"""Stages of the blocks of a large product, and its panels' ways to the device, from a worker's log at level debug."""

from __future__ import annotations

import re

STAGES = ("load", "compute", "finish", "store")
_BLOCK = re.compile(r"block (\S+)/(\d+): (\w+) from (\d+\.\d+) to (\d+\.\d+)")
_PANEL = re.compile(r"panel ([ab]\d+): up from (\d+\.\d+) to (\d+\.\d+)")


def last_product(log):
    """Return lines about the last product in a log, in the order of their beginnings, in milliseconds since the first:
    one for each panel that came, one for each block with its stages. A device has one product at a time.
    """
    blocks = [(task, int(index), stage, float(a), float(b)) for task, index, stage, a, b in _BLOCK.findall(log)]
    if not blocks:
        return []
    last = [found for found in blocks if found[0] == blocks[-1][0]]
    before = max((end for task, *_, end in blocks if task != blocks[-1][0]), default=0.0)
    panels = [(name, float(a), float(b)) for name, a, b in _PANEL.findall(log) if float(a) >= before]
    start = min([began for *_, began, _ in last] + [began for _, began, _ in panels])

    def span(began, ended):
        return f"{1e3 * (began - start):.1f}-{1e3 * (ended - start):.1f}"

    stages = {}
    for _, index, stage, began, ended in last:
        stages.setdefault(index, {})[stage] = began, ended
    lines = [(began, f"panel {name}: {span(began, ended)}") for name, began, ended in panels]
    for index, found in stages.items():
        said = ", ".join(f"{stage} {span(*found[stage])}" for stage in STAGES if stage in found)
        lines.append((min(found.values())[0], f"block {index}: {said}"))
    return [line for _, line in sorted(lines, key=lambda each: each[0])]
