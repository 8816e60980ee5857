"""The curves of elementwise errors: the script from end to end, on the CPU and on the stand-in, and its report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmark_scripts import FOLDER, load, on_stand_in

report, script = load("accuracy_report", "accuracy")

TINY = ("--shrink", 256, "--kinds", "normal", "exp-6n", "identity", "--depths", 256, 4096)


def row(mode, error, **more):
    return {
        "dtype": "complex64", "kind": "normal", "m": 8, "n": 8, "k": 16, "seed": 1, "mode": mode, "source": "kernel",
        "error": error, "real": error, "imag": error, "vendor": 3.0, "vendor_real": 3.0, "vendor_imag": 3.0,
    } | more  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("accuracy") / "accuracy-cpu.json"
    assert script.main([*map(str, TINY), "--device", "cpu", "--output", str(path)]) == 0
    return path


def test_auto_comes_first_and_every_mode_is_there(measured):
    document = json.loads(measured.read_text())
    modes = [row["mode"] for row in document["rows"]]
    assert modes[: 3 * 2 * 4] == ["auto"] * 24
    assert {"3xfp16", "3xtf32", "fp32", "fp64"} <= set(modes)
    assert {"float32 9xbf16", "complex64 3xfp16-3m", "float64 ozaki"} <= set(document["lacking"])
    assert document["failed"] == {}
    assert document["environment"]["blas"]
    assert len({row["seed"] for row in document["rows"]}) > 3
    for each in document["rows"]:
        if each["kind"] == "identity" and each["mode"] in {"auto", "fp32", "fp64"}:
            assert each["error"] == each["vendor"] == 0


def test_it_goes_on_where_it_stopped(measured, capsys):
    before = measured.read_text()
    assert script.main([*map(str, TINY), "--device", "cpu", "--output", str(measured)]) == 0
    assert " u, vendor" not in capsys.readouterr().out
    assert json.loads(measured.read_text())["rows"] == json.loads(before)["rows"]


def test_it_stops_when_the_time_is_up(tmp_path, capsys):
    path = tmp_path / "a.json"
    arguments = [*map(str, TINY), "--device", "cpu", "--output", str(path), "--seconds", "0"]
    assert script.main(arguments) == 4
    assert json.loads(path.read_text())["rows"] == []
    assert "out of time" in capsys.readouterr().err


def test_a_case_in_which_it_died_is_passed_over(tmp_path):
    path = tmp_path / "a.json"
    path.with_suffix(".running").write_text("auto float32 normal 256")
    arguments = ["--device", "cpu", "--output", str(path), "--kinds", "normal", "--dtypes", "float32"]
    assert script.main([*arguments, "--depths", "256", "4096", "--shrink", "256"]) == 3
    document = json.loads(path.read_text())
    assert list(document["failed"]) == ["auto float32 normal 256"]
    assert "auto float32 normal 4096" in document["done"]
    assert not path.with_suffix(".running").exists()


def test_the_report_says_what_the_figures_say(measured):
    found = subprocess.run(
        [sys.executable, str(FOLDER / "accuracy_report.py"), str(measured)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    text = measured.with_suffix(".md").read_text()
    assert "- `auto`, float32: is of Grade A on all of it by moduli (6 cases" in text
    assert "| complex64 | auto | yes | 6 of 6 | 6 of 6 |" in text
    assert "## complex128, in units of u = 2^-53" in text
    assert measured.with_suffix(".png").stat().st_size > 10_000


def test_grades():
    assert report.grade(row("auto", 6.0)) == "A"
    assert report.grade(row("auto", 6.1)) == "-"
    assert report.grade(row("auto", 4.0, vendor=0.0, vendor_real=0.0, vendor_imag=0.0)) == "A"
    assert report.grade(row("3xfp16-3m", 5.0, imag=50.0)) == "A, parts -"
    assert report.grade(row("auto", float("nan"))) == "-"
    assert report.cell(row("3xfp16-3m", 5.0, imag=50.0)) == "5 (imag **50**)"
    assert report.cell(row("auto", 2e7)) == "**2.0e+07**"


def test_failures_are_said_of_auto_too():
    rows = [row("auto", 1.0), row("auto", 9.0, kind="spikes"), row("3xfp16-3m", 1.0, real=70.0)]
    said = "\n".join(report.sentences(rows))
    assert "`auto`, complex64: is not of Grade A in 1 cases (2 cases)." in said
    assert "Nearest to its limit: spikes, k = 16, 9 u where the vendor has 3." in said
    assert "`3xfp16-3m`, complex64, fails Grade A in 0 of 1 cases, and by a part alone in 1 more: normal." in said
    said = "\n".join(report.sentences([row("auto", 1.0, imag=7.0)]))
    assert "is of Grade A on all of it by moduli; in 1 a part alone is beyond its limit (1 cases)" in said
    (auto, other) = report.verdicts(rows)
    assert auto[2:] == ["no", "1 of 2", "1 of 2", "9 (3)", "spikes, k = 16"]
    assert other[2:5] == ["yes", "1 of 1", "0 of 1"]


def test_a_kind_with_a_bound_of_its_own_is_told_apart():
    own = {"kind": "dominant-term", "k": 64}
    rows = [row("auto", 1.0), row("auto", 9.0, **own), row("3xfp16", 17.0, **own), row("fp32", 3.0, **own)]
    assert [report.grade(each) for each in rows] == ["A", "B", "-", "A"]
    assert report.grade(row("auto", 9.0, dtype="complex128", **own)) == "-"
    text = report.markdown({"environment": {"device": "D"}, "rows": rows}, "a.png")
    assert "- `auto`, complex64: is of Grade A on all of it by moduli (1 cases)" in text
    assert "| complex64 | dominant-term | auto | 8 x 8 x 64 | 9 | 3 | 6 | 16 | B |" in text
    assert "| complex64 | dominant-term | 3xfp16 | 8 x 8 x 64 | 17 | 3 | 6 | 16 | - |" in text
    assert "- dominant-term: " in text
    alone = report.markdown({"environment": {"device": "D"}, "rows": rows[1:]}, "a.png")
    assert "In one look" not in alone
    assert "## complex64" not in alone


def test_shapes_of_its_own_are_measured_too(tmp_path):
    path = tmp_path / "a.json"
    arguments = ["--device", "cpu", "--output", str(path), "--kinds", "dominant-term", "--depths", "64"]
    assert script.main([*arguments, "--shrink", "64", "--modes", "auto"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(each["dtype"], each["m"], each["n"], each["k"]) for each in rows] == [
        ("float32", 128, 128, 4), ("complex64", 128, 128, 4), ("float64", 128, 128, 4), ("complex128", 128, 128, 4),
        ("float32", 16, 16, 4), ("float32", 4, 128, 128), ("complex64", 16, 16, 4), ("complex64", 4, 128, 128),
    ]  # fmt: skip
    assert report.main([str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_it_runs_as_on_a_device(tmp_path):
    """The stand-in for CuPy is as strict as CuPy; our kernels are not run there, and all but the vendor's is wrong."""
    path = tmp_path / "a.json"
    found = on_stand_in(FOLDER / "accuracy.py", *TINY, "--dtypes", "float32", "complex128", "--output", path)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr
    document = json.loads(path.read_text())
    assert document["environment"]["blas"].startswith("cuBLAS")
    assert {row["mode"] for row in document["rows"]} >= {"auto", "ozaki", "3xfp16"}
    assert all(row["vendor"] < 100 for row in document["rows"])


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert script.main([]) == 2
    assert "device" in capsys.readouterr().err
