""".npy files in and out: memory-mapped where they are files, "-" for stdin and stdout, never a pickle."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve import _errors
from gemmserve._transfer.arrays import npy_header, pieces
from gemmserve.cli._context import UsageError
from gemmserve.wire import NpyDtypeError, NpyError, NpyHeader, parse_npy_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gemmserve._transfer.arrays import AnyArray

STANDARD: Final = "-"
_HEAD: Final = (1 << 16) + 12


def read_array(path: str) -> AnyArray:
    """The array in a .npy file, mapped rather than read, or from stdin for "-".

    Raises InvalidNpy, DtypeUnsupported, OSError.
    """
    if path == STANDARD:
        if sys.stdin.isatty():
            raise UsageError("'-' reads a .npy from stdin, which is a terminal")
        data = sys.stdin.buffer.read()
        header = _header("stdin", data[:_HEAD], len(data))
        flat: AnyArray = np.frombuffer(data, header.dtype, offset=header.data_offset)
        return flat.reshape(header.shape, order="F" if header.fortran_order else "C")
    with Path(path).open("rb") as file:
        header = _header(path, file.read(_HEAD), os.fstat(file.fileno()).st_size)
        order = header.order
        if not header.nbytes:
            return np.empty(header.shape, header.dtype, order="F" if header.fortran_order else "C")
        return np.memmap(file, header.dtype, "r", header.data_offset, header.shape, order="F" if order == "F" else "C")


def _header(name: str, head: bytes, size: int) -> NpyHeader:
    try:
        header = parse_npy_header(head)
    except NpyDtypeError as error:
        raise _errors.DtypeUnsupported(f"{name}: {error}") from error
    except NpyError as error:
        raise _errors.InvalidNpy(f"{name}: {error}") from error
    if header is None:
        raise _errors.InvalidNpy(f"{name}: ends within its .npy header")
    expected = header.data_offset + header.nbytes
    if size != expected:
        raise _errors.InvalidNpy(f"{name}: holds {size} bytes, its header says {expected}")
    return header


def write_array(path: str, array: AnyArray) -> None:
    """Writes a .npy, Fortran order kept; to stdout for "-". A file appears whole or not at all. Raises OSError."""

    def fill(stream: IO[bytes]) -> None:
        stream.write(npy_header(array))
        for piece in pieces(array):
            stream.write(piece)

    _write(path, fill)


def write_arrays(path: str, arrays: Mapping[str, AnyArray]) -> None:
    """Writes a .npz of several arrays, as `write_array` does."""
    _write(path, lambda stream: np.savez(stream, allow_pickle=False, **dict(arrays)))


def _write(path: str, fill: Callable[[IO[bytes]], Any]) -> None:
    if path == STANDARD:
        check_output(path)
        fill(sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    if target.exists() and not target.is_file():  # a pipe or a device: it cannot be replaced
        with target.open("wb") as stream:
            fill(stream)
        return
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as stream:
            fill(stream)
        part.replace(target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from error  # not the name of a file that nobody asked for
    finally:
        part.unlink(missing_ok=True)


def check_output(path: str | None) -> None:
    """Check the output before any work is done: binary data is not for terminals, and a file's folder is there.

    Raises UsageError.
    """
    if path is None:
        return
    if path == STANDARD:
        if sys.stdout.isatty():
            raise UsageError("stdout is a terminal; redirect it, or give -o a file's name")
        return
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"-o {path}: that is a folder")
    if not target.parent.is_dir():
        raise UsageError(f"-o {path}: there is no folder {target.parent}")
