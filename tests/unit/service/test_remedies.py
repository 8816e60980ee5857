"""What to do is said of every problem, and of nothing that is none."""

from __future__ import annotations

import re

import pytest

import gemmserve_service.http.app  # noqa: F401 (every problem is defined by then)
from gemmserve_service.http.problems import catalogue
from gemmserve_service.remedies import REMEDIES, remedy


def test_every_problem_has_one() -> None:
    assert set(REMEDIES) == set(catalogue())


@pytest.mark.parametrize("slug", sorted(REMEDIES))
def test_it_is_whole_sentences(slug) -> None:
    text = remedy(slug)
    assert re.fullmatch(r"[A-Z].+\.", text)
    assert text.count("`") % 2 == 0


def test_an_unknown_problem_is_told_as_an_unexpected_one() -> None:
    assert remedy("no-such") == remedy("internal")
