"""A `gemmserve serve` of one's own, for as long as a script needs it: free port, throw-away data folder.

with LocalServer() as server, Client(server.url) as client:
    ...
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

READY = re.compile(r"^gemmserve ready on (\S+).*\n", re.MULTILINE)  # the whole line: it is read while it is written


class LocalServer:
    """Starts the server on entry and waits for its ready line; SIGTERM and wait on exit.

    `url` is where it listens, `log` the file with everything that it printed, `returncode` is set once it has ended.
    Raises RuntimeError with the end of the log when it does not become ready.
    """

    def __init__(
        self,
        *arguments: str,
        data_dir: Path | None = None,
        environment: dict[str, str] | None = None,
        start_within_s: float = 60,
        stop_within_s: float = 30,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="gemmserve-")
        self.data_dir = data_dir or Path(self._temporary.name) / "data"
        self.log = Path(self._temporary.name) / "server.log"
        self._arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        self._start_within_s, self._stop_within_s = start_within_s, stop_within_s
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "gemmserve.cli", "serve", "--port", "0", "--data-dir", str(self.data_dir)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *self._arguments], stdout=log, stderr=subprocess.STDOUT, env=self._environment
            )
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Ends the server (SIGTERM drains it) and removes the throw-away folder."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        try:
            self.returncode = self.process.wait(self._stop_within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"the server did not end:\n{self.tail()}") from None
        finally:
            self._temporary.cleanup()

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + self._start_within_s
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if found := READY.search(self.log.read_text(errors="replace")):
                return found[1]
            if ended:
                raise RuntimeError(f"the server ended with status {self.process.returncode}:\n{self.tail()}")
            time.sleep(0.02)
        raise RuntimeError(f"the server was not ready within {self._start_within_s:.0f} s:\n{self.tail()}")
