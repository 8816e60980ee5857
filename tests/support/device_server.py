"""A server whose device is the stand-in for one (device_on_host), and what tests of its results ask it."""

from __future__ import annotations

import re
import select
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import numpy as np
from python_path import python_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gates import Gate
    from live_server import LiveServer

SUPPORT: Final = Path(__file__).parent
DEVICE: Final = {
    "PYTHONPATH": python_path(SUPPORT / "device_on_host", SUPPORT / "cupy_on_numpy"),
    "GEMMSERVE_DEVICE": "cuda:0",
    "GEMMSERVE_WRITE_BACK_DELAY_S": "60",  # nothing is written that nobody asks for
}
"""Environment of such a server."""


def gated(*gates: Gate) -> Mapping[str, str]:
    """Return the environment of such a server that is held at those gates."""
    found = dict(DEVICE)
    for gate in gates:
        found |= gate.environment
    folders = [SUPPORT / "device_on_host", SUPPORT / "cupy_on_numpy", SUPPORT / "held_work"]
    return found | {"PYTHONPATH": python_path(*folders)}


def metric(server: LiveServer, name: str) -> float | None:
    """Return the first value of a metric; None: there is none."""
    with server.http() as http:
        found = re.search(rf"^gemmserve_{name}(?:{{.*}})? (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return None if found is None else float(found[1])


def downloaded(server: LiveServer, array_id: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a complex64 array, asked for without the client."""
    with server.http() as http:
        answer = http.get(f"/v1/arrays/{array_id}/data", headers={"Accept": "application/octet-stream"})
    answer.raise_for_status()
    return np.frombuffer(answer.content, "complex64").reshape(shape)


class Asked:
    """A download that has been asked for on a connection of its own."""

    def __init__(self, server: LiveServer, array_id: str, byte_range: tuple[int, int] | None = None) -> None:
        self._connection = HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        headers = {"Accept": "application/octet-stream"}
        if byte_range is not None:
            headers["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
        self._connection.request("GET", f"/v1/arrays/{array_id}/data", headers=headers)

    @property
    def answered(self) -> bool:
        """Whether there is anything of the answer."""
        return bool(select.select([self._connection.sock], [], [], 0)[0])

    def bytes(self) -> bytes:
        """The whole answer."""
        answer = self._connection.getresponse()
        assert answer.status in {200, 206}, answer.read()
        found = answer.read()
        self._connection.close()
        return found
