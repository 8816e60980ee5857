"""Tables and plots of elementwise errors: docs/benchmarks/accuracy-<device>.md and .png beside the JSON.

    python benchmarks/kernels/accuracy_report.py [docs/benchmarks/accuracy-nvidia-h200.json ...]

From what accuracy.py wrote, and from nothing else: the sentences too follow from the figures.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from report import table_lines
from results import readable

from gemmserve_kernels.bench.elementwise import limit
from gemmserve_kernels.bench.kinds import KINDS, most

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
SHOWN = ("normal", "exp-6n", "spikes", "cauchy", "identity")
"""Kinds that have a curve of their own in the plot."""
ERRORS = ("error", "real", "imag")
EXPECTED = {
    "3xfp16-3m": "As expected: three real products keep an element's modulus at best, not its parts.",
    "tf32": "As expected: its factors keep 11 bits.",
    "1xtf32": "As expected: its factors keep 11 bits.",
    "3xtf32": "As expected: its factors keep 22 bits, and FP32's range at best.",
}
"""Reasons why modes promise less than plain arithmetic."""
NAMED = 10
"""Kinds that a sentence names."""
UNITS = {"float32": "2^-24", "complex64": "2^-24", "float64": "2^-53", "complex128": "2^-53"}
NOTE = """\
An error is the worst |D - R| / (|A| |B|) of any element, in units of the unit roundoff u of the dtype, R being the
product in double precision (64-bit data: exact). Beside each stands the vendor's BLAS in plain arithmetic on the same
data, in the same run. A mode is of Grade A on some data where no element is off by more than max(4 u, twice the
vendor's worst); "parts" hold the real and the imaginary part to the same, each against (|Ar| |Br| + |Ai| |Bi|) and
(|Ar| |Bi| + |Ai| |Br|). Data are drawn anew for each row, whose seed is in the JSON."""

BOUNDED = """\
On these data the rule of all others does not hold for 32-bit numbers on tensor cores. `auto` is held to a bound of
their own (B); to the rule (A) with 64-bit numbers."""


def number(value):
    """Three digits; "0", "inf" and what is large in short."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3g}" if value < 1000 else f"{value:.1e}"


def vendors(row, what):
    """The vendor's own error of the moduli ("error"), or of a part."""
    return row["vendor" if what == "error" else f"vendor_{what}"]


def passes(row, what="error"):
    """Whether the moduli ("error"), or a part, are within the limit."""
    return row[what] <= limit(vendors(row, what))


def bounded(row):
    """Whether the moduli and the parts are within what the kind of data allows `auto`."""
    return all(row[what] <= most(row["kind"], row["dtype"], vendors(row, what)) for what in ERRORS)


def has_bound(row):
    """Whether the kind of data has a bound of its own."""
    return KINDS[row["kind"]].bound > 0


def grade(row):
    """A: the moduli and the parts; "A, parts -": the moduli alone; B: the bound of the kind of data; "-"."""
    if all(map(passes, [row] * len(ERRORS), ERRORS)):
        return "A"
    if has_bound(row) and bounded(row):
        return "B"
    return "A, parts -" if passes(row) else "-"


def excess(row, what="error"):
    """The error over its limit: above 1 where it fails."""
    return row[what] / limit(vendors(row, what))


def worst(rows):
    """The row that is furthest beyond its limit, or nearest to it."""
    return max(rows, key=excess)


def verdicts(rows):
    """A line for each dtype and mode: rows within the limit, the worst, whether it is of Grade A throughout."""
    for dtype, mode in pairs(rows):
        own = [row for row in rows if (row["dtype"], row["mode"]) == (dtype, mode)]
        good, parts = (sum(map(test, own)) for test in (passes, lambda row: grade(row) == "A"))
        bad = worst(own)
        where = f"{bad['kind']}, k = {bad['k']}"
        yield [
            dtype, mode, "yes" if good == len(own) else "no", f"{good} of {len(own)}", f"{parts} of {len(own)}",
            f"{number(bad['error'])} ({number(bad['vendor'])})", where,
        ]  # fmt: skip


def pairs(rows):
    """(dtype, mode) in the order in which they came, `auto` first."""
    found = list(dict.fromkeys((row["dtype"], row["mode"]) for row in rows))
    order = list(dict.fromkeys(dtype for dtype, _ in found))
    return sorted(found, key=lambda pair: (order.index(pair[0]), pair[1] != "auto"))


def sentences(rows):
    """What the figures say in words, of `auto` and of every mode that is not of Grade A."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if (row["dtype"], row["mode"]) == (dtype, "auto")]
        if own:
            bad = [row for row in own if not passes(row)]
            said = "is of Grade A on all of it by moduli" if not bad else f"is not of Grade A in {len(bad)} cases"
            alone = sum(grade(row) == "A, parts -" for row in own)
            said += f"; in {alone} a part alone is beyond its limit" if alone else ""
            near = worst(own)
            yield (
                f"- `auto`, {dtype}: {said} ({len(own)} cases). Nearest to its limit: {near['kind']}, k = {near['k']}, "
                f"{number(near['error'])} u where the vendor has {number(near['vendor'])}."
            )
    for dtype, mode in pairs(rows):
        own = [row for row in rows if (row["dtype"], row["mode"]) == (dtype, mode)]
        moduli = [row for row in own if not passes(row)]
        parts = [row for row in own if grade(row) == "A, parts -"]
        if mode == "auto" or not (moduli or parts):
            continue
        kinds = sorted({row["kind"] for row in [*moduli, *parts]}, key=lambda kind: list(KINDS).index(kind))
        how = f"fails Grade A in {len(moduli)} of {len(own)} cases"
        how += f", and by a part alone in {len(parts)} more" if parts else ""
        named = ", ".join(kinds[:NAMED]) + (f" and {len(kinds) - NAMED} more kinds" if len(kinds) > NAMED else "")
        why = f" {EXPECTED[mode]}" if mode in EXPECTED else ""
        yield f"- `{mode}`, {dtype}, {how}: {named}.{why}"


def beyond(rows):
    """A line for each mode, kind with a bound of its own, and k."""
    for row in rows:
        yield [
            row["dtype"], row["kind"], row["mode"], f"{row['m']} x {row['n']} x {row['k']}",
            number(row["error"]), number(row["vendor"]), number(limit(row["vendor"])),
            number(most(row["kind"], row["dtype"], row["vendor"])), grade(row),
        ]  # fmt: skip


def by_kind(rows, dtype):
    """Names and cells: a line for each kind and k, each mode's error and grade, the vendor's own."""
    chosen = [row for row in rows if row["dtype"] == dtype]
    modes = [mode for name, mode in pairs(chosen) if name == dtype]
    lines = []
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in chosen)]
    for kind in kinds:
        for k in sorted({row["k"] for row in chosen if row["kind"] == kind}):
            here = {row["mode"]: row for row in chosen if (row["kind"], row["k"]) == (kind, k)}
            any_row = next(iter(here.values()))
            vendors = [row["vendor"] for row in here.values()]
            span = number(min(vendors))
            span += f" to {number(max(vendors))}" if number(max(vendors)) != span else ""
            size = f"{any_row['m']} x {any_row['n']} x {k}"
            lines.append([kind, size, span, *(cell(here.get(mode)) for mode in modes)])
    return ["data", "m x n x k", "vendor", *modes], lines


def cell(row):
    """An error, in brackets what it fails."""
    if row is None:
        return ""
    mark = grade(row)
    text = number(row["error"])
    if mark == "A":
        return text
    if mark == "-":
        return f"**{text}**"
    part = max(ERRORS[1:], key=lambda name: excess(row, name))
    return f"{text} ({part} **{number(row[part])}**)"


def markdown(document, picture):
    """The page."""
    environment = document["environment"]
    special = [row for row in document["rows"] if has_bound(row)]
    rows = [row for row in document["rows"] if not has_bound(row)]
    lines = [f"# Accuracy on {environment['device']}, element by element", ""]
    lines += [
        "Written by `benchmarks/kernels/accuracy_report.py` from the JSON of `benchmarks/kernels/accuracy.py`.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in environment.items() if (name, value) != ("shrink", 1)]
    lines += ["", NOTE, ""]
    if rows:
        lines += ["## In one look", "", *sentences(rows), ""]
        columns = ("dtype", "mode", "Grade A", "cases within", "parts too", "worst, u (vendor's)", "where")
        lines += [*table_lines(columns, verdicts(rows)), ""]
    lines += [f"![errors by k]({picture})", ""]
    if special:
        columns = ("dtype", "data", "mode", "m x n x k", "error, u", "vendor's", "rule", "bound", "grade")
        lines += ["## Data with a bound of their own", "", BOUNDED, "", *table_lines(columns, beyond(special)), ""]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        lines += [f"## {dtype}, in units of u = {UNITS[dtype]}", "", "In bold: beyond the limit.", ""]
        lines += [*table_lines(*by_kind(rows, dtype)), ""]
    lines += ["## Kinds of data", ""]
    kinds = {row["kind"] for row in document["rows"]}
    lines += [f"- {kind}: {made.about}" for kind, made in KINDS.items() if kind in kinds]
    lines += [""]
    if document.get("lacking"):
        lines += ["## Modes that this device lacks", "", *(f"- {mode}" for mode in document["lacking"]), ""]
    if document.get("failed"):
        lines += ["## Not measured", "", *(f"- {case}: {why}" for case, why in document["failed"].items()), ""]
    return "\n".join(lines)


# ---- the picture


def plot(document, path):
    """For each dtype the errors of `auto` and of the vendor against k, a curve for each kind that is shown; below, the
    error over its limit of every mode, a point for each kind and k.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = document["rows"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, grid = plt.subplots(
        2, len(dtypes), figsize=(max(7, 4.6 * len(dtypes)), 9), layout="constrained", squeeze=False
    )
    for column, dtype in enumerate(dtypes):
        own = [row for row in rows if row["dtype"] == dtype]
        curves(grid[0, column], own, dtype)
        strips(grid[1, column], own)
    low, high = zip(*(axes.get_ylim() for axes in grid[1]), strict=True)
    for axes in grid[1]:
        axes.set_ylim(min(low), max(*high, 3))
    figure.suptitle(f"Worst error of an element over (|A| |B|), {document['environment']['device']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(axes, rows, dtype):
    """Ours drawn through, the vendor's dashed, in the same colour."""
    mine = [row for row in rows if row["mode"] == "auto"]
    for number_of_kind, kind in enumerate(SHOWN):
        own = sorted((row for row in mine if row["kind"] == kind), key=lambda row: row["k"])
        if not own:
            continue
        depths, color = [row["k"] for row in own], f"C{number_of_kind}"
        axes.plot(depths, [shown(row["error"]) for row in own], "-o", color=color, label=kind, markersize=4)
        axes.plot(depths, [shown(row["vendor"]) for row in own], "--", color=color, linewidth=1)
    axes.set(xlabel="k", yscale="log", title=f"{dtype}: auto, and dashed the vendor")
    axes.set_xscale("log", base=2)
    axes.set_ylabel(f"u = {UNITS[dtype]}")
    axes.axhline(4, color="gray", linestyle=":", linewidth=1)
    axes.grid(alpha=0.3)
    if any(row["kind"] in SHOWN for row in mine):
        axes.legend(fontsize=8)


def shown(error):
    """Exact results have a place at the lower edge of a logarithmic axis."""
    return min(max(error, 1e-2), 1e12)


def strips(axes, rows):
    """A column of points for each mode; red ones are beyond the limit, hollow ones by a part alone, orange ones within
    a bound of their own.
    """
    modes = [mode for _, mode in pairs(rows)]
    for place, mode in enumerate(modes):
        own = [row for row in rows if row["mode"] == mode]
        for i, row in enumerate(own):
            x = place + 0.5 * ((i * 0.618034) % 1 - 0.5)
            over, mark = max(excess(row, what) for what in ERRORS), grade(row)
            face = {"A": "C0", "B": "C1", "-": "C3"}.get(mark, "none")
            edge = {"A": "C0", "B": "C1"}.get(mark, "C3")
            axes.plot(x, shown(over), "o", markersize=3.5, color=edge, markerfacecolor=face)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(modes)), modes, rotation=35, ha="right")
    axes.set(yscale="log", ylabel="error over max(4 u, twice the vendor's)")
    axes.set_title("every kind and k; above 1 it is not Grade A")
    axes.grid(alpha=0.3, axis="y")


def main(arguments):
    sources = [Path(name) for name in arguments] or sorted(DOCS.glob("accuracy-*.json"))
    if not sources:
        print(f"no JSON in {DOCS}: run benchmarks/kernels/accuracy.py first", file=sys.stderr)
        return 2
    for source in sources:
        document = readable(json.loads(source.read_text(encoding="utf-8")))
        picture = source.with_suffix(".png")
        plot(document, picture)
        source.with_suffix(".md").write_text(markdown(document, picture.name), encoding="utf-8")
        print(source.with_suffix(".md"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
