"""The tables of measurements that `auto` decides by, and the choices that they lead to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_scripts import load

import gemmserve_kernels
from gemmserve_kernels import GemmProblem, GemmReduceProblem, Operand
from gemmserve_kernels.algorithms.common.time_model import MODELS
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.estimate import Table, call_seconds, estimate, measured_device, predicted
from gemmserve_kernels.dispatch.routes import _REDUCE_ROUTES, _ROUTES, lags, plan_gemm, plan_gemm_reduce

REPORTS = Path(__file__).parents[4] / "docs" / "benchmarks"
TABLES = sorted((Path(gemmserve_kernels.__file__).parent / "dispatch" / "tables").glob("*.json"))
BY_ARCH = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in TABLES}
H200 = KNOWN["H200"]

(tune_dispatch,) = load("tune_dispatch")


def test_hopper_is_measured():
    assert "sm_90a" in BY_ARCH


@pytest.mark.parametrize("arch", BY_ARCH)
def test_every_point_is_a_measurement(arch):
    document = BY_ARCH[arch]
    assert document["environment"]["arch"] == arch
    assert measured_device(document).arch == arch
    keys = [tuple(point[name] for name in ("dtype", "batch", "m", "n", "k")) for point in document["points"]]
    assert len(set(keys)) == len(keys)
    for point in document["points"]:
        assert point["seconds"]
        assert all(1e-7 < seconds < 10 for seconds in (*point["seconds"].values(), *point["wall"].values()))
        assert all((*route.split(":"), point["dtype"]) in MODELS for route in point["seconds"])
        assert set(point.get("elsewhere", {})) <= set(point["seconds"])


@pytest.mark.parametrize("arch", BY_ARCH)
def test_what_lies_between_the_points_is_known_from_its_neighbours(arch):
    """Each point left out: nine in ten choices are the best or nearly."""
    document = BY_ARCH[arch]
    found = tune_dispatch.left_out(Table.of(document), document)
    good = [each for each in found if each.ratio >= 0.9]
    assert len(good) >= 0.9 * len(found)


def product(m, n, k, dtype, batch=(), **options):
    shapes = (*batch, m, k), (*batch, k, n)
    return GemmProblem.build(*(Operand.contiguous(shape, dtype) for shape in shapes), **options)


def algorithm(*shape, **options):
    return plan_gemm(product(*shape, **options), H200).algorithm


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((3456, 4096, 4096), "complex64", "ozaki"),
        ((8192, 8192, 8192), "complex64", "ozaki"),
        ((8192, 8192, 2000), "complex64", "wgmma"),
        ((2048, 2048, 2048), "complex64", "wgmma"),
        ((1024, 1024, 1024), "complex64", "wgmma"),
        ((1, 8192, 8192), "complex64", "vendor"),  # a vector: the BLAS reads the matrix once
        ((4, 8192, 8192), "complex64", "fused"),
        ((128, 12_000, 512), "complex64", "fused"),
        ((32_768, 64, 64), "complex64", "fused"),
        ((64, 8192, 8192), "complex64", "fused"),
        ((8192, 64, 8192), "complex64", "fused"),
        ((128, 8192, 8192), "complex64", "fused"),
        ((128, 17_000, 8192), "complex64", "fused"),  # 266 tall tiles: not three rounds of 132, for k is cut
        ((256, 8192, 8192), "complex64", "wgmma"),
        ((192, 192, 192, (512,)), "complex64", "fused"),
        ((8192, 8192, 8192), "float32", "wgmma"),
        ((8192, 8192, 8192), "complex128", "ozaki"),
        ((4096, 4096, 4096), "float16", "vendor"),
    ],
)
def test_choices_on_an_h200(shape, dtype, expected):
    m, n, k, *batch = shape
    assert algorithm(m, n, k, dtype, *batch) == expected


def test_a_measured_point_gets_its_fastest_route():
    """Route of `auto`, within a few percent of what its calls take one after another, of those that are accurate."""
    document, wrong, looked_at = BY_ARCH["sm_90a"], [], 0
    for point in document["points"]:
        problem = product(point["m"], point["n"], point["k"], point["dtype"])
        times = {
            route: max(seconds, call_seconds(H200, route.split(":")[0]))
            for route, seconds in point["seconds"].items()
            if route.split(":")[1] in {"plain", "3xfp16", "fp16", "ozaki"} and not lags(route.split(":"), problem)
        }
        if point["batch"] > 1:
            continue
        looked_at += 1
        chosen = algorithm(point["m"], point["n"], point["k"], point["dtype"])
        best = min(times.values())
        if chosen == "fused" and "fused:3xfp16" not in times:  # expected to be faster
            shape = (1, point["m"], point["n"], point["k"])
            assert estimate(H200, "fused", "3xfp16", point["dtype"], shape) <= best
            continue
        taken = min(seconds for route, seconds in times.items() if route.startswith(f"{chosen}:"))
        if best < 0.97 * taken:
            wrong.append((point["dtype"], point["m"], point["n"], point["k"], chosen, best / taken))
    assert looked_at > 400
    assert not wrong


TIMED = (
    ((64, 64, 64, 4096), {"vendor": 0.2106, "fused": 0.1240}),
    ((128, 128, 128, 1024), {"vendor": 0.3735, "wgmma": 0.3390, "fused": 0.1983}),
    ((256, 256, 256, 256), {"vendor": 0.6700, "wgmma": 0.3857, "fused": 0.3460}),
    ((96, 96, 96, 2048), {"vendor": 0.3736, "fused": 0.3575}),
    ((192, 192, 192, 512), {"vendor": 0.5588, "fused": 0.2998}),
    ((48, 48, 48, 8192), {"vendor": 0.3882, "fused": 0.2811}),
    ((48, 48, 48, 4096), {"vendor": 0.1660, "fused": 0.1073}),
    ((512, 512, 512, 64), {"vendor": 1.3065, "wgmma": 0.5259, "fused": 0.8021}),
    ((768, 768, 768, 32), {"vendor": 2.1271, "wgmma": 0.7617, "fused": 1.2785}),
    ((1024, 1024, 1024, 1), {"vendor": 0.1671, "wgmma": 0.0614, "fused": 0.1074}),
    ((64, 8192, 8192, 1), {"vendor": 0.6558, "wgmma": 0.5492, "fused": 0.2599}),
    ((8192, 64, 8192, 1), {"vendor": 0.6690, "wgmma": 0.4936, "fused": 0.2648}),
    ((16, 8192, 8192, 1), {"vendor": 0.3458, "fused": 0.2690}),
    ((128, 8192, 8192, 1), {"vendor": 1.3309, "wgmma": 0.6708, "fused": 0.4970}),
    ((64, 16384, 16384, 1), {"vendor": 2.7460, "fused": 1.0002}),
    ((64, 4096, 4096, 1), {"vendor": 0.1734, "wgmma": 0.1436, "fused": 0.0776}),
    ((4096, 16, 4096, 1), {"vendor": 0.1010, "fused": 0.0749}),
    ((32768, 64, 512, 1), {"vendor": 0.2078, "wgmma": 0.1551, "fused": 0.0908}),
    ((64, 1024, 4096, 1), {"vendor": 0.0534, "fused": 0.0380}),
    ((64, 64, 65536, 1), {"vendor": 0.0806, "fused": 0.0453}),
    ((768, 768, 768, 1), {"vendor": 0.0849, "wgmma": 0.0469, "fused": 0.0671}),
    ((1536, 1536, 1536, 1), {"vendor": 0.5888, "wgmma": 0.1915}),
    ((2048, 2048, 2048, 1), {"vendor": 1.2812, "wgmma": 0.3149}),
    ((64, 17000, 4096, 1), {"vendor": 0.7041, "wgmma": 0.6469, "fused": 0.3589}),
)
"""Milliseconds of complex64 products (m, n, k, batch) on an H200: medians of the device's own time, in turns, of
algorithms that were asked for by name; of the last, with k in four parts."""


@pytest.mark.parametrize(("shape", "times"), TIMED)
def test_the_fastest_of_what_was_timed_by_name_is_taken(shape, times):
    m, n, k, batch = shape
    taken = times[algorithm(m, n, k, "complex64", (batch,) if batch > 1 else ())]
    assert min(times.values()) >= 0.97 * taken


CALLED = (
    ("complex64", 48, {"vendor": (6.9, 31.4), "simt": (5.9, 16.6), "fused": (6.8, 17.4)}),
    ("complex64", 64, {"vendor": (6.9, 23.5), "simt": (6.8, 12.7), "fused": (7.7, 13.4)}),
    ("complex64", 128, {"vendor": (6.6, 18.8), "simt": (10.3, 12.6), "fused": (10.7, 13.9), "wgmma": (12.5, 13.8)}),
    ("complex64", 192, {"vendor": (8.9, 20.8), "simt": (13.9, 14.0), "fused": (11.4, 14.3), "wgmma": (14.1, 14.4)}),
    ("complex64", 256, {"vendor": (10.1, 24.3), "simt": (17.4, 17.6), "fused": (12.2, 13.9), "wgmma": (14.0, 14.2)}),
    ("complex64", 320, {"vendor": (12.4, 18.9), "simt": (20.9, 21.0), "fused": (15.0, 15.1), "wgmma": (16.8, 16.9)}),
    ("complex64", 512, {"vendor": (26.9, 26.8), "simt": (43.2, 43.3), "fused": (20.1, 20.3), "wgmma": (22.4, 22.4)}),
    ("complex128", 64, {"vendor": (11.0, 31.4), "simt": (8.5, 17.9), "dmma": (7.9, 17.1)}),
    ("complex128", 128, {"vendor": (4.6, 19.7), "simt": (13.7, 13.7), "dmma": (10.9, 12.6)}),
    ("complex128", 192, {"vendor": (5.5, 19.7), "simt": (18.9, 18.9), "dmma": (13.9, 13.9)}),
    ("complex128", 512, {"vendor": (22.3, 22.2), "simt": (64.7, 64.6), "dmma": (29.3, 29.3)}),
    ("float32", 64, {"vendor": (4.0, 19.3), "simt": (5.2, 12.4), "fused": (5.8, 12.9), "wgmma": (9.7, 13.3)}),
    ("float32", 128, {"vendor": (5.2, 18.6), "simt": (7.0, 12.6), "fused": (8.9, 14.7), "wgmma": (12.1, 13.3)}),
    ("float32", 192, {"vendor": (6.5, 18.7), "simt": (9.0, 12.3), "fused": (9.6, 14.4), "wgmma": (12.3, 13.9)}),
)
"""Microseconds of one of many products n x n x n into an array that is there: the device's, and from one call to the
next, on an H200 with 16 processors."""


@pytest.mark.parametrize(("dtype", "n", "times"), CALLED)
def test_short_products_go_where_calls_follow_each_other_soonest(dtype, n, times):
    """The vendor's BLAS may need less of the device: it needs more of the host, which choosing another way spares."""
    chosen = algorithm(n, n, n, dtype)
    taken = times[chosen]
    assert min(called for _, called in times.values()) >= 0.9 * taken[1]
    assert taken == times["vendor"] or taken[1] < 0.8 * times["vendor"][1]


