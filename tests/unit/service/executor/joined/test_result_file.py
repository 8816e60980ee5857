"""File of the result that is being written: unmapped, and open no longer than its bytes may come."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemmserve_service.executor.joined.assignments import File
from gemmserve_service.executor.joined.result_file import ResultFile
from gemmserve_service.executor.worker.memory.mappings import Mappings

NBYTES = 1 << 16
LINUX = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not say what is open")


@pytest.fixture
def make_file(tmp_path):
    def make(name="x"):
        (tmp_path / name).write_bytes(bytes(NBYTES))
        return File(name, str(tmp_path / name), NBYTES)

    return make


@pytest.fixture
def result_file():
    file = ResultFile()
    yield file
    file.close()


def is_mapped(path):
    return path in Path("/proc/self/maps").read_text()


def opened(folder):
    """Files of a folder that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = link.readlink()
        except FileNotFoundError:  # of the listing itself
            continue
        if target.is_relative_to(folder):
            found.append(target.name)
    return found


@LINUX
def test_what_is_written_is_in_the_file_which_is_not_mapped(make_file, result_file):
    file = make_file()
    result_file.write(file, 100, memoryview(b"abc"))
    result_file.write(file, 103, memoryview(b"def"))
    assert Path(file.path).read_bytes()[99:107] == b"\0abcdef\0"
    assert not is_mapped(file.path)


def test_who_has_it_mapped_sees_what_was_written(make_file, result_file):
    file = make_file()
    seen = Mappings().of(file.name, file.path, NBYTES)
    result_file.write(file, 100, memoryview(b"abc"))
    assert bytes(seen[100:103]) == b"abc"


def test_nothing_is_written_past_the_end(make_file, result_file):
    file = make_file()
    with pytest.raises(ValueError, match=r".+"):
        result_file.write(file, NBYTES - 1, memoryview(b"ab"))
    assert Path(file.path).read_bytes() == bytes(NBYTES)


def test_pieces_of_one_result_open_its_file_once(make_file, result_file, monkeypatch):
    file, other, paths = make_file(), make_file("y"), []
    really = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: paths.append(path) or really(path, *rest))
    for written, start in ((file, 0), (file, 3), (other, 0), (file, 6)):
        result_file.write(written, start, memoryview(b"abc"))
    monkeypatch.undo()
    assert paths == [file.path, other.path, file.path]
    assert Path(file.path).read_bytes()[:10] == b"abcabcabc\0"
    assert Path(other.path).read_bytes()[:4] == b"abc\0"


@LINUX
def test_a_file_that_is_gone_is_not_kept_open(make_file, result_file, tmp_path):
    result_file.write(make_file(), 0, memoryview(b"abc"))
    result_file.forget(["y"])
    assert opened(tmp_path) == ["x"]
    result_file.forget(["y", "x"])
    assert opened(tmp_path) == []
    result_file.write(make_file("y"), 0, memoryview(b"abc"))
    result_file.close()
    assert opened(tmp_path) == []


def test_a_file_that_cannot_be_opened_is_no_others(make_file, result_file):
    """What comes after the failure goes nowhere but to the file that it is for."""
    file = make_file()
    with pytest.raises(FileNotFoundError):
        result_file.write(File("gone", file.path + "-gone", NBYTES), 0, memoryview(b"abc"))
    result_file.write(file, 0, memoryview(b"def"))
    with pytest.raises(FileNotFoundError):
        result_file.write(File("gone", file.path + "-gone", NBYTES), 0, memoryview(b"abc"))
    assert Path(file.path).read_bytes()[:4] == b"def\0"
