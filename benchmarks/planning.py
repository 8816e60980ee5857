"""Predictions of products on devices, hosts and nodes: `python -m benchmarks.planning`.

It writes docs/benchmarks/planning.json, from rates that were measured on a host with two devices
(`gemmserve_kernels/planning/hosts`), beside what was measured of products that were split over them. Nothing is timed
here: run it again after a change of the model, of the dispatch's tables, or of the rates.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

OUTPUT = Path(__file__).parents[1] / "docs" / "benchmarks" / "planning.json"

# Seconds of complex64 32768 x 32768 x 32768 on two H200s of one host, 2026-11-22: operands and result in pinned memory
# of the host, copies under products. Devices, sides of blocks, whether half of B came from the other device.
SPLIT_SIZE = 32768
SPLITS = [
    (1, 4096, False, 1.42),
    (2, 4096, False, 0.732),
    (2, 4096, True, 0.739),
    (1, 2048, False, 1.58),
    (2, 2048, False, 0.816),
    (2, 2048, True, 0.804),
]
LOADS = tuple(OUTPUT.parent / f"load-nvidia-h200-x2{name}.json" for name in ("-again", ""))
"""Load tests of two hosts alike; of what several have, the first one counts."""
HOST_SIZES = (16384, 32768, 65536)
ROOMY_HOST = 400e9  # bytes a second of the memory of a host that is assumed beside the measured one
NODE_SIZES = (65536, 262144)
NODES = (2, 4, 8, 16, 64, 256, 1000)
NODE_DEVICES = 8
LINKS = {"100 Gb/s": 12.5e9, "400 Gb/s": 50e9}


def predictions():
    """Return the document."""
    from gemmserve_kernels.planning.model import Hosts, Product, predict, speedup
    from gemmserve_kernels.planning.rates import shipped

    rates = shipped()
    roomy = replace(rates, host_memory=ROOMY_HOST)

    def cube(n):
        return Product(n, n, n)

    splits = [
        {
            "devices": devices,
            "side": side,
            "peers": peers,
            "measured_s": measured,
            "predicted_s": predict(
                rates, cube(SPLIT_SIZE), Hosts(devices, memory="pinned", peers=peers), side=side
            ).seconds,
        }
        for devices, side, peers, measured in SPLITS
    ]
    budgets = [
        {
            "n": each["n"],
            "devices": each["devices"],
            "budget": each["budget"],
            "measured_s": each["others_s"],
            "predicted_s": predict(
                rates, cube(each["n"]), Hosts(each["devices"], memory="pageable", device_memory=each["budget"])
            ).seconds,
        }
        for each in served()
    ]
    hosts = []
    for n in HOST_SIZES:
        for devices in range(1, 9):
            row = {"n": n, "devices": devices}
            for name, source, memory in (
                ("pinned", rates, "pinned"),
                ("stored", rates, "pageable"),
                ("pinned_roomy", roomy, "pinned"),
                ("stored_roomy", roomy, "pageable"),
            ):
                found = predict(source, cube(n), Hosts(devices, memory=memory))
                row[name] = {
                    "seconds": found.seconds,
                    "times": speedup(source, found),
                    "devices": found.hosts.count,
                    "bound": found.bound,
                }
            hosts.append(row)
    nodes = []
    for n in NODE_SIZES:
        one = predict(roomy, cube(n), Hosts(NODE_DEVICES, memory="pinned"))
        for count in NODES:
            row = {"n": n, "nodes": count, "one_node_s": one.seconds}
            for name, link in LINKS.items():
                found = predict(roomy, cube(n), Hosts(NODE_DEVICES, count, link, memory="pinned"))
                row[name] = {
                    "seconds": found.seconds,
                    "times": one.seconds / found.seconds,
                    "nodes": found.hosts.nodes,
                    "bound": found.bound,
                }
            nodes.append(row)
    return {
        "environment": {"rates": rates.about, "device": rates.spec.name, "host_memory": rates.host_memory},
        "roomy_host_memory": ROOMY_HOST,
        "pinned": asdict(rates.pinned),
        "pageable": asdict(rates.pageable),
        "splits": splits,
        "budgets": budgets,
        "hosts": hosts,
        "nodes": nodes,
    }


def served():
    """Return the load tests' figures of a product larger than memory, each with its number of `devices`."""
    found = {}
    for path in LOADS:
        for each in json.loads(path.read_text(encoding="utf-8"))["figures"]:
            if each["row"] == "large-product":
                found.setdefault(each["case"], {**each, "devices": len(each["devices"].split(","))})
    return list(found.values())


