"""Tables and plots from the JSON that run.py writes: docs/benchmarks/kernels-<device>.md and .png beside it.

python benchmarks/kernels/report.py [docs/benchmarks/kernels-nvidia-h200.json ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from data import largest
from results import readable
from summary import PLAIN_RIVALS, summary

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"

TITLES = {
    "headline": "3456 x 4096 x 4096 complex64",
    "square": "Square complex64",
    "modes": "The compute modes at 3456 x 4096 x 4096 complex64",
    "mma": "3xFP16 by mma.sync (compute capability 8.0 and later)",
    "float32": "Square float32",
    "thin": "Tall, wide and thin complex64",
    "double": "complex128 and float64",
    "ozaki": "complex128 by residues",
    "batched": "Batched and small complex64 (batch first)",
    "other batches": "Batched and small, other dtypes (batch first)",
    "half": "float16 (accumulates in float32)",
    "ops": "Transposed and conjugated operands",
    "scalars": "With alpha, beta and C",
    "planar": "Planar operands",
    "tf32": "compute=tf32",
    "second-wave": "Beside the vendor's newest library, where one was there, and small and thin products",
    "gemm_reduce": "gemm_reduce (batch, m, n, k) over m; the rival multiplies, then reduces",
}
NOTE = """\
Complex flops are 8 m n k. "gemmserve" is what dispatch chose, "prepared" the same on operands prepared beforehand, an
algorithm's name that algorithm whatever dispatch chose. "ms" is the device's time, from operands to result, "wall ms"
the caller's for calls one after another (where it is not given it is the same). "memory" is what a reduction took
beyond its operands and results. "ceiling" is the share of the time that the arithmetic at the rate of the unit it uses,
or the traffic at that of a copy, would take: both measured in the same run. Errors are relative Frobenius norms against
a reference in higher precision; re and im are those of the real and the imaginary part, each against its own norm."""
COLUMNS = (
    "size", "", "dtype", "compute", "who", "algorithm", "ms", "wall ms", "TFLOP/s", "GB/s", "ceiling",
    "rival's time / this", "memory, MiB", "error", "worst row", "re", "im",
)  # fmt: skip
PARTS = {"3xFP16": ("fp16", 3.0), "3xFP16, 3M": ("fp16", 2.25), "FP32": ("fp32", 1.0)}
"""Ceilings in the plot: the unit, and its operations for one of the product's."""


def rival_of(rows, row):
    """The first plain rival's time over the row's."""
    key = ("table", "case", "dtype", "compute", "label")
    same = [other for other in rows if all(other[name] == row[name] for name in key)]
    rivals = [other["seconds"] for other in same if other["who"] in PLAIN_RIVALS and other["seconds"]]
    return rivals[0] / row["seconds"] if rivals and row["seconds"] else None


def mib(nbytes):
    return None if nbytes is None else nbytes / 2**20


def number(value, spec):
    return "-" if value is None else format(value, spec)


def table_lines(columns, rows):
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def timed(rows, table):
    """Cells of a table of times."""
    for row in (row for row in rows if row["table"] == table):
        wall = row["wall"] and row["wall"] * 1e3
        yield [
            row["case"], row["label"], row["dtype"], row["compute"], row["who"], row["algorithm"],
            number(row["seconds"] and row["seconds"] * 1e3, ".4g"), number(wall, ".4g"), number(row["tflops"], ".3g"),
            number(row["bytes_per_s"] and row["bytes_per_s"] / 1e9, ".0f"), number(row["ceiling_share"], ".0%"),
            number(rival_of(rows, row), ".2f"), number(mib(row.get("workspace")), ".0f"),
            *(number(row[name], ".1e") for name in ERRORS),
        ]  # fmt: skip


ERRORS = ("rel_fro", "worst_row", "rel_real", "rel_imag")


def pivoted(rows, table):
    """Names and cells of a table of errors: a line for each kind and k; each mode's error, and its parts' largest over
    the vendor's plain arithmetic's same part."""
    chosen = [row for row in rows if row["table"] == table]
    names = list(dict.fromkeys(row["who"] for row in chosen))
    lines = []
    for kind, k in dict.fromkeys((row["init"], row["k"]) for row in chosen):
        by_who = {row["who"]: row for row in chosen if (row["init"], row["k"]) == (kind, k)}
        plain = next((by_who[who] for who in PLAIN_RIVALS if who in by_who), None)
        lines.append([kind, str(k), *(error_cell(by_who.get(name), plain) for name in names)])
    return ["data", "k", *names], lines


def error_cell(row, plain):
    if row is None:
        return "-"
    text = number(row["rel_fro"], ".1e")
    if row["fallback"]:
        text += f" (falls back {row['fallback']:.0%})"
    if plain is None or row is plain:
        return text
    parts = [row[name] / plain[name] for name in ERRORS[2:] if plain[name]]
    return f"{text}, x{largest(parts):.2f}" if parts else text


