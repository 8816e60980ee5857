"""The benchmark of hostile data from end to end without a GPU, and its report."""

from __future__ import annotations

import json

import pytest
from benchmark_scripts import FOLDER, load
from benchmark_scripts import on_stand_in as run

(hostile,) = load("hostile")
SMALL = (
    "--extents", 64, "--rounds", 1, "--budget", 0.001, "--kinds", "normal", "infinite", "--dtypes", "float32",
    "--fill-bytes", 1 << 16,
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "hostile.json"
    found = run(FOLDER / "hostile.py", *SMALL, "--output", path)
    assert found.returncode == 0, found.stdout + found.stderr
    return path


def test_both_are_timed_on_every_kind(measured):
    document = json.loads(measured.read_text())
    assert [(row["kind"], row["dtype"], row["extent"]) for row in document["rows"]] == [
        ("normal", "float32", 64),
        ("infinite", "float32", 64),
    ]
    assert all(row["auto_s"] > 0 and row["vendor_s"] > 0 for row in document["rows"])
    assert "device" in document["environment"]


def test_a_second_run_has_nothing_left_to_do(measured):
    before = measured.read_text()
    assert run(FOLDER / "hostile.py", *SMALL, "--output", measured).stdout == ""
    assert measured.read_text() == before


def test_the_report_is_made_of_the_rows(measured):
    assert run(FOLDER / "hostile.py", "--report", measured).returncode == 0
    text = measured.with_suffix(".md").read_text()
    for row in json.loads(measured.read_text())["rows"]:
        assert f"| {row['kind']} | 64 | {row['vendor_s'] * 1e3:.3g} | {row['auto_s'] * 1e3:.3g} |" in text
    assert "The smallest of 2 is " in text


def test_the_smallest_ratio_is_said():
    row = {
        "kind": "spikes", "dtype": "float64", "extent": 4096, "auto_s": 2.0, "vendor_s": 1.8,
        "wide_share": 0.0, "plain_share": 1.0,
    }  # fmt: skip
    other = row | {"kind": "normal", "auto_s": 1.0, "wide_share": None, "plain_share": None}
    text = "\n".join(hostile.report({"environment": {"device": "a GPU"}, "rows": [row, other]}))
    assert "The smallest of 2 is 0.90 (float64, spikes, 4096)." in text
    assert "| spikes | 4096 | 1.8e+03 | 2e+03 | 0.90 | 0 | 100 % |" in text
    assert "| normal | 4096 | 1.8e+03 | 1e+03 | 1.80 |  |  |" in text
    assert "- spikes: 1e-6 N(0, 1)" in text
