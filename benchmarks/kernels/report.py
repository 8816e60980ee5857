"""Tables and plots from the JSON that run.py writes: docs/benchmarks/kernels-<device>.md and .png beside it.

python benchmarks/kernels/report.py [docs/benchmarks/kernels-nvidia-h200.json ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

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
    "batched": "Batched and small (batch first)",
    "data": "Errors by kind of data and k, complex64",
    "float32 data": "Errors by kind of data, float32",
    "double data": "Errors by kind of data, complex128 by residues",
    "error by k": "Errors by compute mode and k, complex64",
    "half": "float16 (accumulates in float32)",
    "ops": "Transposed and conjugated operands",
    "planar": "Planar operands",
    "tf32": "compute=tf32",
    "gemm_reduce": "gemm_reduce (batch, m, n, k) over m; the rival multiplies, then reduces",
}
NOTE = (
    'Complex flops are 8 m n k. "gemmserve" is what dispatch chose, "prepared" the same on operands prepared '
    "beforehand, an algorithm's name that algorithm whatever dispatch chose. Times include everything from operands to "
    "result on the device. Errors are relative Frobenius norms against a reference in higher precision; re and im are "
    "those of the real and the imaginary part, each against its own norm."
)
RIVALS = ("vendor BLAS", "cupy", "np.matmul")
CEILINGS = {"3xFP16 at 749 TF of FP16": 249.7, "FP32": 67.0}
"""TFLOP/s of complex64: cuBLAS's own FP16 rate at 3456 x 4096 x 4096 over three products; the data sheet's FP32."""
COLUMNS = (
    "size",
    "",
    "dtype",
    "compute",
    "who",
    "algorithm",
    "ms",
    "TFLOP/s",
    "GiB/s",
    "rival's time / this",
    "error",
    "worst row",
    "re",
    "im",
)


def times(row):
    return (
        f"{row['seconds'] * 1e3:.4g}",
        f"{row['gflops'] / 1e3:.3g}" if row["gflops"] else "-",
        f"{row['gib_per_s']:.0f}",
    )


def rival_of(rows, row):
    """The first rival's time over the row's."""
    key = ("table", "case", "dtype", "compute", "label")
    same = [other for other in rows if all(other[name] == row[name] for name in key)]
    rivals = [other["seconds"] for other in same if other["who"] in RIVALS]
    return rivals[0] / row["seconds"] if rivals else None


def number(value, spec):
    return "-" if value is None else format(value, spec)


def markdown(document, picture):
    environment, rows = document["environment"], document["rows"]
    lines = [f"# Kernels on {environment['device']}", ""]
    lines += ["Written by `benchmarks/kernels/report.py` from the JSON of `benchmarks/kernels/run.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in environment.items()]
    found = document["summary"]
    lines += [
        "",
        f"cuBLAS's time over that of `auto`, geometric mean over all products: {found['rival_over_auto']:.2f}.",
    ]
    lines += [f"The best of cuBLAS and our algorithms over `auto`, at worst: {found['auto_over_best']:.2f}"]
    lines += [f"({found['auto_over_best_at']}).", "", NOTE, "", f"![TFLOP/s by size, error by k]({picture})", ""]
    for table in dict.fromkeys(row["table"] for row in rows):
        lines += [f"## {TITLES.get(table, table)}", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        for row in (row for row in rows if row["table"] == table):
            cells = [row["case"], row["label"], row["dtype"], row["compute"], row["who"], row["algorithm"]]
            cells += times(row)
            cells += [
                number(rival_of(rows, row), ".2f"),
                number(row["rel_fro"], ".1e"),
                number(row["worst_row"], ".1e"),
                number(row["rel_real"], ".1e"),
                number(row["rel_imag"], ".1e"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def plot(document, path):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (speed, error) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    curves(speed, document["rows"], "square", "m", lambda row: row["gflops"] / 1e3, "who")
    for name, rate in CEILINGS.items():
        speed.axhline(rate, linestyle=":", color="gray")
        speed.annotate(name, (256, rate), va="bottom", fontsize=8)
    speed.set(xlabel="m = n = k", ylabel="TFLOP/s (8 m n k)", ylim=(0, None))
    speed.set_title(f"complex64 on {document['environment']['device']}")
    curves(error, document["rows"], "error by k", "k", lambda row: row["rel_fro"], "compute", only="gemmserve")
    error.set(
        xlabel="k", ylabel="relative error (Frobenius)", yscale="log", title="256 x 256 x k complex64, normal data"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def curves(axes, rows, table, x, y, name, only=None):
    """One curve of y(row) over row[x] for each row[name] of a table."""
    chosen = [row for row in rows if row["table"] == table and only in {None, row["who"]}]
    for label in dict.fromkeys(row[name] for row in chosen):
        own = [row for row in chosen if row[name] == label]
        axes.plot([row[x] for row in own], [y(row) for row in own], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


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
