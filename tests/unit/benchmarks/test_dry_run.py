"""The scripts that need a GPU, from end to end without one: NumPy in CuPy's place, kernels looked up and not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from operator import attrgetter

import pytest
from benchmark_scripts import FOLDER, ROOT, STAND_IN
from benchmark_scripts import on_stand_in as run

try:
    import cupy
except ImportError:
    cupy = None

SMALL = ("--quick", "--shrink", 16, "--rounds", 1, "--budget", 0.001)
SHAPES = ("1024x1024x1024", "4096x256x4096", "4096x4096x4096")
TUNING = ("--shrink", 64, "--rounds", 1, "--budget", 0.001, "--seconds", 3600, "--shapes", *SHAPES)
TABLES = ("headline", "modes", "ozaki", "errors float64", "planar", "scalars", "half", "gemm_reduce")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "kernels.json"
    found = run(FOLDER / "run.py", *SMALL, "--tables", *TABLES, "--output", path)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr
    return path, found.stdout


def test_the_suite_measures_every_contender(suite):
    path, _ = suite
    document = json.loads(path.read_text())
    rows = document["rows"]
    assert document["failed"] == {}
    assert {row["table"] for row in rows} == set(TABLES)
    assert {"gemmserve", "wgmma", "mma", "simt", "prepared", "vendor BLAS", "cuBLAS FAST_TF32", "cuBLAS zgemm3m"} <= {
        row["who"] for row in rows
    }
    for row in rows:
        assert (row["seconds"] is None) == row["table"].startswith("errors")
        assert row["ceiling_s"] is None or row["ceiling_s"] > 0
        if row["who"] == "vendor BLAS":  # the one that really multiplies here
            limit = {"float16": 2e-3, "float64": 1e-15, "complex128": 1e-15}.get(row["dtype"], 1e-6)
            assert 0 < row["rel_fro"] < limit
    # What no kernel wrote is NaN, not what the contender before left there.
    assert all(row["rel_fro"] == "nan" for row in rows if row["who"] in {"wgmma", "simt"})
    shares = {row["arithmetic"] for row in rows if row["fallback"] is not None}
    assert {"3xfp16", "1xfp16"} <= shares


def test_a_second_run_has_nothing_left_to_do(suite):
    path, first = suite
    again = run(FOLDER / "run.py", *SMALL, "--tables", *TABLES, "--output", path)
    assert again.returncode == 0
    assert first.count(" ms ") > 10
    assert " ms " not in again.stdout


def test_a_case_in_which_a_run_died_is_passed_over(suite, tmp_path):
    path, _ = suite
    document = json.loads(path.read_text())
    last = document["done"].pop()
    document["rows"] = [row for row in document["rows"] if row["table"] != "gemm_reduce"]
    (tmp_path / "kernels.json").write_text(json.dumps(document | {"running": last}))
    again = run(FOLDER / "run.py", *SMALL, "--tables", "headline", "gemm_reduce", "--output", tmp_path / "kernels.json")
    assert again.returncode == 3
    assert " ms " not in again.stdout
    assert last in json.loads((tmp_path / "kernels.json").read_text())["failed"]


def test_a_fault_ends_the_run_and_the_next_one_goes_on(tmp_path):
    arguments = (*SMALL, "--tables", "modes", "half", "--output", tmp_path / "kernels.json")
    first = run(FOLDER / "run.py", *arguments, CUPY_ON_NUMPY_FAULT="wgmma_gemm")
    assert first.returncode == 1, first.stdout + first.stderr
    document = json.loads((tmp_path / "kernels.json").read_text())
    (failure,) = document["failed"].values()
    assert "IllegalAddress" in failure
    assert document["done"] == []
    second = run(FOLDER / "run.py", *arguments)
    assert second.returncode == 0
    document = json.loads((tmp_path / "kernels.json").read_text())
    assert len(document["failed"]) == 1
    assert len(document["done"]) == 8


def test_a_fault_while_tuning_costs_one_shape(tmp_path):
    path = tmp_path / "sm_90a.json"
    arguments = (*TUNING, "--dtypes", "float64", "complex64", "--output", path)
    assert run(FOLDER / "tune_dispatch.py", *arguments, CUPY_ON_NUMPY_FAULT="wgmma_gemm").returncode == 1
    measured = json.loads(path.read_text())["points"]  # each was written when it was known, the last before it began
    assert [bool(point["seconds"]) for point in measured] == [True] * len(SHAPES) + [False]
    assert run(FOLDER / "tune_dispatch.py", *arguments, "--missing").returncode == 0
    points = json.loads(path.read_text())["points"]
    assert points[: len(measured)] == measured
    assert len(points) == 2 * len(SHAPES)
    assert all(point["seconds"] for point in points[len(measured) :])


def test_the_report_has_every_table_and_a_picture(suite):
    path, _ = suite
    found = subprocess.run(
        [sys.executable, str(FOLDER / "report.py"), str(path)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    text = path.with_suffix(".md").read_text()
    assert "## Errors by kind of data and k, float64" in text
    assert re.search(r"\| headline, auto, over cuBLAS \| x \| 4\.20 \| - \| [\d.]+ \|", text)
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_a_table_is_gone_on_with_until_the_time_is_up(tmp_path):
    path = tmp_path / "sm_90a.json"
    arguments = (*TUNING, "--dtypes", "float32", "--output", path)
    begun = run(FOLDER / "tune_dispatch.py", *arguments)
    assert begun.returncode == 0, begun.stderr
    document = json.loads(path.read_text())
    assert len(document["points"]) == len(SHAPES)
    points = document["points"][:-1]
    path.write_text(json.dumps(document | {"points": points}))
    stopped = run(FOLDER / "tune_dispatch.py", *arguments, "--missing", "--seconds", 0)
    assert stopped.returncode == 4, stopped.stderr
    assert json.loads(path.read_text())["points"] == points
    routes = set().union(*(point["seconds"] for point in points))
    assert {"vendor:plain", "wgmma:3xfp16", "wgmma:1xfp16", "mma:1xtf32", "vendor:tf32"} <= routes
    assert "mma:1xfp16" not in routes  # its name stands for 1xtf32 as well
    checked = run(FOLDER / "tune_dispatch.py", "--check", "--output", path)
    assert re.search(rf"float32 auto: \d+ of {len(points)} within 0.97", checked.stdout), checked.stderr


def test_without_a_gpu_the_scripts_say_so():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for script in ("run.py", "tune_dispatch.py", "tune_split.py"):
        command = [sys.executable, str(FOLDER / script)]
        found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert found.returncode == 2
        assert "device" in found.stderr


def test_sources_are_listed_for_a_device_that_is_not_here(tmp_path):
    listed = tmp_path / "sources.jsonl"
    found = run(ROOT / "tests" / "gpu" / "sanitize.py", "--only", "wgmma 1xfp16", CUPY_ON_NUMPY_SOURCES=str(listed))
    assert "wgmma 1xfp16: inf WRONG" in found.stdout, found.stderr  # nothing multiplied
    names = {json.loads(line)["name"] for line in listed.read_text().splitlines()}
    assert {"split", "wgmma_gemm"} <= names
    command = [sys.executable, str(FOLDER / "precompile.py"), "--sources", str(listed), "--list"]
    assert "'wgmma_gemm'" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


NAMES = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
import cupy
from cupy import _array
modules = ["cupy", "cupy.linalg", "cupy.random", "cupy.cuda", *(f"cupy.cuda.{name}" for name in %r)]
names = {name: [n for n in vars(importlib.import_module(name)) if not n.startswith("_")] for name in modules}
print(json.dumps([names, cupy.FUNCTIONS, _array.METHODS]))
"""
OWN = {"FUNCTIONS", "MemoryPointer", "ndarray", "np", "ctypes", "os", "time", "alloc", "plain", "wrap", "runtime"}
"""Names of the stand-in's modules that are imported from elsewhere or tells the tests about them."""
MODULES = ("compiler", "cublas", "device", "driver", "memory", "nvrtc", "runtime")


@pytest.mark.skipif(cupy is None, reason="the CuPy wheel is not installed")
def test_the_stand_in_has_no_names_that_cupy_lacks():
    command = [sys.executable, "-c", NAMES % (MODULES,), str(STAND_IN)]
    names, functions, methods = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    lacking = [f"{module}.{name}" for module in names for name in names[module] if not known(module, name)]
    assert lacking == ["cupy.cuda.cublas.TYPES", "cupy.cuda.cublas.SCALE"]
    assert [name for name in functions if not hasattr(cupy, name)] == []
    assert [name for name in methods if not hasattr(cupy.ndarray, name)] == []


def known(module, name):
    """In CuPy some modules are attributes of cupy.cuda that come from elsewhere."""
    return name in OWN or hasattr(attrgetter(module.partition(".")[2])(cupy) if "." in module else cupy, name)
