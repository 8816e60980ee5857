"""Ratios, targets and the page from recorded rows; what a run keeps; a very short real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from benchmark_scripts import load_service

summary, report, histogram, results, run, servers, suite, turns, memory, transfers, install = load_service(
    "summary", "report", "histogram", "results", "run", "servers", "suite", "turns", "memory", "transfers", "install"
)


def row(case, server, operation, medians, *, via="wire", rates=None, phases=None, rate=None):
    """As turns.row makes it."""
    entry = suite.Entry(server, operation, via)
    answers = []
    for i, median in enumerate(medians):
        found = histogram.empty()
        found.record_value(int(median * 1e6))
        answers.append(
            {
                "histogram": histogram.encoded(found),
                "median_ms": median,
                "per_s": rates[i] if rates else 1e3 / median,
                "timings": [[median, phases]] if phases else [],
                "client_cpu": 0.3,
                "cpu_ms": 1.0,
                "cpu_by_role_ms": {"front": 0.75, "worker": 0.25},
                "errors": {},
            }
        )
    made = suite.Case(case, case, 64, (entry,), rate=rate)
    return turns.row(made, entry, answers, 100.0, 0.0)


ROWS = [
    row("round trip", "gemmserve", "axpy", [60.0, 50.0, 90.0]),
    row("round trip", "tritonserver", "axpy", [100.0, 200.0, 100.0]),
    row("round trip", "tritonserver", "echo", [80.0, 100.0, 100.0]),
    row("round trip", "asgi", "echo", [50.0, 50.0, 50.0]),
    row("small 16", "gemmserve", "product", [1.0, 1.0, 4.0], rates=[900.0, 1000.0, 1000.0]),
    row("small 16", "litserve", "product", [5.0, 5.0, 5.0], rates=[300.0, 250.0, 500.0]),
    row("open 100", "gemmserve", "product", [2.0], rate=100.0),
    row("phases 65536", "gemmserve", "axpy", [4.0], phases="receive;dur=1, kernel;dur=2"),
    {"case": "memory", "who": "gemmserve", "nbytes": 1 << 28, "asked": 1 << 32, "idle": 50 << 20,
     "upload": 3 << 20, "download": 65 << 20},
]  # fmt: skip


def found(name):
    (one,) = [each for each in summary.summary(ROWS) if each["name"] == name]
    return one


def test_ratios_pair_the_rounds() -> None:
    # 0.6, 0.25 and 0.9: neither the ratio of the medians (0.6) of other data nor of the means
    assert found("96 MiB on the wire, over tritonserver's time (axpy)")["found"] == pytest.approx(0.6)
    assert found("96 MiB on the wire, over tritonserver's time (echo)")["found"] == pytest.approx(0.75)
    assert found("64 x 64, 16 clients, rate over litserve's")["found"] == pytest.approx(3.0)


def test_targets_know_which_way_is_better() -> None:
    assert found("96 MiB on the wire, over tritonserver's time (axpy)")["met"] is True
    assert found("96 MiB on the wire, over tritonserver's time (echo)")["met"] is False
    assert found("64 x 64, 16 clients, rate over litserve's")["met"] is True
    assert found("anonymous memory of the front over idle, upload")["met"] is True
    assert found("anonymous memory of the front over idle, download")["met"] is False


def test_what_is_not_measured_is_neither_met_nor_missed() -> None:
    one = found("upload of 256 MiB, rate over a recv_into loop's")
    assert (one["found"], one["met"]) == (None, None)
    assert all(each["met"] is None for each in summary.summary([]))


def document():
    return {
        "environment": {"cpu": "a processor", "cpus": 2, "options": {}},
        "sources": "x",
        "versions": {"gemmserve": {"python": "3.11", "gemmserve": "0.1.0"}},
        "ceilings_mib_s": {"memcpy warm": 5000.0},
        "load_before": {"round trip": 0.5, "small 16": 0.25},
        "unavailable": {"small 16": {"bentoml (product)": "bentoml is not installed"}},
        "done": [],
        "rows": ROWS,
    }


def test_the_report_writes_a_page_and_a_picture(tmp_path) -> None:
    source = tmp_path / "service.json"
    source.write_text(json.dumps(document()))
    assert report.main([str(source)]) == 0
    text = source.with_suffix(".md").read_text()
    for wanted in (
        "| gemmserve (axpy) | 60.03 |",
        "| 96 MiB on the wire, over tritonserver's time (axpy) | <= x | 0.7 | - | 0.6 | yes |",
        "bentoml is not installed",
        "4 GiB did not fit",
        "65.0 during the download",
        "memcpy warm: 5000 MiB/s",
        "before each case: 0.25 to 0.5",
    ):
        assert wanted in text
    assert source.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_phases_leave_a_rest() -> None:
    lines = list(report.phase_lines([each for each in ROWS if each["case"] == "phases 65536"]))
    assert lines[0] == "| size | receive | kernel | rest | client |"
    assert lines[2].split("|")[2:6] == [" 1 ", " 2 ", " 1 ", " 4 "]


def test_a_report_of_nothing_says_so(tmp_path, capsys) -> None:
    assert report.main([str(tmp_path / "none.json")]) == 2
    assert "python -m benchmarks.service run" in capsys.readouterr().err


def test_figures_of_other_sources_are_not_continued(tmp_path) -> None:
    path = tmp_path / "service.json"
    first = results.Results(path, {"options": {}}, "one")
    first.add("small 1", [{"case": "small 1"}], {})
    assert results.Results(path, {"options": {}}, "one").document["done"] == ["small 1"]
    other = results.Results(path, {"options": {}}, "two")
    assert other.replaced
    assert other.document["done"] == []
    assert results.Results(path, {"options": {"quick": True}}, "one").document["done"] == []


def test_every_case_has_its_servers_and_exchanges() -> None:
    (exchanges,) = load_service("exchanges")
    names = [case.name for case in suite.suite()]
    assert len(set(names)) == len(names)
    for case in suite.suite():
        assert len({entry.who for entry in case.entries}) == len(case.entries)
        for entry in case.entries:
            protocol = servers.KINDS[entry.server].protocol
            assert (protocol, entry.operation) in {
                *exchanges.PROTOCOLS,
                *(("gemmserve", each) for each in exchanges.ON_THE_SERVER),
            }


def test_phases_span_the_sizes() -> None:
    assert [suite.label(size) for size in suite.PHASE_BYTES][::6] == ["64 KiB", "256 MiB"]


def test_a_rival_that_is_not_installed_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(servers, "ENVIRONMENTS", tmp_path)
    with pytest.raises(servers.ServerError, match="litserve is not installed"):
        servers.interpreter(servers.KINDS["litserve"])
    assert {kind.environment for kind in servers.KINDS.values()} - {""} == set(install.PACKAGES)


def test_a_server_that_does_not_start_shows_its_log() -> None:
    broken = servers.Kind("broken", "frame", ("-c", "raise SystemExit('no disk')"))
    with pytest.raises(servers.ServerError, match="no disk"), servers.Server(broken):
        pass


def test_a_process_s_use_of_processors_is_told_finely() -> None:
    """A few milliseconds are more than nothing, as they are to psutil, which counts hundredths of a second."""
    with subprocess.Popen([sys.executable, "-c", "input(); sum(range(100_000)); print(flush=True); input()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # fmt: skip
        process = psutil.Process(child.pid)
        before = servers.processor_seconds(process)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        used = servers.processor_seconds(process) - before
        child.stdin.write(b"\n")
    assert used > 0
    with pytest.raises(psutil.NoSuchProcess):
        servers.processor_seconds(process)


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(monkeypatch) -> None:
    def used(process):
        if process.pid != os.getpid():
            raise psutil.NoSuchProcess(process.pid)
        return 2.0

    server = servers.Server(servers.Kind("none", "frame", ()))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        both = [psutil.Process(os.getpid()), psutil.Process(child.pid)]
        monkeypatch.setattr(server, "processes", lambda: both)
        monkeypatch.setattr(servers, "processor_seconds", used)
        assert server.cpu_seconds() == sum(server.cpu_by_role().values()) == 2.0
        child.stdin.close()


def test_a_server_s_port_is_none_that_the_system_gives_away() -> None:
    if not servers.PORT_RANGE.is_file():
        pytest.skip("the system does not tell which ports it gives away")
    low, high = map(int, servers.PORT_RANGE.read_text().split())
    if low <= 10_000 and high >= 65_000:
        pytest.skip("it gives every port away")
    assert not low <= servers.free_port() <= high


def test_streams_are_compared_with_those_of_the_same_round() -> None:
    def turn(mib_s, milliseconds):
        found = histogram.empty()
        found.record_value(int(milliseconds * 1e6))
        return {"mib_s": mib_s, "front_cpu_s_per_gib": 0.5, "histogram": histogram.encoded(found)}

    case = suite.Case("transfers", "", 256 << 20, (), kind="transfers")
    plain = [turn(1000.0, 10.0), turn(2000.0, 10.0), turn(1000.0, 30.0)]
    moved = [turn(1500.0, 1.0), turn(2200.0, 1.0), turn(2000.0, 2.0)]
    made = transfers.row(case, (4, "up", 2), moved, plain)
    assert made["over_none"] == 1.5
    assert made["beside"]["p50_ms"] == pytest.approx(1.0, rel=1e-2)
    rows = [*ROWS, transfers.row(case, (4, "up", 0), plain, plain), made]
    document = {"environment": {}, "rows": rows, "ceilings_mib_s": {}, "versions": {}, "unavailable": {}}
    page = report.markdown(document, "picture.png")
    assert "| 4 up | 0 | 1000 | 1.00x | 0.50 | 10 | 30 |" in page
    assert "| 4 up | 2 | 2000 | 1.50x | 0.50 | 1 | 2 |" in page


def test_memory_is_read_from_proc() -> None:
    assert 1 << 20 < memory.rss_anon(os.getpid()) < 1 << 36
    assert memory.fitting(1 << 10) == 1 << 10
    before = memory.rss_anon(os.getpid())
    with memory.Watch(os.getpid()) as watch:
        held = bytearray(b"x") * (64 << 20)
        deadline = time.monotonic() + 60
        while watch.largest < before + (50 << 20) and time.monotonic() < deadline:
            time.sleep(0.01)
        del held
    assert watch.largest >= before + (50 << 20)
    assert memory.fitting(1 << 50) < 1 << 50


@pytest.mark.parametrize("arguments", [["--cases", "nonsense"], ["--servers", "nobody"]])
def test_what_there_is_not_is_refused(arguments, capsys) -> None:
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert "no s" in capsys.readouterr().err


def test_a_beginning_chooses_cases_but_a_name_only_itself() -> None:
    def names(*wanted):
        return [case.name for case in run.chosen(run.parsed(["--cases", *wanted]))]

    assert names("small 1") == ["small 1"]
    assert names("small") == ["small 1", "small 16"]
    assert len(names("phases", "memory")) == 8


def test_a_baseline_takes_part_on_the_wire() -> None:
    (case,) = run.chosen(run.parsed(["--cases", "upload", "--baseline", "elsewhere"]))
    added = [entry for entry in case.entries if entry.server == "gemmserve, baseline"]
    assert {entry.via for entry in added} == {"wire", "wire unix"}


def test_a_short_run_against_real_servers(tmp_path) -> None:
    """The service and the plain ASGI app, as a run does it; the second call finds that all is done."""
    output = tmp_path / "service.json"
    arguments = [
        "--quick",
        "--rounds",
        "1",
        "--cases",
        "small 1",
        "--servers",
        "gemmserve",
        "asgi",
        "--output",
        str(output),
    ]
    assert run.main(arguments) == 0
    kept = json.loads(output.read_text())
    by_server = {each["server"]: each for each in kept["rows"] if each["case"] == "small 1"}
    assert set(by_server) == {"gemmserve", "asgi"}
    assert kept["unavailable"] == {}
    for each in by_server.values():
        assert each["latency"]["count"] > 0
        assert each["errors"] == {}
        assert 0 < each["latency"]["p50_ms"] <= each["latency"]["p99_ms"] <= each["latency"]["max_ms"] * 1.01
    assert {"receive", "queue", "kernel", "total"} <= set(by_server["gemmserve"]["phases_ms"])
    assert set(kept["versions"]) == {"gemmserve", "asgi"}
    assert run.main(arguments) == 0
    assert len(json.loads(output.read_text())["rows"]) == len(kept["rows"])
