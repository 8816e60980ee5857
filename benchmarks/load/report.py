"""Report of a load test: Markdown and an SVG picture beside its JSON, made of the JSON alone."""

from __future__ import annotations

import json

from benchmarks.load import first_products
from benchmarks.service.plots import tails
from benchmarks.service.report import number, table_lines

WRITTEN = "Written by `python -m benchmarks.device.load report` from the JSON of its `run`."
NOTE = """\
Products are n^3 of complex64. "of bound" is achieved over bound: for rates 1 is the bound reached, for times (marked
with \u2264) less is better. The kernel loop is `gemmserve_kernels.gemm` on resident operands, timed in the same run
before there was a server. "front", "workers" and "clients" are processors kept busy meanwhile by the front, by the
workers and by the processes that asked; "GPU %" is NVML's utilisation of each GPU of the host, sampled every 50 ms.
Latencies of open loops count from when a request was to begin. A block is as much of a large product as a small one may
have to wait for: the kernel time of the whole, or of 8192^3 where it is larger. "In the store" counts from the first
submission; the store was on the file system that is named above."""
COLUMNS = (
    "what", "unit", "achieved", "bound", "bound is", "of bound", "p50 ms", "p99 ms", "GPU %", "front", "workers",
    "clients",
)  # fmt: skip


def write(source):
    """Write the page and the picture beside the JSON file `source`."""
    document = json.loads(source.read_text(encoding="utf-8"))
    picture = source.with_suffix(".svg")
    draw(document, picture)
    source.with_suffix(".md").write_text(markdown(document, picture.name), encoding="utf-8")


def line(figure):
    """Return a line for the terminal."""
    what, unit, achieved, _, bound_is, ratio, *_ = row_cells(figure)
    return f"  {figure['row']}: {what}: {achieved} {unit}, {ratio} of {bound_is}"


def row_cells(figure):
    """Return the cells of a figure's line in the table."""
    cpu, latency = figure.get("cpu", {}), figure.get("latency", {})
    gpus = figure.get("gpu_percent")
    less = "\u2264 " if figure["better"] == "less" else ""
    return [
        figure["case"], figure["unit"], number(figure["achieved"], ".4g"), number(figure["bound"], ".4g"),
        figure["bound_is"], less + number(figure["ratio"], ".3g"), number(latency.get("p50_ms"), ".3g"),
        number(latency.get("p99_ms"), ".3g"), ", ".join(f"{each:.0f}" for each in gpus) if gpus else "-",
        number(cpu.get("front"), ".2f"), number(cpu.get("worker"), ".2f"), number(figure.get("client_cpu"), ".2f"),
    ]  # fmt: skip


def markdown(document, picture):
    """Return the page."""
    figures = document["figures"]
    lines = ["# Load test", "", WRITTEN, ""]
    lines += [f"- {name}: {value}" for name, value in document["environment"].items()]
    products = ", ".join(f"{n}^3 {each['seconds'] * 1e3:.4g} ms" for n, each in document["kernels"].items())
    lines += [f"- kernel loop: {products}", "", NOTE, "", f"![Of bounds, tails, use]({picture})", ""]
    for name in dict.fromkeys(figure["row"] for figure in figures):
        own = [figure for figure in figures if figure["row"] == name]
        lines += [f"## {name}", "", *table_lines(COLUMNS, map(row_cells, own)), ""]
        lines += [sentence for say in (errors, bounds, unprepared, phases) for sentence in map(say, own) if sentence]
        for figure in own:
            if "kinds" in figure:
                lines += [*kinds(figure), ""]
    if missing := document["not_measured"]:
        lines += ["## Not measured", "", *(f"- {name}: {reason}" for name, reason in missing.items()), ""]
    return "\n".join(lines)


def errors(figure):
    """Return a sentence about answers that were errors; None where there were none."""
    if not figure.get("errors"):
        return None
    counts = ", ".join(f"{count} x {status}" for status, count in figure["errors"].items())
    return f"{figure['case']}: not answered as asked: {counts}.\n"