def test_every_algorithm_of_a_measured_architecture_has_its_call():
    every = {algorithm for routes in (*_ROUTES.values(), *_REDUCE_ROUTES.values()) for algorithm, _ in routes}
    assert all(call_seconds(H200, algorithm) > 0 for algorithm in every - {"mfma"})  # AMD's, of which none is measured


def test_an_architecture_without_measurements_is_judged_by_the_device_alone():
    assert call_seconds(H200, "vendor") > call_seconds(H200, "simt") > 0
    assert call_seconds(KNOWN["A100"], "vendor") == call_seconds(KNOWN["MI300X"], "vendor") == 0


@pytest.mark.parametrize("shape", [shape for shape, _ in TIMED if max(shape[:2]) >= 1024 and min(shape[:2]) <= 128])
def test_skinny_products_are_estimated_from_others(shape):
    """Within a seventh, most of which is the host's share of the short ones, without the point itself: the same for
    all extents, rounds of tiles and parts of k. Sums of k = 512 leave the tensor cores twice as often."""
    m, n, k, batch = shape
    point, route = (batch, m, n, k), ("fused", "3xfp16", "complex64")
    found = predicted(H200, Table.of(BY_ARCH["sm_90a"]), route, point, without=point)
    assert found == pytest.approx(dict(TIMED)[shape]["fused"] / 1e3, rel=0.3 if k <= 512 else 1 / 7)


