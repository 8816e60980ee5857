"""The load test from end to end on the CPU, tiny; its report, made of the JSON alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_scripts import ROOT, load_package, load_service

exchanges, histogram = load_service("exchanges", "histogram")
client, devices, first_products, gauges, report, rows, sizes, stage = load_package(
    "benchmarks.load", "client", "devices", "first_products", "gauges", "report", "rows", "sizes", "stage"
)
COMMITTED = sorted((ROOT / "docs" / "benchmarks").glob("load-*.json"))


def command(*arguments):
    """Runs benchmarks/device/load.py."""
    path = os.pathsep.join(str(ROOT / package) for package in ("client", "kernels", "service"))
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.device.load", *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def latency(milliseconds):
    found = histogram.empty()
    found.record_value(int(milliseconds * 1e6))
    return {"latency": histogram.summary(found), "histogram": histogram.encoded(found)}


def document():
    class Used:
        def document(self):
            return {"seconds": 2.0, "cpu": {"front": 0.5, "worker": 1.25}, "gpu_percent": [75.0, 0.0]}

    kept = rows.figure("4096^3, 600 results kept", "jobs/s", 300.0, 400.0, "kernel loop", gauges=Used(), client_cpu=2.5)
    beside = rows.figure(
        "64^3 beside 8192^3, closed loop, p99", "ms", 30.0, 20.0, "alone and a block", better="less",
        errors={"503": 2}, **latency(30.0),
    )  # fmt: skip
    kinds = [{**first_products.kind("gemm", "complex64", 64), "first_s": 1.5, "second_s": 0.002}]
    first = rows.figure(
        "empty kernel cache, slowest first product", "s", 1.5, 0.002, "the second one", better="less", kinds=kinds,
        ready_s=4.0, not_tried=3,
    )  # fmt: skip
    return {
        "environment": {"device": "a GPU", "store": "tmpfs, 100 GiB free"},
        "sources": "x",
        "kernels": {"4096": {"seconds": 2.5e-3, "single_s": 2.6e-3}},
        "figures": [
            {"row": "results", **kept},
            {"row": "small-beside-large", **beside},
            {"row": "first-product", **first},
        ],
        "not_measured": {"two-devices": "one device"},
        "seconds": 300.0,
    }


# ---- the report


def test_the_report_is_made_of_the_json(tmp_path) -> None:
    source = tmp_path / "load-gpu.json"
    source.write_text(json.dumps(document()))
    report.write(source)
    text = source.with_suffix(".md").read_text()
    for wanted in (
        "- device: a GPU",
        "- kernel loop: 4096^3 2.5 ms",
        "| 4096^3, 600 results kept | jobs/s | 300 | 400 | kernel loop | 0.75 | - | - | 75, 0 | 0.50 | 1.25 | 2.50 |",
        "| 64^3 beside 8192^3, closed loop, p99 | ms | 30 | 20 | alone and a block | ≤ 1.5 | 30 | 30 | - | - | - | - |",
        "not answered as asked: 2 x 503.",
        "| gemm complex64 64 | 1.500 | 0.0020 |",
        "ready after 4.0 s; 3 kinds not tried",
        "- two-devices: one device",
        "![Of bounds, tails, use](load-gpu.svg)",
    ):
        assert wanted in text
    picture = source.with_suffix(".svg").read_bytes()
    assert picture.startswith(b"<?xml")
    report.write(source)
    assert source.with_suffix(".svg").read_bytes() == picture


def test_a_report_of_nothing_can_be_drawn(tmp_path) -> None:
    source = tmp_path / "load.json"
    source.write_text(json.dumps(document() | {"figures": []}))
    report.write(source)
    assert source.with_suffix(".svg").read_bytes().startswith(b"<?xml")


def test_committed_pages_are_those_of_their_json() -> None:
    made = {path.name: report.markdown(json.loads(path.read_text()), f"{path.stem}.svg") for path in COMMITTED}
    pages = {path.name for path in (ROOT / "docs" / "benchmarks").glob("load-*.md")}
    assert {path.with_suffix(".md").name for path in COMMITTED} == pages
    assert made == {path.name: path.with_suffix(".md").read_text() for path in COMMITTED}


# ---- parts


def test_kinds_of_first_products_are_those_that_the_device_has() -> None:
    found = first_products.kinds((64, 1024, 4096), ("auto", "fp32", "3xfp16", "ozaki"))
    labels = [first_products.label(each) for each in found]
    assert len(set(labels)) == len(labels)
    assert labels[:3] == ["gemm complex64 64", "gemm complex64 1024", "gemm complex64 4096"]
    assert {"gemm float16 4096", "gemm_reduce absmax complex64 1024", "program complex64 1024"} <= set(labels)
    assert {"gemm complex128 1024 ozaki", "gemm complex64 64 3xfp16", "gemm complex64 4096 fp32"} <= set(labels)
    assert not any("3xtf32" in label for label in labels)


def test_a_key_goes_with_the_request_alone() -> None:
    plain = exchanges.exchange("gemmserve", exchanges.Work("product", 4))
    keyed = exchanges.with_key(plain, "gs_secret")
    before, after = (b"".join(each.parts).split(b"\r\n") for each in (plain, keyed))
    assert after == [before[0], b"Authorization: Bearer gs_secret", *before[1:]]
    upload = exchanges.exchange("gemmserve", exchanges.Work("upload", 4))
    with pytest.raises(LookupError):
        exchanges.with_key(upload, "gs_secret")


def test_results_fit_where_they_are_kept(monkeypatch, tmp_path) -> None:
    made = stage.Stage("cpu", sizes.TINY, tmp_path)
    monkeypatch.setattr(stage, "free_bytes", lambda _: 1000)
    assert made.room(10, 2000) == 70
    assert made.room(10, 50) == 50
    assert made.room(10**6, 2000) == sizes.TINY.clients


def test_rows_begin_when_all_is_prepared_or_no_more_of_it_will_be(monkeypatch) -> None:
    said = {
        "gemmserve_host_arena_bytes": itertools.repeat(100.0),
        "gemmserve_device_registered_bytes": iter([0.0, 30.0, 60.0, 100.0, 100.0]),
        "gemmserve_device_preparing": iter([1.0, 1.0, 1.0, 1.0, 0.0]),
    }
    server = SimpleNamespace()
    monkeypatch.setattr(stage, "gauge", lambda _, name, __=None: next(said[name]))
    monkeypatch.setattr(stage, "POLL_S", 0.0)
    assert stage.settled(server) == {"kernels": True, "registered_bytes": 100}
    assert next(said["gemmserve_device_registered_bytes"], None) is None, "it waited for the kernels, too"
    assert server.prepared == {"kernels": True, "registered_bytes": 100}
    said["gemmserve_device_registered_bytes"] = itertools.repeat(64.0)
    said["gemmserve_device_preparing"] = itertools.repeat(1.0)
    monkeypatch.setattr(stage, "STILL_S", 0.01)
    assert stage.settled(server, 2) == {"kernels": False, "registered_bytes": 64}
    said["gemmserve_host_arena_bytes"] = itertools.repeat(0.0)
    said["gemmserve_device_registered_bytes"] = itertools.repeat(0.0)
    said["gemmserve_device_preparing"] = itertools.repeat(0.0)
    assert stage.settled(server) == {"kernels": True, "registered_bytes": 0}


def test_figures_say_what_was_prepared_before_them() -> None:
    class Idle:
        def cpu_by_role(self):
            return {"front": 0.0}

    server = Idle()
    with gauges.Gauges(server) as before:
        pass
    assert before.document()["prepared"] is None
    server.prepared = {"kernels": False, "registered_bytes": 64}
    with gauges.Gauges(server) as after:
        pass
    made = rows.figure("64^3, p50", "ms", 3.0, 1.5, "target", better="less", gauges=after)
    assert made["prepared"] == {"kernels": False, "registered_bytes": 64}
    assert "64^3, p50: kernels were still being loaded ahead" in report.unprepared(made)
    assert report.unprepared(made | {"prepared": {"kernels": True, "registered_bytes": 64}}) is None
    assert report.unprepared(made | {"prepared": None}) is None


class Held(stage.Stage):
    """A stage without a server, whose store has room for so many results."""

    server = SimpleNamespace(url="", path="")

    def __init__(self, store):
        super().__init__("cpu", sizes.FULL, None)
        self.clients, self._store = [], store

    def room(self, *_):
        return self._store

    def watch(self):
        return contextlib.nullcontext()

    def operands(self, _):
        return []

    def kernel_s(self, n):
        return 0.001 if n == sizes.FULL.larges[-1] else 1.0

    def all_clients(self, *_):
        return []


@pytest.fixture
def done(monkeypatch):
    """done(most): from now on no more jobs than that come to an end."""

    def at_most(most):
        def jobs(*_, count, **__):
            return {
                "count": min(count, most), "began": 0.0, "seconds": 1.0, "nbytes": 1, "ids": [], "client_cpu": 0.0
            }  # fmt: skip

        monkeypatch.setattr(rows, "jobs", jobs)
        monkeypatch.setattr(rows, "wait_for_none", lambda *_: None)
        counter = itertools.count()
        monkeypatch.setattr(rows, "gauge", lambda *_: next(counter) / 4)
        monkeypatch.setattr(rows, "ARENA_BYTES", 1 << 50)

    return at_most


@pytest.mark.parametrize(
    ("room", "most", "bounded_by"),
    [(2000, 2000, None), (600, 600, "room in the store"), (600, 400, "time")],
)
def test_a_count_of_results_says_what_bounds_it(done, room, most, bounded_by) -> None:
    done(most)
    kept = next(rows.results(Held(room)))
    assert (kept["count"], kept["asked"], kept["bounded_by"]) == (most, 2000, bounded_by)
    said = report.bounds(kept)
    assert (said is None) if bounded_by is None else (f"bounded by {bounded_by}, 2000 were asked for" in said)


def test_results_that_the_arena_takes_come_before_more(done, monkeypatch) -> None:
    done(2000)
    monkeypatch.setattr(rows, "ARENA_BYTES", 1000 * 8 * sizes.FULL.result**2)
    figures = list(rows.results(Held(1500)))
    found = [each for each in figures if each["case"].count("fetched") == 0]
    n, larger = sizes.FULL.result, sizes.FULL.larges[-1]
    assert [(each["case"], each["straight"], each["bound_is"]) for each in figures if each not in found] == [
        (f"{n}^3, 2000 results fetched by TCP", 0.25, "kernel loop"),
        (f"{n}^3, 2000 results fetched by Unix socket", 0.25, "kernel loop"),
        (f"{larger}^3, 2000 results fetched by Unix socket", 0.25, "link"),
    ]
    assert [each["case"] for each in found] == [
        f"{n}^3, 900 results kept", f"{n}^3, 900 results in the host arena",
        f"{n}^3, 1500 results kept", f"{n}^3, 1500 results in the store",
    ]  # fmt: skip
    assert [each.get("bounded_by") for each in found] == ["room in the host arena", None, "room in the store", None]


def test_files_in_memory_take_no_more_than_is_free(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(stage.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    disk = stage.psutil.disk_usage(str(tmp_path))._replace(free=1 << 60)
    monkeypatch.setattr(stage.psutil, "disk_usage", lambda _: disk)
    monkeypatch.setattr(stage, "file_system", lambda _: "ext4")
    assert stage.free_bytes(tmp_path) == 1 << 60
    monkeypatch.setattr(stage, "file_system", lambda _: "tmpfs")
    assert stage.free_bytes(tmp_path) == 1 << 30


def test_a_folder_s_file_system_is_that_of_the_nearest_mount() -> None:
    assert stage.file_system("/proc/self") == "proc"
    assert stage.file_system("/sys") == "sysfs"


def test_without_nvml_there_is_no_utilisation(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = gauges.GpuSampler()
    sampler.start()
    assert sampler.stop() is None


def test_utilisation_is_the_mean_of_each_gpu(monkeypatch) -> None:
    asked, enough = itertools.count(), threading.Event()

    def rates(handle):
        number = next(asked)
        if number == 0:
            raise RuntimeError("no sample yet")
        if number == 4:
            enough.set()
        return SimpleNamespace(gpu=40 + 10 * handle)

    nvml = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetUtilizationRates=rates,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gauges, "SAMPLE_S", 0.001)
    sampler = gauges.GpuSampler()
    sampler.start()
    assert enough.wait(60)
    assert sampler.stop() == [40.0, 50.0]


class Rows:
    """Array whose rows are downloaded, as a remote one's are."""

    def __init__(self, values) -> None:
        self.values = values

    def __getitem__(self, rows):
        return Rows(self.values[rows])

    def numpy(self):
        return self.values


