"""Figures in the README and the documentation are those of the JSON under docs/benchmarks."""

from __future__ import annotations

import re

import pytest
from benchmarks import figures
from doc_blocks import ROOT


def test_figures_are_those_of_the_reports() -> None:
    found = [str(path.relative_to(ROOT)) for path in figures.stale()]
    assert not found, "make figures"


def test_every_figure_is_used() -> None:
    used = {found[1] for path in figures.pages() for found in figures.MARKED.finditer(path.read_text())}
    assert used == set(figures.FIGURES)


def test_a_typed_figure_is_replaced() -> None:
    text = "It was <!-- figure: chaos.jobs -->7<!-- end --> jobs.\n"
    assert figures.filled(text) == "It was <!-- figure: chaos.jobs -->500<!-- end --> jobs.\n"
    with pytest.raises(ValueError, match="begins a line"):
        figures.filled("<!-- figure: chaos.jobs -->7<!-- end --> jobs\n")
    with pytest.raises(KeyError):
        figures.filled("of <!-- figure: no.such -->7<!-- end -->")


@pytest.mark.parametrize(
    ("value", "count", "text"), [(53.02, 3, "53.0"), (236.3, 3, "236"), (100.2, 2, "100"), (0.2812, 3, "0.281")]
)
def test_digits(value, count, text) -> None:
    assert figures.digits(value, count) == text


def test_rates_are_not_typed() -> None:
    """Speeds are measurements: outside of figures pages name none."""
    rate = re.compile(r"[0-9] (?:TFLOP|[KMGT]i?B|Gflop)/s")
    typed = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in figures.pages()
        for line in figures.MARKED.sub("", path.read_text()).splitlines()
        if rate.search(line)
    ]
    assert not typed, "\n".join(typed)
