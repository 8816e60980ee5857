"""The command line in this process, against a fake service on a socket."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fake_service import FakeService, serving

from gemmserve.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def service() -> Iterator[FakeService]:
    return FakeService()


@pytest.fixture
def url(service) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def files(tmp_path, monkeypatch) -> SimpleNamespace:
    """a.npy (3 x 4), b.npy (4 x 5), c.npy (3 x 5), complex64, in the working directory; and the arrays themselves."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    arrays = {
        name: (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)
        for name, shape in {"a": (3, 4), "b": (4, 5), "c": (3, 5)}.items()
    }
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    return SimpleNamespace(**arrays)


class Binary:
    """A standard stream of bytes, redirected; a terminal only if said so."""

    def __init__(self, data: bytes = b"", *, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(data)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        return self.buffer.write(text.encode())

    def flush(self) -> None:
        """Nothing is held back."""


@pytest.fixture
def cli(monkeypatch, capsys, url):
    """cli("put", "a.npy", stdin=b"...") -> status, out (text), err, data (stdout's bytes if binary=True)."""

    def run(
        *arguments: str, stdin: bytes | None = None, binary: bool = False, terminal: bool = False, **variables: str
    ):
        with monkeypatch.context() as patch:
            patch.setenv("GEMMSERVE_SERVER", url)
            for name, value in variables.items():
                patch.setenv(f"GEMMSERVE_{name.upper()}", value)
            patch.setattr(sys, "stdin", Binary(stdin or b"", terminal=stdin is None))
            stdout = Binary(terminal=terminal)
            if binary or terminal:
                patch.setattr(sys, "stdout", stdout)
            status = main(arguments)
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, out=captured.out, err=captured.err, data=stdout.buffer.getvalue())

    return run
