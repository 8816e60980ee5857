"""The newer cuBLAS: what it is called with, and the whole suite's table beside it without a device."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_scripts import FOLDER, ROOT, load
from benchmark_scripts import on_stand_in as run

from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.problem.errors import DeviceError

newest_blas, suite = load("newest_blas", "suite")
SMALL = ("--quick", "--shrink", 64, "--rounds", 1, "--budget", 0.001, "--tables", "second-wave")
LIBRARY = "/nowhere/librivals.so.13"


def test_emulation_competes_with_what_we_choose_from_data_in_double():
    names = [mode.name for mode in newest_blas.modes("complex128")]
    assert names == [f"newest cuBLAS{suffix}" for suffix in ("", " 55 bits", " 47 bits", " dynamic")]
    assert newest_blas.modes("float64", "ozaki") == newest_blas.modes("float64")
    for dtype, compute in (("float64", "fp64"), ("complex64", "auto"), ("float16", "auto")):
        assert newest_blas.modes(dtype, compute) == (newest_blas.PLAIN,)


@pytest.mark.parametrize(
    ("dtype", "compute", "plain", "emulated"),
    [
        ("complex128", "auto", 70, 79),
        ("float64", "ozaki", 70, 79),
        ("complex64", "auto", 68, 68),
        ("complex64", "tf32", 77, 77),
        ("float32", "1xtf32", 77, 77),
        ("float16", "auto", 68, 68),
    ],
)
def test_arithmetic_by_its_number(dtype, compute, plain, emulated):
    case = Case(dtype=dtype, compute=compute)
    assert newest_blas.compute_type(case, newest_blas.PLAIN) == plain
    assert newest_blas.compute_type(case, newest_blas.EMULATED[0]) == emulated


def test_room_for_emulation_is_more_than_it_was_seen_to_take():
    large = Case(m=8192, n=8192, k=8192, dtype="complex128")
    assert 8.2 * 2**30 < newest_blas.workspace_bytes(large, newest_blas.EMULATED[2]) < 16 * 2**30
    assert newest_blas.workspace_bytes(large, newest_blas.PLAIN) == 64 << 20


def test_products_that_are_one_call():
    case = Case(trans_a="T", trans_b="C", batch=3)
    assert newest_blas.supports(case)
    for change in ({"trans_a": "R"}, {"beta": 1}, {"alpha": 2}, {"layout": "planar"}, {"order": "F"}):
        assert not newest_blas.supports(replace(case, **change))


def test_the_header_s_arguments():
    """cublas_api.h of 13.10: GemmEx_64 has 19, GemmStridedBatchedEx_64 four more."""
    assert len(newest_blas.SIGNATURES["cublasGemmEx_64"]) == 19
    assert len(newest_blas.SIGNATURES["cublasGemmStridedBatchedEx_64"]) == 23


def test_without_a_library_there_is_no_such_rival(monkeypatch):
    monkeypatch.delenv(newest_blas.VARIABLE, raising=False)
    assert not newest_blas.available()
    monkeypatch.setenv(newest_blas.VARIABLE, LIBRARY)
    newest_blas.library.cache_clear()
    with pytest.raises(DeviceError, match="librivals"):
        newest_blas.version()


def test_a_status_is_no_success(monkeypatch):
    monkeypatch.setattr(newest_blas, "library", lambda: {"cublasCreate_v2": lambda *_: 1})
    with pytest.raises(DeviceError, match="cublasCreate_v2 of newest cuBLAS: status 1"):
        newest_blas.call("cublasCreate_v2", None)


# ---- the suite beside it

PRODUCTS = """
import sys
sys.path.insert(0, "benchmarks/kernels")
import cupy, numpy as np, newest_blas
from gemmserve_kernels.bench.cases import Case
import data
for case in [
    Case(m=5, n=7, k=9, dtype="complex128", trans_a="C", trans_b="T"),
    Case(m=5, n=7, k=9, dtype="complex64", batch=3, trans_a="T", trans_b="C"),
    Case(m=5, n=7, k=9, dtype="float64"),
    Case(m=5, n=7, k=9, dtype="float32", batch=2),
    Case(m=5, n=7, k=9, dtype="float16", trans_b="T"),
]:
    sets = [data.operands(cupy, case)]
    for mode, run, bits in newest_blas.rivals(case, sets):
        errors = data.Oracle(cupy, case, sets[0]).errors(run(0))
        print(case.dtype, mode.name, bits(), errors.rel_fro)
        assert errors.rel_fro < {"float16": 1e-3}.get(case.dtype, 1e-6), (case, errors)
