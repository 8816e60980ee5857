"""Two cells behind haproxy, with the configuration that is shipped."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx
from live_server import LiveServer, until
from proxies import found

from gemmserve_service.tenancy.keyring import create_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "cells" / "haproxy.cfg"
SECRET = "a secret of two cells that nobody else has"


NAMES = [f"owner {number}" for number in range(40)]
"""Names of keys. That one cell had none of so many would happen once in 10**12."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


class Cells:
    """As a context manager: `cells` run, and the router at `url` knows that they are ready."""

    def __init__(self, folder: Path, *, names: Sequence[str] = NAMES, environment: Mapping[str, str] = {}) -> None:
        """`names`: of API keys that all cells have."""
        self._folder = folder
        *ports, listen = free_ports(3)
        self.url = f"http://127.0.0.1:{listen}"
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._file = folder / "cells.json"
        self._file.write_text(json.dumps({"cells": dict(enumerate(self.urls)), "secret": SECRET}))
        self._keys = folder / "keys"
        self.keys = {name: create_key(folder / "made", name)[1] for name in names}
        self._keys.write_text("".join(f"{key} {name.replace(' ', '-')}\n" for name, key in self.keys.items()))
        (folder / "owners.map").write_text("")
        self._ports = ports
        self._environment = dict(environment)
        addresses = {f"CELL_{number}": f"127.0.0.1:{port}" for number, port in enumerate(ports)}
        self._router = {"LISTEN": f"127.0.0.1:{listen}", "OWNERS": str(folder / "owners.map"), **addresses}
        self.cells: list[LiveServer] = []

    def start(self, number: int) -> LiveServer:
        """A cell, started (again)."""
        settings = {
            "GEMMSERVE_CELL": str(number),
            "GEMMSERVE_CELLS_FILE": str(self._file),
            "GEMMSERVE_KEYS_FILE": str(self._keys),
            **self._environment,
        }
        port = str(self._ports[number])
        cell = LiveServer("--port", port, data_dir=self._folder / f"cell{number}", environment=settings)
        return cell.__enter__()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for number in range(len(self._ports)):
                self.cells.append(self.start(number))
                stack.callback(self._stop, number)
            program = found("haproxy")
            assert program is not None
            log = stack.enter_context((self._folder / "haproxy.log").open("wb"))
            command = [program, "-db", "-f", str(CONFIGURATION)]
            router = subprocess.Popen(command, env={**os.environ, **self._router}, stdout=log, stderr=log)
            stack.callback(router.wait, 60)
            stack.callback(router.terminate)
            self.wait_ready()
            self._stack = stack.pop_all()
        return self

    def _stop(self, number: int) -> None:
        cell = self.cells[number]
        if cell.returncode is None:
            cell.terminate()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_ready(self) -> None:
        """Waits until the router sends to every cell that lives."""

        def ready() -> bool:
            for cell in self.cells:
                if cell.returncode is None and httpx.get(f"{cell.url}/readyz", trust_env=False).status_code != 200:
                    return False
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200
            return False

        until(ready, 120)

    def http(self, key: str) -> httpx.Client:
        """A plain HTTP client of the router."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)

    def cell_of(self, key: str) -> int:
        """The cell that the router sends a key's new work to."""
        with self.http(key) as http:
            answer = http.get("/v1/cells")
        assert answer.status_code == 200, answer.text
        number: int = answer.json()["cell"]
        return number

    @cached_property
    def owners(self) -> dict[int, str]:
        """A key of each cell, by the cell that has its new work."""
        found: dict[int, str] = {}
        for key in self.keys.values():
            found.setdefault(self.cell_of(key), key)
            if len(found) == len(self.urls):
                return found
        raise AssertionError(f"none of {len(self.keys)} keys belongs to another cell than {list(found)}")
