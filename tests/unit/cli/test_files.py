""".npy files: mapped, judged before use, written whole or not at all."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest

import gemmserve
from gemmserve.cli import _files
from gemmserve.cli._context import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (3, 4)])
@pytest.mark.parametrize("dtype", ["<f4", ">c16", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_read(shape, dtype, order) -> None:
    array = np.asarray(np.random.default_rng(0).standard_normal(shape).astype(dtype), order=order)
    np.save("a.npy", array)
    found = _files.read_array("a.npy")
    np.testing.assert_array_equal(found, array)
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    _files.write_array("b.npy", found)
    again = np.load("b.npy")
    np.testing.assert_array_equal(again, array)
    assert again.flags.f_contiguous == array.flags.f_contiguous


def test_files_are_mapped() -> None:
    np.save("a.npy", np.eye(100))
    assert isinstance(_files.read_array("a.npy"), np.memmap)


@pytest.mark.parametrize(
    ("content", "cls"),
    [
        (b"", gemmserve.InvalidNpy),
        (b"PK\x03\x04 a zip", gemmserve.InvalidNpy),
        (np.eye(3), gemmserve.InvalidNpy),
        (np.eye(3, dtype=int), gemmserve.DtypeUnsupported),
        (np.array([{}], dtype=object), gemmserve.DtypeUnsupported),
    ],
)
def test_what_is_not_read(folder, content, cls) -> None:
    if isinstance(content, np.ndarray):
        stream = io.BytesIO()
        np.save(stream, content, allow_pickle=True)
        # a float array is cut short, the others are whole
        content = stream.getvalue()[: -1 if content.dtype == float else None]
    (folder / "bad.npy").write_bytes(content)
    with pytest.raises(cls, match=r"bad\.npy"):
        _files.read_array("bad.npy")


def test_a_file_appears_whole_or_not_at_all(folder, monkeypatch) -> None:
    _files.write_array("a.npy", np.eye(2))

    def breaks(_array):
        yield b"123"
        raise OSError("disk full")

    monkeypatch.setattr(_files, "pieces", breaks)
    with pytest.raises(OSError, match="disk full"):
        _files.write_array("a.npy", np.eye(3))
    np.testing.assert_array_equal(np.load("a.npy"), np.eye(2))
    assert os.listdir(folder) == ["a.npy"]  # noqa: PTH208


def test_a_device_is_written_to_not_replaced() -> None:
    _files.write_array("/dev/null", np.eye(2))
    assert not os.path.isfile("/dev/null")  # noqa: PTH113


def test_several() -> None:
    _files.write_arrays("a.npz", {"sum": np.arange(3.0), "c": np.eye(2)})
    with np.load("a.npz") as found:
        assert found.files == ["sum", "c"]


@pytest.mark.parametrize(("path", "said"), [("no/d.npy", "no folder no$"), (".", "that is a folder")])
def test_an_output_that_cannot_be_is_refused_before_any_work(path, said) -> None:
    with pytest.raises(UsageError, match=said):
        _files.check_output(path)


def test_an_error_names_the_file_that_was_asked_for(folder, monkeypatch) -> None:
    def full(*_args):
        raise OSError(28, "No space left on device", "somewhere.part")

    monkeypatch.setattr(_files.Path, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: 'd\.npy'$"):
        _files.write_array("d.npy", np.eye(2))
    assert list(folder.iterdir()) == []
