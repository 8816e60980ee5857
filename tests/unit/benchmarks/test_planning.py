"""docs/benchmarks/planning.json is what the planner says, within what newly measured tables change."""

from __future__ import annotations

import json
import statistics

import pytest
from benchmarks import planning

from gemmserve_kernels.planning.rates import rates_of, shipped


def numbers(found):
    """Numbers of a document by their paths."""
    if isinstance(found, dict):
        return {(name, *path): value for name, each in found.items() for path, value in numbers(each).items()}
    if isinstance(found, list):
        return {(place, *path): value for place, each in enumerate(found) for path, value in numbers(each).items()}
    return {(): found} if isinstance(found, float) else {}


def test_the_report_is_what_the_planner_says() -> None:
    now, then = numbers(planning.predictions()), numbers(planning.report())
    assert now.keys() == then.keys()
    far = [path for path, value in now.items() if value != pytest.approx(then[path], rel=0.1)]
    assert not far, "python -m benchmarks.planning && make figures"


def test_splits_that_were_measured() -> None:
    """Within 15 %, in the report as it lies there."""
    for each in planning.report()["splits"]:
        assert each["predicted_s"] == pytest.approx(each["measured_s"], rel=0.15)


def test_products_with_bounded_memory_that_were_measured() -> None:
    """They are those of the load test, predicted within 15 % of the median."""
    budgets = planning.report()["budgets"]
    assert [each["measured_s"] for each in budgets] == [each["others_s"] for each in planning.served()]
    assert len(budgets) >= 4
    assert {each["devices"] for each in budgets} == {1, 2}
    for each in budgets:
        assert each["predicted_s"] == pytest.approx(statistics.median(each["measured_s"]), rel=0.15)


def test_the_shipped_rates_are_those_of_the_probe() -> None:
    found = rates_of(json.loads((planning.OUTPUT.parent / "probe-nvidia-h200.json").read_text()))
    assert shipped("nvidia-h200") == found
    assert shipped().products == found.products
