"""Tables and plots from the JSON that run.py writes: service.md and service.png beside it.

python -m benchmarks.service report [docs/benchmarks/service.json]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from benchmarks.service import plots, transfers
from benchmarks.service.results import ROOT
from benchmarks.service.suite import label, suite
from benchmarks.service.summary import summary

DEFAULT = ROOT / "docs" / "benchmarks" / "service.json"
NOTE = """\
All servers run on this machine, each with one BLAS thread, and take turns in another order every round; a ratio is the
median over the rounds of one server's figure over the other's in the same round. "wire" is a load generator on raw
sockets, one thread, requests built beforehand, answers checked; "sdk" is the server's own Python client, NumPy in and
NumPy out. `axpy` is gemm with a, c and d of shape (n, 1), b (1, 1) and beta 1; `echo` gives a back and computes
nothing. Latencies of open loops count from when a request was to begin. "CPU" is what all processes of the server used
for one exchange, "client" the share of a processor that the load generator took. gemmserve's time includes its queue,
its worker process and its store, which the plain servers do not have."""
STREAMS_NOTE = """\
Streams follow each other without a pause, uploads into space that was used before; "over none" is the median over the
rounds of the rate over that without transfer processes in the same round. `/livez` is asked 200 times a second beside
them."""
WRITTEN = "Written by `python -m benchmarks.service report` from the JSON of `python -m benchmarks.service run`."
COLUMNS = (
    "who", "p50 ms", "p90 ms", "p99 ms", "max ms", "answers/s", "MiB/s", "CPU ms", "client", "RSS MiB", "errors",
)  # fmt: skip


def number(value, spec):
    return "-" if value is None else format(value, spec)


def table_lines(columns, rows):
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def turn_cells(row):
    latency = row["latency"]
    rates = [rate for rate in row["rates"] if rate]
    nbytes = row["up"] + row["down"]
    speed = nbytes / (1 << 20) / (latency["p50_ms"] / 1e3) if latency["count"] and nbytes >= 1 << 20 else None
    return [
        row["who"], *(number(latency.get(name), ".4g") for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms")),
        number(statistics.median(rates) if rates and speed is None else None, ".0f"), number(speed, ".0f"),
        number(row["cpu_ms"], ".3g") + shares(row["cpu_by_role_ms"]), number(row["client_cpu"], ".0%"),
        number(row["rss_mib"], ".0f"),
        ", ".join(f"{count} x {status}" for status, count in row["errors"].items()) or "-",
    ]  # fmt: skip


def shares(by_role):
    """Return the shares of processes in brackets, where there is more than one kind."""
    used = {name: value for name, value in by_role.items() if value >= 0.005}
    return f" ({', '.join(f'{name} {value:.2g}' for name, value in used.items())})" if len(used) > 1 else ""


def target_cells(each):
    answer = {None: "-", True: "yes", False: "no"}[each["met"]]
    return [each["name"], each["unit"], *(number(each[key], ".3g") for key in ("target", "stretch", "found")), answer]


def nominal(row):
    """The size that a case of phases is named after: 24 bytes more or less do not matter."""
    return label(int(row["case"].split()[1]))


def phase_lines(rows):
    """A line a size: what each phase takes of what the client waits for."""
    names = list(dict.fromkeys(name for row in rows for name in row["phases_ms"] if name != "total"))
    cells = []
    for row in rows:
        phases = row["phases_ms"]
        shown = [phases.get(name) for name in names]
        rest = phases["total"] - sum(value for value in shown if value is not None)
        cells.append([nominal(row), *(number(v, ".3g") for v in (*shown, rest, phases["total"]))])
    return table_lines(("size", *names, "rest", "client"), cells)


def markdown(document, picture):
    """The page."""
    environment, rows = document["environment"], document["rows"]
    lines = ["# The service beside others", ""]
    lines += [WRITTEN, ""]
    lines += [f"- {name}: {value}" for name, value in environment.items() if name != "options"]
    if load := document.get("load_before"):
        lines += [f"- processes that ran or waited before each case: {min(load.values())} to {max(load.values())}"]
    lines += [f"- {name}: {value:.0f} MiB/s" for name, value in document["ceilings_mib_s"].items()]
    shown = {who: ", ".join(f"{p} {v}" for p, v in found.items()) for who, found in document["versions"].items()}
    lines += [f"- {who}: {text}" for who, text in sorted(shown.items())]
    lines += ["", "## In one look", ""]
    columns = ("what", "unit", "target", "stretch", "found", "met")
    lines += [*table_lines(columns, map(target_cells, summary(rows))), "", NOTE, ""]
    lines += [f"![Latencies, tails, phases]({picture})", ""]
    titles = {case.name: case.title for case in suite()}
    phases = [row for row in rows if row["case"].startswith("phases ") and row.get("phases_ms")]
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        if "latency" in own[0] and not case.startswith("phases "):
            lines += [f"## {titles.get(case, case)}", "", *table_lines(COLUMNS, map(turn_cells, own)), ""]
    if phases:
        lines += ["## Milliseconds by phase (Server-Timing)", "", *phase_lines(phases), ""]
        lines += ["\"rest\" is what the client waits for beyond the server's own phases: the answer's way back.", ""]
    if streams := [row for row in rows if row["case"] == "transfers"]:
        cells = map(transfers.cells, sorted(streams, key=lambda row: (row["streams"], row["direction"] == "down")))
        lines += [f"## {titles['transfers']}", "", *table_lines(transfers.COLUMNS, cells), "", STREAMS_NOTE, ""]
    for row in (row for row in rows if row["case"] == "memory"):
        lines += ["## Anonymous memory of the front", "", memory_line(row), ""]
    missing = [(case, who, why) for case, found in document["unavailable"].items() for who, why in found.items()]
    if missing:
        lines += ["## Not measured", ""]
        lines += [f"- {titles.get(case, case)}, {who}: {why.strip().splitlines()[-1]}" for case, who, why in missing]
        lines += [""]
    return "\n".join(lines)


def memory_line(row):
    idle, up, down = (row[name] / (1 << 20) for name in ("idle", "upload", "download"))
    scaled = f" ({label(row['asked'])} did not fit)" if row["asked"] != row["nbytes"] else ""
    return (
        f"An array of {label(row['nbytes'])}{scaled}: idle {idle:.0f} MiB, over it at most {up:.1f} MiB during the "
        f"upload, {down:.1f} during the download."
    )


def main(arguments=()):
    """Writes both. 2 where there is no JSON."""
    sources = [Path(name) for name in arguments] or [DEFAULT]
    for source in sources:
        if not source.is_file():
            print(f"no {source}: python -m benchmarks.service run makes it", file=sys.stderr)
            return 2
        document = json.loads(source.read_text(encoding="utf-8"))
        picture = source.with_suffix(".png")
        plots.draw(document, picture)
        source.with_suffix(".md").write_text(markdown(document, picture.name), encoding="utf-8")
        print(source.with_suffix(".md"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
