"""Tables of the guides, from the measurements under docs/benchmarks: benchmarks.figures puts them into the pages.

`TABLES` has a function for each; `tools/pictures.py` draws the guides' pictures.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.bench.elementwise import limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "benchmarks"
HEADLINE = (3456, 4096, 4096)
SINGLE = ("auto", "3xfp16-3m", "3xfp16", "6xbf16", "9xbf16", "3xtf32", "1xtf32", "tf32", "fp32")
DOUBLE = ("auto", "ozaki", "fp64")


@cache
def measured(name: str) -> dict[str, Any]:
    """A report of docs/benchmarks, by its file's stem."""
    report: dict[str, Any] = json.loads((MEASURED / f"{name}.json").read_text())
    return report


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown of a table, with the empty lines that it needs around it."""
    head = list(head)
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n\n" + "\n".join(lines) + "\n\n"


def products(dtype: str, shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Rows of the kernels' report: one product of normal data."""
    return [
        row
        for row in measured("kernels-nvidia-h200")["rows"]
        if row["op"] == "gemm" and row["dtype"] == dtype and (row["m"], row["n"], row["k"]) == shape
        and row["batch"] == 1 and row["init"] == "normal" and row.get("tflops")
    ]  # fmt: skip


def speed(dtype: str, shape: tuple[int, int, int], mode: str) -> tuple[float, float, float] | None:
    """TFLOP/s, that over cuBLAS's plain arithmetic, and the error in norm, of a mode; None: not measured."""
    rows = products(dtype, shape)
    plain = [row for row in rows if row["who"] == "vendor BLAS" and row["compute"] == "auto"]
    if mode in {"fp32", "fp64"}:  # `auto` beside it in the report: plain arithmetic is the vendor's
        found = plain
    else:
        found = [row for row in rows if row["who"] == "gemmserve" and row["compute"] == mode and not row["label"]]
        found = [row for row in found if row["table"] != "mma"]  # the kernel of older devices
        found = found or [
            row for row in rows if row["compute"] == "auto" and row["who"] == "gemmserve" and row["arithmetic"] == mode
        ]
    if not found or not plain:
        return None
    return found[0]["tflops"], found[0]["tflops"] / plain[0]["tflops"], found[0]["rel_fro"]


def elements(dtype: str, mode: str) -> tuple[float, float, int, int] | None:
    """The worst error of an element on normal data at k = 4096, in u, and on any data, in what Grade A allows there.

    Then the number of cases of Grade A, and of all cases.
    """
    rows = [row for row in measured("accuracy-nvidia-h200")["rows"] if (row["dtype"], row["mode"]) == (dtype, mode)]
    if not rows:
        return None
    normal = next(row["error"] for row in rows if row["kind"] == "normal" and row["k"] == 4096)
    good = sum(row["error"] <= limit(row["vendor"]) for row in rows)
    return normal, max(row["error"] / limit(row["vendor"]) for row in rows), good, len(rows)


def modes(dtype: str, shape: tuple[int, int, int], names: tuple[str, ...]) -> str:
    """Table of compute modes: speed, error in norm, errors of elements."""

    def row(mode: str) -> list[str]:
        fast, exact = speed(dtype, shape, mode), elements(dtype, mode)
        return [
            f"`{mode}`",
            *(["-"] * 3 if fast is None else [f"{fast[0]:.0f}", f"{fast[1]:.1f}", f"{fast[2]:.1e}"]),
            *(["-"] * 3 if exact is None else [f"{exact[0]:.2g}", f"{exact[1]:.2g}", f"{exact[2]} of {exact[3]}"]),
        ]

    unit = "2⁻⁵³" if dtype == "complex128" else "2⁻²⁴"
    head = (
        "`compute`", "TFLOP/s", "times cuBLAS", "error in norm", f"worst element, normal data, {unit}",
        "worst on any data, of what Grade A allows", "cases of Grade A",
    )  # fmt: skip
    return table(head, map(row, names))


