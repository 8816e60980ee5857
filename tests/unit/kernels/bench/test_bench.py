"""The benchmark command: cases, targets, errors and formats, on the CPU and on a pretended server."""

from __future__ import annotations

import argparse
import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from gemmserve_kernels import GemmConfig, KernelError, gemm, gemm_reduce
from gemmserve_kernels.bench import cases, grades, verify
from gemmserve_kernels.bench.accuracy import MODES, accuracy
from gemmserve_kernels.bench.cases import INITS, Case, draw
from gemmserve_kernels.bench.cli import BENCH
from gemmserve_kernels.bench.environment import driver_version, environment
from gemmserve_kernels.bench.formats import fields, measurement_table, to_csv
from gemmserve_kernels.bench.kinds import KINDS
from gemmserve_kernels.bench.run import measure
from gemmserve_kernels.bench.sources import sources
from gemmserve_kernels.bench.targets import CpuTarget, ServerTarget
from gemmserve_kernels.device.spec import KNOWN


class Console:
    def __init__(self):
        self.printed, self.noted, self.errors, self.tables = [], [], [], []

    def print(self, text):
        self.printed.append(text)

    def note(self, text):
        self.noted.append(text)

    def error(self, text):
        self.errors.append(text)

    def table(self, columns, rows):
        assert all(len(row) == len(columns) for row in rows)
        self.tables.append((list(columns), [list(row) for row in rows]))


class RemoteArray:
    def __init__(self, client, array):
        self.client, self.array = client, array
        client.kept.add(id(self))

    def numpy(self):
        return self.array

    def delete(self):
        self.client.kept.discard(id(self))


class ComputeUnsupported(Exception):  # noqa: N818 (the SDK's name)
    """The SDK's class of that name."""


class Client:
    """As much of the SDK's client as the benchmark uses."""

    url = "http://127.0.0.1:1"

    def __init__(self):
        self.kept = set()

    def put(self, array):
        return RemoteArray(self, array)

    def gemm(self, a, b, c=None, **options):
        if options["compute"] not in {"auto", "fp32", "fp64"}:
            raise ComputeUnsupported("no such mode")
        if isinstance(a, np.ndarray):
            return gemm(a, b, c, **options)
        return RemoteArray(self, gemm(a.array, b.array, c.array if c else None, **options))

    def gemm_reduce(self, a, b, **options):
        found = gemm_reduce(a.array, b.array, **options)
        if isinstance(found, dict):
            return {name: RemoteArray(self, array) for name, array in found.items()}
        return RemoteArray(self, found)


class Context:
    def __init__(self):
        self.console = Console()
        self.client = Client()

    def connect(self, url):
        assert url == Client.url
        return self.client


def command(*words):
    parser = argparse.ArgumentParser()
    BENCH.configure(parser)
    context = Context()
    status = BENCH.run(parser.parse_args(list(words)), context)
    return status, context.console


SIZES = ["--m", "24", "--n", "20", "--k", "16", "--iterations", "2", "--warmup", "1", "--device", "cpu"]


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64", "complex128"])
def test_data_of_every_kind(init, dtype):
    x = draw(np.random.default_rng(0), (40, 50), np.dtype(dtype), init)
    again = draw(np.random.default_rng(0), (40, 50), np.dtype(dtype), init)
    assert (x.shape, x.dtype) == ((40, 50), dtype)
    assert np.array_equal(x, again)
    assert np.isfinite(x).all()
    parts = [x.real, x.imag] if x.dtype.kind == "c" else [x]
    for part in parts:
        if init == "int":
            assert set(np.unique(part)) == set(range(-5, 6))
        if init == "positive":
            assert (part >= 0).all()
        if init == "wide":
            exponents = np.frexp(part[part != 0])[1]
            assert exponents.max() - exponents.min() >= (8 if dtype == "float16" else 20)
        assert part.any() == (init != "none")


def test_a_case_knows_its_shapes():
    case = Case(m=3, n=4, k=5, batch=2, trans_a="T", layout="planar", beta=1)
    assert case.shapes() == {"a": (2, 2, 5, 3), "b": (2, 2, 5, 4), "c": (2, 2, 3, 4)}
    assert case.problem().result_shape == (2, 2, 3, 4)
    assert case.label == "2 x 3 x 4 x 5"