"""


def test_operands_reach_it_in_their_order(tmp_path):
    script = tmp_path / "products.py"
    script.write_text(PRODUCTS)
    found = run(script, **{newest_blas.VARIABLE: LIBRARY, "OPENBLAS_NUM_THREADS": "1"})
    assert found.returncode == 0, found.stdout + found.stderr
    assert len(found.stdout.splitlines()) == 4 + 1 + 4 + 1 + 1


@pytest.fixture(scope="module")
def second_wave(tmp_path_factory):
    path = tmp_path_factory.mktemp("wave") / "second-wave.json"
    found = run(FOLDER / "run.py", *SMALL, "--output", path, **{newest_blas.VARIABLE: LIBRARY})
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr
    return json.loads(path.read_text())


def test_every_row_of_the_second_wave_has_its_rival(second_wave):
    rows, cases = second_wave["rows"], {}
    assert second_wave["failed"] == {}
    assert second_wave["environment"]["newest cuBLAS"] == "0.0.0"  # the stand-in's
    for row in rows:
        key = (row["op"], row["case"], row["dtype"], row["compute"], row["label"])
        cases.setdefault(key, {})[row["who"]] = row
    (table,) = [table for table in suite.suite(quick=True) if table.name == "second-wave"]
    assert len(second_wave["done"]) == len(table.cases)  # some are of one size when everything is small
    for (op, _, dtype, compute, _), found in cases.items():
        assert {"gemmserve", "newest cuBLAS"} <= set(found)
        double = op == "gemm" and dtype in {"complex128", "float64"} and compute == "auto"
        assert ({"newest cuBLAS 55 bits", "newest cuBLAS 47 bits", "newest cuBLAS dynamic"} <= set(found)) == double
        for who, row in found.items():
            emulated = who.startswith("newest cuBLAS ")
            assert (row["bits"] is not None) == emulated
            assert row["ceiling_s"] is None or not emulated
    of_elements = [row for row in rows if row["op"] == "gemm" and row["dtype"] != "float16" and row["batch"] == 1]
    assert all(row["element"] is not None for row in of_elements)
    assert {"ozaki 16", "ozaki 17"} <= {row["who"] for row in rows}
    assert "spikes" in {row["init"] for row in rows}


def test_a_library_that_does_not_load_ends_the_run_at_once(tmp_path):
    missing = str(tmp_path / "none.so")
    found = run(FOLDER / "run.py", *SMALL, "--output", tmp_path / "x.json", **{newest_blas.VARIABLE: missing})
    assert found.returncode == 2
    assert "none.so" in found.stderr


def test_a_library_in_parts_is_put_together_when_the_last_has_come(tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as tar:
        for name in ("librivals.so.13", "librivalsLt.so.13"):
            member = tarfile.TarInfo(name)
            member.size = 1000
            tar.addfile(member, io.BytesIO(os.urandom(1000)))
    whole, carried = stream.getvalue(), tmp_path / "carried"
    carried.mkdir()
    environment = {
        **os.environ, "PYTHON": "benchmarks/device/dry.sh", "OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path),
        "RIVAL": str(carried), "LIMIT": "200", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    command = ["bash", "benchmarks/device/rival.sh"]
    for number in (1, 2):
        (carried / f"part{number}of2").write_bytes(whole[(number - 1) * 700 :][: 700 if number == 1 else None])
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
        assert found.returncode == 0, found.stdout + found.stderr
        (carried / f"part{number}of2").unlink()
        assert ("newest cuBLAS 0.0.0" in found.stdout) == (number == 2)
        assert ("sources for" in found.stdout) == (number == 1)
    assert "rc 0" in found.stdout
    assert "over cuBLAS at worst" in found.stdout
    assert json.loads((tmp_path / "out" / "second-wave.json").read_text())["failed"] == {}
