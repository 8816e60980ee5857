"""The model of sums that one term dominates: the script, and that its first way is the kernels' own arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmark_scripts import load
from kernel_models import splits

from gemmserve_kernels.bench.kinds import KINDS, operands
from gemmserve_kernels.numerics import models

(script,) = load("dominant_term")


@pytest.mark.parametrize("kind", ["normal", "dominant-term"])
@pytest.mark.parametrize("promote", [16, 32])
def test_it_has_the_bits_of_the_model_of_planes(kind, promote):
    a, b = operands(np, kind, 20, 24, script.K, "complex64", 3)
    left, right = splits.split(a, "3xfp16", "a"), splits.split(np.ascontiguousarray(b.T), "3xfp16", "b")
    expected = splits.multiply(left.planes, right.planes, "3xfp16", promote)
    expected = models.times_powers(expected, left.exponents[:, None] + right.exponents)
    np.testing.assert_array_equal(script.product(a, b, replace(script.WAYS[0], promote=promote)), expected)


def test_parts_on_a_grid_are_those_numbers():
    a, _ = operands(np, "normal", 20, 24, script.K, "complex64", 3)
    parts, exponents = script.planes(a, "a", grid=True)
    exact = np.ldexp(np.stack([a.real, a.imag]).astype(np.float64), -exponents[:, None])
    assert (parts[:2] % 2.0 ** (15 - script.GRID) == 0).all()
    assert abs(parts[:2] + parts[2:].astype(np.float64) - exact).max() <= 2.0**-9


def test_shares_of_tiles_are_those_of_the_verdict():
    """Shares of tiles that are served, by the kernels' own threshold."""
    vectors, k = 512, 64
    a, b = operands(np, "exp-1n", vectors, vectors, k, "complex64", 1)
    left, right = splits.split(a, "3xfp16", "a"), splits.split(np.ascontiguousarray(b.T), "3xfp16", "b")
    found = script.served("exp-1n", k, 256, 8, vectors)["share"]
    assert found == splits.served(left, right, k)[::256, ::256].mean()


def test_all_of_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "SERVED", ((64, 64),))
    path = tmp_path / "a.json"
    assert script.main(["--extent", "16", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    assert len(document["rows"]) == 5 * len(script.WAYS)
    assert len(capsys.readouterr().out.splitlines()) == len(document["rows"]) + len(document["served"])
    assert document["rows"][0].keys() == json.loads(script.OUTPUT.read_text())["rows"][0].keys()


def test_what_was_found():
    """The bound of the kind holds for the kernels' two ways, and is broken by sums that are twice as long."""
    rows = json.loads(script.OUTPUT.read_text())["rows"]
    errors = [row["error"] for row in rows if row["kind"] == "dominant-term"]
    assert errors[0] < errors[1] < KINDS["dominant-term"].bound < errors[2]
