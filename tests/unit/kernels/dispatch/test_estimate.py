"""Estimates of time: the model's shape, and measurements that correct it."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import resources

import pytest
from benchmark_scripts import load

from gemmserve_kernels import GemmProblem, Operand
from gemmserve_kernels.algorithms.common.time_model import BANDWIDTH, MODELS, model_seconds, skinny_parts
from gemmserve_kernels.algorithms.gram.seconds import gram_seconds
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.estimate import Table, correction, estimate, measured_device, predicted, table
from gemmserve_kernels.dispatch.routes import plan_gemm

H200 = KNOWN["H200"]
UNMEASURED = dataclasses.replace(H200, arch="sm_100a", name="another")
KEY = ("simt", "plain", "complex64")

(tune_dispatch,) = load("tune_dispatch")


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


def test_skinny_products_have_a_rate_of_their_own():
    key = ("fused", "3xfp16", "complex64")
    for shape in ((1, 128, 8192, 8192), (1, 8192, 128, 8192)):
        found = 8 * 128 * 8192**2 / model_seconds(H200, *key, shape)
        assert 0.9 * MODELS[key].skinny < found <= MODELS[key].skinny
    memory = 8 * (2 * 16 * 16384 + 16384**2) / BANDWIDTH
    assert model_seconds(H200, *key, (1, 16, 16384, 16384)) >= memory
    assert 8 * 192 * 8192**2 / model_seconds(H200, *key, (1, 192, 8192, 8192)) <= MODELS[key].rate


def test_skinny_products_take_whole_rounds_of_tiles():
    """One tall tile more than multiprocessors takes less than twice as many, for k is cut; that takes launches."""
    key = ("fused", "3xfp16", "complex64")
    one, more, two = (model_seconds(H200, *key, (1, 64, tiles * 128, 8192)) for tiles in (132, 133, 264))
    assert 1.2 * one < more < 0.8 * two
    assert two > 1.9 * one
    halves = model_seconds(H200, *key, (1, 64, 66 * 128, 8192))
    assert 0.5 * one < halves < 0.6 * one


def test_half_the_multiprocessors_take_twice_as_long():
    half = dataclasses.replace(UNMEASURED, sm_count=66)
    shape = (1, 8192, 8192, 8192)
    ratio = model_seconds(half, *KEY, shape) / model_seconds(UNMEASURED, *KEY, shape)
    assert 1.9 < ratio < 2.1


def test_tensor_cores_that_are_not_known_are_not_chosen():
    assert model_seconds(KNOWN["RTX5090"], "mma", "3xfp16", "complex64", (1, 4096, 4096, 4096)) == math.inf
    assert model_seconds(KNOWN["A100"], "mma", "3xfp16", "complex64", (1, 4096, 4096, 4096)) < math.inf


def test_a_product_that_is_reduced_is_not_written():
    thin = (1, 4096, 4096, 16)
    key = ("wgmma", "3xfp16", "complex64")
    assert model_seconds(H200, *key, thin, written=False) < 0.8 * model_seconds(H200, *key, thin)
    deep = (1, 4096, 4096, 4096)
    assert model_seconds(H200, *key, deep, written=False) == model_seconds(H200, *key, deep)


def test_sums_of_squares_by_gram_matrices():
    """By the operations of A^H A and of the forms; A that is shared is multiplied once."""

    def seconds(batch=16, m=65536, n=4096, k=64, matrices=16, spec=H200):
        return gram_seconds(spec, "complex64", (batch, m, n, k), matrices, k * k, 64)

    assert seconds() > 8 * 16 * 65536 * 64**2 / 6e13
    assert seconds(m=4 * 65536) > 3 * seconds()
    assert seconds(n=8192) < 1.2 * seconds()
    assert seconds(matrices=1) < 0.3 * seconds()
    assert seconds(n=1) < seconds()
    assert 2 * seconds() < seconds(spec=KNOWN["A100"]) < math.inf
    assert seconds(spec=KNOWN["RTX5090"]) == math.inf
    # As much as reading the operands takes, however little is to be multiplied.
    assert seconds(batch=1, matrices=1, m=10**8, k=1) > 8e8 / 4e12


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


def _document(*points):
    """Points (dtype, shape, seconds by route, wall by route)."""
    names = ("batch", "m", "n", "k")
    entries = [
        {"dtype": dtype, **dict(zip(names, shape, strict=True)), "seconds": seconds, "wall": wall}
        for dtype, shape, seconds, wall in points
    ]
    return {"environment": {"device": H200.name, "arch": H200.arch, "sm_count": 132}, "points": entries}


def test_a_point_stands_for_its_transpose():
    tall, wide = (1, 4096, 64, 512), (1, 64, 4096, 512)
    far = (1, 64, 64, 64)
    measured = _table((tall, 3 * model_seconds(H200, *KEY, tall)), (far, model_seconds(H200, *KEY, far)))
    assert correction(measured, *KEY, wide) == pytest.approx(3, rel=0.01)
    assert correction(measured, *KEY, tall) == pytest.approx(3, rel=1e-9)


def test_extents_that_are_multiples_of_8_lie_apart_from_others():
    aligned, odd, between = (20_000, 32, 32, 32), (16_384, 33, 33, 33), (16_384, 32, 32, 32)
    measured = _table((aligned, model_seconds(H200, *KEY, aligned)), (odd, 3 * model_seconds(H200, *KEY, odd)))
    assert correction(measured, *KEY, between) < 1.1
    assert correction(measured, *KEY, (20_000, 33, 33, 33)) > 2.7


def test_a_route_that_was_not_measured_has_its_sibling_s_ratio():
    shape = (1, 512, 512, 512)
    key = ("mma", "3xfp16", "complex64")
    seconds = 2 * model_seconds(H200, *key, shape)
    measured = Table.of(_document(("complex64", shape, {"mma:3xfp16": seconds}, {})))
    assert correction(measured, "mma", "1xfp16", "complex64", shape) == pytest.approx(2)
    assert correction(measured, "mma", "1xfp16", "float32", shape) == 1.0


def test_what_the_host_takes_decides_nothing():
    shape = (1, 64, 64, 64)
    times, walls = {"simt:plain": 5e-6, "vendor:plain": 6e-6}, {"simt:plain": 4e-5, "vendor:plain": 9e-6}
    measured = Table.of(_document(("complex64", shape, times, walls)))
    assert predicted(H200, measured, KEY, shape) == pytest.approx(5e-6)


def test_leaving_a_point_out_tells_what_it_is_worth():
    def point(n, simt, vendor):
        return ("complex64", (1, n, n, n), {"simt:plain": simt * n**3, "vendor:plain": vendor * n**3}, {})

    # Everywhere but at 1024 simt is the faster one: without that point it is taken there too.
    points = [point(n, 1e-12, 2e-12) for n in (256, 512, 2048, 4096)] + [point(1024, 2e-12, 1e-12)]
    document = _document(*points)
    found = {each.shape[1]: each for each in tune_dispatch.left_out(Table.of(document), document)}
    assert (found[1024].chosen, found[1024].best) == ("simt:plain", "vendor:plain")
    assert found[1024].ratio == pytest.approx(0.5)
    assert found[256].ratio == 1
    assert all(each.mode == "auto" for each in found.values())


def test_a_table_of_another_device_of_the_architecture_is_read():
    document = _document(("complex64", (1, 64, 64, 64), {"simt:plain": 1e-5}, {}))
    document["environment"] |= {"device": "NVIDIA H100 80GB HBM3", "sm_count": 114}
    assert measured_device(document).name == "NVIDIA H100"
    assert measured_device(document).sm_count == 114
    document["environment"]["arch"] = "sm_61"
    with pytest.raises(ValueError, match="sm_61"):
        Table.of(document)


def test_a_starved_product_is_split_along_k():
    shape = (1, 64, 64, 65536)
    one_tile = model_seconds(H200, *KEY, shape)
    split = model_seconds(H200, "wgmma", "3xfp16", "complex64", shape)
    assert split < one_tile / 20


@pytest.mark.parametrize("fastest", ["simt:plain", "wgmma:3xfp16", "fused:3xfp16", "vendor:plain", "mma:3xfp16"])
def test_the_table_of_the_package_decides(fastest, tmp_path, monkeypatch):
    """From the file to the algorithm: what was measured to be the fastest is taken."""
    routes = ("vendor:plain", "simt:plain", "wgmma:3xfp16", "fused:3xfp16", "mma:3xfp16")
    times = {route: 1e-4 if route == fastest else 1.1e-4 for route in routes}
    (tmp_path / "tables").mkdir()
    document = _document(("complex64", (1, 300, 300, 300), times, {}))
    (tmp_path / "tables" / "sm_90a.json").write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    table.cache_clear()
    try:
        operand = Operand.contiguous((300, 300), "complex64")
        assert plan_gemm(GemmProblem.build(operand, operand), H200).algorithm == fastest.partition(":")[0]
    finally:
        table.cache_clear()


@pytest.mark.parametrize(
    ("tiles", "k", "parts"),
    [
        (64, 8192, 2),
        (128, 8192, 1),
        (8, 4096, 16),
        (133, 4096, 4),
        (158, 3000, 4),
        (256, 512, 1),
        (7813, 512, 1),
        (1, 64, 1),
    ],
)
def test_parts_of_skinny_products_fill_rounds(tiles, k, parts):
    assert skinny_parts(tiles, k, 132, 132) == parts