@pytest.mark.parametrize(
    "case",
    [
        Case(m=30, n=20, k=10),
        Case(m=30, n=20, k=10, batch=3, trans_a="C", alpha=2j, beta=-1, dtype="complex128"),
        Case(m=30, n=20, k=10, layout="planar"),
        Case(m=30, n=20, k=10, dtype="float16", order="F"),
        Case(op="gemm_reduce", m=30, n=20, k=10, batch=2, reduce=("sumsq", "argmax", "mean"), axis=("n", "batch")),
        Case(op="gemm_reduce", m=30, n=20, k=10, pre_op="abs", reduce=("max",), return_c=True, dtype="complex64"),
    ],
)
def test_both_contenders_are_timed_and_right(case):
    rows = measure(case, CpuTarget(), warmup=1, iterations=3)
    assert [row.who for row in rows] == ["gemmserve"] + ["np.matmul"] * (case.layout != "planar")
    for row in rows:
        assert row.checked == "all"
        assert row.rel_fro <= (1e-3 if case.dtype == "float16" else 1e-6)
        assert row.fastest <= row.seconds
        assert row.gflops > 0
        assert row.gib_per_s > 0
    assert rows[0].ratio == 1


def test_without_iterations_nothing_is_timed():
    (row, _) = measure(Case(m=3, n=4, k=5), CpuTarget(), iterations=0)
    assert (row.seconds, row.gflops, row.ratio) == (None, None, None)
    assert row.rel_fro is not None


def test_large_results_are_sampled(monkeypatch):
    monkeypatch.setattr(verify, "_BUDGET", 1e5)
    for case in (Case(m=200, n=30, k=40), Case(m=8, n=8, k=8, batch=100), Case(m=200, n=30, k=40, trans_a="C", beta=1)):
        operands = case.operands()
        d = gemm(operands["a"], operands["b"], operands.get("c"), **case.options())
        found, checked = verify.gemm_errors(case.problem(), operands, d)
        assert checked.endswith("rows")
        assert found.rel_fro < 1e-6
        d[..., 0, :] += 1
        assert verify.gemm_errors(case.problem(), operands, d)[0].worst_row > 0.01
    case = Case(op="gemm_reduce", m=200, n=30, k=40)
    operands = case.operands()
    found, checked = verify.reduce_errors(case.problem(), operands, {"sum": gemm_reduce(**operands)})
    assert checked.endswith("outputs")
    assert found["sum"] < 1e-6


def test_a_server_is_measured_and_left_clean():
    client = Client()
    (row,) = measure(Case(m=8, n=9, k=10, beta=1), ServerTarget(client), warmup=1, iterations=2)
    assert (row.algorithm, row.checked) == ("server", "all")
    assert not client.kept
    (row,) = measure(Case(op="gemm_reduce", m=8, n=9, k=10), ServerTarget(client), iterations=1)
    assert row.rel_fro < 1e-6
    assert not client.kept


def test_operands_leave_the_server_after_a_failure_too():
    client = Client()
    with pytest.raises(ComputeUnsupported):
        measure(Case(m=8, n=9, k=10, compute="tf32"), ServerTarget(client))
    assert not client.kept


def test_what_is_measured_is_said_first():
    _, console = command("gemm", *SIZES)
    assert console.noted[0] == "measuring this machine (--server URL: a server)"
    _, console = command("gemm", *SIZES, "--device", "cuda:99")  # opening it fails, later
    assert console.noted == ["measuring this machine (--server URL: a server)"]


def test_table():
    status, console = command("gemm", *SIZES)
    assert status == 0
    ((columns, rows),) = console.tables
    assert [row[columns.index("who")] for row in rows] == ["gemmserve", "np.matmul"]
    assert all(float(row[columns.index("error")]) < 1e-6 for row in rows)