@pytest.mark.parametrize("report", ["second-wave-nvidia-h200.json", "kernels-nvidia-h200.json"])
def test_the_fastest_of_each_report_is_taken(report):
    rows = json.loads((REPORTS / report).read_text(encoding="utf-8"))["rows"]
    cases: dict[tuple, dict[str, float]] = {}
    for row in rows:
        plain = row["who"] in {"gemmserve", "vendor BLAS", row["algorithm"]} and row["compute"] == "auto"
        if row["op"] == "gemm" and plain and row["seconds"] and row["init"] == "normal" and not row["label"]:
            times = cases.setdefault(tuple(row[name] for name in ("dtype", "batch", "m", "n", "k")), {})
            seconds = max(row["seconds"], call_seconds(H200, row["algorithm"]))
            times[row["algorithm"]] = min(seconds, times.get(row["algorithm"], seconds))
    slow = {}
    for (dtype, batch, m, n, k), times in cases.items():
        chosen = algorithm(m, n, k, dtype, (batch,) if batch > 1 else ())
        arithmetic = {"fused": "3xfp16", "dmma": "plain"}  # may be newer than the report
        taken = times.get(chosen) or estimate(H200, chosen, arithmetic[chosen], dtype, (batch, m, n, k))
        if min(times.values()) < 0.97 * taken:
            slow[dtype, batch, m, n, k] = chosen, times
    assert len(cases) > 20
    assert not slow


