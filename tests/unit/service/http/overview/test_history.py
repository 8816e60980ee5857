"""Rings of an hour: rates from totals, percentiles from the sample, nothing where nothing is known."""

from __future__ import annotations

import json

import pytest

from gemmserve_service.executor.port import Worker
from gemmserve_service.http.overview import history as module
from gemmserve_service.http.overview import schemas
from gemmserve_service.http.overview.history import POINTS, STEP_S, History
from gemmserve_service.http.overview.recent import Recent
from gemmserve_service.jobs.one_shot import EndedJob
from gemmserve_service.schemas import DeviceHealth, JobState, Timings


class Made:
    """A history whose clock and counters a test moves."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.clock, "time", lambda: 1000 + self.now)
        self.totals = dict.fromkeys(("products", "flops", "bytes_in", "bytes_out"), 0.0)
        self.recent = Recent()
        self.workers = [Worker("cuda:0", ready=True), Worker("cuda:1", ready=True)]
        self.history = History(lambda: dict(self.totals), self.recent, lambda: self.workers)

    def advance(self, seconds=float(STEP_S)):
        self.now += seconds
        return self.history.advance()

    def ended(self, **phases):
        self.recent.job_ended(EndedJob("job_1", "gemm", "", JobState.SUCCEEDED, Timings(**phases)), 0, 0)

    @property
    def series(self):
        document = json.loads(self.history.render())
        assert schemas.History.model_validate(document)
        return document["series"]


@pytest.fixture
def made(monkeypatch):
    return Made(monkeypatch)


def test_before_the_first_point_there_is_none(made) -> None:
    document = json.loads(made.history.render())
    assert (document["step"], document["end"]) == (5, 1100.0)
    assert set(document["series"]) == set(schemas.Series.model_fields)
    assert document["series"]["products"] == []
    assert document["series"]["utilisation"] == [[], []]


def test_rates_are_means_of_the_time_that_has_passed(made) -> None:
    made.totals["products"] = 7.0  # since the start, not since 1970
    made.advance()
    made.totals |= {"products": 17.0, "bytes_in": 3e9}
    point = made.advance(4.0)
    assert (point.time, point.series.products, point.series.bytes_in) == (1109.0, 2.5, 7.5e8)
    assert made.series["products"] == [1.4, 2.5]
    assert made.series["flops"] == [0.0, 0.0]


def test_percentiles_are_those_of_the_jobs_that_ended(made) -> None:
    for number in range(1, 101):
        made.ended(queue_s=number, compile_s=1000, h2d_s=0.5, kernel_s=1, d2h_s=0.25, verify_s=0.25)
    series = made.advance().series
    assert (series.queued_p50, series.queued_p99) == (50, 99)
    assert (series.computing_p50, series.computing_p99) == (2, 2)
    assert (series.total_p50, series.total_p99) == (1052, 1101)
    assert made.advance().series.queued_p50 is None, "none ended since"
    assert made.series["queued_p99"] == [99, None]


def test_one_job_is_its_own_percentiles(made) -> None:
    made.ended(queue_s=0.125)
    series = made.advance().series
    assert (series.queued_p50, series.queued_p99, series.computing_p50) == (0.125, 0.125, 0)


def test_utilisation_by_device(made) -> None:
    made.workers[0].health = DeviceHealth(utilisation=0.87654321)
    assert made.advance().series.utilisation == [0.87654321, None]
    made.workers[0].ready = False
    made.advance()
    assert made.series["utilisation"] == [[0.8765, None], [None, None]]


def test_an_hour_and_no_more(made) -> None:
    for number in range(POINTS + 10):
        made.totals["products"] += 5 * number
        made.advance()
    products = made.series["products"]
    assert (len(products), products[0], products[-1]) == (POINTS, 10, POINTS + 9)
    assert POINTS * STEP_S == 3600
    assert all(len(ring) == POINTS for ring in (*made.history._rings.values(), *made.history._utilisation.values()))


@pytest.mark.parametrize(("pause_s", "missed"), [(7.0, 0), (10.0, 1), (26.0, 4), (1e6, POINTS)])
def test_while_the_process_stood_still_points_are_missing(made, pause_s, missed) -> None:
    """So that the others stay where they were in time."""
    made.totals["products"] = 10.0
    made.advance()
    made.totals["products"] += 3 * pause_s
    made.advance(pause_s)
    assert made.series["products"] == ([2.0] + [None] * missed + [3.0])[-POINTS:]


def test_it_is_rendered_once_for_all(made) -> None:
    made.advance()
    assert made.history.render() is made.history.render()
    before = made.history.render()
    made.advance()
    assert made.history.render() != before


def test_numbers_stay_short(made) -> None:
    made.totals["flops"] = 1e15 / 3
    made.advance()
    assert made.series["flops"] == [6.66667e13]