@cache
def report():
    """Return the JSON."""
    return json.loads(OUTPUT.read_text(encoding="utf-8"))


def _table(columns, rows):
    lines = ["", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), "", ""])


def splits_table():
    """Return the table of splits as measured and as predicted."""
    rows = [
        (
            str(each["devices"]),
            f"{each['side']}²",
            "half from the other device" if each["peers"] else "from the host",
            f"{each['measured_s']:.3g} s",
            f"{each['predicted_s']:.3g} s",
            f"{100 * (each['predicted_s'] / each['measured_s'] - 1):+.0f} %",
        )
        for each in report()["splits"]
    ]
    return _table(("devices", "blocks", "B", "measured", "predicted", "difference"), rows)


def budgets_table():
    """Return the table of a product through the service, measured and predicted."""
    rows = [
        (
            f"{each['n']}³",
            str(each["devices"]),
            "all" if each["budget"] is None else f"{each['budget'] / 1e9:g} GB",
            *(f"{pick(each['measured_s']):.3g} s" for pick in (min, statistics.median, max)),
            f"{each['predicted_s']:.3g} s",
            f"{100 * (each['predicted_s'] / statistics.median(each['measured_s']) - 1):+.0f} %",
        )
        for each in report()["budgets"]
    ]
    columns = (
        "product", "devices", "memory", "measured: least", "median", "most", "predicted", "difference of the median",
    )  # fmt: skip
    return _table(columns, rows)


def _times(found, count, name):
    few = f" ({found[name]} of them)" if found[name] < count else ""
    return f"{found['times']:.2f}{few}"


def hosts_table():
    """Return the table of one host with 1 to 8 devices."""
    rows = [
        (
            f"{each['n']}³",
            str(each["devices"]),
            f"{each['pinned']['seconds']:.3g} s",
            *(
                _times(each[name], each["devices"], "devices")
                for name in ("pinned", "stored", "pinned_roomy", "stored_roomy")
            ),
        )
        for each in report()["hosts"]
    ]
    columns = ("product", "devices", "time, pinned", "times one: pinned", "stored", "pinned, roomy", "stored, roomy")
    return _table(columns, rows)


def nodes_table():
    """Return the table of nodes of eight devices."""
    rows = [
        (
            f"{each['n']}³",
            str(each["nodes"]),
            *(text for name in LINKS for text in (_times(each[name], each["nodes"], "nodes"), each[name]["bound"])),
        )
        for each in report()["nodes"]
    ]
    columns = ("product", "nodes", *(text for name in LINKS for text in (f"times one node: {name}", "bound by")))
    return _table(columns, rows)


def rate(*path):
    """Return a rate of the JSON as text."""
    found = report()
    for name in path:
        found = found[name]
    return f"{found / 1e9:.0f} GB/s"


FIGURES = {
    "planning.splits": splits_table,
    "planning.budgets": budgets_table,
    "planning.hosts": hosts_table,
    "planning.nodes": nodes_table,
    "planning.host-memory": lambda: rate("environment", "host_memory"),
    "planning.roomy": lambda: rate("roomy_host_memory"),
    "planning.pinned": lambda: rate("pinned", "up"),
    "planning.ring": lambda: rate("pageable", "up"),
}


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps(predictions(), indent=1) + "\n", encoding="utf-8")
