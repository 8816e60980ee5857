"""Mappings: the bytes of a file, for as long as anybody looks at them, and no descriptor."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from gemmserve_service.runtime import mapping as module
from gemmserve_service.runtime.mapping import Mapping, most_mappings

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at /proc")


@pytest.fixture
def file():
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(1 << 16)
        yield file


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped(file):
    return file.name in Path("/proc/self/maps").read_text()


@linux
def test_it_holds_no_descriptor_and_goes_with_its_last_view(file):
    before = descriptors()
    mapping = Mapping(file.fileno(), 1 << 16)
    assert descriptors() == before
    view = mapping.view(10)
    array = np.frombuffer(view[2:], np.uint8)
    other = np.ndarray((2, 2), "<f8", mapping.array(), 64)
    del mapping, view
    gc.collect()
    assert mapped(file)
    array[:] = 7
    other[:] = 1.5
    assert os.pread(file.fileno(), 12, 0) == b"\0\0" + b"\7" * 8 + b"\0\0"
    assert np.frombuffer(os.pread(file.fileno(), 32, 64)).tolist() == [1.5] * 4
    del array
    assert mapped(file)
    del other
    assert not mapped(file)


def test_two_see_the_same_bytes(file):
    one, other = Mapping(file.fileno(), 1 << 16), Mapping(file.fileno(), 100, writable=False, populate=True)
    one.view(3)[:] = b"abc"
    view = other.view(5)
    assert bytes(view) == b"abc\0\0"
    assert view.readonly
    assert not other.array().flags.writeable
    with pytest.raises(TypeError, match="read-only"):
        view[:1] = b"x"


def test_what_is_not_there_is_not_mapped(file):
    with pytest.raises(ValueError, match="has fewer"):
        Mapping(file.fileno(), (1 << 16) + 1)
    with Path(file.name).open("rb") as reader, pytest.raises(PermissionError):
        Mapping(reader.fileno(), 10)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        Mapping(10**6, 10)


def test_how_many_there_may_be(monkeypatch, tmp_path):
    assert 1 <= most_mappings() <= 8192
    count = tmp_path / "max_map_count"
    monkeypatch.setattr(module, "Path", lambda _: count)
    assert most_mappings() == 8192, "another system"
    for text, expected in (("65530\n", 8192), ("4096\n", 1024), ("0\n", 1)):
        count.write_text(text)
        assert most_mappings() == expected
