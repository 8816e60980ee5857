"""The benchmark of a call's cost on the host: turns, figures, and the whole script without a device."""

from __future__ import annotations

import json

import pytest
from benchmark_scripts import FOLDER, load, on_stand_in

(host_cost,) = load("host_cost")


def test_rows_take_turns_and_the_wait_is_not_counted():
    now, order = [0.0], []

    def call(name, seconds):
        def run():
            order.append(name)
            now[0] += seconds
            return name

        return run

    def wait():
        order.append("wait")
        now[0] += 1000

    functions = {"a": call("a", 2.0), "b": call("b", 3.0)}
    found = host_cost.measured(functions, wait, rounds=2, calls=4, clock=lambda: now[0])
    assert found == {"a": [2.0, 2.0], "b": [3.0, 3.0]}
    before = 2 * (host_cost.PERIOD + 1)
    assert order[before:] == [*"aaaa", "wait", *"bbbb", "wait", *"bbbb", "wait", *"aaaa", "wait"]


def test_what_is_told():
    told = host_cost.summarized([3.0, 1.0, 2.0, 4.0, 5.0])
    assert (told["seconds"], told["fastest"], told["spread"]) == (3.0, 1.0, 1.0)
    assert host_cost.summarized([2.0]) == {"seconds": 2.0, "fastest": 2.0, "spread": 0.0}


def test_names_are_unique_and_every_kind_is_there():
    rows = host_cost.rows()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.case.op for row in rows} == {"gemm", "gemm_reduce"}
    assert {row.who for row in rows} == {"gemmserve", "prepared", "cupy"}


@pytest.mark.parametrize("words", [("simt", "sums"), ("CuPy",)])
def test_the_whole_script(tmp_path, words):
    path = tmp_path / "host-cost.json"
    run = on_stand_in(FOLDER / "host_cost.py", "--rounds", 1, "--calls", 1, "--rows", *words, "--output", path)
    assert run.returncode == 0, run.stderr
    document = json.loads(path.read_text())
    chosen = [row.name for row in host_cost.rows() if any(word in row.name for word in words)]
    assert [row["name"] for row in document["rows"]] == chosen
    assert {"a launch by the driver", "a fresh array of 512 KiB"} <= {part["name"] for part in document["parts"]}
    for row in document["rows"]:
        assert row["seconds"] > 0
        assert (row["who"] == "cupy") == ("algorithm" not in row)
        assert row["name"] in run.stdout