def bounds(figure):
    """Return a sentence about what kept a count or a share small beside what is measured; None where nothing did."""
    if not figure.get("bounded_by"):
        return None
    asked = f", {figure['asked']} were asked for" if "asked" in figure else ""
    return f"{figure['case']}: bounded by {figure['bounded_by']}{asked}.\n"


def unprepared(figure):
    """Return a sentence about preparations that were not over when the figure was measured; None where they were, or
    nobody had looked.
    """
    prepared = figure.get("prepared")
    if prepared is None or prepared["kernels"]:
        return None
    return f"{figure['case']}: kernels were still being loaded ahead.\n"


def phases(figure):
    """Return a sentence about where the time of an exchange went; None where that is not known."""
    spent = figure.get("phases_ms")
    if not spent:
        return None
    total = spent["total"]
    named = ", ".join(f"{name} {value:.3g}" for name, value in spent.items() if name != "total")
    return f"{figure['case']}: medians of {total:.3g} ms: {named}; the rest is sending, and waiting between them.\n"


def kinds(figure):
    """Yield the table of first products of one server."""
    yield f"{figure['case']}; ready after {figure['ready_s']:.1f} s; {figure['not_tried']} kinds not tried:"
    yield ""
    cells = (
        [first_products.label(each), f"{each['first_s']:.3f}", f"{each['second_s']:.4f}"] for each in figure["kinds"]
    )
    yield from table_lines(("product", "first, s", "second, s"), cells)


def draw(document, path):
    """Write the picture: achieved over bound, tails of small products, processors and GPUs in use."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "gemmserve"  # the same JSON gives the same bytes
    from matplotlib import pyplot as plt

    figures = document["figures"]
    height = max(6.0, 0.28 * len(figures))
    canvas, panels = plt.subplots(1, 3, figsize=(22, height), layout="constrained", width_ratios=(3, 2, 2))
    of_bounds(panels[0], figures)
    beside = ("small-beside-large", "small-beside-map", "owners")
    loops = [each | {"server": each["case"]} for each in figures if each["row"] in beside and "histogram" in each]
    tails(panels[1], loops, "Small one-shots")
    in_use(panels[2], figures)
    canvas.savefig(path, metadata={"Date": None})
    plt.close(canvas)


def of_bounds(axes, figures):
    """Draw achieved over bound, the first figure on top: rates in blue, times in orange; the line is the bound."""
    for place, figure in enumerate(reversed(figures)):
        colour = "tab:blue" if figure["better"] == "more" else "tab:orange"
        axes.barh(place, figure["ratio"] - 1, left=1, color=colour)  # from the bound on, to either side
    axes.set_yticks(range(len(figures)), [f"{each['row']}: {each['case']}" for each in reversed(figures)], fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="achieved over bound (blue: more is better, orange: less)", title="Of bounds")
    if figures:
        axes.set_xscale("log")
    axes.grid(alpha=0.3, axis="x")


def in_use(axes, figures):
    """Draw processors kept busy by front, workers and clients, and the busiest GPU as a share."""
    bottom = [0.0] * len(figures)
    series = {
        "front": [figure.get("cpu", {}).get("front", 0.0) for figure in figures],
        "workers": [figure.get("cpu", {}).get("worker", 0.0) for figure in figures],
        "clients": [figure.get("client_cpu") or 0.0 for figure in figures],
    }
    for name, values in series.items():
        axes.bar(range(len(figures)), values, bottom=bottom, label=name)
        bottom = [low + high for low, high in zip(bottom, values, strict=True)]
    gpus = [(i, max(figure["gpu_percent"]) / 100) for i, figure in enumerate(figures) if figure.get("gpu_percent")]
    if gpus:
        axes.plot(*zip(*gpus, strict=True), "k_", label="busiest GPU")
    axes.set_xticks(range(len(figures)), [figure["row"] for figure in figures], rotation=90, fontsize=6)
    axes.set(ylabel="processors busy; share of time a GPU was", title="In use")
    if figures:
        axes.legend(fontsize=7)
    axes.grid(alpha=0.3, axis="y")
