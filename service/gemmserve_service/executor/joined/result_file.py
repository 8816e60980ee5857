"""File of the result that is being written: open until another one is, for a result comes in pieces."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    from gemmserve_service.executor.joined.assignments import File


class ResultFile:
    """The file that was written last. Its pages are not mapped: as they are touched one by one, fresh ones take three
    times as long as they do to write. To be closed.
    """

    def __init__(self) -> None:
        self._name = ""
        self._fd = -1

    def write(self, file: File, start: int, data: memoryview) -> None:
        """Write bytes to a file from `start` on. Raises OSError, and ValueError for bytes past its end."""
        if start + len(data) > file.nbytes:
            raise ValueError(f"{len(data)} bytes from {start} on are past an extent of {file.nbytes}")
        if file.name != self._name:
            self.close()
            self._fd = os.open(file.path, os.O_WRONLY | os.O_CLOEXEC)
            self._name = file.name
        while len(data):
            written = os.pwrite(self._fd, data, start)
            start += written
            data = data[written:]

    def forget(self, names: Container[str]) -> None:
        """Close it if it is one of these, which are gone: its space is free once nobody has it open."""
        if self._name in names:
            self.close()

    def close(self) -> None:
        """Close the file, if one is open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._name, self._fd = "", -1
