"""`serve`, `doctor` and `probe` as the command line finds them: flags, variables, and errors that say what to do."""

from __future__ import annotations

import json
import os

import pytest

from gemmserve.cli import main
from gemmserve_service.processes import supervisor
from gemmserve_service.runtime.start_error import StartError
from gemmserve_service.settings import Settings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("GEMMSERVE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch):
    """The settings that `serve` would run with."""
    seen = []
    monkeypatch.setattr(supervisor, "run", lambda settings: seen.append(settings) or 0)
    return seen


def test_every_setting_is_a_flag_and_a_variable(capsys):
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in text
        assert f"GEMMSERVE_{name.upper()}" in text


def test_flags_become_settings(served, tmp_path):
    arguments = ["--port", "0", "--data-dir", str(tmp_path), "--device", "cuda:1", "--max-store-bytes", "1000"]
    arguments += ["--result-ttl-s", "none", "--log-json", "--allowed-hosts", "a,b", "--drain-s", "1.5"]
    assert main(["serve", *arguments]) == 0
    assert served == [
        Settings(
            port=0,
            data_dir=tmp_path,
            device="cuda:1",
            max_store_bytes=1000,
            result_ttl_s=None,
            log_json=True,
            allowed_hosts=["a", "b"],
            drain_s=1.5,
        )
    ]


def test_a_flag_wins_over_its_variable(served, monkeypatch):
    monkeypatch.setenv("GEMMSERVE_PORT", "1111")
    monkeypatch.setenv("GEMMSERVE_DRAIN_S", "3")
    monkeypatch.setenv("GEMMSERVE_LOG_JSON", "0")
    assert main(["serve", "--port", "2222"]) == 0
    (settings,) = served
    assert (settings.port, settings.drain_s, settings.log_json) == (2222, 3, False)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port", "http"], "--port: must be a whole number, not 'http'"),
        (["--port", "70000"], "--port: must be at most 65535, not 70000"),
        (["--device", "tpu"], "--device: device 'tpu' is not auto, cpu, cpu:N, cuda:N or rocm:N"),
        (["--max-store-bytes", "-1"], "--max-store-bytes: '-1' is no number of bytes: 1000000, 512M, 20GiB"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2(served, capsys, arguments, line):
    assert main(["serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert line in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) == 1
    assert served == []


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org"])
def test_a_host_beyond_loopback_needs_keys_or_a_word(host, capsys, tmp_path):
    assert main(["serve", "--host", host, "--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("give --allow-unauthenticated") == 1


def test_every_reason_is_told(served, capsys):
    assert main(["serve", "--port", "x", "--drain-s", "y"]) == 2
    err = capsys.readouterr().err
    assert "--port" in err
    assert "--drain-s" in err


def test_a_server_that_cannot_start_says_why(monkeypatch, capsys):
    def refuse(settings):
        raise StartError("another server (pid 1) uses the data directory")

    monkeypatch.setattr(supervisor, "run", refuse)
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "gemmserve: another server (pid 1) uses the data directory\n"


def test_doctor_json(capsys, tmp_path):
    status = main(["doctor", "--json", "--data-dir", str(tmp_path)])
    findings = json.loads(capsys.readouterr().out)
    assert status == (1 if any(finding["level"] == "error" for finding in findings) else 0)
    assert all(set(finding) == {"level", "subject", "text", "advice"} for finding in findings)
    subjects = {finding["subject"] for finding in findings}
    assert {"python", "packages", "data", "cpu"} <= subjects


def test_doctor_looks_where_a_server_would_refuse_to_listen(monkeypatch, capsys, tmp_path):
    """Inside a container, say, that waits for its first key."""
    monkeypatch.setenv("GEMMSERVE_HOST", "0.0.0.0")
    monkeypatch.setenv("GEMMSERVE_DATA_DIR", str(tmp_path))
    assert main(["doctor", "--json"]) in {0, 1}
    assert "data" in {finding["subject"] for finding in json.loads(capsys.readouterr().out)}


def test_doctor_with_settings_that_make_no_sense(monkeypatch, capsys):
    monkeypatch.setenv("GEMMSERVE_PORT", "http")
    assert main(["doctor"]) == 2
    assert "--port" in capsys.readouterr().err


@pytest.fixture
def probed(monkeypatch):
    """What `probe` was asked for; it answers with the rates of a known host."""
    from gemmserve_kernels.planning.rates import shipped
    from gemmserve_service.processes.probe import probe

    host = {"copy": {"1": 1e9}, "first_touch": {"1": 1e9}, "disk": {"write": 1e9, "read": 1e9}}
    seen = []

    def answer(device, folder, amounts):
        seen.append((device, folder, amounts))
        return shipped().document() | {"measured": {"host": host, "left_out": ["float16 8192: no time"]}}

    monkeypatch.setattr(probe, "probe", answer)
    return seen


def test_a_probe_is_printed_or_written(probed, tmp_path, capsys):
    from gemmserve_service.processes.probe.amounts import FULL, QUICK

    assert main(["probe", "--data-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == 1
    file = tmp_path / "probe.json"
    assert main(["probe", "--quick", "--device", "cpu", "--data-dir", str(tmp_path), "--output", str(file)]) == 0
    assert "left out: float16 8192: no time" in capsys.readouterr().out
    assert json.loads(file.read_text())["spec"]["arch"] == "sm_90a"
    assert probed == [("auto", tmp_path, FULL), ("cpu", tmp_path, QUICK)]


def test_a_probe_of_no_device(tmp_path, capsys):
    assert main(["probe", "--device", "abacus:0", "--data-dir", str(tmp_path)]) == 2
    assert "abacus" in capsys.readouterr().err