@pytest.mark.parametrize("moved", ["rows", "columns", "k", "nan"])
def test_a_part_of_a_large_product_out_of_its_place_is_seen(moved) -> None:
    n, part = 1536, 512
    a, b = client.large(n, 0), client.large(n, 1)
    right = a @ b
    client.compare_rows(Rows(right), n)
    wrong = right.copy()
    if moved == "rows":
        wrong[:part], wrong[part : 2 * part] = right[part : 2 * part], right[:part]
    elif moved == "columns":
        wrong[:, :part], wrong[:, part : 2 * part] = right[:, part : 2 * part], right[:, :part]
    elif moved == "k":
        wrong = a @ np.roll(b, part, axis=0)
    else:
        wrong[n - 1, 7] = np.nan
    with pytest.raises(AssertionError, match="row"):
        client.compare_rows(Rows(wrong), n)


# ---- all of it


@pytest.mark.slow
def test_every_row_is_measured_on_the_cpu(tmp_path) -> None:
    output = tmp_path / "load.json"
    done = command("run", "--device", "cpu", "--tiny", "--output", output, "--data", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert {each["row"] for each in found["figures"]} == set(rows.ROWS) - {"two-devices", "two-servers"}
    for row in ("two-devices", "two-servers"):
        assert found["not_measured"].pop(row) == "one device"
    assert not found["not_measured"].keys() - {"submissions"}  # the part that needs the SDK's submit_many
    for each in found["figures"]:
        assert each["ratio"] == pytest.approx(each["achieved"] / each["bound"])
        assert each["achieved"] > 0
        assert not each.get("errors")
        assert each["gpu_percent"] is None or len(each["gpu_percent"]) > 0
        if each["row"] != "joined-devices":  # whose workers are no processes of the server
            assert {"front", "worker"} <= set(each["cpu"])
    (kept,) = (each for each in found["figures"] if "results kept" in each["case"])
    assert kept["count"] == sizes.TINY.results
    assert kept["bounded_by"] is None
    (shared,) = (each for each in found["figures"] if "share of device time" in each["case"])
    assert shared["bounded_by"] == (None if min(shared["demands"]) > 0.5 else "demand")
    apart = ("first-product",)  # whose server is measured as it starts
    for each in found["figures"]:
        assert each["prepared"] == (None if each["row"] in apart else {"kernels": True, "registered_bytes": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["load.json"]  # servers took their data along
    assert command("report", output).returncode == 0
    assert "## small-beside-large" in output.with_suffix(".md").read_text()


@pytest.mark.slow
def test_two_servers_have_half_of_the_clients_each(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(str(ROOT / package) for package in ("client", "kernels", "service"))
    )
    with stage.Stage("cpu", sizes.TINY, tmp_path) as found:
        found.kernels["devices"] = 2
        figures = list(devices.servers(found))
    assert [each["case"] for each in figures] == [
        f"32^3 by {used} of two servers{what}" for what in ("", ", by map") for used in (1, 2)
    ]
    for one, two in (figures[:2], figures[2:]):
        assert two["bound"] == pytest.approx(2 * one["achieved"])
        assert [len(each["cpu_of_each"]) for each in (one, two)] == [1, 2]
        assert min(cpu["front"] for cpu in two["cpu_of_each"]) > 0


def test_a_row_that_there_is_not_is_refused() -> None:
    done = command("run", "--output", "x.json", "--only", "nonsense")
    assert done.returncode == 2
    assert "invalid choice" in done.stderr