def test_json_and_csv(tmp_path):
    status, console = command("gemm_reduce", *SIZES, "--reduce", "sum", "absmax", "--format", "json")
    assert status == 0
    document = json.loads(console.printed[0])
    assert document["environment"]["kind"] == "cpu"
    assert set(document["rows"][0]["notes"]["errors"]) == {"sum", "absmax"}
    path = tmp_path / "rows.csv"
    assert command("gemm", *SIZES, "--no-rival", "--no-verify", "--format", "csv", "--output", str(path))[0] == 0
    (record,) = csv.DictReader(path.open())
    assert (record["m"], record["checked"], record["rel_fro"]) == ("24", "no", "")


def test_csv_of_nothing_and_dashes_for_what_was_not_measured():
    assert to_csv([]) == ""
    (row, _) = measure(Case(m=3, n=4, k=5), CpuTarget(), iterations=0, verify=False)
    assert measurement_table([row])[1][0][5:13] == ["-"] * 8
    assert next(csv.reader(io.StringIO(to_csv([row])))) == list(fields(row))


@pytest.mark.parametrize(
    "words",
    [
        ["gemm", "--dtype", "float32", "--alpha", "1j"],
        ["gemm", "--algorithm", "simt", "--device", "cpu"],
        ["gemm", "--compute", "tf32", "--device", "cpu"],
        ["gemm_reduce", "--reduce", "max"],
    ],
)
def test_bad_requests_are_one_line_and_status_1(words):
    status, console = command(*words)
    assert status == 1
    assert len(console.errors) == 1


@pytest.mark.parametrize(
    "words", [["gemm", "--m", "0"], ["gemm", "--block", "12"], ["gemm", "--warmup", "-1"], ["gemm", "--init", "x"]]
)
def test_malformed_arguments_are_usage_errors(words, capsys):
    with pytest.raises(SystemExit) as stop:
        command(*words)
    assert stop.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_block_and_stages_become_a_config():
    parser = argparse.ArgumentParser()
    BENCH.configure(parser)
    from gemmserve_kernels.bench.cli import _case

    case = _case(parser.parse_args(["gemm", "--block", "128x64x8", "--stages", "2"]))
    assert (case.config.block_m, case.config.block_n, case.config.block_k, case.config.stages) == (128, 64, 8, 2)


def test_accuracy_table_says_kernel_or_model():
    rows = accuracy(gemm, m=32, n=24, k=256, seeds=range(2))
    assert [row.mode for row in rows] == list(MODES)
    found = {row.mode: row for row in rows}
    assert [found[mode].source for mode in MODES] == ["kernel", "kernel", "model", "model", "model"]
    assert found["fp64"].rel_fro < 1e-15
    assert found["fp32"].rel_fro < 1e-6
    assert 1e-4 < found["1xtf32"].rel_fro < 1e-3
    assert found["3xtf32"].rel_fro < 1e-6
    assert found["3xfp16"].rel_fro < 1e-6


def test_accuracy_command_here_and_on_a_server():
    sizes = ["--m", "16", "--n", "16", "--k", "32", "64", "--seeds", "1"]
    status, console = command("accuracy", *sizes, "--device", "cpu")
    assert status == 0
    assert len(console.tables[0][1]) == 2 * len(MODES)
    status, console = command("accuracy", *sizes, "--server", Client.url, "--modes", "fp32", "1xtf32")
    assert status == 0
    columns, rows = console.tables[0]
    assert [row[columns.index("from")] for row in rows] == ["kernel", "model"] * 2


ELEMENTS = ["--elementwise", "--m", "16", "--n", "12", "--k", "32", "--seeds", "2"]


def test_elementwise_errors_of_every_dtype_and_mode():
    status, console = command("accuracy", *ELEMENTS, "--kinds", "exp-6n", "identity", "--device", "cpu")
    assert status == 0
    columns, rows = console.tables[0]
    found = {(row[columns.index("dtype")], row[columns.index("mode")], row[columns.index("from")]) for row in rows}
    assert {("float32", "auto", "kernel"), ("complex64", "3xfp16", "model"), ("complex128", "fp64", "kernel")} <= found
    assert len(rows) == 2 * (4 + 4 + 2 + 2)
    by_mode = {(row[1], row[2], row[3]): row for row in rows}
    for dtype in ("float32", "complex64", "float64", "complex128"):
        for kind in ("exp-6n", "identity"):
            assert by_mode[dtype, kind, "auto"][-1] == "A"
        assert float(by_mode[dtype, "identity", "auto"][columns.index("error, u")]) == 0
    assert by_mode["float32", "exp-6n", "3xfp16"][-1] == "-"