def target_lines(found):
    for each in found["targets"]:
        spec = ".1e" if "relF" in each["unit"] else ".2f"
        met = {None: "-", True: "yes", False: "no"}[each["met"]]
        yield [
            each["name"], each["unit"], *(number(each[name], spec) for name in ("target", "stretch", "found")), met,
        ]  # fmt: skip


def markdown(document, picture):
    environment, rows = document["environment"], document["rows"]
    found = summary(rows)
    lines = [f"# Kernels on {environment['device']}", ""]
    lines += ["Written by `benchmarks/kernels/report.py` from the JSON of `benchmarks/kernels/run.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in environment.items()]
    lines += [
        f"- in another run ({other['environment']['date']}, {other['environment']['device']}; {other['kernels']}):"
        f" {', '.join(other['cases'])}"
        for other in document.get("other_runs", ())
    ]
    rates = {name: rate for name, rate in (document.get("rates") or {}).items() if rate}
    if rates:
        shown = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates.items())
        lines += [f"- measured ceilings, TB/s (copy, read and write) and TFLOP/s or TOP/s: {shown}"]
    lines += ["", "## In one look", ""]
    for suffix, where in (("", "on the device"), ("_wall", "on the wall")):
        mean, worst = found[f"rival_over_auto{suffix}"], found[f"auto_over_best{suffix}"]
        at = found[f"auto_over_best_at{suffix}"]
        lines += [
            f"- cuBLAS's time over that of `auto`, {where}, geometric mean of all products: {number(mean, '.2f')}"
        ]
        lines += [
            f"- the best of cuBLAS and our algorithms over `auto`, {where}, at worst: {number(worst, '.2f')} ({at})"
        ]
    lines += ["", *table_lines(("what", "unit", "target", "stretch", "found", "met"), target_lines(found)), ""]
    lines += [NOTE, "", f"![TFLOP/s by size, errors by k]({picture})", ""]
    for table in dict.fromkeys(row["table"] for row in rows):
        if table.startswith("errors "):
            lines += [f"## Errors by kind of data and k, {table.removeprefix('errors ')}", ""]
            lines += ["x: the larger of the parts' errors over that of the rival's plain arithmetic, same part.", ""]
            lines += [*table_lines(*pivoted(rows, table)), ""]
        else:
            lines += [f"## {TITLES.get(table, table)}", "", *table_lines(COLUMNS, timed(rows, table)), ""]
    if document.get("failed"):
        lines += ["## Not measured", "", *(f"- {case}: {why}" for case, why in document["failed"].items()), ""]
    return "\n".join(lines)


def plot(document, path):
    """Speed against size with the ceilings drawn, and errors against k for each kind of data."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = document["rows"]
    kinds = list(dict.fromkeys(row["init"] for row in rows if row["table"] == "errors complex64"))
    figure, grid = plt.subplots(2, 3, figsize=(16, 8.5), layout="constrained")
    panels = list(grid.flat)
    speed = panels[0]
    curves(speed, [row for row in rows if row["table"] == "square"], "m", "tflops")
    for name, rate in lines_of(document.get("rates") or {}).items():
        speed.axhline(rate, linestyle=":", color="gray")
        speed.annotate(name, (256, rate), va="bottom", fontsize=8)
    speed.set(xlabel="m = n = k", ylabel="TFLOP/s (8 m n k)", ylim=(0, None))
    speed.set_title(f"complex64 on {document['environment']['device']}")
    for panel, kind in zip(panels[1:], kinds, strict=False):
        curves(panel, [r for r in rows if r["table"] == "errors complex64" and r["init"] == kind], "k", "rel_fro")
        panel.set(xlabel="k", ylabel="relative error (Frobenius)", yscale="log", title=f"1024 x 1024 x k, {kind}")
    for panel in panels[1 + len(kinds) :]:
        panel.set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def lines_of(rates):
    """TFLOP/s of complex64 that the measured units allow."""
    return {name: rates[unit] / work / 1e12 for name, (unit, work) in PARTS.items() if rates.get(unit)}


def curves(axes, rows, x, y):
    """One curve of a figure over a size for each contender."""
    for who in dict.fromkeys(row["who"] for row in rows):
        own = [row for row in rows if row["who"] == who and row[y]]
        style = "--" if who in PLAIN_RIVALS or "cuBLAS" in who else "-"
        axes.plot([row[x] for row in own], [row[y] for row in own], style, marker="o", label=who)
    axes.set_xscale("log", base=2)
    if rows:
        axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def main(arguments):
    sources = [Path(name) for name in arguments] or sorted(DOCS.glob("kernels-*.json"))
    if not sources:
        print(f"no JSON in {DOCS}: run benchmarks/kernels/run.py first", file=sys.stderr)
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
