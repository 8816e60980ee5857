"""Writing to extents: by their mapping where there is one, else by their file, which stays unmapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmserve_service.executor.worker.memory.mappings import Mappings

NBYTES = 1 << 16


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "extent"
    path.write_bytes(bytes(NBYTES))
    return path


def is_mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
def test_a_file_that_is_not_mapped_is_written_and_stays_so(file):
    mappings = Mappings()
    mappings.write("x", str(file), NBYTES, 100, memoryview(b"abc"), by_file=True)
    assert file.read_bytes()[99:104] == b"\0abc\0"
    assert not is_mapped(file)
    mappings.write("x", str(file), NBYTES, 200, memoryview(b"def"), by_file=False)
    assert file.read_bytes()[200:203] == b"def"
    assert is_mapped(file)


def test_who_has_it_mapped_sees_what_was_written_to_the_file(file):
    mappings = Mappings()
    seen = mappings.of("x", str(file), NBYTES)
    Mappings().write("x", str(file), NBYTES, 100, memoryview(b"abc"), by_file=True)
    assert bytes(seen[100:103]) == b"abc"


@pytest.mark.parametrize("by_file", [True, False])
def test_nothing_is_written_past_the_end(file, by_file):
    with pytest.raises(ValueError, match=r".+"):
        Mappings().write("x", str(file), NBYTES, NBYTES - 1, memoryview(b"ab"), by_file=by_file)
    assert file.read_bytes() == bytes(NBYTES)