def test_elementwise_errors_as_json_and_of_a_server():
    words = [*ELEMENTS, "--kinds", "spikes", "--dtype", "float32", "float64", "--modes", "auto", "ozaki", "--json"]
    status, console = command("accuracy", *words, "--device", "cpu")
    assert status == 0
    document = json.loads(console.printed[0])
    assert [(row["dtype"], row["mode"]) for row in document["rows"]] == [("float32", "auto"), ("float64", "auto")]
    row = document["rows"][0]
    assert row["limit"] == max(4, 2 * row["vendor"])
    assert row["seed"] in {0, 1}
    status, console = command("accuracy", *words, "--server", Client.url)
    assert status == 0
    assert len(json.loads(console.printed[0])["rows"]) == 2


@pytest.mark.parametrize("words", [["--dtype", "float64"], ["--modes", "9xbf16"]])
def test_the_table_of_norms_has_no_such(words):
    status, console = command("accuracy", *words, "--device", "cpu")
    assert status == 1
    assert "--elementwise" in console.errors[0]


def test_the_worst_seed_is_shown():
    row, _ = grades.grades(np, "normal", m=5, n=5, k=5, dtype="float32", seed=1, modes=("auto",))
    worse = replace(row[0], error=3.0, limit=4.0, seed=2)
    best = replace(row[0], error=3.5, limit=8.0, seed=3)
    assert grades.worst_of([best, worse, replace(best, mode="fp32")]) == [worse, replace(best, mode="fp32")]


def test_a_kind_with_a_bound_of_its_own_has_a_grade_of_its_own():
    def off_by(units):
        def multiply(a, b, *, compute):
            return a @ b * np.float32(1 + units * 2.0**-24)

        (row,), _ = grades.grades(
            np, "dominant-term", m=9, n=9, k=64, dtype="float32", seed=1, modes=("auto",), multiply=multiply
        )
        assert row.limit == KINDS["dominant-term"].bound
        return row.grade, row.parts

    assert off_by(0) == ("A", True)
    assert off_by(12) == ("B", True)
    assert off_by(20) == ("-", False)


def test_other_errors_of_a_server_are_not_taken_for_a_missing_mode():
    context = Context()

    def fail(*_, **__):
        raise ConnectionError("gone")

    context.client.gemm = fail
    parser = argparse.ArgumentParser()
    BENCH.configure(parser)
    with pytest.raises(ConnectionError):
        BENCH.run(parser.parse_args(["accuracy", "--server", Client.url]), context)


def test_a_case_that_is_no_problem():
    with pytest.raises(KernelError):
        cases.Case(trans_a="X").problem()


def test_the_driver_is_found_in_either_form_of_the_modules_line():
    open_module = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root)  Tue 2026\n"
    )
    closed_module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n"
    assert driver_version(open_module) == "580.159.04"
    assert driver_version(closed_module) == "535.54.03"
    assert driver_version("nothing of the kind") is None


def test_the_sources_of_a_case_are_known_without_a_device():
    h200 = KNOWN["H200"]
    every = {source.name for source in sources(Case(m=512, n=512, k=512), h200)}
    assert {"split", "wgmma_gemm", "mma_gemm", "dmma_fallback", "gemm"} <= every
    one = Case(m=512, n=512, k=512, config=GemmConfig(algorithm="simt"))
    assert {source.name for source in sources(one, h200, every=False)} == {"gemm"}
    assert sources(Case(m=512, n=512, k=512, config=GemmConfig(algorithm="vendor")), h200, every=False) == set()
    assert sources(Case(m=512, n=512, k=512, compute="ozaki"), KNOWN["A100"]) == set()
    reduction = Case(op="gemm_reduce", m=512, n=512, k=512, reduce=("absmax",), config=GemmConfig(algorithm="simt"))
    assert {source.name for source in sources(reduction, h200)} >= {"gemm_reduce"}


def test_the_device_s_size_is_part_of_the_environment():
    assert "sm_count" not in environment(None)
    assert environment(CpuTarget().spec)["cores"] >= 1
