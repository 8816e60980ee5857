"""Tables and plots from the JSON that run.py writes: docs/benchmarks/kernels-<device>.md and .png beside it.

python benchmarks/kernels/report.py [docs/benchmarks/kernels-nvidia-h200.json ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"

TITLES = {
    "square": "Square complex64",
    "article": "3456 x 4096 x 4096 complex64",
    "dtypes": "Other dtypes",
    "half": "float16 (accumulates in float32)",
    "data": "Errors by kind of data",
    "ops": "Transposed and conjugated operands",
    "planar": "Planar operands",
    "thin": "Thin products",
    "batched": "Batched and small (batch first)",
    "tf32": "compute=tf32",
    "gemm_reduce": "gemm_reduce (batch, m, n, k) over m; the rival multiplies, then reduces",
}
NOTE = (
    'Complex flops are 8 m n k. "gemmserve" is what dispatch chose, "portable" our own kernel whatever it chose. '
    "Errors are relative Frobenius norms against a reference in higher precision."
)
COLUMNS = (
    "size",
    "",
    "dtype",
    "who",
    "algorithm",
    "ms",
    "TFLOP/s",
    "GiB/s",
    "rival's time / this",
    "error",
    "worst row",
)


def times(row):
    return (
        f"{row['seconds'] * 1e3:.4g}",
        f"{row['gflops'] / 1e3:.3g}" if row["gflops"] else "-",
        f"{row['gib_per_s']:.0f}",
    )


def rival_of(rows, row):
    key = ("table", "case", "dtype", "compute", "label")
    same = [other for other in rows if all(other[name] == row[name] for name in key)]
    rivals = [other["seconds"] for other in same if other["who"] not in {"gemmserve", "portable"}]
    return rivals[0] / row["seconds"] if rivals else None


def number(value, spec):
    return "-" if value is None else format(value, spec)


def markdown(document, picture):
    environment, rows = document["environment"], document["rows"]
    lines = [f"# Kernels on {environment['device']}", ""]
    lines += ["Written by `benchmarks/kernels/report.py` from the JSON of `benchmarks/kernels/run.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in environment.items()]
    means = ", ".join(f"{who} {value:.2f}" for who, value in document["summary"].items())
    lines += ["", f"Rival's time over ours, geometric mean over all cases: {means}. Above 1, ours is faster.", ""]
    lines += [NOTE, "", f"![TFLOP/s by size]({picture})", ""]
    for table in dict.fromkeys(row["table"] for row in rows):
        lines += [f"## {TITLES.get(table, table)}", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        for row in (row for row in rows if row["table"] == table):
            cells = [row["case"], row["label"], row["dtype"], row["who"], row["algorithm"], *times(row)]
            cells += [
                number(rival_of(rows, row), ".2f"),
                number(row["rel_fro"], ".1e"),
                number(row["worst_row"], ".1e"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def plot(document, path):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in document["rows"] if row["table"] == "square"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for who in dict.fromkeys(row["who"] for row in rows):
        own = [row for row in rows if row["who"] == who]
        axes.plot([row["m"] for row in own], [row["gflops"] / 1e3 for row in own], marker="o", label=who)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("m = n = k")
    axes.set_ylabel("TFLOP/s (8 m n k)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"complex64 on {document['environment']['device']}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments):
    sources = [Path(name) for name in arguments] or sorted(DOCS.glob("kernels-*.json"))
    if not sources:
        print(f"no JSON in {DOCS}: run benchmarks/kernels/run.py first", file=sys.stderr)
        return 2
    for source in sources:
        document = json.loads(source.read_text(encoding="utf-8"))
        picture = source.with_suffix(".png")
        plot(document, picture)
        source.with_suffix(".md").write_text(markdown(document, picture.name), encoding="utf-8")
        print(source.with_suffix(".md"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
