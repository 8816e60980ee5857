"""The picture: medians of the large cases, tails of the small one, rates of open loops, phases by size."""

from __future__ import annotations

from benchmarks.service import histogram
from benchmarks.service.suite import label

OURS, THEIRS = "tab:blue", "tab:gray"
TAIL_TICKS = (2, 10, 100, 1000, 10_000)


def draw(document, path):
    """Writes the picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in document["rows"] if "latency" in row and row["latency"]["count"]]
    figure, grid = plt.subplots(2, 3, figsize=(17, 10), layout="constrained")
    panels = list(grid.flat)
    bars(panels[0], of(rows, "round trip"), "96 MiB round trip on the wire")
    bars(panels[1], of(rows, "sdk") + of(rows, "shared memory"), "96 MiB, NumPy in, NumPy out")
    bars(panels[2], of(rows, "upload"), "256 MiB to a resident array")
    tails(panels[3], of(rows, "small 16"), "64 x 64 complex64, 16 clients")
    open_loops(panels[4], [row for row in rows if row["rate"]])
    phases(panels[5], [row for row in rows if row["case"].startswith("phases ") and row["phases_ms"]])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def of(rows, case):
    return [row for row in rows if row["case"] == case]


def colour(row):
    return OURS if row["server"].startswith("gemmserve") else THEIRS


def bars(axes, rows, title):
    """Medians, the slowest at the bottom; the line is from the fastest round to the slowest."""
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = sorted(rows, key=lambda row: row["latency"]["p50_ms"], reverse=True)
    medians = [row["latency"]["p50_ms"] for row in rows]
    lowest = [max(0.0, m - min(row["medians_ms"])) for m, row in zip(medians, rows, strict=True)]
    highest = [max(0.0, max(row["medians_ms"]) - m) for m, row in zip(medians, rows, strict=True)]
    axes.barh(range(len(rows)), medians, xerr=[lowest, highest], color=[colour(row) for row in rows], ecolor="black")
    axes.set_yticks(range(len(rows)), [row["who"] for row in rows], fontsize=8)
    if rows:
        axes.set_xscale("log")
        axes.set_xlim(min(medians) / 2, None)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="ms (median)", title=title)
    axes.grid(alpha=0.3, axis="x")


def tails(axes, rows, title):
    """Latency by percentile."""
    for row in rows:
        points = histogram.curve(histogram.merged([row["histogram"]]))
        width = 2.5 if row["server"].startswith("gemmserve") else 1.2
        axes.plot(*zip(*points, strict=True), label=row["server"], linewidth=width)
    axes.set_xscale("log")
    axes.set_xticks(TAIL_TICKS, [f"{100 * (1 - 1 / tick):g}" for tick in TAIL_TICKS])
    axes.set(xlabel="percentile", ylabel="ms", title=title)
    if rows:
        axes.set_yscale("log")
        axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def open_loops(axes, rows):
    """p50 and p99 against the rate that was asked for."""
    for index, server in enumerate(dict.fromkeys(row["server"] for row in rows)):
        own = sorted((row for row in rows if row["server"] == server), key=lambda row: row["rate"])
        rates = [row["rate"] for row in own]
        for name, style in (("p50_ms", "-"), ("p99_ms", "--")):
            values = [row["latency"][name] for row in own]
            axes.plot(rates, values, style, color=f"C{index}", marker="o", label=f"{server}, {name[:3]}")
    axes.set(xlabel="requests a second", ylabel="ms from the intended start", title="64 x 64 complex64, open loop")
    if rows:
        axes.set_yscale("log")
        axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def phases(axes, rows):
    """Shares of what the client waits for, by size; milliseconds above."""
    names = list(dict.fromkeys(name for row in rows for name in row["phases_ms"] if name != "total"))
    names = [name for name in names if any(row["phases_ms"].get(name) for row in rows)]
    bottom = [0.0] * len(rows)
    for name in [*names, "rest"]:
        heights = [share(row["phases_ms"], name, names) for row in rows]
        axes.bar(range(len(rows)), heights, bottom=bottom, label=name)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    for place, row in enumerate(rows):
        total = f"{row['phases_ms']['total']:.3g} ms"
        axes.annotate(total, (place, bottom[place]), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [label(int(row["case"].split()[1])) for row in rows], fontsize=8)
    axes.set(ylabel="share of the client's time", ylim=(0, 1.25), title="gemmserve, one shot, by phase")
    if rows:
        axes.legend(fontsize=7, ncols=4, loc="upper center")


def share(found, name, names):
    """Return a phase's share of all that the client waits for; "rest" is what no phase accounts for, where they do not
    overlap.
    """
    if name == "rest":
        return max(0.0, found["total"] - sum(found.get(each, 0.0) for each in names)) / found["total"]
    return found.get(name, 0.0) / found["total"]
