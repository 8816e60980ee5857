"""`gemmserve plan`, and what it prints."""

from __future__ import annotations

import argparse
import json
import re

import pytest

from gemmserve.cli._context import Context
from gemmserve_kernels.planning.cli import PLAN
from gemmserve_kernels.planning.rates import shipped


def plan(capsys, *arguments: str) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    PLAN.configure(parser)
    args = parser.parse_args([*arguments])
    status = PLAN.run(args, Context(args))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def of(n: int, *more: str) -> tuple[str, ...]:
    return ("--m", str(n), "--n", str(n), "--k", str(n), *more)


def test_lines(capsys) -> None:
    status, out, _ = plan(capsys, *of(32768, "--devices", "2", "--memory", "pinned"))
    assert status == 0
    lines = {line[:11].strip(): line[12:] for line in out.splitlines()}
    assert lines["product"] == "complex64 32768 x 32768 x 32768, auto: ozaki, ozaki"
    assert lines["devices"].startswith("2 x NVIDIA H200; rates: two NVIDIA H200 of one host")
    assert re.fullmatch(r"1\.9\d times as fast, efficiency 9\d%", lines["one device"])
    assert lines["bound by"] == "arithmetic"
    assert lines["cut"] == "64 blocks of 4096 x 4096, k whole, devices 2 x 1 (row shares)"
    assert lines["memory"] == "17.7 GB of 150 GB a device; everything stays"
    assert lines["transfers"] == "12.9 GB up and 4.29 GB down a device, 25.8 GB out of a host's memory"


def test_json(capsys) -> None:
    status, out, _ = plan(capsys, *of(65536, "--devices", "8", "--nodes", "2", "--link", "400Gb/s", "--json"))
    found = json.loads(out)
    assert status == 0
    assert found["hosts"]["link"] == 50e9
    assert found["efficiency"] == pytest.approx(found["times_one_device"] / 16)
    assert found["seconds"] >= found["compute_s"] + found["start_s"]
    assert found["network"] > 0


def test_nodes_and_streams(capsys) -> None:
    _, out, _ = plan(capsys, *of(65536, "--nodes", "4", "--link", "100Gb/s", "--device-memory", "20GB"))
    assert "on 4 nodes" in out
    assert "nodes 2 x 2" in out
    assert "streams" in out
    assert "to a node" in out


def test_rates_of_a_file(tmp_path, capsys) -> None:
    slower = shipped().document()
    for product in slower["products"]:
        product["seconds"] *= 2
    slower["about"] = "a slower one"
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(slower))
    mine = json.loads(plan(capsys, *of(16384, "--json"))[1])
    found = json.loads(plan(capsys, *of(16384, "--json", "--probe", str(path)))[1])
    assert found["rates"] == "a slower one"
    assert found["compute_s"] == pytest.approx(2 * mine["compute_s"])


def test_small_and_resident(capsys) -> None:
    _, out, _ = plan(capsys, *of(2048, "--devices", "4", "--memory", "device"))
    assert "none: one block" in out
    assert "transfers   none" in out
    assert "note        less than 2^43 operations: not cut, one device has it" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--nodes", "2"), "a link"),
        (("--compute", "fp64", "--dtype", "float16"), "fp64"),
    ],
)
def test_what_cannot_be_planned(capsys, more, said) -> None:
    status, out, err = plan(capsys, *of(4096, *more))
    assert status == 1
    assert not out
    assert said in err


@pytest.mark.parametrize(
    "more", [("--link", "100"), ("--device-memory", "much"), ("--devices", "0"), ("--rates", "abacus")]
)
def test_wrong_usage(capsys, more) -> None:
    with pytest.raises(SystemExit) as stop:
        plan(capsys, *of(4096, *more))
    assert stop.value.code == 2
