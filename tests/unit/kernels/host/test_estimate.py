"""Estimates of time: the model's shape, and measurements that correct it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from gemmserve_kernels.device import KNOWN
from gemmserve_kernels.estimate import MODELS, Table, correction, estimate, model_seconds, table

H200 = KNOWN["H200"]
UNMEASURED = dataclasses.replace(H200, arch="sm_100a", name="another")
KEY = ("simt", "plain", "complex64")


@pytest.mark.parametrize("key", MODELS, ids="-".join)
def test_more_work_takes_more_time(key):
    small, large = (model_seconds(H200, *key, (1, n, n, n)) for n in (1024, 4096))
    assert 0 < small < large < math.inf
    assert model_seconds(H200, *key, (8, 1024, 1024, 1024)) > small


def test_a_large_product_runs_at_its_rate():
    for key, model in MODELS.items():
        unit = 8 if key[2].startswith("complex") else 2
        found = unit * 8192**3 / model_seconds(H200, *key, (1, 8192, 8192, 8192))
        assert 0.5 * model.rate < found <= model.rate


def test_half_the_multiprocessors_take_twice_as_long():
    half = dataclasses.replace(UNMEASURED, sm_count=66)
    shape = (1, 8192, 8192, 8192)
    ratio = model_seconds(half, *KEY, shape) / model_seconds(UNMEASURED, *KEY, shape)
    assert 1.9 < ratio < 2.1


def test_tensor_cores_that_are_not_known_are_not_chosen():
    assert model_seconds(KNOWN["RTX5090"], "mma", "3xfp16", "complex64", (1, 4096, 4096, 4096)) == math.inf
    assert model_seconds(KNOWN["A100"], "mma", "3xfp16", "complex64", (1, 4096, 4096, 4096)) < math.inf


def test_what_no_algorithm_does_takes_for_ever():
    assert estimate(H200, "wgmma", "3xfp16", "complex128", (1, 64, 64, 64)) == math.inf


def _table(*points):
    """Points (shape, seconds) of one algorithm."""
    documents = [
        {"dtype": KEY[2], **dict(zip(("batch", "m", "n", "k"), shape, strict=True)), "seconds": {"simt:plain": seconds}}
        for shape, seconds in points
    ]
    return Table.of({"environment": {"device": H200.name, "arch": H200.arch}, "points": documents})


def test_a_measured_point_is_its_own_estimate():
    points = [((1, 64, 64, 64), 3e-5), ((1, 4096, 4096, 4096), 2e-2), ((100, 16, 16, 16), 1e-5)]
    measured = _table(*points)
    for shape, seconds in points:
        found = model_seconds(H200, *KEY, shape) * correction(measured, *KEY, shape)
        assert found == pytest.approx(seconds, rel=1e-9)


def test_between_points_the_ratio_is_between_theirs():
    low, high = (1, 512, 512, 512), (1, 2048, 2048, 2048)
    measured = _table(
        (low, 1.1 * model_seconds(H200, *KEY, low)),
        (high, 1.9 * model_seconds(H200, *KEY, high)),
    )
    near_low, middle, near_high = (correction(measured, *KEY, (1, n, n, n)) for n in (600, 1024, 1800))
    assert 1.1 < near_low < middle < near_high < 1.9
    assert correction(measured, "vendor", "plain", "complex64", low) == 1.0


def test_an_unmeasured_architecture_has_the_model():
    assert table("sm_100a") == Table({})