def load(row: str, case: str) -> dict[str, Any]:
    """Figure of the load test; how many results there were is left out of `case`."""
    source = "load-results-nvidia-h200" if row in {"put-get", "results"} else "load-nvidia-h200"
    found: dict[str, Any] = next(
        each
        for each in measured(source)["figures"]
        if each["row"] == row and re.sub(r"\d+ results", "results", each["case"]).startswith(case)
    )
    return found


def job_time() -> str:
    """Where the time of a job goes, by size, operands on the device."""
    small = measured("service-nvidia-h200")["small"]
    rows = [
        [
            f"{each['size']}³", f"{each['job_p50_s'] * 1e3:.2f}", f"{each['phases_p50_s']['queue_s'] * 1e3:.2f}",
            f"{each['phases_p50_s']['kernel_s'] * 1e3:.2f}", f"{each['kernels_p50_s'] * 1e3:.2f}",
        ]
        for each in small
    ]  # fmt: skip
    stream = measured("service-nvidia-h200")["stream"]
    rows.append(
        [f"{stream['size']}³, one of {stream['jobs']} in a row", f"{stream['seconds_per_job'] * 1e3:.2f}", "-",
         f"{stream['phases_p50_s']['kernel_s'] * 1e3:.2f}", f"{stream['compute_s'] * 1e3:.2f}"]
    )  # fmt: skip
    head = ("complex64", "job, ms", "of that queue, ms", "worker, ms", "kernels called directly, ms")
    return table(head, rows)


def rates() -> str:
    """Rates at which bytes move, slowest first."""
    service = measured("service-nvidia-h200")
    found = [
        (load(row, case)["achieved"], what)
        for row, case, what in (
            ("put-get", "put, fresh, TCP", "`put` to space never used before, TCP on one machine"),
            ("put-get", "put, recycled, TCP", "`put` to space used before"),
            ("put-get", "get, recycled, TCP", "`.numpy()` of a stored array"),
            ("results", "4096^3, results fetched by TCP", "results fetched as they are made, TCP, eight clients"),
            ("results", "4096^3, results fetched by Unix socket", "the same by the Unix socket"),
            ("results", "4096^3, results in the host arena", "results from the device to the host arena"),
            ("results", "4096^3, results in the store", "results from the device, more than the arena takes"),
        )
    ]
    found.append((service["first_copy"]["bytes_per_s"] / 1e9, "a stored array's first copy to the device"))
    found.append((service["link"]["host_to_device"] / 1e9, "PCIe, for comparison"))
    return table(("what", "GB/s"), [[what, f"{rate:.1f}"] for rate, what in sorted(found)])


def ways() -> str:
    """Ways to send the same product, by what they cost."""
    figures = {(each["case"], each["who"]): each for each in measured("service")["rows"] if "who" in each}
    one = figures["batch wire", "gemmserve (product)"]["latency"]["p50_ms"]
    thousand = figures["batch wire", "gemmserve (batch)"]["latency"]["p50_ms"]
    job = figures["batch resident", "gemmserve (job)"]["latency"]["p50_ms"]
    resident = figures["batch resident", "gemmserve (batch resident)"]["latency"]["p50_ms"]
    return table(
        ("64 x 64 complex64, no GPU, two processors", "ms", "ms a product"),
        [
            ["one-shot: `client.gemm(a, b)`", f"{one:.2f}", f"{one:.2f}"],
            ["1,000 in one exchange: `gemm_many`", f"{thousand:.0f}", f"{thousand / 1e3:.2f}"],
            ["job on resident arrays, submitted and waited for", f"{job:.2f}", f"{job:.2f}"],
            ["1,000 such products in one exchange", f"{resident:.0f}", f"{resident / 1e3:.3f}"],
        ],
    )


TABLES: dict[str, Callable[[], str]] = {
    "guides.modes-complex64": lambda: modes("complex64", HEADLINE, SINGLE),
    "guides.modes-complex128": lambda: modes("complex128", (8192, 8192, 8192), DOUBLE),
    "guides.job-time": job_time,
    "guides.rates": rates,
    "guides.ways": ways,
}
