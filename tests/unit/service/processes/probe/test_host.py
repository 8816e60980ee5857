"""Rates of memory and disk."""

from __future__ import annotations

import pytest

from gemmserve_service.processes.probe import host
from gemmserve_service.processes.probe.host import copy_rates, disk_rates, first_touch_rates


@pytest.mark.parametrize("rates", [copy_rates, first_touch_rates])
def test_every_number_of_threads_has_a_rate(rates) -> None:
    found = rates(100_003, (1, 3))
    assert set(found) == {"1", "3"}
    assert min(found.values()) > 0


@pytest.mark.parametrize(("nbytes", "threads"), [(10, 1), (10, 3), (9, 3), (2, 3)])
def test_the_parts_are_all_of_it_once(nbytes, threads) -> None:
    moved = []
    assert host._once(nbytes, threads, moved.append) > 0
    assert sorted(index for part in moved for index in range(part.start, part.stop)) == list(range(nbytes))


def test_a_file_is_written_and_read_whole(tmp_path, monkeypatch) -> None:
    sizes = []
    monkeypatch.setattr(host, "_PIECE", 1000)
    monkeypatch.setattr(host.os, "fsync", lambda number: sizes.append(host.os.fstat(number).st_size))
    found = disk_rates(tmp_path, 2500)
    assert sizes == [2500]
    assert set(found) == {"write", "read"}
    assert min(found.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_no_folder(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        disk_rates(tmp_path / "absent", 10)
