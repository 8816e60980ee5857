"""The tables of measurements that `auto` decides by, and the choices that they lead to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_scripts import load

import gemmserve_kernels
from gemmserve_kernels import GemmProblem, Operand
from gemmserve_kernels.algorithms.common.time_model import MODELS
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.estimate import Table, estimate, measured_device
from gemmserve_kernels.dispatch.routes import plan_gemm

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


def algorithm(m, n, k, dtype, batch=(), **options):
    shapes = (*batch, m, k), (*batch, k, n)
    problem = GemmProblem.build(*(Operand.contiguous(shape, dtype) for shape in shapes), **options)
    return plan_gemm(problem, H200).algorithm


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((3456, 4096, 4096), "complex64", "wgmma"),
        ((8192, 8192, 8192), "complex64", "wgmma"),
        ((2048, 2048, 2048), "complex64", "wgmma"),
        ((1024, 1024, 1024), "complex64", "wgmma"),
        ((64, 8192, 8192), "complex64", "fused"),
        ((8192, 64, 8192), "complex64", "fused"),
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
    """Route of `auto`, within a few percent."""
    document, wrong, looked_at = BY_ARCH["sm_90a"], [], 0
    for point in document["points"]:
        times = {r: s for r, s in point["seconds"].items() if r.split(":")[1] in {"plain", "3xfp16", "fp16", "ozaki"}}
        if point["batch"] > 1:
            continue
        looked_at += 1
        chosen = algorithm(point["m"], point["n"], point["k"], point["dtype"])
        best = min(times.values())
        if chosen == "fused" and "fused:3xfp16" not in times:  # expected to be faster by more than may be doubted
            shape = (1, point["m"], point["n"], point["k"])
            assert estimate(H200, "fused", "3xfp16", point["dtype"], shape) <= best
            continue
        taken = min(seconds for route, seconds in times.items() if route.startswith(f"{chosen}:"))
        if best < 0.97 * taken:
            wrong.append((point["dtype"], point["m"], point["n"], point["k"], chosen, best / taken))
    assert looked_at > 400
    assert not wrong
