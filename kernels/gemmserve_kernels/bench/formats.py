"""Rows as a table, CSV or JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.bench.accuracy import AccuracyRow
    from gemmserve_kernels.bench.cases import Row
    from gemmserve_kernels.bench.grades import GradeRow

FORMATS: Final = ("table", "csv", "json")


def fields(row: Row | AccuracyRow | GradeRow) -> dict[str, Any]:
    """A row as plain values, rates included."""
    values = dataclasses.asdict(row)
    for rate in ("gflops", "gib_per_s"):
        if hasattr(row, rate):
            values[rate] = getattr(row, rate)
    return values


def to_json(rows: Sequence[Row | AccuracyRow | GradeRow], environment: dict[str, Any]) -> str:
    """One object: the environment and the rows."""
    return json.dumps({"environment": environment, "rows": [fields(row) for row in rows]}, indent=2)


def to_csv(rows: Sequence[Row | AccuracyRow | GradeRow]) -> str:
    """One line a row after the names; nested values as JSON."""
    text = io.StringIO()
    records = [fields(row) for row in rows]
    writer = csv.DictWriter(text, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({name: json.dumps(v) if isinstance(v, dict) else v for name, v in record.items()})
    return text.getvalue().rstrip("\n")


def measurement_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Names and cells. "x" is a row's time over ours: above 1, ours is faster."""
    names = ["size", "dtype", "compute", "who", "algorithm", "ms", "GFLOP/s", "GiB/s", "x", "error"]
    names += ["worst row", "re", "im", "checked"]
    cells = [
        [
            row.case,
            row.dtype,
            row.compute,
            row.who,
            row.algorithm,
            _number(row.seconds and row.seconds * 1e3, ".4g"),
            _number(row.gflops, ".4g"),
            _number(row.gib_per_s, ".4g"),
            _number(row.ratio, ".2f"),
            _number(row.rel_fro, ".1e"),
            _number(row.worst_row, ".1e"),
            _number(row.rel_real, ".1e"),
            _number(row.rel_imag, ".1e"),
            row.checked,
        ]
        for row in rows
    ]
    return names, cells


def accuracy_table(rows: Sequence[AccuracyRow]) -> tuple[list[str], list[list[str]]]:
    """Names and cells."""
    names = ["size", "dtype", "init", "mode", "from", "error", "worst row", "re", "im"]
    return names, [
        [
            f"{row.m} x {row.n} x {row.k}",
            row.dtype,
            row.init,
            row.mode,
            row.source,
            *(f"{value:.2e}" for value in (row.rel_fro, row.worst_row, row.rel_real, row.rel_imag)),
        ]
        for row in rows
    ]


def grade_table(rows: Sequence[GradeRow]) -> tuple[list[str], list[list[str]]]:
    """Names and cells; errors in units of u, the vendor's beside ours."""
    names = ["size", "dtype", "data", "mode", "from", "error, u", "vendor", "re", "vendor", "im", "vendor", "grade"]
    return names, [
        [
            f"{row.m} x {row.n} x {row.k}",
            row.dtype,
            row.kind,
            row.mode,
            row.source,
            *(
                f"{value:.3g}"
                for value in (row.error, row.vendor, row.real, row.vendor_real, row.imag, row.vendor_imag)
            ),
            row.grade,
        ]
        for row in rows
    ]


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
