"""Products drawn at random: the script from end to end on the CPU, what it draws, and its page."""

from __future__ import annotations

import json
import os
import random
from types import SimpleNamespace

import pytest
from benchmark_scripts import load

from gemmserve_kernels.bench.kinds import KINDS
from gemmserve_kernels.bench.kinds import operands as data

(script,) = load("random_accuracy")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "random.json"
    command = ("--device", "cpu", "--shrink", 32, "--seconds", 2, "--processes", 2, "--seed", 5, "--output", path)
    assert script.main([*map(str, command)]) == 0
    return path


def test_every_process_measures_products_of_its_own(measured):
    document = json.loads(measured.read_text())
    assert document["cases"] == sum(each["cases"] for each in document["groups"]) > 20
    assert document["beyond"] == 0  # NumPy beside itself
    assert {each["by"] for each in document["groups"]} == {"numpy:plain"}
    assert len({each["dtype"] for each in document["groups"]}) == 4
    assert max(each["worst"] for each in document["groups"]) <= 0.5
    assert document["failed"] == []
    page = measured.with_suffix(".md")
    written = page.read_text()
    assert f"{document['cases']} products" in written
    page.unlink()
    assert script.main(["--report", str(measured)]) == 0
    assert page.read_text() == written


def done_at_once(number, seed, args, found):
    """Stands in the place of `work`: measures one case."""
    found.put({"number": number})
    found.put(None)


def ended_early(number, seed, args, found):
    """The same, and dies before it has said that it is done."""
    found.put({"number": number})
    found.close()
    found.join_thread()
    os._exit(7)


def test_a_process_that_dies_is_told_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(script, "LOOK_S", 0.2)
    cases = list(script.answers(5, SimpleNamespace(processes=1, seconds=1), target=done_at_once))
    assert cases == [{"number": 0}]
    cases = list(script.answers(5, SimpleNamespace(processes=1, seconds=1), target=ended_early))
    assert cases == [{"number": 0}, {"failed": "a process ended by 7"}]


def test_draws_are_those_of_the_seed_and_within_what_is_measured():
    args = script.parsed([])
    one, same, other = (script.drawn(random.Random(seed), args) for seed in ("5 0", "5 0", "5 1"))
    assert one == same != other
    draws = random.Random(1)
    found = [script.drawn(draws, args) for _ in range(600)]
    assert {each["kind"] for each in found} == set(KINDS)
    for each in found:
        m, n, k = (each[name] for name in "mnk")
        assert min(m, n, k) >= 16
        assert m * n * k <= script.PRODUCTS
        assert (m + n) * k <= script.ELEMENTS
    assert 0.6 < sum(each["m"] % 8 == 0 for each in found) / len(found) < 0.85


def test_what_is_beyond_its_limit_is_told_with_its_seed():
    case = {"dtype": "float64", "kind": "constant", "m": 40, "n": 30, "k": 20, "seed": 77, "by": "dmma:plain"}
    errors = {"error": [9.4, 1.4], "real": [9.4, 1.4], "imag": [0.0, 0.0]}
    fine = case | errors | {"dtype": "float32", "ratio": 0.5}
    lost = case | errors | {"ratio": float("nan")}
    failed = case | {"failed": "DeviceError: lost"}
    document = {"environment": {"device": "a GPU"}, "kinds": 2, "near": [], "failed": []}
    script.summed([fine, case | errors | {"ratio": 2.35}, failed, lost], document)
    assert (document["cases"], document["beyond"], document["failed"]) == (3, 2, [failed])
    assert [group["dtype"] for group in document["groups"]] == ["float32", "float64"]
    page = script.markdown(document)
    assert "**2 are beyond the limit" in page
    assert "| 2.35 | dmma:plain | float64 | constant | 40 x 30 x 20 | 9.4 (1.4) | 9.4 (1.4) | 0 (0) | 77 |" in page
    assert "DeviceError: lost" in page


def test_a_case_is_measured_beside_what_its_kind_allows(monkeypatch):
    """An error of twelve units where the vendor has none to speak of."""
    case = {"dtype": "float32", "kind": "normal", "m": 8, "n": 8, "k": 4, "seed": 3}
    xp, spec = script.opened("cpu")
    assert script.measured(xp, spec, case)["ratio"] <= 0.5
    a, b = data(xp, "normal", 8, 8, 4, "float32", 3)
    grades = script.grades

    def off(*arguments, **more):
        return grades(*arguments, **more, multiply=lambda *_, **__: (a @ b) * a.dtype.type(1 + 12 * 2.0**-24))

    monkeypatch.setattr(script, "grades", off)
    assert script.measured(xp, spec, case)["ratio"] > 1
