"""How the clients' drivers time calls."""

from __future__ import annotations

import io
import json

from benchmark_scripts import load_service

(driver,) = load_service("driver")


def test_the_first_call_is_not_timed_and_the_first_and_last_results_are_checked() -> None:
    made, checked, gone = [], [], []

    def call():
        made.append(len(made))
        return made[-1]

    durations = driver.timed(call, checked.append, 60, 3, gone.append)
    assert len(durations) == 3
    assert (made, checked, gone) == ([0, 1, 2, 3], [0, 3], [0, 1, 2, 3])


def test_at_least_one_call_is_timed_however_short_the_time() -> None:
    assert len(driver.timed(int, lambda _: None, 0, None)) == 1


def test_a_wrong_result_is_an_error_and_the_driver_goes_on(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"n": 1}\n{"n": 2}\n'))

    def run(command):
        if command["n"] == 1:
            raise AssertionError("wrong")
        return {"durations_ns": [5]}

    driver.serve(run)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"error": "AssertionError: wrong"}
    assert second["durations_ns"] == [5]