@pytest.mark.parametrize(
    ("batch", "extent", "k", "expected"),
    [
        (8, 1024, 128, "dmma"),  # a short k
        (2, 1024, 512, "dmma"),  # few rows
        (1, 2048, 512, "dmma"),
        (16, 512, 512, "dmma"),  # short rows
        (64, 256, 512, "dmma"),
        (8, 1024, 256, "screen"),
        (8, 1024, 2048, "screen"),
        (64, 1024, 512, "screen"),
        (1, 4096, 512, "screen"),
    ],
)
def test_where_extremes_of_float64_were_faster_on_the_device(batch, extent, k, expected):
    """As measured on an H200 over m."""
    a, b = Operand.contiguous((batch, extent, k), "float64"), Operand.contiguous((batch, k, extent), "float64")
    problem = GemmReduceProblem.build(a, b, reduce="max", axis="m")
    assert plan_gemm_reduce(problem, H200).algorithm == expected


@pytest.mark.parametrize(
    ("dtype", "compute", "extents", "expected"),
    [
        ("complex64", "auto", (1, 4096, 4096, 4096), {"wgmma"}),
        ("float32", "auto", (1, 2048, 2048, 2048), {"wgmma"}),
        ("complex64", "auto", (256, 512, 512, 64), {"wgmma"}),
        ("complex128", "auto", (1, 4096, 4096, 4096), {"screen", "ozaki"}),
        ("float32", "fp32", (1, 4096, 4096, 4096), {"vendor"}),
        ("complex64", "fp32", (1, 1024, 1024, 1024), {"vendor"}),
        ("complex64", "fp64", (1, 1024, 1024, 1024), {"vendor"}),
        ("float32", "fp32", (1, 256, 256, 64), {"simt"}),
        ("float16", "fp32", (1, 2048, 2048, 2048), {"vendor"}),
        ("float32", "tf32", (1, 4096, 4096, 4096), {"wgmma"}),
    ],
)
def test_where_the_vendors_product_is_reduced(dtype, compute, extents, expected):
    """As the table of an H200 estimates it: where it multiplies faster than our kernels of that arithmetic."""
    batch, m, n, k = extents
    a, b = Operand.contiguous((batch, m, k), dtype), Operand.contiguous((batch, k, n), dtype)
    reduce = "absmax" if dtype.startswith("complex") else "max"
    for axis in ("m", "n"):
        problem = GemmReduceProblem.build(a, b, reduce=reduce, axis=axis, compute=compute)
        assert plan_gemm_reduce(problem, H200).algorithm in expected
